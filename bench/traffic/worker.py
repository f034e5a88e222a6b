"""python -m bench.traffic.worker: the counting, in a process that has TRITON_INTERPRET=1 from its start.

Prints a JSON object {"rows": [...], "peers": {name: {"version", "status"}}} as its last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import ours, peers
from .cases import (
    ALL,
    BOTH,
    CLIPPED,
    FLOORS,
    FORWARD,
    LINEAR_LOGPROBS,
    LINEAR_LOSS,
    LOGPROBS,
    LOGPROBS_ENTROPY,
    LOSS,
    QUARTER,
    SEQUENCES,
    Case,
    Work,
)
from .counter import LOGITS, OTHER, READ, TORCH, TRITON, WEIGHT, WRITE, Traffic, counting

OURS = "ours"
TOKENS, TOKEN_OP_TOKENS = 32, 512
VOCAB, EVEN_VOCAB = 10_007, 16_384
"""A multiple of no block, whose rows start at odd addresses; and one of every block. Both take several blocks."""

LINEAR_VOCAB, WIDTH = 4_001, 64
CHUNK_COLUMNS = 1_024
"""Part of the vocabulary that TRL's chunked kernels take at once. Of tokens there is one chunk on both sides."""

Provider = Callable[[Case], Work]

LIGER_ROW = (
    f"its layout has one more row of logits for each sequence (of {TOKENS // SEQUENCES} tokens), which is cleared"
)
NO_LOGPROBS_ALONE = "always makes the entropy, too"
TRL_ENTROPY = "makes the entropy from hidden states, too, as its trainer asks for"
CCE_LOG1P = "with log(1 + x) for libdevice's log1p, which the interpreter has not"


class Counted:
    """The rows so far, and what became of the peers."""

    def __init__(self, wanted: Sequence[str] | None, quick: bool) -> None:
        self.quick = quick
        self.rows: list[dict[str, Any]] = []
        self.peers = {name: _installed(name) for name in peers.PACKAGES if wanted is None or name in wanted}

    def count(
        self, op: str, provider: str, direction: str, cases: Sequence[Case], make: Provider, note: str = ""
    ) -> None:
        """A row for each case, unless the provider is a peer that was not asked for or that cannot run."""
        name = provider.split()[0]
        if name != OURS and self.peers.get(name, {}).get("status") not in ("installed", "counted"):
            return
        for case in cases:
            try:
                work = make(case)
                widths = (case.vocab, CHUNK_COLUMNS, case.vocab % CHUNK_COLUMNS)
                with counting(widths, -1 if case.hidden is None else case.hidden.shape[-1]) as traffic:
                    results = work()
            except Exception as error:
                if name == OURS:
                    raise
                # Whatever stops a peer is the finding.
                self.peers[name]["status"] = f"does not run in the interpreter: {_cause(error)}"
                return
            if name != OURS:
                self.peers[name]["status"] = "counted"
            self.rows.append(_row(op, provider, direction, case, traffic, note, case.fault(results)))

    def count_token_op(self, op: ours.TokenOp) -> None:
        with counting() as traffic:
            results = op.work()
        n = TOKEN_OP_TOKENS
        row = dict.fromkeys(_KEYS) | {"op": op.name, "provider": OURS, "direction": "all", "tokens": n}
        row |= {"dtype": "float32", "other_bytes_per_token": _per(traffic.bytes(source=TRITON), n)}
        row |= {"torch_bytes_per_token": _per(traffic.bytes(source=TORCH), n)}
        row |= {"floor_bytes_per_token": _per(op.floor, n), "note": "", "fault": op.fault(results)}
        row["ratio_to_floor"] = _per(traffic.bytes(source=TRITON), op.floor)
        self.rows.append(row)


_KEYS = (
    "op", "provider", "direction", "active", "clipped", "tokens", "vocab", "width", "dtype",
    "read_passes", "write_passes", "torch_passes", "floor_passes", "ratio_to_floor", "weight_passes", "matmul_work",
    "other_bytes_per_token", "torch_bytes_per_token", "floor_bytes_per_token", "note", "fault",
)  # fmt: skip


def _row(op: str, provider: str, direction: str, case: Case, traffic: Traffic, note: str, fault: str) -> dict[str, Any]:
    n, linear = case.tokens, case.hidden is not None
    dtype = case.logits.dtype if case.hidden is None else case.hidden.dtype
    one_pass = n * case.vocab * dtype.itemsize
    read, write = traffic.bytes(READ, LOGITS), traffic.bytes(WRITE, LOGITS)
    floor = FLOORS[op, direction](case)
    row: dict[str, Any] = {"op": op, "provider": provider, "direction": direction, **case.shares._asdict()}
    row |= {"tokens": n, "vocab": case.vocab, "width": None, "dtype": str(dtype).removeprefix("torch.")}
    row |= {"read_passes": _per(read, one_pass), "write_passes": _per(write, one_pass)}
    row |= {"torch_passes": _per(traffic.bytes(kind=LOGITS, source=TORCH), one_pass), "floor_passes": floor}
    row |= {"ratio_to_floor": round((read + write) / one_pass / floor, 4) if floor else None}
    row |= {"weight_passes": None, "matmul_work": None}
    row |= {"other_bytes_per_token": _per(traffic.bytes(kind=OTHER, source=TRITON), n)}
    row |= {"torch_bytes_per_token": _per(traffic.bytes(kind=OTHER, source=TORCH), n)}
    row |= {"floor_bytes_per_token": None, "note": note, "fault": fault}
    if linear and case.weight is not None:
        row["width"] = case.weight.shape[1]
        row["weight_passes"] = _per(traffic.bytes(kind=WEIGHT), case.weight.numel() * dtype.itemsize)
        row["matmul_work"] = _per(traffic.matmul_operations, 2 * n * case.weight.numel())
    return row


def _per(number: float, unit: float) -> float:
    return round(number / unit, 4)


def count_logits(counted: Counted) -> None:
    cases = [Case.of_logits(share, TOKENS, VOCAB, torch.bfloat16) for share in (ALL, QUARTER, CLIPPED)]
    even = [] if counted.quick else [Case.of_logits(ALL, TOKENS, EVEN_VOCAB, torch.bfloat16)]
    if counted.quick:
        cases = cases[1:2]
    counted.count(LOSS, OURS, BOTH, cases + even, ours.logits_policy_loss)
    counted.count(LOSS, f"{OURS} (in place)", BOTH, cases, partial(ours.logits_policy_loss, inplace=True))
    counted.count(LOSS, "liger", BOTH, cases + even, partial(peers.liger_grpo_loss, inplace=False), LIGER_ROW)
    counted.count(LOSS, "liger (in place)", BOTH, cases, partial(peers.liger_grpo_loss, inplace=True), LIGER_ROW)
    counted.count(
        LOSS, "trl", BOTH, cases + even, peers.trl_grpo_loss, "log-prob kernels, the loss between them in torch"
    )
    for entropy, op in ((False, LOGPROBS), (True, LOGPROBS_ENTROPY)):
        note = "" if entropy else NO_LOGPROBS_ALONE
        for gradient, direction in ((False, FORWARD), (True, BOTH)):
            # Forward does not know of clipping, and an entropy's gradient is one of clipped tokens, too.
            chosen = cases if gradient and not entropy else cases[:2]
            options: dict[str, Any] = {"gradient": gradient, "entropy": entropy}
            counted.count(op, OURS, direction, chosen, partial(ours.token_logprobs, **options))
            counted.count(op, "trl", direction, chosen, partial(peers.trl_logprobs, **options), note)
            if not gradient and not entropy:
                counted.count(op, "liger", direction, chosen, peers.liger_logprobs)


def count_linear(counted: Counted) -> None:
    shares = [QUARTER] if counted.quick else [ALL, QUARTER, CLIPPED]
    cases = [Case.of_hidden(share, TOKENS, LINEAR_VOCAB, WIDTH, torch.float32) for share in shares]
    chunked: dict[str, Any] = {"chunk": CHUNK_COLUMNS}
    counted.count(LINEAR_LOGPROBS, OURS, FORWARD, cases[:2], ours.linear_token_logprobs)
    counted.count(LINEAR_LOGPROBS, "trl", FORWARD, cases[:2], partial(peers.trl_linear_logprobs, **chunked))
    counted.count(LINEAR_LOGPROBS, "cce", FORWARD, cases[:2], peers.cce_linear_logprobs, CCE_LOG1P)
    counted.count(LINEAR_LOSS, OURS, BOTH, cases, partial(ours.linear_policy_loss, chunk_rows=TOKENS))
    counted.count(LINEAR_LOSS, "trl", BOTH, cases, partial(peers.trl_linear_grpo_loss, **chunked), TRL_ENTROPY)


def count_token_ops(counted: Counted) -> None:
    for op in ours.token_ops(TOKEN_OP_TOKENS):
        counted.count_token_op(op)


def _installed(name: str) -> dict[str, str | None]:
    try:
        return {"version": version(peers.PACKAGES[name]), "status": peers.REFUSALS.get(name, "installed")}
    except PackageNotFoundError:
        return {"version": None, "status": "not installed"}


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first."""
    for earlier in _causes(error):
        error = earlier
    return (f"{type(error).__name__}: {error}".rstrip(": ") or type(error).__name__).split("\n")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__) is not None:
        yield cause
        error = cause


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.traffic.worker", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", nargs="*")
    options = parser.parse_args(arguments)
    # The interpreter computes with numpy, which remarks on the infinities that kernels compute with.
    warnings.filterwarnings("ignore", ".* encountered", RuntimeWarning)
    counted = Counted(options.peers, options.quick)
    count_logits(counted)
    count_linear(counted)
    if not options.quick:
        count_token_ops(counted)
    print(json.dumps({"rows": counted.rows, "peers": counted.peers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
