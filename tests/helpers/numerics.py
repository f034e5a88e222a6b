"""How results are compared: errors are measured against float64 and bounded by the dtype's own resolution."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(name: str, actual: Tensor, expected: Tensor, *, rtol: float, atol: float = 0.0) -> None:
    """|actual - expected| <= rtol·|expected| + atol everywhere, infinities equal, no NaN."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert not actual.isnan().any(), f"{name} has NaN at {actual.isnan().nonzero()[0].tolist()}"
    same = actual == expected
    error = torch.where(same, 0.0, (actual - expected).abs())
    worst = (error - rtol * torch.where(same, 0.0, expected.abs())).flatten()
    if worst.numel() and worst.max() > atol:
        at = worst.argmax()
        raise AssertionError(
            f"{name}: {float(actual.flatten()[at])!r}, expected {float(expected.flatten()[at])!r} "
            f"at flat position {int(at)} (rtol {rtol:g}, atol {atol:g})"
        )


def assert_rows_close(
    name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    rtol: float,
    floor: Tensor | float = 0.0,
    zero: Tensor | None = None,
) -> None:
    """Largest error of each row [..., V] within rtol of the row's largest entry (+ floor).

    Rows in `zero` must be exactly zero; by default those whose expected entries all are.
    """
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.isfinite().all(), f"{name} is not finite at {(~actual.isfinite()).nonzero()[0].tolist()}"
    if actual.numel() == 0:
        return
    size = expected.abs().amax(-1)
    zero = size == 0 if zero is None else zero
    assert (expected[zero] == 0).all(), f"{name}: the reference is not zero where it has to be"
    assert (actual[zero] == 0).all(), f"{name}: rows with a zero reference gradient must be exactly zero"
    error = (actual - expected).abs().amax(-1)
    excess = error - rtol * size - floor
    if excess.max() > 0:
        at = excess.argmax()
        raise AssertionError(f"{name}: error {float(error.flatten()[at]):g} in a row of {float(size.flatten()[at]):g}")


EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 2.0**-52}
"""Spacing of numbers near 1: one unit in the last place."""
