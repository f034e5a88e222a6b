"""What the kernels share: safe elementary functions, launch helpers, and the description of an ahead-of-time compile.

The elementary functions are built from exp2 and log alone: device libraries have better known ones (tanh, expm1,
log1p), but the interpreter that tests these kernels on a CPU cannot call them.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32: a running maximum that starts here never meets (-inf) - (-inf)."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

HEADROOM = tl.constexpr(2.0**-24)
"""What rewards and the like are multiplied by on their way in, and divided by on their way out: exact as a power of 2
(for numbers above 1e-30), and sums of millions of the largest float32 then fit."""


@triton.jit
def f32(x):
    """A scalar argument as float32: one that arrived as float64 would put 64-bit operations into the inner loop."""
    return tl.full([], x, tl.float32)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def expm1(x):
    """exp(x) - 1 without its cancellation near 0: the rounding of u = exp(x) divides out in (u - 1)/log(u)."""
    u = exp(x)
    near = u == 1.0
    far = (u - 1.0 == -1.0) | (u > 1e30)
    quotient = (u - 1.0) * x / tl.log(tl.where(near | far, 2.0, u))
    return tl.where(near, x, tl.where(far, u - 1.0, quotient))


@triton.jit
def log1p(x):
    """log(1 + x) for x >= -1, by the same division as expm1."""
    u = 1.0 + x
    near = u == 1.0
    return tl.where(near, x, tl.log(u) * x / tl.where(near, 1.0, u - 1.0))


@triton.jit
def tanh(x):
    """Relative error below 3e-7 everywhere: by its series where 1 - exp(-2|x|) would cancel."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def tanh_slope(x):
    """1 - tanh(x)², without its cancellation for large |x|."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@functools.cache
def current_target() -> tuple[str, int]:
    """Backend ("cuda", "hip", ...) and warp size of the current device; the interpreter has neither."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter", 32
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.warp_size


def current_architecture() -> str:
    """The current device as compile_check.TARGETS names it: "sm_90", "gfx942", ..., or "interpreter"."""
    if current_target()[0] == "interpreter":
        return "interpreter"
    architecture = triton.runtime.driver.active.get_current_target().arch
    return architecture if isinstance(architecture, str) else f"sm_{architecture}"


def compile_options(threads: int, backend: str, warp_size: int) -> dict[str, Any]:
    """Options of a launch or an ahead-of-time compile with that many threads."""
    options: dict[str, Any] = {"num_warps": max(1, threads // warp_size)}
    if backend == "hip":
        # exp2 is one instruction then; exact denormals cost five and the registers for their masks.
        options["allow_flush_denorm"] = True
    return options


def launch_options(threads: int) -> dict[str, Any]:
    """compile_options for the current device."""
    return compile_options(threads, *current_target())


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if x.device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(x.device).device(x.device)


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel ahead of time, for compile_check.

    Args:
        kernel: the jit function.
        name: what distinguishes the variant, for people.
        types: type of every runtime argument, as "*bf16", "i32", "fp32"; all others are constexpr.
        constants: value of every constexpr argument.
        threads: size of the thread block.
        aligned: arguments known to be multiples of 16, as a launch would find.
        stages: depth of the software pipeline, None for Triton's default.
        targets: those of compile_check.TARGETS that the variant is for, None for all.
        reads: bytes that an element costs in each pass of the kernel, a loop over memory (the last number stands for
            all further ones); less than an element's size where one read serves several.
        elements: of a thread block, where not a loop's reads tell them: those of a matmul's tile, which the code around
            the matmul's loop works on, or of a kernel without loops.
    """

    kernel: Any
    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    threads: int
    aligned: tuple[str, ...] = ()
    stages: int | None = None
    targets: tuple[str, ...] | None = None
    reads: tuple[float, ...] = ()
    elements: int = 0
