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
    ("lengths", "turn_sequence", "error", "message"),
    [
        (torch.tensor([1.0]), None, TypeError, "lengths must be int32 or int64, got torch.float32"),
        ([2, 3], None, TypeError, "lengths must be a tensor, got list"),
        (torch.tensor([[1]]), None, ValueError, r"lengths must have one dimension, got \[1, 1\]"),
        (torch.tensor([2, -1]), None, ValueError, "lengths must be >= 0, got -1"),
        (torch.tensor([2, 1]), torch.tensor([0]), ValueError, r"turn_sequence must be \[2\], .*, got \[1\]"),
        (torch.tensor([2, 1]), torch.tensor([0, -1]), ValueError, "turn_sequence must be >= 0, got -1"),
        (torch.tensor([2, 1]), torch.tensor([0.0, 1.0]), TypeError, "turn_sequence must be int32 or int64"),
    ],
)
def test_wrong_arguments_are_named(lengths, turn_sequence, error, message):
    with pytest.raises(error, match=message):
        Segments.from_lengths(lengths, turn_sequence)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([0, 7, 5]),), r"cu_turns must start at 0 and never decrease, got \[0, 7, 5\]"),
        ((torch.tensor([1, 5]),), r"cu_turns must start at 0 and never decrease, got \[1, 5\]"),
        ((torch.tensor([0, 2, 4]), torch.tensor([0, 3]), 2), "turn_sequence must lie in 0 .. num_sequences - 1 = 1"),
        ((torch.tensor([0, 2, 4]), torch.tensor([0, 1])), r"num_sequences must be given \(>= 1\) with turn_sequence"),
    ],
)
def test_the_constructor_refuses_what_would_read_out_of_bounds(arguments, message):
    with pytest.raises(ValueError, match=message):
        Segments(*arguments)
