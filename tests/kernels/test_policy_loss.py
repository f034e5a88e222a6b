"""policy_loss against its float64 reference, on every option; and the properties that RSPO's argument rests on."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_configs import configs
from numerics import assert_close

from rspo_kernels import STATS, PolicyLossConfig, Segments, policy_loss, reference

LOG_PROBS = ("logp", "old_logp", "behavior_logp", "ref_logp")


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """Tokens of a few sequences with everything a caller may give, extremes included."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    config = draw(configs())
    lengths = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    turns, n = len(lengths), int(lengths.sum())
    turn_sequence = torch.randint(0, turns, (turns,), generator=rng)
    sequence_set = torch.randint(0, 3, (int(turn_sequence.max()) + 1,), generator=rng)
    segments = Segments.from_lengths(lengths, turn_sequence, sequence_set)
    spread = draw(st.sampled_from([0.0, 1e-4, 0.3, 5.0, 60.0]))
    base = -torch.rand(n, generator=rng) * 5
    tensors = {"logp": base}
    optional = [name for name in LOG_PROBS[1:] if draw(st.booleans())]
    if config.kl_coef > 0 and "ref_logp" not in optional:
        optional.append("ref_logp")
    for name in optional:
        tensors[name] = base + torch.randn(n, generator=rng) * spread
    if draw(st.booleans()):
        # Where tokens share a ratio, impossible tokens of both signs have no sum that two orders agree on.
        impossible = list(tensors) if config.ratio_level == "token" else ["logp"]
        for name in impossible:
            tensors[name] = tensors[name].masked_fill(torch.rand(n, generator=rng) < 0.3, -torch.inf)
    if config.entropy_coef != 0 or draw(st.booleans()):
        tensors["entropy"] = torch.rand(n, generator=rng) * 3
    tensors["advantages"] = torch.randn(n, generator=rng) * draw(st.sampled_from([1.0, 0.0, 1e4]))
    if draw(st.booleans()):
        tensors["advantages"][torch.rand(n, generator=rng) < 0.4] = 0.0
    if draw(st.booleans()):
        tensors["weights"] = torch.rand(n, generator=rng) * (torch.rand(n, generator=rng) < 0.7)
    if draw(st.booleans()):
        mask = torch.rand(n, generator=rng) < draw(st.sampled_from([0.0, 0.5]))
        tensors = {name: x.masked_fill(~mask, torch.nan) for name, x in tensors.items()}
        tensors["mask"] = mask
    upstream = draw(st.sampled_from([1.0, -3.0]))
    return {"config": config, "segments": segments, "tensors": tensors, "upstream": upstream}


def run_op(problem, device, backend):
    tensors = {name: x.to(device) for name, x in problem["tensors"].items()}
    leaves = {name: tensors[name].requires_grad_() for name in ("logp", "entropy") if name in tensors}
    ids = (problem["segments"].cu_turns.diff(), problem["segments"].turn_sequence, problem["segments"].sequence_set)
    segments = Segments.from_lengths(*(x.to(device) for x in ids))
    loss, stats = policy_loss(**tensors, segments=segments, config=problem["config"], backend=backend)
    (loss * problem["upstream"]).backward()
    return loss, stats, {name: x.grad for name, x in leaves.items()}


def ratio_ids(problem) -> dict:
    """What shares a ratio, in the reference's words."""
    segments, level = problem["segments"], problem["config"].ratio_level
    member_ids = segments.token_turn if level == "turn" else segments.token_sequence
    return {"member_ids": member_ids, "set_ids": segments.token_set if level == "set" else None}


def run_reference(problem):
    tensors = {name: x if x.dtype == torch.bool else x.double().detach() for name, x in problem["tensors"].items()}
    leaves = {name: tensors[name].requires_grad_() for name in ("logp", "entropy") if name in tensors}
    loss, stats = reference.policy_loss(
        **tensors, **ratio_ids(problem), sequence_ids=problem["segments"].token_sequence, config=problem["config"]
    )
    (loss * problem["upstream"]).backward()
    return loss, stats, {name: x.grad for name, x in leaves.items()}


def near_a_decision(problem) -> torch.Tensor:
    """Tokens whose ratio lies within float32's rounding of a bound, where either side of a decision is right."""
    config, tensors = problem["config"], problem["tensors"]
    keep = tensors.get("mask", torch.ones_like(tensors["logp"], dtype=torch.bool))
    logps = {
        name: torch.where(keep, tensors[name].double(), 0).clamp(min=-1e30) for name in LOG_PROBS if name in tensors
    }
    new = logps["logp"]
    old = logps.get("old_logp", new)
    behavior = logps.get("behavior_logp", old)
    raw_r, raw_c = new - behavior, old - behavior
    if config.ratio_level != "token":
        ids = (*ratio_ids(problem).values(), config.ratio_reduction)
        raw_r, raw_c = (reference.shared_log_ratio(x, keep, *ids) for x in (raw_r, raw_c))
    ratio, center = (x.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp() for x in (raw_r, raw_c))
    pivot = center if config.center_cap is None else center.clamp(max=config.center_cap)
    if config.clip_center == "none":
        pivot = torch.ones_like(pivot)
    low, high = (pivot - config.clip_low, pivot + config.clip_high)
    if config.clip_center == "relative":
        low, high = pivot * (1 - config.clip_low), pivot * (1 + config.clip_high)
    near = torch.zeros_like(ratio, dtype=torch.bool)
    for bound in (low, high, pivot * (config.dual_clip or 1e30)):
        near |= (ratio - bound).abs() <= 1e-5 * (ratio + bound.abs())
    near |= (raw_r.abs() - config.log_ratio_clamp).abs() < 1e-4
    if config.ratio_level != "token":
        # Whether a segment of rounded sums is exactly on-policy is a decision too.
        near |= (raw_c != 0) & (raw_c.abs() < 1e-5)
    if "old_logp" not in tensors or config.clip_low * config.clip_high > 0:
        # r == c exactly where the caller gave one tensor for both: decided alike in any precision.
        near &= raw_r != raw_c
    if "ref_logp" in logps:
        near |= ((logps["ref_logp"] - new).abs() - 10).abs() < 1e-4
    return near


def spread_over_segments(near, problem) -> torch.Tensor:
    """All tokens of a segment that has a token in doubt."""
    if problem["config"].ratio_level == "token":
        return near
    ids = ratio_ids(problem)
    top = ids["member_ids"] if ids["set_ids"] is None else ids["set_ids"]
    return torch.isin(top, top[near])


@given(problem=problems())
def test_agrees_with_the_float64_reference(place, problem):
    loss, stats, grads = run_op(problem, *place)
    loss_64, stats_64, grads_64 = run_reference(problem)
    assert loss.dtype == torch.float32
    assert tuple(stats) == STATS
    # float32 knows a log-ratio of size 20 to 2e-6, and so its exponential relatively.
    near = spread_over_segments(near_a_decision(problem), problem)
    for name, grad in grads.items():
        expected = grads_64[name].masked_fill(near, 0.0)
        actual = grad.cpu().masked_fill(near, 0.0)
        size = float(expected.abs().max()) if expected.numel() else 0.0
        assert_close(f"gradient of {name}", actual, expected, rtol=1e-4, atol=1e-6 * size + 1e-12)
        zero = expected == 0
        if problem["config"].loss == "sapo":
            # Its slope s·(1 - s) is 0 in the reference where s rounds to 1; ours keeps those digits.
            adv = problem["tensors"]["advantages"]
            zero &= (adv == 0) | adv.isnan() if problem["config"].ratio_level == "token" else adv.isnan()
        assert (actual[zero] == 0).all(), f"gradient of {name}: exact zeros"
    if near.any():
        return
    terms = reference_size(problem)
    assert_close("loss", loss, loss_64, rtol=1e-4, atol=2e-6 * terms + 1e-9)
    for name in STATS:
        if name != "clip_frac_dual":
            size = float(max(stats_64["ratio_max"], stats_64["center_max"], 1.0)) if name != "ess" else 1.0
            assert_close(name, stats[name], stats_64[name], rtol=1e-4, atol=1e-6 * size)


def reference_size(problem) -> float:
    """Σ |loss_t| / normalizer: what the rounding errors of the sum are relative to."""
    tensors = {
        name: x if x.dtype == torch.bool else x.double() for name, x in problem["tensors"].items() if name != "weights"
    }
    terms = reference.policy_loss_terms(config=problem["config"], **tensors, **ratio_ids(problem))
    return float(terms["loss"].detach().abs().sum())


def test_gradcheck_of_the_pytorch_path():
    torch.manual_seed(0)
    n = 12
    old, behavior, ref = (-torch.rand(3, n, dtype=torch.float64) - 0.5).unbind()
    logp = (old + 0.3 * torch.randn(n, dtype=torch.float64)).requires_grad_()
    entropy = torch.rand(n, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(n, dtype=torch.float64)
    for estimator, weighted in itertools.product(("k1", "k2", "k3"), (False, True)):
        config = PolicyLossConfig(
            kl_coef=0.3, kl_estimator=estimator, kl_weighted=weighted, entropy_coef=0.1, weight_cap=1.0
        )
        assert torch.autograd.gradcheck(
            lambda x, h, c=config: policy_loss(
                x, advantages, old_logp=old, behavior_logp=behavior, ref_logp=ref, entropy=h, config=c
            )[0],
            (logp, entropy),
        )


def test_is_ppo_when_tokens_are_on_policy(place):
    """With behavior = old the shifted clip is the textbook min(r·A, clip(r, 1 ± ε)·A)."""
    device, backend = place
    torch.manual_seed(1)
    old = torch.randn(50, device=device)
    logp = old + torch.randn(50, device=device) * 0.4
    advantages = torch.randn(50, device=device)
    ratio = (logp - old).double().exp()
    textbook = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    for center in ("shift", "none", "relative"):
        config = PolicyLossConfig(clip_center=center)
        for behavior in (None, old):
            loss, _ = policy_loss(
                logp, advantages, old_logp=old, behavior_logp=behavior, config=config, backend=backend
            )
            assert_close("loss", loss, textbook, rtol=1e-5)


def test_nothing_clips_before_the_first_update(place):
    """logp = old_logp: r = c for any behaviour policy, so no token is clipped and none has a zero gradient."""
    device, backend = place
    torch.manual_seed(2)
    old = -torch.rand(64, device=device) * 3
    behavior = -torch.rand(64, device=device) * 3
    advantages = torch.randn(64, device=device)
    logp = old.clone().requires_grad_()
    loss, stats = policy_loss(logp, advantages, old_logp=old, behavior_logp=behavior, backend=backend)
    loss.backward()
    assert stats["clip_frac_low"] == stats["clip_frac_high"] == 0
    assert_close("ratio", stats["ratio_mean"], stats["center_mean"], rtol=1e-6)
    assert (logp.grad != 0).all()
    expected = -(advantages * (old - behavior).exp()) / 64
    assert_close("gradient", logp.grad, expected, rtol=1e-5)


def test_the_shifted_interval(place):
    """A > 0 is clipped only above c + ε, A < 0 only below c - ε (the paper's eq. 4)."""
    device, backend = place
    center = torch.tensor([0.5, 0.5, 0.5, 0.5, 3.0, 3.0, 0.1, 0.1], device=device)
    ratio = torch.tensor([0.69, 0.71, 0.31, 0.29, 3.21, 2.79, 0.001, 0.31], device=device)
    sign = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0], device=device)
    clipped = [False, True, False, True, True, True, False, True]
    behavior = torch.full_like(center, -1.0)
    logp = (ratio.log() + behavior).requires_grad_()
    loss, stats = policy_loss(
        logp, sign, old_logp=center.log() + behavior, behavior_logp=behavior, backend=backend, normalizer=1.0
    )
    loss.backward()
    assert [bool(g == 0) for g in logp.grad] == clipped
    assert float(stats["clip_frac_high"]) == pytest.approx(3 / 8)
    assert float(stats["clip_frac_low"]) == pytest.approx(2 / 8)
    expected = torch.where(torch.tensor(clipped, device=device), 0.0, -sign * ratio)
    assert_close("gradient", logp.grad, expected, rtol=1e-5)


def test_dual_clip_leaves_replayed_tokens_alone_unless_asked(place):
    device, backend = place
    old = torch.full((2,), -1.0, device=device)
    behavior = torch.tensor([-1.0, -1.5], device=device)  # an on-policy token and a replayed one
    advantages = torch.full((2,), -1.0, device=device)
    for replay, zero in ((False, [True, False]), (True, [True, True])):
        logp = (old + 2.0).requires_grad_()
        config = PolicyLossConfig(dual_clip=3.0, dual_clip_replay=replay)
        loss, stats = policy_loss(
            logp, advantages, old_logp=old, behavior_logp=behavior, config=config, backend=backend
        )
        loss.backward()
        assert [bool(g == 0) for g in logp.grad] == zero
        assert float(stats["clip_frac_dual"]) == sum(zero) / 2


def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(place):
    """One batch or four ragged micro-batches with the global count: the same gradient, in every aggregation."""
    device, backend = place
    torch.manual_seed(3)
    lengths = torch.tensor([3, 1, 5, 2, 4, 1, 6])
    n = int(lengths.sum())
    logp, old, behavior = (-torch.rand(3, n, device=device)).unbind()
    advantages = torch.randn(n, device=device)
    mask = torch.rand(n, device=device) < 0.7
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        config = PolicyLossConfig(aggregation=aggregation, horizon=10)

        def call(rows, normalizer, x, config=config):
            offsets = [0, *lengths.cumsum(0).tolist()]
            cut = slice(offsets[rows.start], offsets[rows.stop])
            return policy_loss(
                x[cut],
                advantages[cut],
                mask=mask[cut],
                old_logp=old[cut],
                behavior_logp=behavior[cut],
                segments=Segments.from_lengths(lengths[rows].to(device)),
                normalizer=normalizer,
                config=config,
                backend=backend,
            )[0]

        whole = logp.clone().requires_grad_()
        loss = call(slice(0, 7), None, whole)
        loss.backward()
        sequences = mask.split(lengths.tolist())
        count = mask.sum() if aggregation == "token-mean" else torch.tensor(sum(bool(s.any()) for s in sequences))
        parts = logp.clone().requires_grad_()
        total = 0.0
        for start, stop in ((0, 1), (1, 3), (3, 4), (4, 7)):
            part = call(slice(start, stop), count.to(device), parts)
            part.backward()
            total += float(part.detach())
        assert total == pytest.approx(float(loss.detach()), rel=1e-5)
        assert_close(aggregation, parts.grad, whole.grad, rtol=1e-6, atol=1e-9)


def test_mixture_of_two_means_through_weights(place):
    """Row weights (1 - α)/n_on and α/n_off with normalizer 1 are eq. 1: (1 - α)·mean_on + α·mean_off."""
    device, backend = place
    torch.manual_seed(4)
    old, behavior = (-torch.rand(2, 20, device=device)).unbind()
    logp = old + 0.05 * torch.randn(20, device=device)
    advantages = torch.randn(20, device=device)
    on = torch.arange(20, device=device) < 14
    weights = torch.where(on, (1 - 0.125) / 14, 0.125 / 6)
    mixed, _ = policy_loss(
        logp, advantages, old_logp=old, behavior_logp=torch.where(on, old, behavior), weights=weights, normalizer=1.0,
        backend=backend,
    )  # fmt: skip
    mean_on, _ = policy_loss(logp[on], advantages[on], old_logp=old[on], backend=backend)
    mean_off, _ = policy_loss(
        logp[~on], advantages[~on], old_logp=old[~on], behavior_logp=behavior[~on], backend=backend
    )
    assert_close("loss", mixed, 0.875 * mean_on + 0.125 * mean_off, rtol=1e-5, atol=1e-7)


def test_padded_inputs_and_advantages_by_row(place):
    device, backend = place
    torch.manual_seed(5)
    logp, old = (-torch.rand(2, 4, 6, device=device)).unbind()
    advantages = torch.randn(4, device=device)
    mask = torch.arange(6, device=device) < torch.tensor([[6], [2], [0], [3]], device=device)
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        config = PolicyLossConfig(aggregation=aggregation)
        by_row, _ = policy_loss(logp, advantages, mask=mask, old_logp=old, config=config, backend=backend)
        packed, _ = policy_loss(
            logp[mask],
            advantages,
            old_logp=old[mask],
            segments=Segments.from_lengths(torch.tensor([6, 2, 0, 3], device=device)),
            config=PolicyLossConfig(aggregation=aggregation, horizon=6),
            backend=backend,
        )
        assert_close(aggregation, by_row, packed, rtol=1e-6)


def test_advantages_by_turn_sequence_and_set(place):
    device, backend = place
    torch.manual_seed(6)
    lengths = torch.tensor([2, 3, 1, 4], device=device)
    turn_sequence, sequence_set = torch.tensor([1, 0, 1, 2], device=device), torch.tensor([1, 0, 1], device=device)
    segments = Segments.from_lengths(lengths, turn_sequence, sequence_set)
    logp, old = (-torch.rand(2, 10, device=device)).unbind()
    turn = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3, 3], device=device)
    sequence = turn_sequence[turn]
    for level, index in (("turn", turn), ("sequence", sequence), ("set", sequence_set[sequence])):
        advantages = torch.randn(int(index.max()) + 1, device=device)
        for named in (None, level):
            ragged, _ = policy_loss(
                logp, advantages, old_logp=old, segments=segments, advantage_level=named, backend=backend
            )
        plain, _ = policy_loss(logp, advantages[index], old_logp=old, backend=backend)
        assert torch.equal(ragged, plain)


def test_gspo_by_hand_and_srpo_of_single_members(place):
    """One ratio exp(mean log-ratio) for a sequence; a set of one member is a sequence."""
    device, backend = place
    torch.manual_seed(7)
    logp, old = (-torch.rand(2, 9, device=device)).unbind()
    advantages = torch.tensor([1.0, -2.0], device=device)
    means = [(logp - old)[:4].mean(), (logp - old)[4:].mean()]
    ratios = torch.stack(means).exp()
    by_hand = -torch.minimum(ratios * advantages, ratios.clamp(0.9, 1.1) * advantages).mean()
    alone = Segments.from_lengths(torch.tensor([4, 5], device=device))
    both = Segments.from_lengths(torch.tensor([4, 5], device=device), None, torch.tensor([1, 0], device=device))
    for level, segments in (("sequence", alone), ("set", alone), ("set", both)):
        config = PolicyLossConfig(loss="gspo", clip_low=0.1, clip_high=0.1, ratio_level=level)
        loss, _ = policy_loss(
            logp, advantages, old_logp=old, segments=segments, advantage_level="sequence", config=config,
            backend=backend,
        )  # fmt: skip
        assert_close(level, loss, by_hand, rtol=1e-5)


def test_srpo_gradient_of_a_set(place):
    """s_U = exp(mean over members of ℓ_m), ℓ_m a sum of tokens: each active token gets s_U·A_U/|U|."""
    device, backend = place
    lengths, owners = torch.tensor([2, 3, 1], device=device), torch.tensor([0, 0, 1], device=device)
    segments = Segments.from_lengths(lengths, None, owners)
    old = torch.full((6,), -1.0, device=device)
    logp = (old + torch.tensor([0.02, 0.04, -0.01, 0.03, 0.01, 0.05], device=device)).requires_grad_()
    advantages = torch.tensor([0.5, -1.0], device=device)
    config = PolicyLossConfig(ratio_level="set", ratio_reduction="sum")
    loss, _ = policy_loss(
        logp, advantages, old_logp=old, segments=segments, advantage_level="set", config=config, normalizer=1.0,
        weights=torch.tensor([1 / 5] * 5 + [1.0], device=device), backend=backend,
    )  # fmt: skip
    loss.backward()
    s = torch.tensor([(0.06 + 0.03) / 2, 0.05]).exp()
    expected = torch.tensor([-0.5 * float(s[0]) / 2] * 5 + [1.0 * float(s[1])])
    assert_close("gradient", logp.grad, expected, rtol=1e-5)


def test_advantages_that_fit_several_levels(place):
    """Four turns of one token each: tokens first, and what is named where it is."""
    device, backend = place
    owners = torch.tensor([1, 0, 3, 2], device=device)
    segments = Segments.from_lengths(torch.ones(4, dtype=torch.int64, device=device), owners)
    logp, old = (-torch.rand(2, 4, device=device)).unbind()
    advantages = torch.arange(4.0, device=device)
    for level, by_token in ((None, advantages), ("turn", advantages), ("sequence", advantages[owners])):
        ragged, _ = policy_loss(
            logp, advantages, old_logp=old, segments=segments, advantage_level=level, backend=backend
        )
        plain, _ = policy_loss(logp, by_token, old_logp=old, backend=backend)
        assert torch.equal(ragged, plain)
    pairs = Segments.from_lengths(torch.tensor([2, 2], device=device), torch.tensor([1, 0], device=device))
    coarsest, _ = policy_loss(logp, advantages[:2], old_logp=old, segments=pairs, backend=backend)
    plain, _ = policy_loss(logp, advantages[[1, 1, 0, 0]], old_logp=old, backend=backend)
    assert torch.equal(coarsest, plain)


def test_small_divergences_keep_their_digits(place):
    """exp(d) - 1 - d of d = 1e-4 is 5e-9: the difference has none of its digits in float32."""
    device, backend = place
    for d in (1e-4, -1e-3, 0.04, 0.06):
        logp = torch.zeros(3, device=device)
        config = PolicyLossConfig(kl_coef=1.0)
        partners = {"old_logp": torch.full((3,), -d, device=device), "ref_logp": torch.full((3,), d, device=device)}
        _, stats = policy_loss(logp, torch.zeros(3, device=device), **partners, config=config, backend=backend)
        exact = torch.expm1(torch.tensor(d, dtype=torch.float32).double()) - float(torch.tensor(d))
        assert_close("kl_ref", stats["kl_ref"], exact, rtol=1e-5)
        assert_close("approx_kl_k3", stats["approx_kl_k3"], exact, rtol=1e-5)


def test_a_fully_masked_batch_keeps_its_graph(place):
    device, backend = place
    for n in (0, 5):
        logp = torch.full((n,), torch.nan, device=device, requires_grad=True)
        loss, stats = policy_loss(
            logp, torch.ones(n, device=device), mask=torch.zeros(n, device=device), backend=backend
        )
        loss.backward()
        assert loss.requires_grad
        assert loss == 0
        assert (logp.grad == 0).all()
        assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(place, dtype):
    device, backend = place
    torch.manual_seed(7)
    old = -torch.rand(40, device=device).to(dtype)
    logp = (old + 0.1 * torch.randn(40, device=device).to(dtype)).requires_grad_()
    advantages = torch.randn(40, device=device).to(dtype)
    loss, _ = policy_loss(logp, advantages, old_logp=old, backend=backend)
    loss.backward()
    logp_64 = logp.detach().double().requires_grad_()
    loss_64, _ = policy_loss(logp_64, advantages.double(), old_logp=old.double(), backend="torch")
    loss_64.backward()
    assert loss.dtype == torch.float32
    assert logp.grad.dtype == dtype
    assert_close("loss", loss, loss_64, rtol=1e-5, atol=1e-7)
    assert_close("gradient", logp.grad, logp_64.grad, rtol=float(torch.finfo(dtype).eps), atol=1e-9)


def test_strided_inputs_and_gradients_only_where_they_belong(place):
    device, backend = place
    torch.manual_seed(8)
    block = -torch.rand(16, 6, device=device)
    columns = [block[:, i] for i in range(6)]
    names = ("logp", "advantages", "old_logp", "behavior_logp", "ref_logp", "weights")
    strided = {name: x.detach() for name, x in zip(names, columns, strict=True)}
    packed = {name: x.contiguous() for name, x in strided.items()}
    config = PolicyLossConfig(kl_coef=0.1)
    results = []
    for tensors in (strided, packed):
        tensors = {name: x.requires_grad_() for name, x in tensors.items()}
        loss, _ = policy_loss(**tensors, config=config, backend=backend)
        results.append((loss, *torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)))
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert [g is not None for g in results[0][1:]] == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logp": torch.zeros(2, 2, 2)}, ValueError, r"logp must be \[N\] or \[B, L\], got \[2, 2, 2\]"),
        ({"logp": torch.zeros(4, dtype=torch.long)}, TypeError, "logp must be float32"),
        ({"advantages": torch.zeros(3)}, ValueError, r"advantages must be \[4\] \(token\), got \[3\]"),
        ({"old_logp": torch.zeros(5)}, ValueError, r"old_logp must have the shape of logp, \[4\], got \[5\]"),
        ({"behavior_logp": [0.0] * 4}, TypeError, "behavior_logp must be a tensor, got list"),
        ({"mask": torch.ones(4, 1)}, ValueError, r"mask must have the shape of logp"),
        ({"normalizer": 0}, ValueError, "normalizer must be a finite number > 0, got 0"),
        ({"normalizer": torch.ones(1)}, ValueError, r"normalizer must be a number or a 0-d tensor, got \[1\]"),
        ({"config": PolicyLossConfig(kl_coef=0.1)}, ValueError, "ref_logp must be given with config.kl_coef = 0.1"),
        ({"config": PolicyLossConfig(entropy_coef=0.1)}, ValueError, "entropy must be given"),
        ({"config": PolicyLossConfig(aggregation="seq-mean-token-mean")}, ValueError, "segments must be given"),
        ({"segments": Segments.from_lengths(torch.tensor([2, 3]))}, ValueError, "segments must cover the N = 4 tokens"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"logp": torch.zeros(4), "advantages": torch.zeros(4)} | change
    if "segments" in change:
        arguments["advantages"] = torch.zeros(2)
    with pytest.raises(error, match=message):
        policy_loss(**arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "reinforce"}, "loss must be one of 'grpo', 'ppo', 'dapo', 'dr_grpo', 'gspo', 'cispo', 'sapo', got"),
        ({"clip_low": -0.1}, "clip_low must be a finite number >= 0, got -0.1"),
        ({"clip_high": float("nan")}, "clip_high must be a finite number >= 0, got nan"),
        ({"clip_high": "0.2"}, "clip_high must be a finite number >= 0, got '0.2'"),
        ({"clip_center": "left"}, "clip_center must be one of 'shift', 'none', 'relative', got 'left'"),
        ({"center_cap": 0.0}, "center_cap must be > 0 or None, got 0.0"),
        ({"weight_cap": -1}, "weight_cap must be > 0 or None, got -1"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1 or None, got 1.0"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of 'k1', 'k2', 'k3', got 'k4'"),
        ({"log_ratio_clamp": 100.0}, r"log_ratio_clamp must be in \(0, 40\], got 100.0"),
        ({"horizon": 0}, "horizon must be a positive int or None, got 0"),
        ({"horizon": True}, "horizon must be a positive int or None, got True"),
        ({"kl_weighted": "no"}, "kl_weighted must be True or False, got 'no'"),
        ({"aggregation": "mean"}, "aggregation must be one of 'token-mean', .*, got 'mean'"),
    ],
)
def test_wrong_config_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**fields)


def test_another_loss_brings_its_own_defaults():
    """Through dataclasses.replace too, which cannot tell what was given; what was given stays, also if it is equal."""
    losses = ("grpo", "ppo", "dapo", "dr_grpo", "gspo", "cispo", "sapo")
    for before, after in itertools.product(losses, losses):
        first = PolicyLossConfig(before)
        for config in (first, copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert config == first
            assert dataclasses.replace(config, loss=after) == PolicyLossConfig(after)
    plain = PolicyLossConfig()
    assert dataclasses.replace(plain, loss="dapo").clip_high == 0.28
    assert dataclasses.replace(plain, loss="dapo", clip_high=0.2).clip_high == 0.2
    assert dataclasses.replace(PolicyLossConfig(clip_high=0.2), loss="dapo").clip_high == 0.2
    assert dataclasses.replace(plain, kl_coef=0.1, loss="dapo", clip_low=0.2) == PolicyLossConfig("dapo", kl_coef=0.1)
    kept = PolicyLossConfig(aggregation="token-mean", clip_low=0.1)
    assert dataclasses.replace(kept, loss="sapo").aggregation == "token-mean"
    assert dataclasses.replace(dataclasses.replace(kept, loss="gspo"), loss="sapo").clip_low == 0.1
    sent = pickle.loads(pickle.dumps(PolicyLossConfig(clip_low=0.2, kl_coef=0.1)))
    assert dataclasses.replace(sent, loss="gspo") == PolicyLossConfig("gspo", clip_low=0.2, kl_coef=0.1)
    with pytest.raises(ValueError, match="ratio_level must be 'turn', 'sequence' or 'set' with loss 'gspo'"):
        dataclasses.replace(PolicyLossConfig(ratio_level="token"), loss="gspo")
