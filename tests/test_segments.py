"""Segments: which token belongs to which turn and sequence."""

from __future__ import annotations

import pytest
import torch

from rspo_kernels import Segments


def test_turns_of_shuffled_sequences():
    segments = Segments.from_lengths(torch.tensor([2, 0, 3, 1]), torch.tensor([1, 1, 0, 1]))
    assert segments.cu_turns.tolist() == [0, 2, 2, 5, 6]
    assert (segments.num_turns, segments.num_sequences, segments.num_tokens) == (4, 2, 6)
    assert segments.token_turn.tolist() == [0, 0, 2, 2, 2, 3]
    assert segments.token_sequence.tolist() == [1, 1, 0, 0, 0, 1]


def test_each_turn_is_a_sequence_by_default():
    segments = Segments.from_lengths(torch.tensor([1, 2]))
    assert segments.num_sequences == 2
    assert segments.token_sequence.tolist() == [0, 1, 1]
    assert Segments.from_lengths(torch.zeros(0, dtype=torch.int64)).num_tokens == 0


@pytest.mark.parametrize(
    ("lengths", "turn_sequence", "message"),
    [
        (torch.tensor([1.0]), None, "lengths must be an integer tensor"),
        (torch.tensor([2, -1]), None, "lengths must be >= 0, got -1"),
        (torch.tensor([2, 1]), torch.tensor([0]), r"turn_sequence must be \[T\] = \[2\], got \[1\]"),
        (torch.tensor([2, 1]), torch.tensor([0, -1]), "turn_sequence must be >= 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(lengths, turn_sequence, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_lengths(lengths, turn_sequence)
