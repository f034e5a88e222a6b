"""What both backends share: the description of the work, without a word on how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LogitsTransform(NamedTuple):
    """From raw logits to the scores whose softmax is the policy: scale, then softcap, then temperature.

    Only the first `valid_vocab` columns are part of the distribution; a target equal to `ignore_index` is masked.
    Where the vocabulary is spread over the processes of `vocab_group` (a process group's name, "" for none), the
    logits are this process's columns, the first of which is token `vocab_start`.
    """

    scale: float
    softcap: float | None
    temperature: float
    valid_vocab: int
    ignore_index: int
    vocab_group: str = ""
    vocab_start: int = 0

    @property
    def factor(self) -> float:
        """What a difference of scores is multiplied by: 1/temperature, with the scale where there is no softcap."""
        return (self.scale if self.softcap is None else 1.0) / self.temperature


@dataclass(frozen=True)
class RatioSegments:
    """Tokens that share one ratio: log r of a segment is the sum of share·(logp - behavior_logp) over its tokens.

    index: int64 [N], the segment of each token.
    share: [N], 1 for sums; 1/(tokens of the member) for means, times 1/(members of the set) for sets; 0 where masked.
    count: number of segments.
    """

    index: Tensor
    share: Tensor
    count: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, all else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kept(targets: Tensor, mask: Tensor | None, transform: LogitsTransform) -> Tensor:
    """Which tokens count, bool of the shape of the targets."""
    keep = targets != transform.ignore_index
    return keep if mask is None else keep & mask


def index_sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums [..., count] of the values [..., N] with the same index, int64 [N], always in the same order."""
    if not values.is_cuda:
        return values.new_zeros(*values.shape[:-1], count).index_add(-1, index, values)
    # index_add's atomics have no order there; index_put sorts.
    rows = values.movedim(-1, 0)
    return rows.new_zeros(count, *rows.shape[1:]).index_put((index,), rows, accumulate=True).movedim(0, -1)


@dataclass(frozen=True)
class ScanLayout:
    """Segments to scan over: segment s holds the tokens order[cu[s]:cu[s + 1]] of a tensor [N], in that order.

    order: int64 [N]; None: the tokens stand in order already.
    cu: int [segments + 1]; None: segments of `length` tokens each.
    """

    order: Tensor | None
    cu: Tensor | None
    length: int

    def count(self, num_tokens: int) -> int:
        """Number of segments."""
        return num_tokens // max(self.length, 1) if self.cu is None else self.cu.numel() - 1

    def token_segment(self, x: Tensor) -> Tensor:
        """Segment of each place in the order, int64 [N] for a tensor x [N]."""
        n = x.numel()
        segments = torch.arange(self.count(n), device=x.device)
        return torch.repeat_interleave(segments, self.length if self.cu is None else self.cu.diff(), output_size=n)
