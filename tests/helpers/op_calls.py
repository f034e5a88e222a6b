"""Every differentiable op, called on the same problem."""

from __future__ import annotations

import torch

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    discounted_returns,
    gae,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    masked_whiten,
    policy_loss,
    step_advantages,
    token_logprobs,
)

N, WIDTH, VOCAB = 12, 8, 33


CONFIG = PolicyLossConfig(kl_coef=0.1, entropy_coef=0.01, center_cap=1.0, dual_clip=3.0)


SEQUENCES = PolicyLossConfig(loss="gspo", kl_coef=0.1, kl_weighted=True, entropy_coef=0.01)


def problem(device):
    torch.manual_seed(3)
    old, behavior, ref = (-torch.rand(3, N) * 3).to(device).unbind()
    return {
        "logits": 30 * torch.randn(N, VOCAB, device=device),
        "hidden": torch.randn(N, WIDTH, device=device),
        "weight": torch.randn(VOCAB, WIDTH, device=device),
        "bias": torch.randn(VOCAB, device=device),
        "targets": torch.randint(0, VOCAB, (N,), device=device),
        "logp": -torch.rand(N, device=device) * 3,
        "entropy": torch.rand(N, device=device),
        "advantages": torch.randn(N, device=device),
        "partners": {"old_logp": old, "behavior_logp": behavior, "ref_logp": ref},
        "segments": Segments.from_lengths(torch.tensor([5, 0, 4, 3], device=device)),
        "groups": torch.arange(N, device=device) % 3,
    }


def of_logits(p, backend):
    return token_logprobs(p["logits"], p["targets"], with_entropy=True, backend=backend)


def of_logits_inplace(p, backend):
    return token_logprobs(p["logits"] * 1.0, p["targets"], with_entropy=True, inplace=True, backend=backend)


def of_hidden(p, backend):
    return linear_token_logprobs(
        p["hidden"], p["weight"], p["targets"], bias=p["bias"], with_entropy=True, chunk_rows=4, backend=backend
    )


def loss(p, backend, config=CONFIG):
    options = {"entropy": p["entropy"], "segments": p["segments"], "config": config, "backend": backend}
    return flat(policy_loss(p["logp"], p["advantages"], **p["partners"], **options))


def loss_of_sequences(p, backend):
    return loss(p, backend, SEQUENCES)


def loss_of_logits(p, backend, config=CONFIG, inplace=False):
    options = {"segments": p["segments"], "config": config, "inplace": inplace, "backend": backend}
    logits = p["logits"] * 1.0 if inplace else p["logits"]
    return flat(logits_policy_loss(logits, p["targets"], p["advantages"], **p["partners"], **options))


def loss_of_logits_inplace(p, backend):
    return loss_of_logits(p, backend, inplace=True)


def loss_of_logits_of_sequences(p, backend):
    return loss_of_logits(p, backend, SEQUENCES)


def loss_of_hidden(p, backend, config=CONFIG):
    options = {"segments": p["segments"], "config": config, "chunk_rows": 4, "backend": backend}
    head = (p["hidden"], p["weight"], p["targets"], p["advantages"])
    return flat(linear_policy_loss(*head, bias=p["bias"], **p["partners"], **options))


def loss_of_hidden_of_sequences(p, backend):
    return loss_of_hidden(p, backend, SEQUENCES)


def advantages(p, backend):
    a = group_advantages(p["advantages"], p["groups"], backend=backend)
    b = step_advantages(p["advantages"], p["groups"], p["groups"], p["targets"] % 2, backend=backend)
    c = masked_whiten(p["advantages"], backend=backend)
    d = gae(p["advantages"], p["logp"], segments=p["segments"], backend=backend)
    return a, *b, c, *d, discounted_returns(p["advantages"], segments=p["segments"], gamma=0.9, backend=backend)


def flat(result):
    return result[0], *result[1].values()


LEAVES = ("logits", "hidden", "weight", "bias", "logp", "entropy")


FROM_HIDDEN = (of_hidden, loss_of_hidden, loss_of_hidden_of_sequences)


OPS = (
    of_logits, of_logits_inplace, loss, loss_of_sequences, loss_of_logits, loss_of_logits_inplace,
    loss_of_logits_of_sequences, *FROM_HIDDEN, advantages,
)  # fmt: skip
