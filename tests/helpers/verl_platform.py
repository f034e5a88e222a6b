"""The CPU as a platform of verl, which has none of its own. To be imported, and started, before the rest of verl."""

from __future__ import annotations

import contextlib
import os
import socket
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class _CpuModule(types.ModuleType):
    """torch.cpu with memory statistics, all 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: 0

    def is_available(self) -> bool:
        return False

    def get_device_name(self) -> str:
        return "CPU"

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """What verl asks of a device, answered by the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def start() -> None:
    """Make this process the only one of a gloo group, on the CPU platform."""
    set_platform(CpuPlatform())
    prepare_engines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def prepare_engines() -> None:
    """Let verl's FSDP engine run on this platform."""
    import verl.models.transformers.monkey_patch as monkey_patch
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    with contextlib.suppress(AssertionError):  # registered before
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithLMHead)
    # verl 0.9.1 patches a class that TRL 1.16 does not have.
    monkey_patch.is_trl_available = lambda: False
