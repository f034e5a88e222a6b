"""Weights on their way to an engine: through a folder, which the engine is told to read.

A folder is what every engine can read, whatever its kernels make of the weights and however it splits them over GPUs.
It costs one write and one read of the weights, a second or a few for 1.5 billion on a local disk or in memory
(/dev/shm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..config import EngineConfig
from ..models.policy import Policy
from .base import EngineError

Post = Callable[[str, dict[str, Any]], Any]
"""Sends JSON to a path of a server and returns the answer's."""


@contextmanager
def written(policy: Policy, folder: Path | None) -> Iterator[Path]:
    """A policy as a model folder for the length of a block, in `folder` or among the system's temporary ones."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="weights-", dir=folder) as place:
        path = Path(place).resolve()
        path.chmod(0o755)  # the server may run as someone else
        policy.save_whole(path)
        yield path


class WeightPush:
    """Whose weights an engine holds, and how it gets those of the agent that acts.

    Args:
        load: makes the engine read a model folder.
        settings: `push_folder` is where the weights are written; the engine sees it under the same path.
        folder: of the run, which has a folder for the weights where `push_folder` names none. None: the system's
            temporary folder.
    """

    def __init__(self, load: Callable[[Path], None], settings: EngineConfig, folder: Path | None) -> None:
        self.load = load
        self.folder = folder / "engine" if folder is not None else None
        if settings.push_folder is not None:
            self.folder = Path(settings.push_folder)
        self._held: int | None = None  # version of the weights that the engine has

    def push(self, policy: Policy) -> None:
        """Give the engine a policy's weights, unless it has them. Raises what `load` does."""
        if self._held == policy.version:
            return
        self._held = None
        with written(policy, self.folder) as path:
            self.load(path)
        self._held = policy.version


def load_vllm(post: Post, path: Path) -> None:
    """A vLLM server with VLLM_SERVER_DEV_MODE=1: all of its workers call `reload_weights`, then what they remember of
    earlier prompts is dropped."""
    post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
    post("reset_prefix_cache", {})


def load_sglang(post: Post, path: Path) -> None:
    """An SGLang server: /update_weights_from_disk, which also drops what is remembered of earlier prompts. Raises
    EngineError where it does not take the weights."""
    answer = post("update_weights_from_disk", {"model_path": str(path), "flush_cache": True})
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise EngineError(f"SGLang has not taken the weights in {path}: {answer}")


PUSHES: dict[str, Callable[[Post, Path], None]] = {"vllm": load_vllm, "sglang": load_sglang}
"""What makes a server read a model folder, by `engine.push_weights`."""
NEEDS = {"vllm": "a vLLM server that was started with VLLM_SERVER_DEV_MODE=1", "sglang": "an SGLang server"}
"""What it takes, in words."""
