"""Says what to install where TRL is missing or too old; imported before anything that needs it."""

from __future__ import annotations

OLDEST = (1, 16)
"""Private methods of GRPOTrainer are overridden, and have the arguments of this version."""

try:
    import datasets
    import trl
except ImportError as error:
    raise ImportError(f"rspo.integrations.trl needs TRL: pip install 'rspo[trl]' ({error})") from error

if tuple(int(part) for part in trl.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"rspo.integrations.trl needs TRL {OLDEST[0]}.{OLDEST[1]}, found {trl.__version__}")

__all__ = ["datasets", "trl"]
