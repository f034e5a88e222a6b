"""Triton kernels of other libraries, to be compiled beside ours as their own launchers would launch them.

Each for bf16 logits of 151,936 columns (Qwen2.5's vocabulary), or hidden states and weight of width 1,536, with a
temperature of 1, which costs them nothing: a constant that compilers drop. Their files are loaded by path, without the
packages around them, which import half of a training stack. verl has one configuration of its kernel;
cut-cross-entropy's is the one it takes where it does not tune.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

VOCABULARY = 151_936
WIDTH = 1_536
TOKENS = 4_096
HOPPER_ON = ("sm_90", "sm_100")
"""Targets on which a launcher copies tiles in bulk."""


@dataclass(frozen=True)
class Peer:
    """A library, where it is installed, and the kernels of it that are compiled."""

    name: str
    package: str
    kernels: Callable[[], list[Any]]

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def load(package: str, file: str, **stand_ins: ModuleType) -> ModuleType:
    """One file of an installed package, imported without the package; `stand_ins` for what it imports of that."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed")
    path = Path(next(iter(spec.submodule_search_locations)), file)
    name = f"{package}_{path.stem}"
    found = spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ModuleNotFoundError(f"{package} has no {file}")
    module = module_from_spec(found)
    hidden = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        found.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(hidden)
    return module


def variant(kernel: Any, name: str, types: dict[str, str], constants: dict[str, Any], threads: int, **more: Any) -> Any:
    """A Variant whose arguments are i32 unless `types` or `constants` say more, and whose pointers are all aligned."""
    from rspo_kernels.backends.triton_impl.common import Variant

    types = dict.fromkeys(kernel.arg_names, "i32") | types
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return Variant(kernel, name, types, constants, threads, (*pointers, *more.pop("aligned", ())), **more)


def liger() -> list[Any]:
    """Log-prob of a token, and the GRPO loss forward and backward, each one warp to a row."""
    module = load("liger_kernel", "ops/grpo_loss.py")
    sizes = {"L": TOKENS, "N": VOCABULARY, "BLOCK_N": 2048}
    loss = sizes | {
        "TEMPERATURE": 1.0, "BETA": 0.04, "EPS_LOW": 0.2, "EPS_HIGH": 0.4, "LOSS_TYPE": 0, "SAPO_TEMP_POS": 1.0,
        "SAPO_TEMP_NEG": 1.05, "DELTA": 0.0, "USE_BIAS_CORRECTION_KL": False, "VLLM_IS_RATIO": None, "PHI_SEQ": None,
    }  # fmt: skip
    floats = ("LOG_P", "OLD_LOGP", "REF_LOGP", "ADVANTAGES", "LOSS", "LSE", "KL", "IS_CLIPPED", "DLOSS")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("LOGITS", "DLOGITS"), "*bf16")
    types |= {"INPUT_IDS": "*i64", "MASK": "*i64", "COMPLETION_MASK": "*i64"}
    kernels = (
        (module._selective_log_softmax_kernel, "log-prob", sizes | {"TEMPERATURE": 1.0}, 4),
        (module._grpo_loss_fwd_kernel, "loss, forward", loss, 2),
        (module._grpo_loss_bwd_kernel, "loss, backward", loss, 2),
    )
    return [
        variant(kernel, name, _of(kernel, types), _of(kernel, constants), 32, stages=stages, reads=(2,))
        for kernel, name, constants, stages in kernels
    ]


def trl() -> list[Any]:
    """Log-prob and entropy, forward and backward (with the gradient of log-prob alone and of both)."""
    module = load("trl", "kernels/logprob_entropy.py")
    block = module._BLOCK_SIZE
    constants = {"n_cols": VOCABULARY, "TEMPERATURE": 1.0, "HAS_MASK": True, "BLOCK_SIZE": block}
    floats = (
        "logprobs_ptr", "entropy_ptr", "log_z_ptr", "expected_logit_ptr", "grad_logprobs_ptr", "grad_entropy_ptr",
    )  # fmt: skip
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("logits_ptr", "grad_logits_ptr"), "*bf16")
    types |= {"index_ptr": "*i64", "row_mask_ptr": "*i1"}
    strides = ("logits_batch_stride", "logits_row_stride", "grad_logits_batch_stride", "grad_logits_row_stride")
    found = []
    for kernel, name, option, work in (
        (module._forward_kernel, "log-prob and entropy", {}, {"reads": (2,)}),
        (module._backward_kernel, "log-prob", {"HAS_ENTROPY_GRAD": False}, {"elements": block}),
        (module._backward_kernel, "log-prob and entropy", {"HAS_ENTROPY_GRAD": True}, {"elements": block}),
    ):
        given = _of(kernel, constants | {"HAS_LOGPROB_GRAD": True} | option)
        aligned = tuple(stride for stride in strides if stride in kernel.arg_names)
        found.append(variant(kernel, name, _of(kernel, types), given, 128, aligned=aligned, **work))
    return found


def verl() -> list[Any]:
    """Log-prob and entropy from hidden states, the kernel with the matmul; its one configuration."""
    device = ModuleType("verl.utils.device")
    # Only asked for when launched, but imported.
    device.__dict__.update(
        get_device_capability=lambda: (0, 0), get_device_name=str, is_cuda_available=False, get_torch_device=object
    )
    stand_ins = {"verl": ModuleType("verl"), "verl.utils": ModuleType("verl.utils"), "verl.utils.device": device}
    module = load("verl", "utils/kernel/kernels.py", **stand_ins)
    tuned = module.efficient_entropy_kernel_general_mainloop
    config, kernel = tuned.configs[0], tuned.fn
    types = {name: "i64" for name in kernel.arg_names if name.startswith("stride_")}
    types |= {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"hidden_ptr": "*bf16", "weight_ptr": "*bf16", "labels_ptr": "*i64", "rcp_temperature": "fp32"}
    ones = ("stride_hidden_k", "stride_weight_k", "stride_max_n", "stride_accu_n", "stride_entropy_b_n")
    constants = config.kwargs | dict.fromkeys((*ones, "stride_global_logprobs"), 1) | {"USE_TMA": True}
    aligned = ("num_tokens", "hidden_size", "vocab_size", "vocab_per_split", "stride_hidden_m", "stride_weight_n")
    tile = config.kwargs["BLOCK_SIZE_M"] * config.kwargs["BLOCK_SIZE_N"]
    more = {"stages": config.num_stages, "elements": tile, "targets": HOPPER_ON, "aligned": aligned}
    return [variant(kernel, "log-prob and entropy", types, constants, 32 * config.num_warps, **more)]


def cut_cross_entropy() -> list[Any]:
    """log Σ exp from hidden states; its configuration where it does not tune."""
    kernel = import_module("cut_cross_entropy.cce_lse_forward")._cce_lse_forward_kernel
    while not hasattr(kernel, "arg_names") or hasattr(kernel.fn, "arg_names"):
        kernel = kernel.fn
    config = import_module("cut_cross_entropy.tl_autotune")._cce_forward_best_config()
    types = {"E": "*bf16", "C": "*bf16", "LSE": "*fp32", "Locks": "*i32"}
    constants = config.kwargs | {"LA": None, "Valids": None, "softcap": None}
    constants |= dict.fromkeys(("stride_ed", "stride_cd", "stride_lse_b", "stride_vb"), 1)
    constants |= dict.fromkeys(("HAS_VALIDS", "HAS_SOFTCAP", "HAS_LA"), False)
    constants |= {"GROUP_B": 8, "EVEN_D": WIDTH % config.kwargs["BLOCK_D"] == 0, "DOT_PRECISION": "ieee"}
    tile = config.kwargs["BLOCK_B"] * config.kwargs["BLOCK_V"]
    aligned = ("B", "V", "D", "stride_eb", "stride_cv", "B_BIN", "num_locks")
    more = {"stages": config.num_stages, "elements": tile, "targets": HOPPER_ON, "aligned": aligned}
    return [variant(kernel, "log-sum-exp", types, constants, 32 * config.num_warps, **more)]


PEERS = {
    "liger": Peer("liger-kernel", "liger_kernel", liger),
    "trl": Peer("trl", "trl", trl),
    "verl": Peer("verl", "verl", verl),
    "cce": Peer("cut-cross-entropy", "cut_cross_entropy", cut_cross_entropy),
}


def _of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` the kernel has an argument for."""
    return {name: value for name, value in given.items() if name in kernel.arg_names}
