"""NaN on a token that counts shows in the loss and in that token's gradient; other tokens may hold anything."""

from __future__ import annotations

import pytest
import torch

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    policy_loss,
    token_logprobs,
)

N, WIDTH, VOCAB, AT = 6, 4, 9, 2
PARTNERS = ("old_logp", "behavior_logp", "ref_logp", "weights", "advantages")
FIRST_INPUT = {"logp": "logp", "logits": "logits", "hidden": "hidden"}
CONFIGS = {
    "grpo": PolicyLossConfig(),
    "full": PolicyLossConfig(
        clip_center="relative", center_cap=1.0, weight_cap=2.0, dual_clip=3.0, kl_coef=0.1, kl_weighted=True,
        entropy_coef=0.01,
    ),
    "k1": PolicyLossConfig(kl_coef=0.1, kl_estimator="k1", clip_center="none"),
    "cispo": PolicyLossConfig("cispo", kl_coef=0.1),
    "sapo": PolicyLossConfig("sapo", aggregation="token-mean"),
    "gspo": PolicyLossConfig("gspo", kl_coef=0.1),
}  # fmt: skip


def problem(start, device, wide=1.0):
    """Tokens with partners; `wide` times as far from the old policy, so that many are clipped."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(N, WIDTH, device=device), torch.randn(VOCAB, WIDTH, device=device)
    targets = torch.arange(N, device=device)
    logits = hidden @ weight.T
    logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    x = {"logp": logp.clone(), "logits": logits, "hidden": hidden, "weight": weight, "targets": targets}
    x |= {"entropy": torch.rand(N, device=device), "mask": torch.ones(N, dtype=torch.bool, device=device)}
    for name in ("old_logp", "behavior_logp", "ref_logp"):
        x[name] = logp + wide * torch.randn(N, device=device)
    return x | {"weights": torch.rand(N, device=device) + 0.5, "advantages": torch.randn(N, device=device)}


def run(start, p, config, backend):
    """The loss and each token's gradient, a row of numbers."""
    leaf = p[start].detach().clone().requires_grad_()
    common = {name: p[name] for name in (*PARTNERS[:4], "mask")} | {"config": config, "backend": backend}
    common["segments"] = Segments.from_lengths(torch.tensor([3, 3], device=leaf.device))
    if start == "logp":
        loss, _ = policy_loss(leaf, p["advantages"], entropy=p["entropy"], **common)
    elif start == "logits":
        loss, _ = logits_policy_loss(leaf, p["targets"], p["advantages"], **common)
    else:
        loss, _ = linear_policy_loss(leaf, p["weight"], p["targets"], p["advantages"], chunk_rows=2, **common)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad.reshape(N, -1)


def spoil(x, row):
    x[row if x.dim() == 1 else (row, 0)] = torch.nan


STARTS = pytest.mark.parametrize("start", ["logp", "logits", "hidden"])
CONFIG_NAMES = pytest.mark.parametrize("name", CONFIGS)


@STARTS
@CONFIG_NAMES
def test_nan_on_a_token_shows(place, start, name):
    device, backend = place
    config = CONFIGS[name]
    for wide in (0.01, 3.0):
        for spoiled in (start, *PARTNERS, *(["entropy"] if start == "logp" else [])):
            p = problem(start, device, wide)
            spoil(p[spoiled], AT)
            loss, grad = run(start, p, config, backend)
            assert loss.isnan(), spoiled
            assert grad[AT].isnan().any(), spoiled
            apart = [3, 4, 5] if config.ratio_level == "sequence" else [0, 1, 3, 4, 5]
            assert grad[apart].isfinite().all(), spoiled


@STARTS
@CONFIG_NAMES
@pytest.mark.parametrize("silence", ["mask", "weights"])
def test_nan_on_a_token_that_does_not_count_is_nothing(place, start, name, silence):
    """A masked token, or one of weight 0 as far as no other shares its ratio."""
    device, backend = place
    config = CONFIGS[name]
    if silence == "weights" and config.ratio_level != "token":
        pytest.skip("tokens of weight 0 still have a part in their sequence's ratio")
    p = problem(start, device)
    p[silence][AT] = 0
    expected = run(start, p, config, backend)
    for spoiled in (start, "entropy", *PARTNERS[:3], "advantages", *(["weights"] if silence == "mask" else [])):
        spoil(p[spoiled], AT)
    loss, grad = run(start, p, config, backend)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad, expected[1])
    assert (grad[AT] == 0).all()


@STARTS
@CONFIG_NAMES
def test_nan_beside_a_masked_token_leaves_its_gradient_0(place, start, name):
    """Also where both are of one sequence, whose ratio is then NaN."""
    device, backend = place
    p = problem(start, device)
    p["mask"][AT - 1] = False
    for spoiled in (start, "advantages"):
        spoil(p[spoiled], AT)
    loss, grad = run(start, p, CONFIGS[name], backend)
    assert loss.isnan()
    assert (grad[AT - 1] == 0).all()


@STARTS
def test_nan_is_not_multiplied_away_by_an_advantage_of_0(place, start):
    """Rows of zero advantage enter no matmul of the loss from hidden states; NaN shows all the same."""
    device, backend = place
    for spoiled in (start, *PARTNERS):
        p = problem(start, device)
        p["advantages"].zero_()
        spoil(p[spoiled], AT)
        loss, grad = run(start, p, PolicyLossConfig(), backend)
        assert loss.isnan(), spoiled
        assert grad[AT].isnan().any(), spoiled


@pytest.mark.parametrize("spoiled", PARTNERS)
def test_nan_shows_on_an_impossible_target(place, spoiled):
    """Its logit of -inf gives no gradient of its own."""
    device, backend = place
    p = problem("logits", device)
    p["logits"][AT, AT] = -torch.inf
    p[spoiled][AT] = torch.nan
    for start in ("logits", "logp"):
        p["logp"][AT] = -torch.inf
        loss, grad = run(start, p, PolicyLossConfig(kl_coef=0.1), backend)
        assert loss.isnan()
        assert grad[AT].isnan().any()


@pytest.mark.parametrize("name", CONFIGS)
def test_nan_beside_an_impossible_target_shows(place, name):
    """The row has no distribution, and so no log-prob of -inf either."""
    device, backend = place
    for value in (torch.nan, torch.inf):
        p = problem("logits", device)
        p["logits"][AT, AT] = -torch.inf
        p["logits"][AT, AT + 1] = value
        logp, entropy = token_logprobs(p["logits"], p["targets"], with_entropy=True, backend=backend)
        assert logp[AT].isnan()
        assert entropy[AT].isnan()
        loss, grad = run("logits", p, CONFIGS[name], backend)
        assert loss.isnan()
        assert grad[AT].isnan().any()
        bias = torch.zeros(VOCAB, device=device)
        bias[0] = value
        bias[1] = -torch.inf
        p["targets"][:] = 1
        assert linear_token_logprobs(p["hidden"], p["weight"], p["targets"], bias=bias, backend=backend).isnan().all()


@pytest.mark.parametrize("exact_stats", [False, True])
def test_nan_of_a_segment_without_advantage_shows(place, exact_stats):
    """A token of weight 0 breaks the ratio of the others, which have an advantage of 0 and would enter no matmul."""
    device, backend = place
    for spoiled in ("hidden", "old_logp", "behavior_logp"):
        p = problem("hidden", device)
        p["advantages"][:3] = 0
        p["weights"][AT] = 0
        spoil(p[spoiled], AT)
        loss, _ = linear_policy_loss(
            p["hidden"], p["weight"], p["targets"], p["advantages"], weights=p["weights"], old_logp=p["old_logp"],
            behavior_logp=p["behavior_logp"], segments=Segments.from_lengths(torch.tensor([3, 3], device=device)),
            config=PolicyLossConfig("gspo"), exact_stats=exact_stats, backend=backend,
        )  # fmt: skip
        assert loss.isnan(), spoiled
