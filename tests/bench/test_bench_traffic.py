"""The traffic suite: its counter on kernels whose bytes are known, what it says of our kernels and of a worse table."""

from __future__ import annotations

import argparse
import copy
import os
import warnings
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
import triton.language as tl  # noqa: E402

from bench import traffic  # noqa: E402
from bench.report import Report  # noqa: E402
from bench.traffic import ours, peers, worker  # noqa: E402
from bench.traffic.cases import BOTH, CLIPPED, FORWARD, LOGPROBS, LOSS, QUARTER, Case  # noqa: E402
from bench.traffic.counter import LOGITS, OTHER, READ, TORCH, TRITON, WEIGHT, WRITE, counting  # noqa: E402

COMMITTED = Path(traffic.__file__).parents[1] / "results" / "interpreter" / "traffic.json"

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]


@triton.jit
def copy_kernel(p_x, p_out, p_count, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    tl.store(p_out + o, tl.load(p_x + o, mask=inside), mask=inside)
    tl.atomic_add(p_count, 1)


@triton.jit
def descriptor_kernel(p_x, p_out, rows, cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(p_x, [rows, cols], [cols, 1], [BLOCK, BLOCK])
    out = tl.make_tensor_descriptor(p_out, [rows, cols], [cols, 1], [BLOCK, BLOCK])
    out.store([0, 0], x.load([0, 0]))


@triton.jit
def stray_kernel(p_x, p_out):
    tl.store(p_out, tl.load(p_x + 1000))


class TestCounter:
    pytestmark = interpreted

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_masked_lanes_request_nothing_and_atomics_both_read_and_write(self, dtype):
        x, count = torch.randn(3, 7).to(dtype), torch.zeros(1, dtype=torch.int32)
        out = torch.zeros_like(x)
        with counting([7]) as counted:
            copy_kernel[(2,)](x, out, count, 21, BLOCK=16)
        assert torch.equal(out, x)
        assert counted.bytes(READ, LOGITS) == counted.bytes(WRITE, LOGITS) == 21 * x.element_size()
        assert counted.bytes(READ, OTHER) == counted.bytes(WRITE, OTHER) == 2 * 4
        assert counted.bytes(source=TORCH) == 0

    def test_descriptors_request_what_lies_inside(self):
        x = torch.randn(5, 12)
        out = torch.zeros_like(x)
        with counting([12]) as counted:
            descriptor_kernel[(1,)](x, out, 5, 12, BLOCK=16)
        assert torch.equal(out, x)
        assert counted.bytes(READ) == counted.bytes(WRITE) == 5 * 12 * 4

    def test_views_of_one_storage_count_as_the_matrix_that_it_holds(self):
        x, count = torch.randn(2, 8, 7), torch.zeros(1, dtype=torch.int32)
        with counting([7]) as counted:
            copy_kernel[(1,)](x[1], x[0].flatten(), count, 20, BLOCK=32)
        assert counted.bytes(READ, LOGITS) == counted.bytes(WRITE, LOGITS) == 80

    def test_an_address_outside_of_all_tensors_is_an_error(self):
        with pytest.raises(Exception, match="outside of the kernel's tensors"), counting():
            stray_kernel[(1,)](torch.zeros(4), torch.zeros(4))

    def test_nothing_is_counted_after_the_block(self):
        x, count = torch.randn(16), torch.zeros(1, dtype=torch.int32)
        with counting() as counted:
            pass
        copy_kernel[(1,)](x, torch.zeros_like(x), count, 16, BLOCK=16)
        torch.mm(torch.randn(2, 2), torch.randn(2, 2))
        assert not counted.moved

    def test_torch_operators_read_operands_and_write_results(self):
        hidden, weight, logits = torch.randn(3, 4), torch.randn(7, 4), torch.empty(3, 7)
        with counting([7], 4) as counted:
            torch.mm(hidden, weight.t(), out=logits)
            torch.empty(3, 7).view(7, 3).zero_()
            logits.t().mul_(torch.ones(()).expand(7, 3))
            weight.addmm_(logits.t(), hidden)
        assert counted.bytes(READ, LOGITS) == (1 + 1) * 21 * 4 + 4  # mul_, addmm_, one number expanded
        assert counted.bytes(WRITE, LOGITS) == (1 + 1 + 1) * 21 * 4  # mm, zero_, mul_
        assert counted.bytes(READ, WEIGHT) == 2 * 28 * 4
        assert counted.bytes(WRITE, WEIGHT) == 28 * 4
        assert counted.matmul_operations == 2 * (2 * 3 * 4 * 7)

    def test_operators_of_our_library_are_looked_into(self):
        """`hidden @ weight.T` inside of one reaches the counter as a matmul, whole or taken apart."""
        case = Case.of_hidden(CLIPPED, 8, 64, 16, torch.float32)
        work = ours.linear_policy_loss(case, chunk_rows=8)
        with counting([64], 16) as counted:
            results = work()
        assert case.fault(results) == ""
        # Forward for all tokens, both gradients for the half that is not clipped.
        assert counted.matmul_operations == 2 * (1 + 2 * 0.5) * 8 * 64 * 16


class TestOurKernels:
    """What the kernels' docstrings say: V is large enough that what is read twice at a row's edges is < 2 %."""

    pytestmark = interpreted

    @pytest.mark.parametrize("inplace", [False, True])
    def test_loss_reads_active_rows_twice_clipped_rows_once_and_masked_rows_never(self, inplace):
        for shares, reads in ((QUARTER, 0.5), (CLIPPED, 1.5)):
            case = Case.of_logits(shares, 8, 3001, torch.float32)
            work = ours.logits_policy_loss(case, inplace=inplace)
            with counting([3001]) as counted:
                results = work()
            one_pass = case.logits.numel() * 4
            assert case.fault(results) == ""
            assert counted.bytes(READ, LOGITS, TRITON) / one_pass == pytest.approx(reads, rel=0.02)
            assert counted.bytes(WRITE, LOGITS, TRITON) / one_pass == pytest.approx(1, rel=0.001)

    def test_a_wrong_result_is_a_fault(self):
        case = Case.of_logits(CLIPPED, 8, 101, torch.float32)
        right = ours.logits_policy_loss(case)()
        assert case.fault(right) == ""
        assert "loss is wrong" in case.fault(right | {"loss": right["loss"] * 1.01})
        assert "grad is not 0" in case.fault(right | {"grad": right["grad"] + 1e-6 * right["grad"].abs().max()})
        assert "grad is wrong" in case.fault(right | {"grad": right["grad"] * torch.nan})


class TestPeers:
    pytestmark = interpreted

    def test_one_that_is_not_installed_is_listed(self, monkeypatch):
        monkeypatch.setitem(peers.PACKAGES, "liger", "no-such-distribution")
        counted = worker.Counted(["liger", "verl"], quick=True)
        counted.count(LOSS, "liger", BOTH, [], peers.liger_logprobs)
        assert counted.peers["liger"] == {"version": None, "status": "not installed"}
        assert set(counted.peers) == {"liger", "verl"}
        assert not counted.rows

    def test_one_that_does_not_run_is_listed_with_its_reason(self, monkeypatch):
        def make(case):
            def work():
                raise RuntimeError("outer") from AssertionError("needs a GPU")

            return work

        counted = worker.Counted(["trl"], quick=True)
        counted.peers["trl"] = {"version": "1.0", "status": "installed"}
        counted.count(LOGPROBS, "trl", FORWARD, [Case.of_logits(QUARTER, 8, 11, torch.float32)], make)
        assert counted.peers["trl"]["status"] == "does not run in the interpreter: AssertionError: needs a GPU"
        assert not counted.rows


@pytest.fixture
def committed() -> Report:
    return Report.read(COMMITTED)


def test_the_committed_table_is_whole(committed):
    assert not [row["fault"] for row in committed.rows if row["fault"]]
    text = traffic.table(committed)
    assert all(row["op"] in text for row in committed.rows)
    assert all(peer in text for peer in peers.PACKAGES)
    assert traffic.compare(committed, committed) == []


def test_a_table_that_got_worse_is_found(committed):
    worse = copy.deepcopy(committed)
    row = next(row for row in worse.rows if row["provider"] == "ours" and row["read_passes"])
    row["read_passes"] += 0.25
    (found,) = traffic.compare(worse, committed)
    assert found.startswith(row["op"])
    assert "read_passes" in found
    assert traffic.compare(committed, worse) == []  # less is no fault


def test_rows_that_are_new_or_gone_are_found(committed):
    fewer = copy.deepcopy(committed)
    gone = fewer.rows.pop(0)
    (found,) = traffic.compare(fewer, committed)
    assert found.startswith(gone["op"])
    assert found.endswith("only in the table")
    (found,) = traffic.compare(committed, fewer)
    assert found.endswith("not in the table")
    fewer.settings["quick"] = True
    assert traffic.compare(fewer, committed) == []


@pytest.mark.parametrize("change", [{"version": "99"}, {"status": "not installed"}])
def test_a_peer_is_compared_with_its_own_version_only(committed, change):
    other = copy.deepcopy(committed)
    for row in other.rows:
        if row["provider"] == "trl":
            row["write_passes"] = 0.0
    if committed.settings["peers"]["trl"]["status"] == "counted":
        assert traffic.compare(other, committed)
    other.settings["peers"]["trl"] |= change
    assert traffic.compare(other, committed) == []


@pytest.mark.slow
def test_the_suite_runs_in_a_process_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = traffic.run(argparse.Namespace(quick=True, peers=[]))
    assert report.device == "interpreter"
    assert not report.settings["peers"]
    assert {row["provider"].split()[0] for row in report.rows} == {"ours"}
