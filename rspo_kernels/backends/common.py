"""What both backends share: the description of the work, without a word on how it is done."""

from __future__ import annotations

from typing import NamedTuple


class LogitsTransform(NamedTuple):
    """From raw logits to the scores whose softmax is the policy: scale, then softcap, then temperature.

    Only the first `valid_vocab` columns are part of the distribution; a target equal to `ignore_index` is masked.
    """

    scale: float
    softcap: float | None
    temperature: float
    valid_vocab: int
    ignore_index: int
