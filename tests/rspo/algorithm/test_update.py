"""One update: ratios before it, the weights of eq. 1, independence of micro-batches, what stops a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rspo_toys import small_config, small_policy
from updates import ALPHA, mixed_trajectories, run_update, scored_batch

from rspo.algorithm.rewards import NonFiniteError
from rspo.algorithm.update import Mixture, deal, prepare
from rspo.config import Config
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY
from rspo.models.agent import Agent


def gradients(agent: Agent) -> list[torch.Tensor]:
    return [p.grad.clone() for p in agent.policy.model.parameters() if p.grad is not None]


def test_at_learning_rate_zero_ratios_are_one_and_nothing_clips() -> None:
    config = apply_flags(small_config(), ["optimizer.learning_rate=0", "loss.center_cap=null"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, config, trajectories)
    stats = run_update(agent, config, trajectories, batch)
    for name in ("clip_frac_low", "clip_frac_high", "replay/clip_frac_low", "replay/clip_frac_high"):
        assert stats[name] == 0, name
    assert stats["approx_kl_k3"] == pytest.approx(0, abs=1e-7)
    # Replayed tokens: r = c = π_old/π_B, far from 1.
    center = (batch.old_logp - batch.behavior_logp)[batch.is_replay].exp()
    assert stats["replay/ratio_mean"] == pytest.approx(float(center.mean()), rel=1e-4)
    assert stats["replay/center_mean"] == pytest.approx(float(center.mean()), rel=1e-4)
    assert abs(float(center.mean()) - 1) > 0.05
    on_policy = [t for t in trajectories if t.source != REPLAY]
    alone = run_update(agent, config, on_policy)
    assert (alone["ratio_mean"], alone["ratio_max"]) == (pytest.approx(1, abs=1e-5), pytest.approx(1, abs=1e-4))


def test_old_logprobs_of_replay_are_taken_from_the_policy_as_it_is() -> None:
    config = small_config()
    agent = Agent(small_policy(), config)
    batch = scored_batch(agent, config, mixed_trajectories())
    with torch.no_grad():
        logp, _ = agent.policy.logprobs(batch, 1.0)
    torch.testing.assert_close(batch.old_logp, logp, atol=1e-5, rtol=0)
    assert not torch.allclose(batch.old_logp[batch.is_replay], batch.behavior_logp[batch.is_replay], atol=0.1)
    assert torch.equal(batch.old_logp[~batch.is_replay], batch.behavior_logp[~batch.is_replay])


def test_behavior_can_be_ignored() -> None:
    """Then replayed tokens have ratio and centre 1 before the first step."""
    config = apply_flags(small_config(), ["swap.ignore_behavior=true", "optimizer.learning_rate=0"])
    agent = Agent(small_policy(), config)
    batch = scored_batch(agent, config, mixed_trajectories())
    assert torch.equal(batch.behavior_logp, batch.old_logp)
    stats = run_update(agent, config, mixed_trajectories(), batch)
    assert stats["replay/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert stats["replay/center_mean"] == 1


def test_equation_one_weights_two_means() -> None:
    """The gradient of (1 - α)·mean_on + α·mean_off, taken term by term with autograd."""
    config = apply_flags(small_config(), ["optimizer.minibatches=1", "optimizer.grad_clip=1e9", "loss.center_cap=null"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, config, trajectories)

    logp, _ = agent.policy.logprobs(batch, 1.0)
    objective = (logp - batch.behavior_logp).exp() * batch.advantages  # nothing clips before the first step
    expected = -(1 - ALPHA) * objective[~batch.is_replay].mean() - ALPHA * objective[batch.is_replay].mean()
    by_hand = torch.autograd.grad(expected, list(agent.policy.model.parameters()))

    agent.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    stats = run_update(agent, config, trajectories, batch)
    assert stats["loss"] == pytest.approx(expected.item(), rel=0, abs=1e-5)  # of terms of 1 and 2, which cancel
    torch.testing.assert_close(gradients(agent), list(by_hand), atol=1e-6, rtol=1e-4)


def test_minibatches_keep_the_weights_of_equation_one() -> None:
    """Two mini-batches: each takes its terms with the divisors of the whole update, times two; plain SGD by hand."""
    config = apply_flags(small_config(), ["optimizer.minibatches=2", "optimizer.grad_clip=1e9", "loss.center_cap=null"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, config, trajectories)
    taken: list[list[torch.Tensor]] = []
    agent.optimizer.step = lambda *_: taken.append(gradients(agent))  # type: ignore[method-assign, assignment]
    run_update(agent, config, trajectories, batch)
    logp, _ = agent.policy.logprobs(batch, 1.0)
    objective = (logp - batch.behavior_logp).exp() * batch.advantages
    mean = (1 - ALPHA) * objective[~batch.is_replay].mean() + ALPHA * objective[batch.is_replay].mean()
    by_hand = torch.autograd.grad(-mean, list(agent.policy.model.parameters()))
    assert len(taken) == 2
    # The mini-batches partition the terms, so that the mean of their gradients is the gradient of the whole.
    torch.testing.assert_close([(a + b) / 2 for a, b in zip(*taken, strict=True)], list(by_hand), atol=1e-6, rtol=1e-4)


def test_the_gradient_is_clipped_to_its_norm() -> None:
    config = apply_flags(small_config(), ["optimizer.minibatches=1", "optimizer.grad_clip=1e-3"])
    agent = Agent(small_policy(), config)
    agent.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    stats = run_update(agent, config, mixed_trajectories())
    norm = torch.stack([g.norm() for g in gradients(agent)]).norm()
    assert stats["gradient_norm"] > 1e-3, "the reported norm is that before clipping"
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_divisors() -> None:
    batch = Batch.from_trajectories(mixed_trajectories())
    n_off = int(batch.is_replay.sum())
    n_on = batch.num_tokens - n_off
    loss = Config().loss
    assert Mixture.of(batch, loss, ALPHA, pooled=False) == Mixture(n_on / (1 - ALPHA), n_off / ALPHA)
    assert Mixture.of(batch, loss, ALPHA, pooled=True) == Mixture(batch.num_tokens, batch.num_tokens)
    rows = Mixture.of(batch, replace(loss, aggregation="seq-mean-token-sum"), ALPHA, pooled=False)
    assert rows == Mixture((batch.num_rows - 4) / (1 - ALPHA), 4 / ALPHA)
    alone = Batch.from_trajectories([t for t in mixed_trajectories() if t.source != REPLAY])
    assert Mixture.of(alone, loss, ALPHA, pooled=False) == Mixture(n_on, 0)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_gradient_does_not_depend_on_micro_batches(aggregation: str) -> None:
    results = []
    for tokens in (8, 24, 100_000):
        flags = [
            f"optimizer.micro_batch_tokens={tokens}",
            "optimizer.minibatches=1",
            "optimizer.grad_clip=1e9",
            f"loss.aggregation={aggregation}",
            "loss.entropy_coef=0.01",
        ]
        config = apply_flags(small_config(), flags)
        agent = Agent(small_policy(), config)
        agent.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
        stats = run_update(agent, config, mixed_trajectories())
        results.append((gradients(agent), stats["loss"]))
    for grads, loss in results[1:]:
        torch.testing.assert_close(grads, results[0][0], atol=1e-6, rtol=1e-4)
        # The loss is a sum of advantages of ±1 and 2, which cancel: float32 has it to 1e-6, whatever is left of them.
        assert loss == pytest.approx(results[0][1], rel=0, abs=1e-5)


def test_minibatches_deal_every_row_once() -> None:
    batch = Batch.from_trajectories(mixed_trajectories())
    config = small_config().optimizer
    for settings, count in ((replace(config, minibatches=4), 4), (replace(config, minibatch_rows=10), 3)):
        parts = deal(batch, settings, np.random.default_rng(0))
        assert len(parts) == count
        assert sorted(torch.cat(parts).tolist()) == list(range(batch.num_rows))


def test_kl_term_pulls_towards_the_reference() -> None:
    config = apply_flags(small_config(), ["loss.kl_coef=0.1"])
    agent, reference = Agent(small_policy(0), config), small_policy(1)
    trajectories = [replace(t, advantages=np.zeros(len(t), dtype=np.float32)) for t in mixed_trajectories()]
    batch = scored_batch(agent, small_config(), trajectories)
    with pytest.raises(ValueError, match="needs a reference"):
        prepare(agent, batch, trajectories, config, None)
    batch = prepare(agent, batch, trajectories, config, reference)
    first = run_update(agent, config, trajectories, batch)["kl_ref"]
    for _ in range(5):
        last = run_update(agent, config, trajectories, batch)["kl_ref"]
    assert 0 < last < first


def test_non_finite_values_name_their_place_and_leave_the_weights() -> None:
    config = apply_flags(small_config(), ["optimizer.minibatches=1"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, config, trajectories)
    before = [p.clone() for p in agent.policy.model.parameters()]
    advantages = batch.advantages.clone()
    advantages[batch.turn_trajectory[batch.token_turn] == 4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"trajectory 4 of group 0 .*advantage nan"):
        run_update(agent, config, trajectories, replace(batch, advantages=advantages))
    assert all(torch.equal(a, b) for a, b in zip(before, agent.policy.model.parameters(), strict=True))

    with torch.no_grad():
        next(iter(agent.policy.model.parameters())).fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="log-prob nan"):
        run_update(agent, config, trajectories, batch)


def test_the_trajectory_at_fault_is_named_where_whitening_has_spread_it() -> None:
    """One value is not a number, in another mini-batch than the one that fails first: all advantages are none then."""
    config = apply_flags(small_config(), ["optimizer.minibatches=8"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, config, trajectories)
    values = torch.zeros(batch.num_tokens)
    values[batch.turn_trajectory[batch.token_turn] == 5] = float("nan")
    batch = replace(batch, values=values, returns=values, advantages=torch.full_like(values, float("nan")))
    with pytest.raises(NonFiniteError, match=r"turn 0 of trajectory 5 of group 0 .*value nan"):
        run_update(agent, config, trajectories, batch)


def test_a_reference_that_is_not_finite_is_named() -> None:
    config = apply_flags(small_config(), ["loss.kl_coef=0.1"])
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    batch = scored_batch(agent, small_config(), trajectories)
    with pytest.raises(NonFiniteError, match="reference log-prob nan"):
        run_update(agent, config, trajectories, replace(batch, ref_logp=torch.full_like(batch.old_logp, float("nan"))))


def test_branching_copies_weights_and_optimizer_state() -> None:
    config = small_config()
    agent = Agent(small_policy(), config)
    trajectories = mixed_trajectories()
    run_update(agent, config, trajectories)
    twin = agent.branch()
    before = [p.clone() for p in agent.policy.model.parameters()]
    run_update(agent.branch(fresh_optimizer=True), config, trajectories)
    run_update(twin, config, trajectories)
    assert all(torch.equal(a, b) for a, b in zip(before, agent.policy.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, twin.policy.model.parameters(), strict=True))
    # The twin goes on as agent A would have: same step count, same moments.
    run_update(agent, config, trajectories)
    torch.testing.assert_close(
        [p.detach() for p in agent.policy.model.parameters()], [p.detach() for p in twin.policy.model.parameters()]
    )
    assert len(agent.branch(fresh_optimizer=True).optimizer.state_dict()["optimizer"]["state"]) == 0
