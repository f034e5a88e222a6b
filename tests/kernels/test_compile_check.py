"""The ahead-of-time compile check, and that nothing but a real choice compiles a kernel anew.

Both need Triton's compiler, which cannot live in a process with its interpreter: they run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rspo_kernels import compile_check
from rspo_kernels.compile_check import Result

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )


@pytest.mark.slow
def test_every_kernel_compiles_without_a_spill(tmp_path):
    """One target here; `make check` compiles for all. The interpreter's variable must not keep it from working."""
    report = tmp_path / "report.json"
    run = python(
        "-m", "rspo_kernels.compile_check", "--target", "sm_90", "--write", str(report), TRITON_INTERPRET="1"
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(report.read_text())["rows"]
    assert all(r["error"] is None and r["spills"] == 0 and r["registers"] > 0 for r in results)
    rows = [r for r in results if r["kernel"].startswith(("logprobs_", "loss_rows_"))]
    assert {r["load_bits"] for r in rows} == {128}, "the row kernels must load 16 bytes at once"
    # Above about 13 for each pass an H200 issues instructions for longer than it waits for memory (machine_code.py).
    plain = [r for r in rows if "softcap" not in r["variant"] and "same_phase" not in r["variant"]]
    assert all(len(r["passes"]) == (2 if r["kernel"] == "loss_rows_kernel" else 1) for r in rows)
    assert max(max(r["passes"]) for r in plain) < 11
    assert all(r["threads"] == 0 for r in plain), "threads must not wait for each other within a row"
    # More than 128 registers a thread would leave one block of 256 threads to a multiprocessor.
    assert max(r["registers"] for r in rows) <= 128
    matmuls = [r for r in results if r["kernel"] == "linear_logprobs_kernel"]
    assert matmuls
    assert all(r["matrix"] == "wgmma.mma_async" for r in matmuls), "tiles must be multiplied by the widest instruction"
    for kernel in ("logprobs_forward_kernel", "policy_loss_kernel", "group_advantages_kernel"):
        assert kernel in run.stdout
    assert f"{len(results)} compiles, 0 faults" in run.stdout


def test_every_kernel_is_in_the_check():
    """Reads the sources, so that a kernel without a variant is noticed."""
    folder = Path(compile_check.__file__).parent / "backends" / "triton_impl"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    kernels = {word.split("(")[0] for word in text.split("\ndef ")[1:] if "_kernel(" in word.split("\n")[0]}
    assert kernels
    assert kernels == {variant.kernel.__name__ for variant in compile_check.variants()}


def test_faults_are_named_and_fail(monkeypatch, capsys):
    results = [
        Result("good", "fp32", "sm_90", registers=40, store_bits=32),
        Result("bad", "fp32", "sm_90", registers=255, spills=16, store_bits=32),
        Result("worse", "bf16", "gfx942", error="CompilationError: no"),
        Result("dead", "bf16", "sm_100", registers=4),
    ]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile_check, "check", lambda targets: results)
    assert compile_check.main([]) == 1
    printed = capsys.readouterr().out
    assert "4 compiles, 3 faults" in printed
    assert "bad [fp32] for sm_90: spills 16 bytes" in printed
    assert "worse [bf16] for gfx942: CompilationError: no" in printed
    assert "dead [bf16] for sm_100: stores nothing" in printed
    monkeypatch.setattr(compile_check, "check", lambda targets: results[:1])
    assert compile_check.main([]) == 0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"registers": 48}, None),
        ({"registers": 32, "load_bits": 128, "shared": 9, "passes": (8.8, 2.0)}, None),
        ({"registers": 49}, "k [v] for sm_90: 49 registers, 40 in the table"),
        ({"load_bits": 32}, "k [v] for sm_90: load_bits 32, 64 in the table"),
        ({"matrix": "mma.sync"}, "k [v] for sm_90: multiplies by 'mma.sync', by 'wgmma.mma_async' in the table"),
        ({"passes": (8.0, 7.8)}, "k [v] for sm_90: pass 2 has 7.8 instructions an element, 7.0 in the table"),
        ({"passes": (15.0,)}, "k [v] for sm_90: makes 1 passes, 2 in the table"),
        ({"passes": (15.0,)}, "k [v] for sm_90: pass 1 has 15.0 instructions an element, 8.0 in the table"),
        ({"variant": "w"}, "k [w] for sm_90: not in the table"),
        ({"spills": 4}, "k [v] for sm_90: spills 4 bytes"),
        ({"error": "no"}, "k [v] for sm_90: no"),
    ],
)
def test_results_are_compared_with_the_table(tmp_path, monkeypatch, capsys, change, fault):
    """By the version of Triton that wrote it strictly; by another only what is a fault by itself fails."""
    before = Result("k", "v", "sm_90", 40, 0, 0, 64, 32, "wgmma.mma_async", (8.0, 7.0))
    other_target = dataclasses.replace(before, target="sm_80")
    table = tmp_path / "table.json"
    compile_check.write([before, other_target], table)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile_check, "check", lambda targets: [dataclasses.replace(before, **change)])
    arguments = ["--target", "sm_90", "--compare", str(table)]
    assert compile_check.main(arguments) == (fault is not None)
    assert fault is None or fault in capsys.readouterr().out
    monkeypatch.setattr(compile_check, "version", lambda package: "99.0")
    by_itself = "spills" in change or "error" in change
    assert compile_check.main(arguments) == by_itself
    printed = capsys.readouterr().out
    assert "differences that do not fail" in printed
    assert fault is None or fault in printed


def test_a_kernel_that_is_gone_is_noticed(tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.json"
    results = [Result(name, "v", "sm_90", 40, 0, 0, 64, 32) for name in ("k", "gone")]
    compile_check.write(results, table)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile_check, "check", lambda targets: results[:1])
    assert compile_check.main(["--target", "sm_90", "--compare", str(table)]) == 1
    assert "gone [v] for sm_90: only in the table" in capsys.readouterr().out


def test_the_committed_table_has_every_variant():
    rows = json.loads((ROOT / "bench" / "results" / "ahead-of-time" / "compile.json").read_text())["rows"]
    recorded = [r for r in rows if r["provider"] == compile_check.PROVIDER]
    names = {(r["kernel"], r["variant"], r["target"]) for r in recorded}
    assert names == {
        (variant.kernel.__name__, variant.name, target)
        for variant in compile_check.variants()
        for target in variant.targets or compile_check.TARGETS
    }
    assert all(r["spills"] == 0 and r["error"] is None for r in recorded)
    counted = ("logprobs_", "loss_rows_", "linear_logprobs_", "policy_loss_", "gae_", "masked_whiten_")
    assert all(r["passes"] for r in recorded if r["kernel"].startswith(counted))


def test_other_libraries_are_not_compared():
    ours, theirs = Result("k", "v", "sm_90", 40), Result("k", "v", "sm_90", 40, provider="another")
    assert compile_check.differences([ours], [ours, theirs]) == []
    worse = dataclasses.replace(theirs, registers=255)
    assert compile_check.differences([ours, worse], [ours, theirs]) == []


def test_a_machine_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(compile_check, "find_spec", lambda name: None)
    assert compile_check.main([]) == 2
    assert "needs triton, which is not installed" in capsys.readouterr().err


def test_a_target_that_is_not_known(capsys):
    with pytest.raises(SystemExit):
        compile_check.main(["--target", "sm_20"])
    assert "sm_90" in capsys.readouterr().err


COUNT_COMPILES = """
import dataclasses, json
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from rspo_kernels.backends.common import LogitsTransform
from rspo_kernels.backends.triton_impl import advantages, common, fused, linear_logprobs, logprobs, policy_loss
from rspo_kernels.config import PolicyLossConfig

# What a launch would look up among its compiled kernels, instead of the launch.
common.current_target = lambda: ("cuda", 32)
linear_logprobs.current_architecture = lambda: "sm_90"
backend = make_backend(GPUTarget("cuda", 90, 32))
keys = {}

def run(self, *args, grid, warmup, **kwargs):
    binder = create_function_from_signature(self.signature, self.params, backend)
    _, specialization, options = binder(*args, **kwargs)
    keys.setdefault(self.__name__, set()).add(str((specialization, options)))

JITFunction.run = run
how = LogitsTransform(1.0, None, 1.0, 48, -100)

def everything(batch, length, temperature=1.0, clip=0.2, odd=0):
    tokens = batch * length
    logits = torch.zeros(batch, length, 48, dtype=torch.bfloat16)
    labels = torch.zeros(odd + tokens, dtype=torch.int64)[odd:].view(batch, length)
    mask = torch.ones(odd + tokens, dtype=torch.bool)[odd:].view(batch, length)
    transform = how._replace(temperature=temperature)
    saved = logprobs.token_logprobs_forward(logits, labels, mask, transform, True)
    logp, entropy, row_max, log_sum = saved
    g = torch.zeros(odd + tokens)[odd:].view(batch, length)
    out = torch.empty_like(logits)
    logprobs.token_logprobs_backward(
        g, g, logits, labels, mask, logp, entropy, row_max, log_sum, transform, out
    )
    vectors = torch.zeros(odd + tokens)[odd:]
    config = PolicyLossConfig(clip_low=clip, kl_coef=clip)
    policy_loss.policy_loss_forward(
        vectors, vectors, None, mask.flatten(), vectors, vectors, vectors, vectors, None, None, config
    )
    partners = (vectors, None, mask.flatten(), vectors, vectors, vectors, vectors)
    fused.logits_policy_loss(logits, labels, partners, transform, config, False, out)
    hidden, weight = torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(48, 64, dtype=torch.bfloat16)
    linear_logprobs.linear_token_logprobs(
        hidden, weight, None, labels.flatten(), torch.ones(tokens, dtype=torch.bool), transform, True
    )
    advantages.group_advantages(vectors, labels.flatten(), "mean", "std", "zero", 1e-6)

everything(2, 16)
for batch, length in ((1, 1), (1, 16), (3, 7), (16, 1), (5, 129)):
    everything(batch, length)
everything(2, 16, temperature=0.7, clip=0.28)
everything(2, 16, odd=1)
print(json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_no_recompilation_for_lengths_numbers_and_offsets():
    """Batch size, length, temperature, ε and the alignment of vectors are arguments: one kernel serves them all."""
    run = python("-c", COUNT_COMPILES, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "logprobs_forward_kernel": 1,
        "logprobs_backward_kernel": 1,
        "policy_loss_kernel": 1,
        "loss_rows_kernel": 1,
        "linear_logprobs_kernel": 1,
        "merge_parts_kernel": 1,
        "group_advantages_kernel": 1,
    }
