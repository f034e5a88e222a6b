"""What the ops do at their edges: autocast, denominators, NaN, overlapping memory, derivatives that they lack."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

from rspo_kernels import (
    PolicyLossConfig,
    discounted_returns,
    gae,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    masked_whiten,
    policy_loss,
    token_logprobs,
)

B, L, V, H = 2, 3, 7, 4
NAN = float("nan")
CONFIGS = {
    "grpo": {},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "capped": {"center_cap": 1.0, "weight_cap": 2.0, "dual_clip": 3.0},
    "uncentred": {"clip_center": "none"},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "weighted k3": {"kl_coef": 0.1, "kl_weighted": True},
    "sequence": {"ratio_level": "sequence"},
    "entropy": {"entropy_coef": 0.1},
}


def inputs(device):
    """Leaves of every op, and the partners of the losses."""
    data = {
        "logp": -torch.rand(B, L),
        "logits": torch.randn(B, L, V),
        "hidden": torch.randn(B, L, H),
        "weight": torch.randn(V, H),
        "targets": torch.randint(0, V, (B, L)),
        "advantages": torch.randn(B, L),
        "old_logp": -torch.rand(B, L),
        "behavior_logp": -torch.rand(B, L),
        "ref_logp": -torch.rand(B, L),
        "weights": torch.rand(B, L) + 0.1,
    }
    return {name: x.to(device) for name, x in data.items()}


def loss_of(kind, data, backend, **options):
    """One of the three losses, and its leaf."""
    partners = {name: data[name] for name in ("old_logp", "behavior_logp", "weights")}
    if options.get("config", PolicyLossConfig()).kl_coef:
        partners["ref_logp"] = data["ref_logp"]
    leaf = data[{"policy": "logp", "logits": "logits", "linear": "hidden"}[kind]].clone().requires_grad_()
    targets, advantages = data["targets"], data["advantages"]
    if kind == "policy":
        if options.get("config", PolicyLossConfig()).entropy_coef:
            partners["entropy"] = torch.ones_like(data["logp"])
        loss, _ = policy_loss(leaf, advantages, **partners, **options, backend=backend)
    elif kind == "logits":
        loss, _ = logits_policy_loss(leaf, targets, advantages, **partners, **options, backend=backend)
    else:
        loss, _ = linear_policy_loss(leaf, data["weight"], targets, advantages, **partners, **options, backend=backend)
    return loss, leaf


KINDS = ("policy", "logits", "linear")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_a_live_token_reaches_loss_and_gradient(place, kind, config):
    device, backend = place
    config = PolicyLossConfig(**config)
    names = ["leaf", "advantages", "old_logp", "behavior_logp", "weights"] + ["ref_logp"] * (config.kl_coef > 0)
    for name, masked in product(names, (False, True)):
        data = inputs(device)
        for poisoned in ("logp", "logits", "hidden") if name == "leaf" else (name,):
            data[poisoned][0, 1] = NAN
        mask = torch.ones(B, L, dtype=torch.bool, device=device)
        mask[0, 1] = not masked
        loss, leaf = loss_of(kind, data, backend, mask=mask, config=config)
        loss.backward()
        if masked:
            assert loss.isfinite(), name
            assert leaf.grad.isfinite().all(), name
            assert not leaf.grad[0, 1].any(), name
        else:
            assert loss.isnan(), name
            assert leaf.grad[0, 1].isnan().any(), name
        assert leaf.grad[1].isfinite().all(), f"{name}: another sequence was hit"


@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_a_token_of_weight_zero_is_silent(place, kind):
    device, backend = place
    data = inputs(device)
    data["weights"][0, 1] = 0
    data["advantages"][0, 1] = data["old_logp"][0, 1] = NAN
    loss, leaf = loss_of(kind, data, backend)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[0, 1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_one_denominator_for_the_three_losses(place, kind):
    device, backend = place
    data = inputs(device)
    none, all_ = torch.zeros(B, L, dtype=torch.bool, device=device), torch.ones(B, L, dtype=torch.bool, device=device)
    for normalizer in (None, 3.0, none.sum(), torch.tensor(0.0, device=device), torch.tensor(2, device=device)):
        loss, leaf = loss_of(kind, data, backend, mask=none, normalizer=normalizer)
        loss.backward()
        assert loss == 0
        assert loss.requires_grad
        assert not leaf.grad.any()
    by_number, _ = loss_of(kind, data, backend, mask=all_, normalizer=5)
    by_tensor, _ = loss_of(kind, data, backend, mask=all_, normalizer=torch.tensor(5, device=device))
    assert by_number == by_tensor
    for wrong in (0, 0.0, -1, NAN, float("inf"), True):
        for mask in (none, all_):
            with pytest.raises(ValueError, match=f"normalizer must be a finite number > 0, got {wrong!r}"):
                loss_of(kind, data, backend, mask=mask, normalizer=wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wrong", "masks"), [(0.0, [1]), (-2.0, [0, 1]), (NAN, [0, 1]), (float("inf"), [0, 1])])
def test_a_wrong_denominator_in_a_tensor_shows(place, kind, wrong, masks):
    device, backend = place
    data = inputs(device)
    for live in masks:
        mask = torch.full((B, L), bool(live), device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match="normalizer must be finite and > 0"):
                loss_of(kind, data, backend, mask=mask, normalizer=torch.tensor(wrong))
        elif live:
            loss, leaf = loss_of(kind, data, backend, mask=mask, normalizer=torch.tensor(wrong, device=device))
            loss.backward()
            assert loss.isnan()
            assert leaf.grad.isnan().any()


def every_op(data, backend):
    """The differentiable results of all ops, by name, each with the leaves that it depends on."""
    leaves = {name: data[name].clone().requires_grad_() for name in ("logp", "logits", "hidden", "weight")}
    logp, logits, hidden, weight = leaves.values()
    targets, advantages = data["targets"], data["advantages"]
    from_logits = token_logprobs(logits, targets, with_entropy=True, backend=backend)
    from_hidden = linear_token_logprobs(hidden, weight, targets, with_entropy=True, backend=backend)
    partners = {"old_logp": data["old_logp"], "behavior_logp": data["behavior_logp"], "backend": backend}
    with_entropy = PolicyLossConfig(entropy_coef=0.1)
    return leaves, {
        "token_logprobs": from_logits[0].sum() + from_logits[1].sum(),
        "linear_token_logprobs": from_hidden[0].sum() + from_hidden[1].sum(),
        "policy_loss": policy_loss(logp, advantages, **partners)[0],
        "logits_policy_loss": logits_policy_loss(logits, targets, advantages, config=with_entropy, **partners)[0],
        "linear_policy_loss": linear_policy_loss(hidden, weight, targets, advantages, config=with_entropy, **partners)[
            0
        ],
    }


def advantages_of(data, backend):
    rewards = data["advantages"].flatten()
    groups = torch.arange(B * L, device=rewards.device) // 3
    return {
        "group_advantages": group_advantages(rewards, groups, backend=backend),
        "gae": gae(data["advantages"], data["logp"], gamma=0.9, lam=0.9, backend=backend)[0],
        "discounted_returns": discounted_returns(data["advantages"], gamma=0.9, backend=backend),
        "masked_whiten": masked_whiten(data["advantages"], backend=backend),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_outside(place, dtype):
    """Operators choose dtypes by hand: only an lm_head is cast at the door, as torch.nn.functional.linear does."""
    device, backend = place
    data = inputs(device)
    cast = data | {name: data[name].to(dtype) for name in ("hidden", "weight")}
    leaves, plain = every_op(cast, backend)
    with torch.autocast(device, dtype=dtype):
        inside, results = every_op(data, backend)
        others = advantages_of(data, backend)
        grads = {name: torch.autograd.grad(x, inside.values(), allow_unused=True) for name, x in results.items()}
    for name, result in results.items():
        assert result.dtype == torch.float32, name
        assert torch.equal(result, plain[name]), name
        expected = torch.autograd.grad(plain[name], leaves.values(), allow_unused=True)
        for grad, want in zip(grads[name], expected, strict=True):
            assert want is None or torch.equal(grad, want.to(grad.dtype)), name
    for name, result in advantages_of(data, backend).items():
        assert torch.equal(result, others[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entropy_of_a_large_vocabulary_under_autocast(place, dtype):
    device, backend = place
    columns = 262_144 if backend == "torch" else 4_096
    logits = torch.full((1, columns), -1.0, device=device)
    logits[0, 0] = 0
    with torch.autocast(device, dtype=dtype):
        _, entropy = token_logprobs(logits, torch.zeros(1, dtype=torch.long, device=device), with_entropy=True,
                                    backend=backend)  # fmt: skip
    right = torch.distributions.Categorical(logits=logits.double()).entropy()
    # An ulp of each of the sums of ones that are 262,144 long, of which the logarithm is taken.
    assert torch.allclose(entropy.double(), right, rtol=1e-5, atol=0)


@pytest.mark.parametrize("op", ["token_logprobs", "linear_token_logprobs", *(f"{k}_loss" for k in KINDS)])
def test_a_second_derivative_is_refused(place, op):
    device, backend = place
    name = op if "logprobs" in op else {"policy_loss": "policy_loss"}.get(op, op.replace("_loss", "_policy_loss"))
    leaves, results = every_op(inputs(device), backend)
    leaf = {"policy_loss": "logp", "token_logprobs": "logits", "logits_policy_loss": "logits"}.get(name, "hidden")
    (grad,) = torch.autograd.grad(results[name], leaves[leaf], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        (leaves[leaf].square().sum() + grad.square().sum()).backward()


def test_forward_mode_is_refused(place):
    device, backend = place
    data = inputs(device)
    with forward_ad.dual_level():
        for name in ("logp", "logits", "hidden", "weight"):
            dual = data | {name: forward_ad.make_dual(data[name], torch.ones_like(data[name]))}
            calls = {
                "logp": lambda d: policy_loss(d["logp"], d["advantages"], backend=backend),
                "logits": lambda d: token_logprobs(d["logits"], d["targets"], backend=backend),
                "hidden": lambda d: linear_token_logprobs(d["hidden"], d["weight"], d["targets"], backend=backend),
            }
            with pytest.raises(RuntimeError, match=f"{name} has a forward-mode tangent"):
                calls.get(name, calls["hidden"])(dual)


def test_inplace_is_refused_where_elements_share_memory(place):
    device, backend = place
    targets = torch.zeros(2, 3, dtype=torch.long, device=device)
    base = torch.randn(40, device=device)
    overlapping = {
        "expanded": base[:14].view(2, 1, 7).expand(2, 3, 7),
        "expanded batch": base[:21].view(1, 3, 7).expand(2, 3, 7),
        "sliding window": base.as_strided((2, 3, 7), (21, 1, 1)),
        "rows that meet": base.as_strided((2, 3, 7), (20, 6, 1)),
    }
    for logits in overlapping.values():
        with pytest.raises(ValueError, match="inplace=True needs logits whose elements"):
            token_logprobs(logits, targets, inplace=True, backend=backend)
        with pytest.raises(ValueError, match="inplace=True needs logits whose elements"):
            logits_policy_loss(logits, targets, torch.ones(2, 3, device=device), inplace=True, backend=backend)
    leaf = torch.randn(2, 4, 7, device=device, requires_grad=True)
    views = {
        "slice": lambda x: x[:, :-1],
        "every other": lambda x: x[..., ::2][:, :3],
        "a batch of one, expanded to one": lambda x: x[:1, :3].expand(1, 3, 7),
    }
    for view in views.values():
        own = view(leaf * 1)
        (there,) = torch.autograd.grad(token_logprobs(own, targets[: len(own)], backend=backend).sum(), leaf)
        own = view(leaf * 1)
        here = token_logprobs(own, targets[: len(own)], inplace=True, backend=backend).sum()
        assert torch.equal(torch.autograd.grad(here, leaf)[0], there)


def test_inplace_under_compile():
    leaf, targets = torch.randn(2, 3, 7, requires_grad=True), torch.zeros(2, 3, dtype=torch.long)

    def of_logits(x, inplace):
        return logits_policy_loss(x * 1, targets, torch.ones(2, 3), inplace=inplace, backend="torch")[0]

    def of_logprobs(x, inplace):
        return token_logprobs(x * 1, targets, inplace=inplace, backend="torch").sum()

    for function in (of_logits, of_logprobs):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(leaf, True), leaf)
        assert torch.equal(grad, torch.autograd.grad(function(leaf, False), leaf)[0])
