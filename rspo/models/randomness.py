"""The random streams of a run. Each purpose has its own, so that drawing from one does not shift another."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from .processes import ALONE, Ranks


class RandomStreams:
    """Seeded generators, whose states can be saved and restored exactly.

    tasks: which tasks and episode seeds are rolled out.  minibatches: how rows are dealt.  replay: ties and uniform
    samples of the buffer.  noise: of dense rewards.  sampling: tokens (a torch.Generator on `device`), the only
    stream in which processes of one run differ.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.seed = seed
        self.tasks = named_generator(seed, "tasks")
        self.minibatches = named_generator(seed, "minibatches")
        self.replay = named_generator(seed, "replay")
        self.noise = named_generator(seed, "noise")
        self.sampling = torch.Generator(device)
        self.sampling.manual_seed(named_seed(seed, ranks.own_name("sampling")))

    _NUMPY = ("tasks", "minibatches", "replay", "noise")

    def state(self) -> dict[str, Any]:
        """Plain values for JSON, the same in all processes."""
        numpy_states = {name: getattr(self, name).bit_generator.state for name in self._NUMPY}
        main, *others = self.ranks.gather(lambda: bytes(self.sampling.get_state().tolist()).hex())
        return {**numpy_states, "sampling": main, "sampling_of_others": others}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Another number of processes than it was made by begins to sample tokens from new
        streams, which follow from the seed and the state."""
        for name in self._NUMPY:
            getattr(self, name).bit_generator.state = state[name]
        sampling = [state["sampling"], *state.get("sampling_of_others", ())]
        if len(sampling) == self.ranks.size:
            mine = bytes.fromhex(sampling[self.ranks.rank])
            self.sampling.set_state(torch.tensor(list(mine), dtype=torch.uint8))
        else:
            place = f"sampling, {self.ranks.size} processes from {state['tasks']['state']['state']}"
            self.sampling.manual_seed(named_seed(self.seed, self.ranks.own_name(place)))


def named_seed(seed: int, name: str) -> int:
    """A seed for one purpose, the same on every machine."""
    return int(np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1)[0])


def named_generator(seed: int, name: str) -> np.random.Generator:
    """A generator for one purpose."""
    return np.random.default_rng(np.random.SeedSequence((seed, zlib.crc32(name.encode()))))
