"""Weights on their way to an engine: through a folder, which the engine is told to read.

A folder is what every engine can read, whatever its kernels make of the weights and however it splits them over GPUs.
It costs one write and one read of the weights, a second or a few for 1.5 billion on a local disk or in memory
(/dev/shm).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..models import Policy
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


class WeightPush(ABC):
    """Makes a server read weights.

    Args:
        post: sends to the server.
        folder: for the weights; the server sees it under the same path. None: the system's temporary folder.
    """

    def __init__(self, post: Post, folder: Path | None) -> None:
        self.post = post
        self.folder = folder

    def push(self, policy: Policy) -> None:
        """Give the server a policy's weights. Raises EngineError where it does not take them."""
        with written(policy, self.folder) as path:
            self.load(path)

    @abstractmethod
    def load(self, path: Path) -> None:
        """Make the server read a model folder."""


class VLLMPush(WeightPush):
    """A vLLM server with VLLM_SERVER_DEV_MODE=1: all of its workers call `reload_weights`, then what they remember of
    earlier prompts is dropped."""

    def load(self, path: Path) -> None:
        self.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        self.post("reset_prefix_cache", {})


class SGLangPush(WeightPush):
    """An SGLang server: /update_weights_from_disk, which also drops what is remembered of earlier prompts."""

    def load(self, path: Path) -> None:
        answer = self.post("update_weights_from_disk", {"model_path": str(path), "flush_cache": True})
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"SGLang has not taken the weights in {path}: {answer}")


PUSHES: dict[str, type[WeightPush]] = {"vllm": VLLMPush, "sglang": SGLangPush}
