"""Algorithm 1 on verl's own FSDP worker and agent-loop worker, on the CPU in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import ParityEnv, copies, small_policy
from torch import Tensor
from verl_import import real_verl
from verl_loops import engine_of, labelled, make_trainer, weights

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import prepare, update
from rspo.config import OptimizerConfig
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.agent import Agent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _verl() -> None:
    real_verl()


def test_an_update_is_the_trainers_update(tmp_path: Path) -> None:
    """Two passes over replayed and on-policy rows with clipping, KL and entropy: verl's worker comes to the weights
    that the trainer's own update comes to, and reports the same loss and gradient."""
    actor = "actor_rollout_ref.actor"
    start = small_policy(1)
    trainer, _, _ = make_trainer(
        tmp_path,
        f"{actor}.use_kl_loss=true",
        f"{actor}.kl_loss_coef=0.1",
        f"{actor}.entropy_coeff=0.01",
        f"{actor}.ppo_epochs=2",
        f"+{actor}.optim.override_optimizer_config.eps=0.001",
        f"{actor}.ppo_max_token_len_per_gpu=40",  # several micro-batches
        "rspo.optimizer.minibatch_rows=1000",
        "rspo.loss.center_cap=null",
        start=start,
    )
    settings = trainer.settings
    agent, reference = Agent(start.copy(), _own(settings)), start
    trajectories = labelled()
    batch = Batch.from_trajectories(copies(trajectories))
    batch = prepare(agent, batch, trajectories, agent.config, reference)
    expected = update(agent, batch, trajectories, agent.config, 0.25, np.random.default_rng(0), PhaseTimer())

    from rspo.models.randomness import RandomStreams

    trainer.random = RandomStreams(0)
    stats = trainer._update(trajectories, 0.25)

    trained = dict(agent.policy.model.named_parameters())
    moved = 0.0
    for name, value in weights(engine_of(trainer)).items():
        if name in trained:
            torch.testing.assert_close(value, trained[name].detach(), rtol=1e-4, atol=2e-6)
            moved = max(moved, float((value - start.model.state_dict()[name]).abs().max()))
    assert moved > 1e-3
    assert stats["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert stats["grad_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
    assert stats["center_max"] == pytest.approx(expected["center_max"], rel=1e-4)
    assert expected["center_max"] > 1.5
    assert expected["clip_frac_high"] + expected["clip_frac_low"] > 0


def _own(settings: Any) -> Any:
    """The same settings for the trainer's own agent, in one mini-batch."""
    return replace(
        settings,
        optimizer=OptimizerConfig(
            learning_rate=0.01, weight_decay=0.01, eps=1e-3, epochs=2, minibatches=1, micro_batch_tokens=10_000
        ),
    )


@pytest.mark.parametrize("fresh", [False, True])
def test_agent_a_comes_back_bit_for_bit(tmp_path: Path, fresh: bool) -> None:
    """Before A's first step and after it: weights, optimiser state and schedule; and its next update is the one that
    it would have been without B."""
    from rspo.models.randomness import RandomStreams

    scheduled = ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]
    trainer, _, _ = make_trainer(tmp_path / "swapped", *scheduled)
    plain, _, _ = make_trainer(tmp_path / "plain", *scheduled)
    worker, engine = trainer.actor_rollout_wg.actor, engine_of(trainer)
    for step in range(2):
        before = weights(engine)
        worker.keep_agent(fresh)
        trainer.random = RandomStreams(100 + step)
        trainer._update(labelled())  # B
        assert any(not torch.equal(value, before[name]) for name, value in weights(engine).items())
        worker.restore_agent()
        for name, value in weights(engine).items():
            assert torch.equal(value, before[name]), name
        stats = []
        for each in (trainer, plain):
            each.random = RandomStreams(step)
            stats.append(each._update(labelled()))
        assert stats[0]["lr"] == stats[1]["lr"] < 0.01
        for name, value in weights(engine_of(plain)).items():
            assert torch.equal(value, weights(engine)[name]), name
    with pytest.raises(RuntimeError, match="keep_agent"):
        worker.restore_agent()


def test_snapshot_of_flat_parameters() -> None:
    """FSDP's first version, which verl's worker cannot make on a CPU: one step before, one step after."""
    from types import SimpleNamespace

    from torch.distributed.fsdp import FullyShardedDataParallel

    from rspo.integrations.verl.worker import Snapshot

    module = FullyShardedDataParallel(torch.nn.Linear(5, 3), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
    engine = SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule)

    def step() -> Tensor:
        module(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return torch.cat([p.detach().clone().flatten() for p in module.parameters()])

    step()
    before = Snapshot.of(engine)
    first, second = step(), step()
    before.restore(engine)
    assert torch.equal(step(), first)
    assert torch.equal(step(), second)
    assert not torch.equal(first, second)


def test_fresh_optimizer_is_a_new_one(tmp_path: Path) -> None:
    from rspo.models.randomness import RandomStreams

    trainer, _, _ = make_trainer(tmp_path)
    trainer.random = RandomStreams(0)
    trainer._update(labelled())
    trainer.actor_rollout_wg.actor.keep_agent(True)
    states = engine_of(trainer).optimizer.state.values()
    assert states
    assert all(not value.any() for state in states for value in state.values())


LOOP_OF_B = [
    "keep_agent",
    *["generate 12", "compute_log_prob", "update_actor", "weights to engine"] * 2,
    "generate 12",
    "compute_log_prob",
    "restore_agent",
    "weights to engine",
]
UPDATE_OF_A = ["generate 12", "compute_log_prob", "compute_log_prob", "update_actor", "weights to engine"]


def test_the_loop_is_algorithm_1(tmp_path: Path) -> None:
    """Three updates in loops of two, with everything played and trained: the order of the workers' calls, what B and A
    are trained on, and what is recorded."""
    trainer, calls, log = make_trainer(tmp_path, "trainer.total_training_steps=3", "trainer.test_freq=3")
    seen: list[tuple[str, list[Trajectory], float]] = []
    own_update = trainer._update

    def watched(trajectories: list[Trajectory], alpha: float = 0.0) -> dict[str, float]:
        seen.append(("A" if alpha else "B", trajectories, alpha))
        return own_update(trajectories, alpha)

    collected: list[Trajectory] = []
    own_note = trainer._note

    def noted(agent: str, trajectories: list[Trajectory], stats: dict[str, float]) -> None:
        if agent == "collect":
            collected.extend(trajectories)
        own_note(agent, trajectories, stats)

    trainer._update, trainer._note = watched, noted
    trainer.fit()
    assert calls == ["weights to engine", *LOOP_OF_B, *UPDATE_OF_A * 2, *LOOP_OF_B, *UPDATE_OF_A, "generate 8"]

    assert [agent for agent, _, _ in seen] == ["B", "B", "A", "A", "B", "B", "A"]
    for agent, trajectories, alpha in seen:
        replayed = [t for t in trajectories if t.source == REPLAY]
        assert len(replayed) == (4 if agent == "A" else 0)  # α·B·N
        assert len(trajectories) - len(replayed) == 12  # (1 - α)·B·N
        assert alpha == (0.25 if agent == "A" else 0.0)
        for t in trajectories:
            wanted = [turn.dense_reward if agent == "B" else turn.reward for turn in t.turns]
            np.testing.assert_array_equal(t.rewards, np.float32(wanted))
            assert len(t) <= ParityEnv.max_turns
    groups = {(t.group, t.task, len(t)) for t in seen[0][1] if not t.won}
    assert len({group for group, _, _ in groups}) == len(groups)  # members of a group share task and seed

    assert [step for step, _ in log.records] == [1, 2, 3]
    first, second, third = (record for _, record in log.records)
    assert first["collect/success"] == np.mean([t.won for t in collected[:12]])
    assert "collect/success" not in second  # B's work is in the record of A's next update
    assert first["rollout/logprob_difference"] < 1e-5  # the client has the actor's weights
    assert first["replay/trajectories"] == 4
    assert first["replay/success"] == 1.0
    assert first["replay/log_center_q95"] > first["replay/log_center_q05"]
    assert first["center_max"] > 1.0
    assert any(name.startswith("val-core/rspo_parity:ParityEnv/acc") for name in third)
    for _, record in log.records:
        assert all(np.isfinite(value) for value in record.values())


def test_resumes_between_loops(tmp_path: Path) -> None:
    """From verl's own checkpoint: the step, the weights, and the tasks that come next."""
    first, *_ = make_trainer(tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=1")
    first.fit()
    assert {path.name for path in (tmp_path / "checkpoints").glob("global_step_*")} == {"global_step_2"}
    second, calls, log = make_trainer(tmp_path, "trainer.total_training_steps=3")
    loaded: list[dict[str, Tensor]] = []
    second._to_engine_once = second._to_engine

    def watched() -> None:
        if not loaded:
            loaded.append(weights(engine_of(second)))
        second._to_engine_once()

    second._to_engine = watched
    drawn: list[int] = []
    own_rows = second._endless_rows

    def rows() -> Any:
        for row in own_rows():
            drawn.append(int(row.non_tensor_batch["task_index"][0]))
            yield row

    second._endless_rows = rows
    second.fit()
    assert [step for step, _ in log.records] == [3]
    assert calls == ["weights to engine", *LOOP_OF_B, *UPDATE_OF_A]
    for name, value in weights(engine_of(first)).items():
        assert torch.equal(value, loaded[0][name]), name
    expected = [int(next(first.task_rows).non_tensor_batch["task_index"][0]) for _ in drawn]
    assert drawn == expected


def test_base_method_has_no_agent_b(tmp_path: Path) -> None:
    trainer, calls, _ = make_trainer(tmp_path, "rspo.method=gigpo", "trainer.total_training_steps=1")
    trainer.fit()
    assert calls == ["weights to engine", "generate 16", "compute_log_prob", "update_actor", "weights to engine"]
