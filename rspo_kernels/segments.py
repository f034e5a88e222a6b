"""Segments: the ragged structure of packed tokens, token -> turn -> sequence (trajectory) -> set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .checks import integer


@dataclass(frozen=True)
class Segments:
    """Packed tokens [N] as consecutive turns, each turn belonging to a sequence, each sequence to a set.

    Turns are runs of consecutive tokens; the turns of one sequence may stand anywhere, as after shuffling, but in
    their order. A set holds the sequences that act as one (SRPO: the outputs of several agents).

    Args:
        cu_turns: int [T + 1], offsets of the turns, cu_turns[0] = 0 and cu_turns[T] = N, non-decreasing.
        turn_sequence: int [T], the sequence of each turn in 0 .. num_sequences - 1; None: each turn is a sequence.
        num_sequences: number of sequences; needed with turn_sequence.
        sequence_set: int [num_sequences], the set of each sequence in 0 .. num_sets - 1; None: each is a set.
        num_sets: number of sets; needed with sequence_set.

    Make one with `Segments.from_lengths`, which checks its input. The constructor reads CPU tensors to check them too,
    and takes those of accelerators as they are.
    """

    cu_turns: Tensor
    turn_sequence: Tensor | None = None
    num_sequences: int = 0
    sequence_set: Tensor | None = None
    num_sets: int = 0

    def __post_init__(self) -> None:
        _check_integers("cu_turns", self.cu_turns)
        if self.cu_turns.numel() < 1:
            raise ValueError("cu_turns must be [T + 1], got an empty tensor")
        if _readable(self.cu_turns) and (int(self.cu_turns[0]) != 0 or bool((self.cu_turns.diff() < 0).any())):
            raise ValueError(f"cu_turns must start at 0 and never decrease, got {self.cu_turns.tolist()}")
        if self.turn_sequence is None:
            object.__setattr__(self, "num_sequences", self.num_turns)
        else:
            _check_ids("turn_sequence", self.turn_sequence, self.num_turns, "num_sequences", self.num_sequences)
        if self.sequence_set is None:
            object.__setattr__(self, "num_sets", self.num_sequences)
        else:
            _check_ids("sequence_set", self.sequence_set, self.num_sequences, "num_sets", self.num_sets)

    @classmethod
    def from_lengths(
        cls, lengths: Tensor, turn_sequence: Tensor | None = None, sequence_set: Tensor | None = None
    ) -> Segments:
        """Segments of turns of the given lengths, int [T]; turn_sequence int [T]; sequence_set int [sequences].

        Reads them on the host to check them: raises ValueError for negative lengths or ids.
        """
        _check_integers("lengths", lengths)
        for name, ids in (("turn_sequence", turn_sequence), ("sequence_set", sequence_set)):
            if ids is not None:
                _check_integers(name, ids)
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
        cu_turns = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=cu_turns[1:])
        num_sequences, num_sets = _count("turn_sequence", turn_sequence), _count("sequence_set", sequence_set)
        return cls(cu_turns, turn_sequence, num_sequences, sequence_set, num_sets)

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

    @cached_property
    def token_set(self) -> Tensor:
        """Set of each token, int64 [N]."""
        if self.sequence_set is None:
            return self.token_sequence
        return self.sequence_set.long()[self.token_sequence]

    @cached_property
    def cu_sequences(self) -> Tensor:
        """Offsets of the sequences once their turns stand together, int64 [num_sequences + 1]."""
        if self.turn_sequence is None:
            return self.cu_turns
        lengths = self.cu_turns.diff().long()
        sizes = lengths.new_zeros(self.num_sequences).index_add(0, self.turn_sequence.long(), lengths)
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    @cached_property
    def sequence_order(self) -> Tensor | None:
        """Tokens in the order in which the turns of a sequence stand together, int64 [N]; None: they already do.

        Sequence s holds the tokens sequence_order[cu_sequences[s]:cu_sequences[s + 1]].
        """
        if self.turn_sequence is None:
            return None
        turns = torch.argsort(self.turn_sequence, stable=True)
        lengths = self.cu_turns.diff().long()[turns]
        # Where a turn begins here, less where it begins there: the same for all of its tokens.
        shift = self.cu_turns[:-1].long()[turns] - (lengths.cumsum(0) - lengths)
        tokens = torch.arange(self.num_tokens, device=self.cu_turns.device)
        return tokens + torch.repeat_interleave(shift, lengths, output_size=self.num_tokens)

    def level(self, name: str) -> tuple[Tensor, int]:
        """Segment of each token, int64 [N], and the number of segments, at level "turn", "sequence" or "set"."""
        return {
            "turn": lambda: (self.token_turn, self.num_turns),
            "sequence": lambda: (self.token_sequence, self.num_sequences),
            "set": lambda: (self.token_set, self.num_sets),
        }[name]()


def _readable(x: Tensor) -> bool:
    """Whether looking at the values costs nothing."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_integers(name: str, x: Tensor) -> None:
    """A one-dimensional int32 or int64 tensor."""
    integer(name, x)
    if x.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got {list(x.shape)}")


def _check_ids(name: str, ids: Tensor, length: int, count_name: str, count: int) -> None:
    """`length` ids in 0 .. count - 1."""
    _check_integers(name, ids)
    if ids.shape != (length,):
        raise ValueError(f"{name} must be [{length}], one for each of the level below, got {list(ids.shape)}")
    if count < 1 and length:
        raise ValueError(f"{count_name} must be given (>= 1) with {name}, got {count}")
    if length and _readable(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{name} must lie in 0 .. {count_name} - 1 = {count - 1}, got {int(ids.min())} .. {int(ids.max())}"
        )


def _count(name: str, ids: Tensor | None) -> int:
    """One more than the largest id; 0 for None."""
    if ids is None or ids.numel() == 0:
        return 0
    if int(ids.min()) < 0:
        raise ValueError(f"{name} must be >= 0, got {int(ids.min())}")
    return int(ids.max()) + 1
