"""The same bits from the same run on one CPU thread, whatever the CPU and wherever in memory its tensors lie.

The matrix products of Intel's MKL, which PyTorch's builds for x86 use, may depend in their last bits on the alignment
of their operands; on AMD's CPUs they do. Two things are done about it. MKL is asked for results that do not depend on
it. And a policy's weights are brought into memory of PyTorch's own, which begins at multiples of 64 bytes: safetensors
maps files, in which weights begin at multiples of 8.
"""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from pathlib import Path

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes at multiples of which PyTorch's CPU memory begins."""
MKL_MODE = "MKL_CBWR"
"""MKL's environment variable, which it reads when it is first used."""
_FREE = 1
"""MKL's word for having no reproducible mode, MKL_CBWR_OFF."""


def reproducible_products() -> None:
    """Set MKL's reproducible mode for this process and those that it starts, unless the environment sets one already.

    Warns where MKL had been used before, which leaves it as it is.
    """
    if MKL_MODE in os.environ or not torch.backends.mkl.is_available():
        return
    os.environ[MKL_MODE] = strict_mode()
    if mkl_mode() == _FREE:
        warnings.warn(
            "run.reproducible=true came too late for MKL, which this process had used before: last bits may depend on"
            f" where tensors lie; set {MKL_MODE}={strict_mode()} in the environment, or make the run before anything"
            " else multiplies matrices",
            stacklevel=2,
        )


def strict_mode() -> str:
    """MKL's mode with one order of sums whatever the alignment (STRICT), at the widest vectors that it has on this
    CPU: narrower ones than AVX-512 cost an Intel CPU that has it three quarters more time, and on others MKL may not
    have it."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_intel()
    return f"{'AVX512' if wide else 'AVX2'},STRICT"


def mkl_mode() -> int | None:
    """The branch that MKL says it is in, 1 without a reproducible mode; None where it cannot be asked. Asked for the
    first time, it reads the environment."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(1))
    except (OSError, AttributeError):
        return None


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "GenuineIntel" in platform.processor()


@torch.no_grad()
def align(module: nn.Module) -> None:
    """Move parameters and buffers on the CPU that begin at other addresses into new memory; values and ties stay."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
