"""Which implementation runs.

`select` turns the `backend` option of an op into the module that will do the work. "auto" takes Triton for
accelerators and PyTorch for the CPU; the environment variable RSPO_KERNELS_BACKEND overrides "auto". A backend that
is asked for and cannot run is an error, never a silent fallback.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch

from .common import LogitsTransform

Implementation = Any
"""A backend's module, or an object with the functions of one."""

BACKENDS = ("auto", "torch", "triton")
TRITON_DEVICES = ("cuda", "xpu")  # ROCm devices call themselves cuda
ENVIRONMENT_VARIABLE = "RSPO_KERNELS_BACKEND"


def resolve(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The backend that will run: "torch" or "triton".

    Raises:
        ValueError: an unknown name (as argument or in RSPO_KERNELS_BACKEND).
        RuntimeError: Triton was asked for and cannot run on these tensors.
    """
    origin = "backend"
    if backend == "auto" and (override := os.environ.get(ENVIRONMENT_VARIABLE)):
        backend, origin = override, ENVIRONMENT_VARIABLE
    if backend not in BACKENDS:
        raise ValueError(f"{origin} must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    obstacle = _triton_obstacle(device, dtype)
    if backend == "auto":
        # On an accelerator without Triton the PyTorch path would be a silent fallback: refuse there too.
        wants_triton = device.type in TRITON_DEVICES and dtype != torch.float64
        backend = "triton" if wants_triton else "torch"
    if backend == "triton" and obstacle:
        raise RuntimeError(f"{origin}='triton' cannot run here: {obstacle}; backend='torch' runs on any device")
    return backend


@functools.cache
def _triton_installed() -> bool:
    """Looked up once: a search of the import path takes longer than a launch."""
    return importlib.util.find_spec("triton") is not None


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _triton_installed():
        return "triton is not installed"
    if dtype == torch.float64:
        return "the Triton kernels compute in float32 and take no float64 input"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU tensors need TRITON_INTERPRET=1 set before triton is imported (for tests only)"
    if device.type not in (*TRITON_DEVICES, "cpu"):
        return f"no Triton kernels for device type {device.type!r}"
    return None


def implementation(backend: str, transform: LogitsTransform | None = None) -> Implementation:
    """What a resolved backend offers; over a vocabulary that is spread over processes where the transform says so.

    Both backends have the same functions under the same names.
    """
    impl = importlib.import_module(f".{backend}_impl", __package__)
    if transform is not None and transform.vocab_group:
        from .vocab_parallel import VocabParallel

        return VocabParallel(impl)
    return impl
