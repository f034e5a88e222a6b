"""The random streams of a run. Each purpose has its own, so that drawing from one does not shift another."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch


class RandomStreams:
    """Seeded generators, whose states can be saved and restored exactly.

    tasks: which tasks and episode seeds are rolled out.  minibatches: how rows are dealt.  replay: ties and uniform
    samples of the buffer.  noise: of dense rewards.  sampling: tokens (a torch.Generator on `device`).
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.tasks = named_generator(seed, "tasks")
        self.minibatches = named_generator(seed, "minibatches")
        self.replay = named_generator(seed, "replay")
        self.noise = named_generator(seed, "noise")
        self.sampling = torch.Generator(device)
        self.sampling.manual_seed(named_seed(seed, "sampling"))

    _NUMPY = ("tasks", "minibatches", "replay", "noise")

    def state(self) -> dict[str, Any]:
        """Plain values for JSON."""
        numpy_states = {name: getattr(self, name).bit_generator.state for name in self._NUMPY}
        return {**numpy_states, "sampling": bytes(self.sampling.get_state().tolist()).hex()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for name in self._NUMPY:
            getattr(self, name).bit_generator.state = state[name]
        self.sampling.set_state(torch.tensor(list(bytes.fromhex(state["sampling"])), dtype=torch.uint8))


def named_seed(seed: int, name: str) -> int:
    """A seed for one purpose, the same on every machine."""
    return int(np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1)[0])


def named_generator(seed: int, name: str) -> np.random.Generator:
    """A generator for one purpose."""
    return np.random.default_rng(np.random.SeedSequence((seed, zlib.crc32(name.encode()))))
