"""What two processes do together, as a program for torchrun: `rspo_processes.py WORK FOLDER`.

Each piece of work leaves its results in FOLDER, one file for each process, for tests to compare with one process.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rspo_toys import make_trajectory, small_config, small_policy
from torch import Tensor
from transformers import TrainerCallback

from rspo import RSPOTrainer
from rspo.algorithm.estimators import make_estimator
from rspo.algorithm.rewards import NonFiniteError
from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import prepare, update
from rspo.config import Config, ConfigError
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.engines import TransformersEngine
from rspo.models.agent import Agent
from rspo.models.processes import ALONE, ProcessRanks, Ranks, join, play_groups
from rspo.models.sharded_tensors import whole
from rspo.models.sharding import load_policy
from rspo.runs.checkpoint import load_checkpoint, save_checkpoint
from rspo.runs.records import Tracker
from rspo.start import open_run

ALPHA = 0.25
COMMON = ("optimizer.eps=1e-3", "optimizer.micro_batch_tokens=40", "loss.center_cap=null")
"""A large ε: where gradients are as small as rounding errors, Adam would make whole steps of them."""
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "replay": ("rspo", ("optimizer.minibatches=3", "loss.entropy_coef=0.01")),
    "clipped": ("rspo", ("optimizer.grad_clip=1e-2", "optimizer.minibatches=2", "optimizer.epochs=2")),
    "rows-fewer-than-processes": ("rspo", ("optimizer.minibatch_rows=1",)),
    "sequences": ("rspo", ("loss.aggregation=seq-mean-token-mean", "policy.packing=on")),
    "own-critic": ("ppo", ("optimizer.minibatches=2", "estimator.bootstrap=true")),
    "shared-critic": ("ppo", ("critic.backbone=shared", "optimizer.minibatches=2")),
    "reference": ("rspo", ("loss.kl_coef=0.1",)),
    "untied": ("rspo", ("policy.path=untied", "policy.fused=on", "policy.gradient_checkpointing=true")),
    "tied-fused": ("rspo", ("policy.fused=on", "optimizer.minibatches=2")),
    "adapter": ("rspo", ("lora.rank=4", "optimizer.minibatches=2")),
    "bfloat16": ("rspo", ("policy.path=rounded", "policy.dtype=bfloat16", "optimizer.minibatches=2")),
}

RUN_FLAGS = ("swap.k=1", "run.save_every=1", "run.keep=9", "evaluation.episodes=5", "env.history_length=1")
SMALL_MODEL = (
    "warmup.trajectories=40", "warmup.max_updates=20", "warmup.check_episodes=16", "warmup.band=[0, 1]",
    "warmup.held_out_band=[0, 1]",
)  # fmt: skip
WHOLE_ONLY = ("adapter",)
"""Cases of models that are not sharded."""
CHECKPOINTED = ("own-critic", "bfloat16")
"""Cases whose agents are also saved, loaded, and branched."""


def case_config(name: str, *flags: str) -> Config:
    method, own = CASES[name]
    return small_config(*COMMON, *own, *flags, method=method)


def trajectories_of(config: Config) -> list[Trajectory]:
    """On-policy and replayed ones, of which nothing divides by two."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    played = [make_trajectory(i // 4, i % 4, turns=2 + i % 3, reward=rewards[i], seed=i) for i in range(7)]
    played[2].truncated, played[2].final_prompt_ids = True, np.array([3, 4, 5])
    if config.method == "rspo":
        played += [replace(make_trajectory(2, i, turns=3, reward=float(i), seed=9), source=REPLAY) for i in range(3)]
    make_estimator("grpo", config.estimator)(played)
    return played


def started(config: Config, start: Path, ranks: Ranks = ALONE) -> Agent:
    """An agent at the start policy."""
    policy = load_policy(start / (config.policy.path or "tied"), config)
    if config.lora.rank > 0:
        policy = policy.adapted(config.lora, seed=0)
    return Agent(policy, config, make_estimator(config.estimator_name, config.estimator).needs_critic, ranks=ranks)


def updated(config: Config, start: Path, ranks: Ranks = ALONE) -> tuple[Agent, dict[str, float]]:
    """An agent after two updates on fixed trajectories, and the statistics of the second."""
    agent = started(config, start, ranks)
    estimator = make_estimator(config.estimator_name, config.estimator)
    reference = agent.policy.copy() if config.loss.kl_coef > 0 else None
    trajectories = trajectories_of(config)
    rng = np.random.default_rng(0)
    for _ in range(2):
        batch = prepare(agent, Batch.from_trajectories(trajectories), trajectories, config, reference)
        batch = estimator.at_update(batch)
        stats = update(agent, batch, trajectories, config, ALPHA, rng, PhaseTimer())
    return agent, stats


def weights_of(agent: Agent) -> dict[str, Tensor]:
    """The whole float32 weights of the optimisers."""
    return {
        f"{name}{i}": whole(master.detach()).clone()
        for name, optimizer in (("policy", agent.optimizer), ("critic", agent.critic_optimizer))
        if optimizer is not None
        for i, master in enumerate(optimizer.masters)
    }


def do_updates(start: Path, answer: dict[str, Any]) -> None:
    """Each case in both ways of holding a model; then what else an agent does."""
    for shard in ("none", "fsdp"):
        ranks = ProcessRanks(in_step=shard == "fsdp")
        flag = f"parallel.shard={shard}"
        for name in CASES:
            if shard != "none" and name in WHOLE_ONLY:
                continue
            agent, stats = updated(case_config(name, flag), start, ranks)
            answer[f"{name}/{shard}"] = (weights_of(agent), stats)
            if name not in CHECKPOINTED:
                continue
            saved, has_critic = start / f"saved-{name}-{shard}", agent.critic is not None
            save_checkpoint(saved, agent, {"step": 0})
            again = load_checkpoint(saved, agent.config, has_critic, ranks=ranks).agent
            before, now = weights_of(agent), weights_of(again)
            answer[f"loaded/{name}/{shard}"] = all(torch.equal(before[key], now[key]) for key in before)
            twin = agent.branch()
            answer[f"twin/{name}/{shard}"] = (weights_of(agent), weights_of(twin))
            trained(twin, start)
            trained(agent, start)
            answer[f"trained/{name}/{shard}"] = (weights_of(agent), weights_of(twin))
            alone = load_checkpoint(start / f"alone-{name}", agent.config, has_critic, ranks=ranks).agent
            trained(alone, start)
            answer[f"from-alone/{name}/{shard}"] = weights_of(alone)


def trained(agent: Agent, start: Path) -> None:
    """One more update."""
    config, trajectories = agent.config, trajectories_of(agent.config)
    batch = prepare(agent, Batch.from_trajectories(trajectories), trajectories, config, None)
    batch = make_estimator(config.estimator_name, config.estimator).at_update(batch)
    update(agent, batch, trajectories, config, ALPHA, np.random.default_rng(1), PhaseTimer())


def do_rest(start: Path, answer: dict[str, Any]) -> None:
    """Errors, order, generation."""
    ranks = ProcessRanks()

    def fails_on(rank: int) -> Callable[[], int]:
        def work() -> int:
            if dist.get_rank() == rank:
                raise KeyError(f"process {rank}")
            return dist.get_rank()

        return work

    answer["gathered"] = ranks.gather(lambda: f"process {ranks.rank}")
    answer["from main"] = ranks.from_main(lambda: ranks.rank)
    answer["errors"] = [raised(lambda: ranks.gather(fails_on(1))), raised(lambda: ranks.from_main(fails_on(0)))]
    mine = ranks.share(5)
    played = play_groups(ranks, lambda: [make_trajectory(g, i) for i in (1, 0) for g in range(len(mine))])
    answer["groups"] = [(t.group, t.index) for t in played]

    for shard in ("none", "fsdp"):
        do_agent(shard, start, answer)


def do_agent(shard: str, start: Path, answer: dict[str, Any]) -> None:
    """An update that fails, generation of which each process has another amount to do, and an update after that."""
    config = case_config("replay", "optimizer.minibatches=1", f"parallel.shard={shard}")
    agent = started(config, start, ProcessRanks(in_step=shard == "fsdp"))
    trajectories = trajectories_of(config)
    batch = prepare(agent, Batch.from_trajectories(trajectories), trajectories, config, None)

    def run_update(batch: Batch) -> dict[str, float]:
        return update(agent, batch, trajectories, config, ALPHA, np.random.default_rng(0), PhaseTimer())

    before = weights_of(agent)
    advantages = batch.advantages.clone()
    advantages[batch.token_turn == 5] = float("nan")  # one row, which one process computes
    answer[f"non-finite/{shard}"] = raised(lambda: run_update(replace(batch, advantages=advantages)))
    after = weights_of(agent)
    answer[f"untouched/{shard}"] = all(torch.equal(before[name], after[name]) for name in before)

    rank = dist.get_rank()
    prompts = [np.arange(3, 6 + i + rank) for i in range(3 + 2 * rank)]
    with agent.policy.whole():
        engine = TransformersEngine(agent.policy, config.rollout, torch.Generator().manual_seed(0))
        generated = [generation for _ in range(1 + rank) for generation in engine.generate(prompts)]
    answer[f"generated/{shard}"] = [(g.response_ids.tolist(), g.logp.tolist()) for g in generated]
    run_update(batch)
    answer[f"after generation/{shard}"] = weights_of(agent)


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except (KeyError, NonFiniteError) as error:
        return str(error)
    return "nothing"


def do_runs(start: Path, answer: dict[str, Any]) -> None:
    """Runs of two loops; then the second loop again, from the checkpoint after the first."""
    for shard, source in (("none", "history"), ("fsdp", "dense")):
        config = small_config(
            f"policy.path={start / 'tied'}", f"parallel.shard={shard}", f"swap.source={source}", *RUN_FLAGS
        )
        folder = start / f"run-{shard}"
        train(config, folder)
        if dist.get_rank() == 0:
            shutil.copytree(folder, start / f"resumed-{shard}")
            shutil.rmtree(start / f"resumed-{shard}" / "checkpoints" / "step-000002")
        dist.barrier()
        train(config, start / f"resumed-{shard}", resume=True)
    answer["done"] = True


class Counter(TrainerCallback):
    """Counts events."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.seen["step"] = self.seen.get("step", 0) + 1

    def on_log(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.seen["log"] = self.seen.get("log", 0) + 1


def do_trainer(start: Path, answer: dict[str, Any]) -> None:
    """RSPOTrainer, before and after it has trained, in a main process that is slow to open its records; then with
    models that differ, and with none."""
    init = Tracker.__init__

    def slowly(self: Tracker, *arguments: Any, **options: Any) -> None:
        time.sleep(1.0)
        init(self, *arguments, **options)

    Tracker.__init__ = slowly  # type: ignore[method-assign]
    for shard in ("none", "fsdp"):
        counter = Counter()
        config = small_config(f"policy.path={start / 'tied'}", f"parallel.shard={shard}", "method=grpo", *RUN_FLAGS)
        trainer = RSPOTrainer(args=config, output_dir=start / f"hf-{shard}", callbacks=[counter], progress=False)
        before = trainer.evaluate()
        trainer.save_model(start / f"hf-{shard}" / "before")
        result = trainer.train()
        metrics = {f"eval_{name}": value for name, value in trainer.evaluate().items()}
        trainer.save_model(start / f"hf-{shard}" / "saved")
        state = trainer.state
        answer[shard] = (counter.seen, len(state.log_history), result.training_loss, metrics)
        answer[f"before/{shard}"] = before
        answer[f"main/{shard}"] = state.is_world_process_zero
    other = small_policy(seed=dist.get_rank())
    try:
        RSPOTrainer(other, small_config(), output_dir=start / "hf-given", progress=False).train()
    except ConfigError as error:
        answer["given"] = str(error)
    small = small_config("method=grpo", *SMALL_MODEL, *RUN_FLAGS, "run.steps=1")
    trainer = RSPOTrainer(args=small, output_dir=start / "hf-small", progress=False)
    answer["small before"] = trainer.evaluate()
    trainer.train()


def train(config: Config, folder: Path, resume: bool = False) -> None:
    trainer = open_run(config, folder, resume=resume, progress=False)
    trainer.train()
    trainer.close()


def main() -> None:
    torch.set_num_threads(1)
    work, folder = sys.argv[1], Path(sys.argv[2])
    assert join(small_config("parallel.processes=2")) is not ALONE
    answer: dict[str, Any] = {}
    {"updates": do_updates, "rest": do_rest, "runs": do_runs, "trainer": do_trainer}[work](folder, answer)
    torch.save(answer, folder / f"{work}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
