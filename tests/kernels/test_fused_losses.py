"""The fused losses, from logits and from hidden states, against the float64 references put together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_configs import configs
from numerics import EPS, assert_close, assert_rows_close

from rspo_kernels import (
    STATS,
    PolicyLossConfig,
    Segments,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    policy_loss,
    reference,
    token_logprobs,
)

DTYPES = (torch.float32, torch.float32, torch.bfloat16)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """Hidden states, a head, and tokens of a few sequences, most of them masked or without an advantage."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    config = draw(configs())
    # Decisions at exactly the bound are tested in test_policy_loss; here they would hide what is tested.
    config = dataclasses.replace(config, clip_low=max(config.clip_low, 0.1), clip_high=max(config.clip_high, 0.1))
    turns = draw(st.integers(1, 4))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=turns, max_size=turns)))
    n, width, vocab = int(lengths.sum()), draw(st.sampled_from([1, 8])), draw(st.sampled_from([2, 33, 130]))
    valid = draw(st.sampled_from([None, max(1, vocab - 1)]))
    targets = torch.randint(0, valid or vocab, (n,), generator=rng)
    targets[torch.rand(n, generator=rng) < 0.2] = -100
    advantages = torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < draw(st.sampled_from([0.0, 0.5, 1.0])))
    base = -torch.rand(n, generator=rng) * 5
    return {
        "hidden": torch.randn(n, width, generator=rng),
        "weight": torch.randn(vocab, width, generator=rng),
        "bias": torch.randn(vocab, generator=rng) if draw(st.booleans()) else None,
        "targets": targets,
        "advantages": advantages,
        "dtype": draw(st.sampled_from(DTYPES)),
        "segments": Segments.from_lengths(lengths, torch.randint(0, turns, (turns,), generator=rng)),
        "partners": {
            "mask": torch.rand(n, generator=rng) < draw(st.sampled_from([0.0, 0.5, 1.0])),
            "weights": torch.rand(n, generator=rng) if draw(st.booleans()) else None,
            "old_logp": base if draw(st.booleans()) else None,
            "behavior_logp": base + torch.randn(n, generator=rng) if draw(st.booleans()) else None,
            "ref_logp": base + torch.randn(n, generator=rng),
        },
        "config": config,
        "transform": {
            "temperature": draw(st.sampled_from([1.0, 0.6])),
            "softcap": draw(st.sampled_from([None, 5.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.5])),
            "valid_vocab": valid,
        },
        "upstream": draw(st.sampled_from([1.0, -2.5])),
    }


def expected(problem, hidden, weight, bias):
    """Loss, statistics and gradients of hidden, weight, bias by the references in float64."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = leaves[0] @ leaves[1].T + (0.0 if leaves[2] is None else leaves[2])
    mask = problem["partners"]["mask"] & (problem["targets"] != -100)
    logp, entropy = reference.token_logprobs(logits, problem["targets"], mask=mask, **problem["transform"])
    segments, level = problem["segments"], problem["config"].ratio_level
    partners = {name: x.double() for name, x in problem["partners"].items() if name != "mask" and x is not None}
    loss, stats = reference.policy_loss(
        logp, problem["advantages"].double(), problem["config"], mask=mask, entropy=entropy,
        sequence_ids=segments.token_sequence,
        member_ids=segments.token_turn if level == "turn" else segments.token_sequence,
        set_ids=segments.token_set if level == "set" else None, **partners,
    )  # fmt: skip
    (loss * problem["upstream"]).backward()
    return loss, stats, [None if x is None else x.grad for x in leaves]


def on(device, x):
    """x, and what is inside it, on a device."""
    if isinstance(x, dict):
        return {name: on(device, value) for name, value in x.items()}
    if isinstance(x, Segments):
        ids = (x.cu_turns.diff(), x.turn_sequence, x.sequence_set)
        return Segments.from_lengths(*(on(device, part) for part in ids))
    return x.to(device) if isinstance(x, torch.Tensor) else x


def leaf(x, device, dtype=None):
    """A leaf of its own: .to() may return the very tensor."""
    return x.detach().to(device, dtype, copy=True).requires_grad_()


def close_decisions(problem) -> bool:
    """Whether some ratio lies so near a bound that half precision (or one ulp) may decide otherwise."""
    with torch.no_grad():
        sides = []
        for scale in (1 - 1e-3, 1.0, 1 + 1e-3):
            moved = {**problem, "hidden": problem["hidden"] * scale}
            _, stats, _ = _statistics(moved)
            sides.append([float(stats[name]) for name in ("clip_frac_low", "clip_frac_high", "clip_frac_dual")])
    return not sides[0] == sides[1] == sides[2]


def _statistics(problem):
    with torch.enable_grad():
        return expected(problem, problem["hidden"], problem["weight"], problem["bias"])


def assert_gradients(problem, grads, wanted, tolerance):
    for name, actual, want in zip(("hidden", "weight", "bias"), grads, wanted, strict=True):
        assert (actual is None) == (want is None), name
        if want is not None and want.numel():
            size = float(want.abs().max())
            assert_close(f"gradient of {name}", actual, want, rtol=tolerance, atol=tolerance * size + 1e-10)


@given(problem=problems(), chunk_rows=st.sampled_from([1, 3, None]), exact_stats=st.booleans())
def test_linear_policy_loss(place, problem, chunk_rows, exact_stats):
    device, backend = place
    if close_decisions(problem):
        return
    hidden, weight, bias = problem["hidden"], problem["weight"], problem["bias"]
    leaves = [None if x is None else leaf(x, device) for x in (hidden, weight, bias)]
    loss, stats = linear_policy_loss(
        leaves[0], leaves[1], problem["targets"].to(device), problem["advantages"].to(device), bias=leaves[2],
        **on(device, problem["partners"]), segments=on(device, problem["segments"]), config=problem["config"],
        **problem["transform"], chunk_rows=chunk_rows, exact_stats=exact_stats, with_entropy=True, backend=backend,
    )  # fmt: skip
    (loss * problem["upstream"]).backward()
    loss_64, stats_64, grads_64 = expected(problem, hidden, weight, bias)
    assert_gradients(problem, [None if x is None else x.grad for x in leaves], grads_64, 2e-4)
    size = max(1.0, float(stats_64["ratio_max"]))
    assert_close("loss", loss, loss_64, rtol=2e-4, atol=2e-5 * size * float(problem["advantages"].abs().sum() + 10))
    assert stats["num_tokens"] == stats_64["num_tokens"]
    if exact_stats:
        for name in STATS:
            assert_close(name, stats[name], stats_64[name], rtol=1e-3, atol=1e-4 * size)


@given(problem=problems(), exact_stats=st.booleans(), seed=st.integers(0, 99))
def test_statistics_of_parts(place, problem, exact_stats, seed):
    """Those of a part are those of a call with its rows only; loss and gradients are those without parts."""
    device, backend = place
    if close_decisions(problem):
        return
    segments, targets = problem["segments"], problem["targets"]
    pieces = segments.token_set if problem["config"].ratio_level == "set" else segments.token_sequence
    choice = torch.randint(3, (len(targets) + 1,), generator=torch.Generator().manual_seed(seed))[pieces]
    parts = torch.stack([choice == 0, choice == 1])  # rows of the third belong to no part
    partners = dict(problem["partners"])
    mask = partners.pop("mask")

    def results(mask, **given):
        leaves = [None if x is None else leaf(x, device) for x in map(problem.get, ("hidden", "weight", "bias"))]
        loss, stats = linear_policy_loss(
            leaves[0], leaves[1], targets.to(device), problem["advantages"].to(device), bias=leaves[2],
            **on(device, partners), mask=mask.to(device), segments=on(device, segments), config=problem["config"],
            **problem["transform"], exact_stats=exact_stats, with_entropy=True, chunk_rows=3, backend=backend, **given,
        )  # fmt: skip
        loss.backward()
        return loss, stats, [x.grad for x in leaves if x is not None]

    loss, stats, grads = results(mask, parts=parts.to(device))
    whole_loss, _, whole_grads = results(mask)
    assert torch.equal(loss, whole_loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, whole_grads, strict=True))
    for i, part in enumerate(parts):
        _, alone, _ = results(mask & part)
        for name in STATS:
            assert_close(name, stats[name][i], alone[name], rtol=1e-5, atol=1e-6)


@given(problem=problems(), inplace=st.booleans(), padded=st.booleans())
def test_logits_policy_loss(place, problem, inplace, padded):
    device, backend = place
    if close_decisions(problem):
        return
    config, segments = problem["config"], problem["segments"]
    n = problem["targets"].numel()
    padded = padded and config.ratio_level == "token" and config.aggregation == "token-mean" and n > 0
    source = (problem["hidden"] @ problem["weight"].T).to(problem["dtype"]).to(device).requires_grad_()
    logits = source * 1.0
    shape = (2, n // 2) if padded and n % 2 == 0 else (1, n) if padded else (n,)
    tensors = {name: x if x is None else x.reshape(shape) for name, x in problem["partners"].items()}
    loss, stats = logits_policy_loss(
        logits.reshape(*shape, logits.shape[1]), problem["targets"].reshape(shape).to(device),
        problem["advantages"].reshape(shape).to(device), **on(device, tensors),
        segments=None if padded else on(device, segments), config=config, **problem["transform"], with_entropy=True,
        inplace=inplace, backend=backend,
    )  # fmt: skip
    (loss * problem["upstream"]).backward()
    identity = torch.eye(logits.shape[1])
    loss_64, stats_64, grads_64 = expected(problem, source.detach().cpu(), identity, None)
    assert source.grad.dtype == source.dtype
    # In half precision the gradient is rounded once when made and once when scaled.
    tolerance = 2e-4 if source.dtype == torch.float32 else 2 * EPS[source.dtype]
    floor = 1e-5 * float(grads_64[0].abs().max()) + 1e-10 if n else 0.0
    no_zeros = torch.zeros(n, dtype=torch.bool)
    assert_rows_close("gradient", source.grad, grads_64[0], rtol=tolerance, floor=floor, zero=no_zeros)
    size = max(1.0, float(stats_64["ratio_max"]))
    assert_close("loss", loss, loss_64, rtol=2e-4, atol=2e-5 * size * float(problem["advantages"].abs().sum() + 10))
    for name in STATS:
        assert_close(name, stats[name], stats_64[name], rtol=1e-3, atol=1e-4 * size)


@given(problem=problems(), chunk_rows=st.sampled_from([1, 4, None]), with_entropy=st.booleans())
def test_linear_token_logprobs(place, problem, chunk_rows, with_entropy):
    device, backend = place
    hidden, weight, bias = (None if problem[k] is None else problem[k] for k in ("hidden", "weight", "bias"))
    rng = torch.Generator().manual_seed(0)
    upstream = torch.randn(2, problem["targets"].numel(), generator=rng)
    upstream = upstream * (torch.rand(upstream.shape, generator=rng) < 0.7)
    results = []
    for op, dtype, where in ((linear_token_logprobs, torch.float32, device), (None, torch.float64, "cpu")):
        leaves = [None if x is None else leaf(x, where, dtype) for x in (hidden, weight, bias)]
        options = {"mask": problem["partners"]["mask"].to(where), **problem["transform"]}
        targets = problem["targets"].to(where)
        if op is None:
            logits = leaves[0] @ leaves[1].T + (0.0 if leaves[2] is None else leaves[2])
            logp, entropy = reference.token_logprobs(logits, targets, **options)
        else:
            options |= {"chunk_rows": chunk_rows, "with_entropy": with_entropy, "backend": backend}
            out = op(leaves[0], leaves[1], targets, bias=leaves[2], **options)
            logp, entropy = out if with_entropy else (out, None)
        total = (logp * upstream[0].to(where)).sum()
        if with_entropy:
            total = total + (entropy * upstream[1].to(where)).sum()
        total.backward()
        results.append((logp, entropy if with_entropy else logp, [None if x is None else x.grad for x in leaves]))
    ours, wanted = results
    assert_close("logp", ours[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert_close("entropy", ours[1], wanted[1], rtol=1e-4, atol=1e-5)
    assert_gradients(problem, ours[2], wanted[2], 1e-4)


def test_sparsity_is_exact(place):
    """Rows left out of the matmuls change nothing: the gradients are those with every row in."""
    device, backend = place
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 16, device=device), torch.randn(100, 16, device=device)
    targets = torch.randint(0, 100, (60,), device=device)
    mask = torch.rand(60, device=device) < 0.5
    advantages = torch.randn(60, device=device) * (torch.rand(60, device=device) < 0.5)
    old = token_logprobs(hidden @ weight.T, targets) + torch.randn(60, device=device)
    results = []
    for exact in (False, True):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss, stats = linear_policy_loss(
            *leaves, targets, advantages, mask=mask, old_logp=old, exact_stats=exact, backend=backend
        )
        loss.backward()
        results.append((loss, *(x.grad for x in leaves), stats))
    for sparse, dense in zip(results[0][:3], results[1][:3], strict=True):
        # Matmuls of fewer rows may add up in another order.
        assert_close("sparse", sparse, dense, rtol=1e-5, atol=1e-6)
    assert results[0][3]["num_tokens"] == results[1][3]["num_tokens"] == mask.sum()
    assert 0 < results[1][3]["clip_frac_high"] < results[0][3]["clip_frac_high"], "fewer rows share the statistics"
    needless = ~mask | (advantages == 0)
    assert (results[0][1][needless] == 0).all()


@pytest.mark.parametrize("level", ["turn", "sequence", "set"])
def test_sparsity_keeps_the_rows_that_share_a_ratio(place, level):
    """A row without an advantage still belongs to the ratio of a segment in which another row has one."""
    device, backend = place
    torch.manual_seed(4)
    hidden, weight = torch.randn(24, 8), torch.randn(30, 8) / 3
    targets, advantages = torch.randint(0, 30, (24,)), torch.randn(24)
    advantages[1::2] = 0.0
    advantages[12:] = 0.0  # segments without any advantage
    ids = (torch.tensor([3, 5, 4, 6, 6]), torch.tensor([0, 1, 0, 2, 3]), torch.tensor([0, 0, 1, 1]))
    old = token_logprobs(hidden @ weight.T, targets, backend="torch") + 0.2 * torch.randn(24)
    config = PolicyLossConfig(ratio_level=level, clip_low=0.5, clip_high=0.5)
    results = []
    for exact in (False, True):
        leaves = [x.clone().to(device).requires_grad_() for x in (hidden, weight)]
        loss, _ = linear_policy_loss(
            *leaves, targets.to(device), advantages.to(device), old_logp=old.to(device), config=config,
            segments=Segments.from_lengths(*(x.to(device) for x in ids)), exact_stats=exact, chunk_rows=7,
            backend=backend,
        )  # fmt: skip
        loss.backward()
        results.append((loss, *(x.grad for x in leaves)))
    assert (results[1][1][1:12:2] != 0).any(), "rows without an advantage do move"
    for sparse, dense in zip(*results, strict=True):
        assert_close(level, sparse, dense, rtol=1e-5, atol=1e-6)


def test_the_weight_gradient_sums_in_full_precision():
    """Many chunks of equal bfloat16 contributions: a bfloat16 sum would stop growing."""
    from rspo_kernels.backends.linear import Gradients, Head

    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    head = Head(hidden, weight, None, 1)
    sums = []
    for full_precision in (True, False):
        grads = Gradients(head, 1, (False, True, False), full_precision)
        for _ in range(1000):
            grads.add(slice(0, 1), weight, hidden, torch.ones(1, dtype=torch.bool))
        sums.append(float(grads.weight))
    assert sums == [1000.0, 256.0]


def test_rows_left_out_are_never_multiplied(place, monkeypatch):
    """Counts the rows that enter the matmuls: forward the active ones, backward those that were not clipped."""
    from rspo_kernels.backends import linear

    device, backend = place
    seen = {"forward": 0, "backward": 0}
    logits, add = linear.Head.logits, linear.Gradients.add

    def counted_logits(self, hidden, buffer):
        seen["forward"] += hidden.shape[0]
        return logits(self, hidden, buffer)

    def counted_add(self, rows, dlogits, hidden, moved):
        seen["backward"] += int(moved.sum())
        return add(self, rows, dlogits, hidden, moved)

    monkeypatch.setattr(linear.Head, "logits", counted_logits)
    monkeypatch.setattr(linear.Gradients, "add", counted_add)
    hidden = torch.randn(40, 8, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device, requires_grad=True)
    targets = torch.zeros(40, dtype=torch.int64, device=device)
    mask = torch.arange(40, device=device) < 30
    advantages = (torch.arange(40, device=device) % 3 == 0).float()  # ten of the thirty
    old = token_logprobs(hidden.detach() @ weight.detach().T, targets)
    old[:6] -= 1.0  # of which two are clipped: rows 0 and 3
    linear_policy_loss(hidden, weight, targets, advantages, mask=mask, old_logp=old, chunk_rows=4, backend=backend)
    assert seen == {"forward": 10, "backward": 8}


def test_a_frozen_head_gets_no_gradient(place):
    device, backend = place
    hidden = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device)
    targets = torch.randint(0, 20, (6,), device=device)
    loss, _ = linear_policy_loss(hidden, weight, targets, torch.ones(6, device=device), backend=backend)
    loss.backward()
    assert weight.grad is None
    assert (hidden.grad != 0).any()
    with torch.no_grad():
        loss, _ = linear_policy_loss(hidden, weight, targets, torch.ones(6, device=device), backend=backend)
    assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads(place, dtype):
    """Errors no larger than twice those of the same computation in plain PyTorch."""
    device, backend = place
    torch.manual_seed(1)
    hidden, weight = torch.randn(30, 32).to(dtype), (torch.randn(200, 32) / 6).to(dtype)
    targets, advantages = torch.randint(0, 200, (30,)), torch.randn(30)
    old = token_logprobs(hidden.double() @ weight.double().T, targets).float()

    def gradients(function, dtype, where):
        leaves = [leaf(x, where, dtype) for x in (hidden, weight)]
        function(*leaves).backward()
        return [x.grad.double().cpu() for x in leaves]

    def ours(h, w):
        return linear_policy_loss(
            h, w, targets.to(device), advantages.to(device), old_logp=old.to(device), chunk_rows=8, backend=backend
        )[0]

    def plain(h, w):
        logp = torch.log_softmax((h @ w.T).float() if h.dtype != torch.float64 else h @ w.T, -1)
        logp = logp.gather(-1, targets[:, None]).squeeze(-1)
        return policy_loss(logp, advantages.to(logp.dtype), old_logp=old.to(logp.dtype))[0]

    exact = gradients(plain, torch.float64, "cpu")
    for ours_grad, plain_grad, exact_grad in zip(
        gradients(ours, dtype, device), gradients(plain, dtype, "cpu"), exact, strict=True
    ):
        assert (ours_grad - exact_grad).norm() <= 2 * (plain_grad - exact_grad).norm()


def test_float64_matches_to_the_last_digits():
    torch.manual_seed(2)
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(15, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(15, dtype=torch.float64, requires_grad=True)
    targets, advantages = torch.randint(0, 15, (10,)), torch.randn(10, dtype=torch.float64)
    old = token_logprobs(hidden.detach() @ weight.detach().T + bias.detach(), targets) + 0.05
    config = PolicyLossConfig(kl_coef=0.2, entropy_coef=0.1)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_policy_loss(
            h, w, targets, advantages, bias=b, old_logp=old, ref_logp=old - 0.3, config=config, chunk_rows=3
        )[0],
        (hidden, weight, bias),
    )


def test_inplace_logits_loss_allows_one_backward_pass(place):
    device, backend = place
    logits = torch.randn(4, 9, device=device, requires_grad=True) * 1.0
    targets = torch.tensor([0, 1, 2, 3], device=device)
    loss, _ = logits_policy_loss(logits, targets, torch.ones(4, device=device), inplace=True, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="allows one backward pass"):
        loss.backward()


def test_results_are_bit_identical_run_to_run(place):
    """No float atomics anywhere: there is no other mode than the deterministic one."""
    device, backend = place
    torch.manual_seed(3)
    hidden, weight = torch.randn(50, 16, device=device), torch.randn(300, 16, device=device)
    targets = torch.randint(0, 300, (50,), device=device)
    advantages, old = torch.randn(50, device=device), -5 + torch.randn(50, device=device)
    segments = Segments.from_lengths(torch.tensor([20, 30], device=device))
    for config in (PolicyLossConfig(), PolicyLossConfig(loss="gspo", entropy_coef=0.1)):
        runs = []
        for _ in range(3):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            loss, stats = linear_policy_loss(
                *leaves, targets, advantages, old_logp=old, segments=segments, config=config, chunk_rows=16,
                backend=backend,
            )  # fmt: skip
            loss.backward()
            runs.append([loss, *(x.grad for x in leaves), *stats.values()])
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(3)}, ValueError, r"weight must be \[V, H\] with the H = 3 of hidden, got \[5, 2\]"),
        ({"hidden": torch.zeros(4, 2, dtype=torch.int32)}, TypeError, "hidden must be float32"),
        ({"weight": torch.zeros(5)}, ValueError, r"hidden must be \[..., H\] and weight \[V, H\]"),
        ({"weight": torch.zeros(5, 2).half()}, TypeError, "weight must have the dtype of hidden, torch.float32, got"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must have the shape of the vocabulary of weight, \[5\], got"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, "targets must have the shape of hidden without"),
        ({"targets": torch.full((4,), 5)}, ValueError, r"targets must lie in 0 .. 4 .*, got 5 at flat position 0"),
        ({"advantages": torch.zeros(3)}, ValueError, r"advantages must be \[4\] \(token\), got \[3\]"),
        ({"parts": torch.zeros(1, 4)}, TypeError, "parts must be a bool tensor, got torch.float32"),
        ({"parts": torch.zeros(4, dtype=torch.bool)}, ValueError, r"parts must be \[P, 4\], got \[4\]"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be a positive int or None, got 0"),
        ({"valid_vocab": 6}, ValueError, "valid_vocab must be an int in 1 .. V = 5, got 6"),
        ({"config": "gspo"}, TypeError, "config must be a PolicyLossConfig, got str"),
        ({"backend": "cute"}, ValueError, "backend must be one of 'auto', 'torch', 'triton', got 'cute'"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {
        "hidden": torch.zeros(4, 2),
        "weight": torch.zeros(5, 2),
        "targets": torch.zeros(4, dtype=torch.int64),
        "advantages": torch.zeros(4),
    } | change
    with pytest.raises(error, match=message):
        linear_policy_loss(**arguments)
