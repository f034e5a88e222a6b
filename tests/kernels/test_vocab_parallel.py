"""A vocabulary spread over two processes gives what the whole one gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numerics import assert_close

from rspo_kernels import (
    PolicyLossConfig,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    policy_loss,
    reference,
    token_logprobs,
)

WORLD = 2
N, WIDTH, VOCAB = 14, 6, 20  # of 20 tokens the first process has 12, the second 8
CUTS = (0, 12, 20)


def normal(seed, *shape):
    """The same numbers in every process and on every device, on the default one."""
    rng = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device="cpu").to(torch.get_default_device())


def problem():
    hidden, weight, bias = normal(4, N, WIDTH), normal(5, VOCAB, WIDTH), normal(6, VOCAB)
    bias[5] = bias[15] = -torch.inf  # impossible tokens, one of which is a target
    bias[12:] += 3.0
    targets = torch.arange(N) + 3
    targets[7] = -100
    return hidden, weight, bias, targets


def run_in_processes(tmp_path, device, case, *arguments):
    """Run case(rank, vocabulary slice, *arguments) in two processes, tensors on `device`; assertions inside fail here.

    Two processes may share a GPU: gloo adds up tensors of GPUs too.
    """
    mp.spawn(_process, (str(tmp_path / "rendezvous"), device, case, arguments), nprocs=WORLD)


def _process(rank, rendezvous, device, case, arguments):
    torch.set_num_threads(1)
    torch.set_default_device(device)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    try:
        case(rank, slice(CUTS[rank], CUTS[rank + 1]), *arguments)
    finally:
        dist.destroy_process_group()


def check_logprobs(rank, mine, backend):
    hidden, weight, bias, targets = problem()
    options = {"temperature": 0.7, "mask": targets != 5}
    upstream = normal(1, 2, N)
    for softcap in (None, 4.0):
        options["softcap"] = softcap
        finite = bias if softcap is None else torch.nan_to_num(bias, neginf=-9.0)
        logits = (hidden @ weight.T + finite).double().requires_grad_()
        logp_64, entropy_64 = reference.token_logprobs(logits, targets, **options)
        possible = torch.where(logp_64 > -torch.inf, logp_64, 0.0)
        ((possible * upstream[0]).sum() + (entropy_64 * upstream[1]).sum()).backward()
        local = logits.detach().float()[:, mine].clone().requires_grad_()
        logp, entropy = token_logprobs(
            local, targets, **options, with_entropy=True, vocab_group=dist.group.WORLD, vocab_start=mine.start,
            backend=backend,
        )  # fmt: skip
        possible = torch.where(logp > -torch.inf, logp, 0.0)
        ((possible * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
        assert_close("logp", logp, logp_64, rtol=1e-6, atol=3e-6)
        assert_close("entropy", entropy, entropy_64, rtol=1e-5, atol=1e-5)
        assert_close("gradient", local.grad, logits.grad[:, mine], rtol=1e-4, atol=1e-6)


def check_default_start(rank, _, backend, sizes):
    """Slices of any width find their place by themselves."""
    vocab = sum(sizes)
    hidden, weight = normal(4, N, WIDTH), normal(5, vocab, WIDTH)
    targets, advantages = torch.arange(N) % vocab, normal(2, N)
    spread = {"vocab_group": dist.group.WORLD, "backend": backend}
    mine = weight.split(sizes)[rank].contiguous()
    logits = hidden @ weight.T
    local = logits.split(sizes, dim=1)[rank].contiguous()
    expected = token_logprobs(logits, targets, backend=backend)
    options = {"old_logp": expected - 0.1, "backend": backend}
    loss, _ = logits_policy_loss(logits, targets, advantages, **options)
    options |= spread
    assert_close("logits", token_logprobs(local, targets, **spread), expected, rtol=1e-5, atol=1e-5)
    assert_close("hidden", linear_token_logprobs(hidden, mine, targets, **spread), expected, rtol=1e-5, atol=1e-5)
    for actual, _ in (
        logits_policy_loss(local, targets, advantages, **options),
        linear_policy_loss(hidden, mine, targets, advantages, **options),
    ):
        assert_close("loss", actual, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(9, 8), (3, 14), (8, 8)])
def test_first_tokens_of_unequal_slices(tmp_path, place, sizes):
    device, backend = place
    run_in_processes(tmp_path, device, check_default_start, backend, sizes)


def check_losses(rank, mine, backend, config):
    hidden, weight, bias, targets = problem()
    bias = torch.nan_to_num(bias, neginf=-9.0)
    advantages = normal(2, N)
    advantages[2:5] = 0.0
    old = token_logprobs(hidden @ weight.T + bias, targets, backend="torch") + 0.3 * normal(3, N)
    partners = {"old_logp": old, "ref_logp": old - 0.1, "config": config}
    whole = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = whole[0] @ whole[1].T + whole[2]
    logp, entropy = token_logprobs(logits, targets, with_entropy=True, backend="torch")
    expected, stats_64 = policy_loss(
        logp, advantages.double(), entropy=entropy, mask=targets != -100, old_logp=old.double(),
        ref_logp=old.double() - 0.1, config=config, backend="torch",
    )  # fmt: skip
    grads_64 = torch.autograd.grad(expected * 3, [*whole, logits])
    spread = {"vocab_group": dist.group.WORLD, "vocab_start": mine.start, "backend": backend}

    local = [hidden.clone(), weight[mine].clone(), bias[mine].clone()]
    local = [x.requires_grad_() for x in local]
    loss, stats = linear_policy_loss(
        local[0], local[1], targets, advantages, bias=local[2], chunk_rows=4, exact_stats=True, **partners, **spread
    )
    grads = torch.autograd.grad(loss * 3, local)
    assert_close("loss", loss, expected, rtol=1e-5, atol=1e-6)
    for name in ("ratio_mean", "clip_frac_high", "kl_ref", "num_tokens"):
        assert_close(name, stats[name], stats_64[name], rtol=1e-4, atol=1e-6)
    for name, actual, want in zip(
        ("hidden", "weight", "bias"), grads, (grads_64[0], grads_64[1][mine], grads_64[2][mine]), strict=True
    ):
        assert_close(f"gradient of {name}", actual, want, rtol=1e-4, atol=2e-6)

    part = (hidden @ weight[mine].T + bias[mine]).requires_grad_()
    loss, _ = logits_policy_loss(part, targets, advantages, **partners, **spread)
    (grad,) = torch.autograd.grad(loss * 3, part)
    assert_close("loss", loss, expected, rtol=1e-5, atol=1e-6)
    assert_close("gradient of logits", grad, grads_64[3][:, mine], rtol=1e-4, atol=1e-6)

    leaves = [hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()]
    logp = linear_token_logprobs(*leaves, targets, bias=bias[mine], chunk_rows=5, **spread)
    whole_logp = token_logprobs(whole[0] @ whole[1].T + whole[2].detach(), targets, backend="torch")
    grads = torch.autograd.grad(logp.sum(), leaves)
    grads_64 = torch.autograd.grad(whole_logp.sum(), whole[:2])
    assert_close("logp", logp, whole_logp, rtol=1e-5, atol=1e-5)
    assert_close("gradient of hidden", grads[0], grads_64[0], rtol=1e-4, atol=1e-5)
    assert_close("gradient of weight", grads[1], grads_64[1][mine], rtol=1e-4, atol=1e-5)


def check_errors(rank, mine):
    hidden, weight, _, targets = problem()
    logits = (hidden @ weight.T)[:, mine]
    targets[0] = VOCAB
    logp = token_logprobs(logits, targets, vocab_group=dist.group.WORLD, vocab_start=mine.start)
    assert logp.isnan().tolist() == [True] + [False] * (N - 1)
    with pytest.raises(TypeError, match=r"vocab_group must be a .*ProcessGroup, got str"):
        token_logprobs(logits, targets, vocab_group="world")
    with pytest.raises(ValueError, match="vocab_start must be None without vocab_group, got 3"):
        token_logprobs(logits, targets, vocab_start=3)


def test_logprobs(tmp_path, place):
    device, backend = place
    run_in_processes(tmp_path, device, check_logprobs, backend)


@pytest.mark.parametrize(
    "config",
    [PolicyLossConfig(), PolicyLossConfig(kl_coef=0.2, entropy_coef=0.1)],
    ids=["sparse", "dense"],
)
def test_losses(tmp_path, place, config):
    device, backend = place
    run_in_processes(tmp_path, device, check_losses, backend, config)


def test_targets_that_nobody_has_and_wrong_arguments(tmp_path, place):
    run_in_processes(tmp_path, place[0], check_errors)
