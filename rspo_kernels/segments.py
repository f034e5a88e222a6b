"""Segments: the ragged structure of packed tokens, token -> turn -> sequence (trajectory)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Packed tokens [N] as consecutive turns, each turn belonging to a sequence.

    Turns are runs of consecutive tokens; the turns of one sequence may stand anywhere, as after shuffling.

    Args:
        cu_turns: int [T + 1], offsets of the turns, cu_turns[0] = 0 and cu_turns[T] = N, non-decreasing.
        turn_sequence: int [T], the sequence of each turn in 0 .. num_sequences - 1; None: each turn is a sequence.
        num_sequences: number of sequences; needed with turn_sequence.

    Make one with `Segments.from_lengths`, which checks its input.
    """

    cu_turns: Tensor
    turn_sequence: Tensor | None = None
    num_sequences: int = 0

    def __post_init__(self) -> None:
        if self.cu_turns.dim() != 1 or self.cu_turns.numel() < 1 or self.cu_turns.is_floating_point():
            raise ValueError(
                f"cu_turns must be an integer tensor [T + 1], got {self.cu_turns.dtype} {list(self.cu_turns.shape)}"
            )
        if self.turn_sequence is None:
            object.__setattr__(self, "num_sequences", self.num_turns)
        elif self.turn_sequence.shape != (self.num_turns,):
            raise ValueError(f"turn_sequence must be [T] = [{self.num_turns}], got {list(self.turn_sequence.shape)}")
        elif self.num_sequences < 1 and self.num_turns:
            raise ValueError(f"num_sequences must be given (>= 1) with turn_sequence, got {self.num_sequences}")

    @classmethod
    def from_lengths(cls, lengths: Tensor, turn_sequence: Tensor | None = None) -> Segments:
        """Segments of turns of the given lengths, int [T]; turn_sequence int [T] names each turn's sequence.

        Reads both on the host to check them: raises ValueError for negative lengths or sequence ids.
        """
        if lengths.dim() != 1 or lengths.is_floating_point():
            raise ValueError(f"lengths must be an integer tensor [T], got {lengths.dtype} {list(lengths.shape)}")
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
        cu_turns = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=cu_turns[1:])
        if turn_sequence is None:
            return cls(cu_turns)
        if turn_sequence.numel() and int(turn_sequence.min()) < 0:
            raise ValueError(f"turn_sequence must be >= 0, got {int(turn_sequence.min())}")
        num_sequences = int(turn_sequence.max()) + 1 if turn_sequence.numel() else 0
        return cls(cu_turns, turn_sequence.long(), num_sequences)

    @property
    def num_turns(self) -> int:
        """T."""
        return self.cu_turns.numel() - 1

    @cached_property
    def num_tokens(self) -> int:
        """N, read from the device once."""
        return int(self.cu_turns[-1])

    @cached_property
    def token_turn(self) -> Tensor:
        """Turn of each token, int64 [N]."""
        turns = torch.arange(self.num_turns, device=self.cu_turns.device)
        return torch.repeat_interleave(turns, self.cu_turns.diff(), output_size=self.num_tokens)

    @cached_property
    def token_sequence(self) -> Tensor:
        """Sequence of each token, int64 [N]."""
        if self.turn_sequence is None:
            return self.token_turn
        return self.turn_sequence.long()[self.token_turn]
