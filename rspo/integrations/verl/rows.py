"""Between the trainer's batches and verl's: rows of a prompt and a response, padded on either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from verl import DataProto

from rspo_kernels import PolicyLossConfig

from ...algorithm.update import Mixture
from ...data.batch import Batch


@dataclass(frozen=True)
class Rows:
    """The rows of a batch as verl wants them: prompts padded on the left, responses on the right.

    In the per_turn layout a row's response is its turn's. In the conversation layout it begins with the first turn's
    and holds what follows, of which the observations are masked.

    data: DataProto of R rows with prompts [R, P], responses [R, L], input_ids, attention_mask and position_ids
        [R, P + L], response_mask [R, L], all int64.
    token_row, token_column: int64 [N], where the batch's response tokens stand in the responses.
    """

    data: DataProto
    token_row: Tensor
    token_column: Tensor

    @classmethod
    def of(cls, batch: Batch, pad_token_id: int) -> Rows:
        """Of any batch on the CPU."""
        lengths = batch.row_lengths
        prompt = torch.full_like(lengths, batch.input_ids.shape[1])
        prompt.scatter_reduce_(0, batch.token_row, batch.token_column + 1, "amin")
        before, after = int(prompt.max()), int((lengths - prompt).max())
        # Each row moves right, so that all responses begin in the same column.
        source = torch.arange(before + after) - (before - prompt).unsqueeze(1)
        real = (source >= 0) & (source < lengths.unsqueeze(1))
        source = source.clamp(0, batch.input_ids.shape[1] - 1)
        input_ids = torch.where(real, batch.input_ids.gather(1, source), pad_token_id)
        column = batch.token_column + 1 - prompt[batch.token_row]
        mask = torch.zeros(len(lengths), after, dtype=torch.int64)
        mask[batch.token_row, column] = 1
        tensors = {
            "prompts": input_ids[:, :before],
            "responses": input_ids[:, before:],
            "input_ids": input_ids,
            "attention_mask": real.long(),
            "position_ids": source * real,
            "response_mask": mask,
        }
        return cls(DataProto.from_dict(tensors), batch.token_row, column)

    def spread(self, tokens: Tensor) -> Tensor:
        """Values [N] of response tokens at their places [R, L], elsewhere 0."""
        grid = tokens.new_zeros(self.data.batch["response_mask"].shape)
        grid[self.token_row, self.token_column] = tokens
        return grid

    def deal(self, order: Tensor, values: Mapping[str, Tensor]) -> DataProto:
        """The rows in the given order, with token values [N] spread out beside them; -1 is a row without loss.

        Padding repeats the shortest row, which costs least.
        """
        shortest = int(self.data.batch["attention_mask"].sum(-1).argmin())
        padding = order < 0
        dealt = self.data.select_idxs(torch.where(padding, shortest, order))
        for name, tokens in values.items():
            dealt.batch[name] = self.spread(tokens)[torch.where(padding, shortest, order)]
        dealt.batch["response_mask"][padding] = 0
        return dealt

    def gather(self, grid: Tensor) -> Tensor:
        """The inverse: of a grid [R or more, L] the values [N] at response tokens."""
        return grid[self.token_row, self.token_column]


def loss_weights(batch: Batch, config: PolicyLossConfig, alpha: float, pooled: bool, minibatches: int) -> Tensor:
    """Factor of each token's loss [N], so that the sum of the products over a whole update is eq. 1.

    (1 - α)/n_on for on-policy and α/n_off for replayed tokens under "token-mean"; under the aggregations over
    sequences, n are rows and a row's tokens share its term. A mini-batch is one part of the update, hence the factor
    `minibatches`.
    """
    mixture = Mixture.of(batch, config, alpha, pooled)
    shares = torch.tensor([1.0 / divisor if divisor > 0 else 0.0 for divisor in (mixture.on_policy, mixture.replay)])
    weights = shares[batch.is_replay.long()] * minibatches
    if config.aggregation == "seq-mean-token-mean":
        weights = weights / torch.bincount(batch.token_row)[batch.token_row]
    elif config.aggregation == "seq-mean-token-sum-norm":
        assert config.horizon is not None  # the configuration has seen to it
        weights = weights / config.horizon
    return weights


def deal_rows(num_rows: int, minibatches: int, processes: int, divisor: int, rng: np.random.Generator) -> np.ndarray:
    """Which row goes where, int64 [n]: verl cuts a batch into a piece for each process and each piece in order into
    mini-batches; n is a multiple of `minibatches`·`processes`·`divisor`, and -1 stands for a row of padding.

    Rows are dealt at random. No mini-batch is all padding, because padding is dealt last, one to each in turn.

    divisor: what a process's part of a mini-batch must be a multiple of.
    """
    size = -(-num_rows // (minibatches * processes * divisor)) * processes * divisor
    dealt = np.full(size * minibatches, -1)
    dealt[:num_rows] = rng.permutation(num_rows)
    parts = dealt.reshape(size, minibatches).T.reshape(minibatches, processes, size // processes)
    return parts.transpose(1, 0, 2).reshape(-1)
