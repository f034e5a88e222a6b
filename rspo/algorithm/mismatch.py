"""How far an engine's probabilities are from the training model's, and the weights that make up for it.

An engine with kernels, rounding or sampling of its own draws from π_engine, while training believes that it drew from
π_train. Both say the log-probs of the same tokens at the time of the rollout; with d = log π_train - log π_engine, the
importance weight of a token is exp(d).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from ..config import EngineConfig
from ..data.trajectory import Trajectory, Turn
from ..engines import EngineError

LARGE_GAP = 0.1
"""Mean |d| in nats/token beyond which a rollout brings a warning."""
LOG_WEIGHT_LIMIT = 20.0
"""Log weights are clamped to ± this before they are exponentiated."""


def _log_weights(turn: Turn) -> np.ndarray:
    """d of a turn's tokens, float64 [T]; empty where the engine does not know its log-probs."""
    if turn.engine_logp is None:
        return np.zeros(0)
    return turn.behavior_logp.astype(np.float64) - turn.engine_logp.astype(np.float64)


def engine_mismatch(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Over all tokens whose log-probs the engine knows, as `engine/...`: mean and largest |d| in nats, the KL of engine
    to training model by the estimators k1 (mean -d) and k3 (mean exp(d) - 1 - d), and the effective sample size of the
    weights w = exp(d) as a share, (Σw)²/(n·Σw²). Empty where there are no such tokens."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    gap = np.concatenate([np.zeros(0), *map(_log_weights, turns)])
    if not len(gap):
        return {}
    weights = np.exp(np.clip(gap, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
    return {
        "engine/logp_gap_mean": float(np.abs(gap).mean()),
        "engine/logp_gap_max": float(np.abs(gap).max()),
        "engine/k1": float(-gap.mean()),
        "engine/k3": float((weights - 1 - gap).mean()),
        "engine/ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    }


def check_mismatch(trajectories: Sequence[Trajectory], config: EngineConfig) -> None:
    """Warn of a large mismatch. Raises EngineError above `engine.mismatch_limit`."""
    gap = engine_mismatch(trajectories).get("engine/logp_gap_mean", 0.0)
    limit = config.mismatch_limit
    found = f"log-probs of the engine and of the training model differ by {gap:.3g} nats/token on average in a rollout"
    causes = "does it have the same weights, template and temperature, and sample from the whole vocabulary?"
    if limit is not None and not gap <= limit:
        raise EngineError(f"{found}, more than engine.mismatch_limit={limit}: {causes}")
    if not gap <= LARGE_GAP:
        warnings.warn(f"{found}: {causes}", stacklevel=2)


def importance_weights(trajectories: Sequence[Trajectory], cap: float) -> np.ndarray:
    """min(exp(d), cap) of all response tokens in order, float32 [N]: truncated importance sampling.

    Raises EngineError where the engine has not said its log-probs.
    """
    weights = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.engine_logp is None:
                raise EngineError(f"engine.importance_cap={cap} needs the engine's log-probs, {trajectory} has none")
            weights.append(np.minimum(np.exp(np.clip(_log_weights(turn), -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)), cap))
    return np.concatenate(weights).astype(np.float32)
