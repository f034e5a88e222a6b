"""The bench suite `kernels`: providers are right, wrong ones are caught, and the arithmetic of its tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import kernels
from bench.cli import main
from bench.kernels import imports, providers
from bench.kernels.cases import cases
from bench.kernels.engine import Settings, compare_with_best, run_workload
from bench.kernels.floor import Rates, bytes_moved, operations, rows_moved, rows_needed
from bench.kernels.memory import resident_peak
from bench.kernels.present import summary
from bench.kernels.providers import OURS, Provider
from bench.kernels.reference import expect, relative_error
from bench.kernels.timing import interleave, quantile
from bench.kernels.workloads import LINEAR_OPS, LOGITS_OPS, LOSS_OPS, SCAN_OPS, Inputs, Workload, make
from bench.report import Report

CPU = torch.device("cpu")
OPS = (*LOGITS_OPS, *LINEAR_OPS, "policy_loss", *SCAN_OPS)
ROWS = 64
SETTINGS = Settings(CPU, threads=1, share=0.0, least=2, most=2)


@pytest.fixture(autouse=True)
def _without_the_compiler() -> Iterator[None]:
    """torch.compile runs what it was given: the compiler would take longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def workload(op: str, dtype: str = "fp32", **options: object) -> Workload:
    model = "tiny" if op in (*LOGITS_OPS, *LINEAR_OPS) else ""
    masked = op in (*LOSS_OPS, "gae", "masked_whiten")
    directions = ("forward",) if op in SCAN_OPS else ("both", "forward")
    return Workload(op, model, ROWS, dtype, **({"active": 0.5 if masked else 1.0, "directions": directions} | options))


@pytest.fixture
def rates() -> Rates:
    """Rates that need no measurement."""
    dtypes = ("fp32", "bf16")
    return Rates(CPU, True, dict.fromkeys(dtypes, 1e9), {(dtype, 32): 1e9 for dtype in dtypes})


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Replace the providers of an op by these beside ours."""

    def replace(op: str, *others: Provider) -> None:
        ours = [p for p in providers.providers(op) if p.library == OURS]
        monkeypatch.setattr("bench.kernels.engine.providers", lambda *_: [*ours, *others])

    return replace


CASES = [
    *((op, dtype, False) for op in (*LOGITS_OPS, *LINEAR_OPS) for dtype in ("fp32", "bf16")),
    *((op, "fp32", False) for op in ("policy_loss", *SCAN_OPS)),
    *((op, "fp32", True) for op in LOSS_OPS),
]
"""Zero advantages and clipped tokens matter to losses only; log-probs, rewards and values are always float32."""


@pytest.mark.parametrize(("op", "dtype", "natural"), CASES)
def test_every_provider_agrees_with_the_reference(op: str, dtype: str, natural: bool, rates: Rates) -> None:
    rows = run_workload(workload(op, dtype, natural=natural), SETTINGS, rates)
    for row in rows:
        name = f"{row['provider']}, {row['direction']}"
        assert row["status"] in ("right", "absent"), f"{name}: {row['note']}"
        if row["status"] == "right":
            assert row["median_ms"] > 0, name
            assert row["rounds"] == 2, name
        else:
            assert row["note"].startswith(("not installed", "does not run on cpu")), name
            assert row["median_ms"] is None, name
    assert rows[0]["provider"] == OURS
    assert not any(row["fault"] for row in rows)


def test_trls_tiles_are_as_wide_as_its_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    (chunked,) = (p for p in providers.providers("linear_token_logprobs") if p.library == "trl")
    utils = imports.load("trl.trainer.utils", without=("datasets", "pandas"))
    inputs = make(workload("linear_token_logprobs"), CPU)
    columns: list[int] = []
    matmul = torch.mm

    def mm(a: Tensor, b: Tensor, **options: Tensor) -> Tensor:
        columns.append(b.shape[1])
        return matmul(a, b, **options)

    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 400)
    monkeypatch.setattr(torch, "mm", mm)
    with torch.no_grad():
        chunked.load()(inputs)
    assert columns == [400, 400, 200]


@pytest.mark.parametrize("package", ["liger_kernel", "trl", "verl", "cut_cross_entropy"])
def test_peers_of_the_requirements_are_found(package: str) -> None:
    pytest.importorskip(package.replace("verl", "tensordict"), reason=f"{package}: requirements/bench.txt")
    modules = {
        "liger_kernel": ("liger_kernel.chunked_loss.grpo_loss", ()),
        "trl": ("trl.trainer.utils", ("datasets", "pandas")),
        "cut_cross_entropy": ("cut_cross_entropy", ()),
    }
    if package == "verl":
        assert imports.load_verl("verl.trainer.ppo.core_algos").compute_policy_loss_vanilla
        assert "verl.workers" not in sys.modules
    else:
        assert imports.load(*modules[package])


def test_a_stand_in_is_gone_after_the_import() -> None:
    with imports._standing_in(["no_such_package_here"]):
        assert sys.modules["no_such_package_here"].Anything
    assert "no_such_package_here" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here"):
        imports.load("no_such_package_here.module")


def test_a_wrong_provider_is_caught_and_not_timed(only, rates: Rates) -> None:
    def slightly_off(x: Inputs) -> dict[str, Tensor]:
        return {"logp": 1.01 * torch.log_softmax(x.logits, -1).gather(-1, x.targets[:, None])[:, 0]}

    def wrong_gradient(x: Inputs) -> dict[str, Tensor]:
        logp = torch.log_softmax(x.logits, -1).gather(-1, x.targets[:, None])[:, 0]
        return {"logp": logp.detach() + 2 * (logp - logp.detach())}

    def not_a_number(x: Inputs) -> dict[str, Tensor]:
        return {"logp": x.logits.sum(-1) * float("nan")}

    def breaks(x: Inputs) -> dict[str, Tensor]:
        raise RuntimeError("no kernel image\nfor this device")

    functions = (slightly_off, wrong_gradient, not_a_number, breaks)
    only("token_logprobs", *(Provider("token_logprobs", f.__name__, "eager", lambda f=f: f) for f in functions))
    ours, *others = run_workload(workload("token_logprobs", directions=("both",)), SETTINGS, rates)
    assert ours["status"] == "right"
    assert [row["status"] for row in others] == ["wrong", "wrong", "wrong", "failed"]
    assert all(row["median_ms"] is None and row["rounds"] == 0 for row in others)
    assert others[0]["error"] == pytest.approx(0.01, rel=0.2)
    assert others[1]["error"] == pytest.approx(1.0, rel=0.01)
    assert "not timed" in others[0]["note"]
    assert others[3]["note"] == "RuntimeError: no kernel image"
    assert ours["vs_best"] is None, "there is no peer to compare with"


def test_a_missing_peer_is_a_row_that_says_so(only, rates: Rates) -> None:
    def load() -> object:
        return imports.load("no_such_package_here")

    only("token_logprobs", Provider("token_logprobs", "missing", "liger", load))
    rows = run_workload(workload("token_logprobs"), SETTINGS, rates)
    missing = [row for row in rows if row["provider"] == "missing"]
    assert len(missing) == 2, "one for each direction"
    assert all(row["status"] == "absent" and "no_such_package_here" in row["note"] for row in missing)


def test_ours_being_wrong_is_a_fault(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    broken = Provider("token_logprobs", OURS, OURS, lambda: lambda x: {"logp": x.logits.sum(-1)})
    monkeypatch.setattr("bench.kernels.engine.providers", lambda *_: [broken])
    assert all(row["fault"] for row in run_workload(workload("token_logprobs"), SETTINGS, rates))


def test_calls_are_interleaved_in_rotated_order_until_their_share_is_used_up() -> None:
    order: list[str] = []
    seconds = {"a": 1.0, "b": 1.0, "slow": 30.0}
    now = 0.0

    def call(name: str):
        def run() -> tuple[float, float]:
            nonlocal now
            order.append(name)
            now += seconds[name]
            return seconds[name], 0.0

        return run

    samples = interleave({name: call(name) for name in seconds}, share=5.0, least=2, most=100, clock=lambda: now)
    assert order[:6] == ["a", "b", "slow", "b", "slow", "a"]
    assert {name: len(s.wall) for name, s in samples.items()} == {"a": 5, "b": 5, "slow": 2}
    assert samples["slow"].quantiles() == (30.0, 30.0, 30.0)


def test_a_call_that_fails_late_ends_alone(only, rates: Rates) -> None:
    turns = iter(range(100))

    def runs_out(x: Inputs) -> dict[str, Tensor]:
        if next(turns) > 2:
            raise RuntimeError("out of memory\nat last")
        return {"logp": torch.log_softmax(x.logits, -1).gather(-1, x.targets[:, None])[:, 0]}

    only("token_logprobs", Provider("token_logprobs", "late", "eager", lambda: runs_out))
    ours, late = run_workload(workload("token_logprobs", directions=("both",)), SETTINGS, rates)
    assert (ours["status"], ours["rounds"]) == ("right", 2)
    assert (late["status"], late["note"]) == ("failed", "RuntimeError: out of memory")
    assert late["median_ms"] is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no room")])
def test_what_was_measured_before_an_end_is_kept(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [workload(op) for op in ("group_advantages", "masked_whiten", "gae")]

    def run(workload: Workload, settings: Settings, rates: Rates) -> list[dict[str, Any]]:
        if workload.op == "masked_whiten":
            raise error
        return run_workload(workload, settings, rates)

    monkeypatch.setattr(kernels, "run_workload", run)
    kept: list[set[str]] = []

    def keep(report: Report) -> None:
        kept.append({row["op"] for row in report.rows})

    report = kernels.measure(chosen, CPU, 1, True, 60.0, ["eager"], memory=False, keep=keep)
    first, second, third = ([r for r in report.rows if r["op"] == w.op] for w in chosen)
    assert kept[:2] == [{"group_advantages"}, {"group_advantages", "masked_whiten"}]
    assert all(row["status"] == "right" for row in first)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert report.settings["interrupted"] == interrupted
    assert second[0]["note"] == ("not run: interrupted" if interrupted else "not run: RuntimeError: no room")
    assert second[0]["fault"] == (not interrupted)
    assert third[0]["status"] == ("not run" if interrupted else "right")


def test_a_run_that_is_interrupted_writes_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run_workload", interrupt)
    assert main(["kernels", "--device", "cpu", "--quick", "--threads", "1", "--out", str(tmp_path)]) == 1
    assert "not run: interrupted" in capsys.readouterr().out
    assert "not run: interrupted" in (tmp_path / "kernels.md").read_text()
    assert Report.read(tmp_path / "kernels.json").settings["interrupted"]


def test_quantiles_are_numpys() -> None:
    values = torch.rand(17).tolist()
    for q in (0.2, 0.5, 0.8):
        assert quantile(values, q) == pytest.approx(float(torch.tensor(values).quantile(q)), abs=1e-6)
    assert quantile([3.0], 0.8) == 3.0


def test_ratios_to_the_best() -> None:
    rows = [{"library": OURS, "median_ms": 2.0}, {"library": "trl", "median_ms": 3.0}]
    rows += [{"library": "verl", "median_ms": 6.0}, {"library": "cce", "median_ms": None}]
    compare_with_best(rows)
    assert [row.get("vs_best") for row in rows] == [1.5, 1.5, 3.0, None]
    rows = [{"library": OURS, "median_ms": 2.0}, {"library": "trl", "median_ms": 1.0}]
    compare_with_best(rows)
    assert [row["vs_best"] for row in rows] == [0.5, 1.0]


def test_the_floor_counts_active_rows() -> None:
    linear = make(workload("linear_policy_loss", natural=True), CPU)
    needed, moved, matmul = rows_needed(linear), rows_moved(linear), 2 * 32 * 1000
    active = linear.mask & (linear.advantages != 0)
    assert needed == int(active.sum()) < 0.5 * ROWS
    assert 0 < moved < needed
    assert operations(linear, "forward") == needed * matmul
    assert operations(linear, "both") == (needed + 2 * moved) * matmul

    logits = make(workload("logits_policy_loss"), CPU)
    row, tokens = 4 * 1000, 4 * ROWS * 4
    assert bytes_moved(logits, "forward") == rows_needed(logits) * row + tokens
    assert bytes_moved(logits, "both") == rows_needed(logits) * row + ROWS * row + tokens
    logps = make(workload("token_logprobs", "bf16"), CPU)
    assert bytes_moved(logps, "both") == 3 * ROWS * 1000 * 2 + tokens
    assert operations(logps, "both") == 0


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    inputs = make(workload("linear_policy_loss"), CPU)
    slow_memory = Rates(CPU, True, {"fp32": 1.0}, {("fp32", 32): 1e30})
    assert slow_memory.seconds(inputs, "both") == bytes_moved(inputs, "both")
    slow_matmul = Rates(CPU, True, {"fp32": 1e30}, {("fp32", 32): 1.0})
    assert slow_matmul.seconds(inputs, "both") == operations(inputs, "both")


def test_measured_rates_are_sane() -> None:
    rates = Rates(CPU, quick=True)
    assert 1e8 < rates.bytes_per_second("fp32") < 1e12
    assert rates.operations_per_second("bf16", 32) >= rates.operations_per_second("fp32", 32) > 1e8


def test_inputs_are_the_same_in_every_process_and_clear_of_the_clip_bounds() -> None:
    chosen = workload("linear_policy_loss", natural=True)
    first, again = make(chosen, CPU), make(chosen, CPU)
    assert torch.equal(first.hidden, again.hidden)
    assert torch.equal(first.mask, again.mask)
    expect(first)
    ratio = first.log_ratio.exp()
    distance = torch.minimum((ratio - 0.8).abs(), (ratio - 1.2).abs())
    assert distance.min() > 0.05
    masked = make(workload("logits_policy_loss", active=0.25), CPU).mask
    assert float(masked.float().mean()) == pytest.approx(0.25, abs=0.05)
    runs = int((masked[1:] != masked[:-1]).sum())
    assert runs < masked.numel() / 4, "the mask comes in runs"


def test_errors_are_relative_and_never_hide_a_nan() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected, expected) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), expected) == float("inf")
    assert relative_error(torch.tensor(1.5), torch.tensor(1.0), scale=10.0) == pytest.approx(0.05)
    where = torch.tensor([True, False])
    assert relative_error(torch.tensor([3.0, float("nan")]), expected, where=where) == 0.0


def test_the_peak_of_a_call_is_what_it_allocates() -> None:
    peak = resident_peak(lambda: torch.ones(50_000_000))
    if isinstance(peak, str):
        pytest.skip(peak)
    assert peak == pytest.approx(2e8, rel=0.1)


def test_a_report_survives_json_and_names_what_was_left_out(tmp_path: Path) -> None:
    chosen = [workload("group_advantages"), workload("masked_whiten")]
    report = kernels.measure(chosen, CPU, 1, True, budget=-1.0, peers=["eager"], memory=False)
    assert [row["status"] for row in report.rows] == ["not run", "not run"]
    report.rows += kernels.measure(chosen, CPU, 1, True, budget=60.0, peers=["eager"], memory=False).rows
    report.write(tmp_path / "kernels.json")
    again = Report.read(tmp_path / "kernels.json")
    assert again == report
    text = kernels.table(again)
    assert "not run: the budget of -1 s was used up" in text
    assert "## masked_whiten" in text
    assert len({line.count("|") for line in summary(again).splitlines()}) == 1
    kernels.plot(again, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 0


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(SystemExit, match="nobody"):
        kernels.measure([], CPU, 1, True, peers=["nobody"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_cover_every_op_and_have_one_length(device: str) -> None:
    full, quick = cases(device, False), cases(device, True)
    assert {w.op for w in full} == set(OPS)
    assert {w.op for w in quick} >= {"linear_policy_loss", "logits_policy_loss", "token_logprobs", *SCAN_OPS}
    assert full[0].op == quick[0].op == "linear_policy_loss"
    for w in (*full, *quick):
        assert w.rows % w.length == 0, w
        assert len(set(full)) == len(full)
