"""verl's trainer of RSPO without workers of its own, and what its tests look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rspo_toys import make_trajectory, small_policy
from torch import Tensor

from rspo.algorithm.estimators import GRPO
from rspo.config import EstimatorConfig
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.policy import Policy


class Log:
    """Records in the place of verl's loggers."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.records.append((step, data))


def make_trainer(tmp_path: Path, *overrides: str, start: Policy | None = None) -> tuple[Any, list[str], Log]:
    """A trainer with its workers, the list of their calls, and its records."""
    import verl_cpu
    from verl.trainer.ppo.ray_trainer import Role
    from verl.utils.config import omega_conf_to_dataclass

    from rspo.integrations.verl.trainer import RSPORayTrainer

    model = tmp_path / "model"
    (start or small_policy()).save(model)
    config = verl_cpu.tiny_config(model, tmp_path / "checkpoints", *overrides)
    tokenizer = omega_conf_to_dataclass(config.actor_rollout_ref.model).tokenizer
    trainer = RSPORayTrainer(
        config, tokenizer=tokenizer, role_worker_mapping={Role.ActorRolloutRef: None}, resource_pool_manager=None
    )
    log = Log()
    trainer._tracking = lambda: log
    calls = verl_cpu.attach_workers(trainer, model)
    trainer.set_loss()
    return trainer, calls, log


def engine_of(trainer: Any) -> Any:
    return trainer.actor_rollout_wg.actor.actor.engine


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in engine.module.state_dict().items()}


def labelled() -> list[Trajectory]:
    """On-policy and replayed trajectories of one to three turns, with advantages."""
    made = [
        make_trajectory(group, index, turns=1 + (group + index) % 3, reward=10.0 * ((group + index) % 2))
        for group in range(4)
        for index in range(4)
    ]
    GRPO(EstimatorConfig())(made)
    for turn in (turn for t in made if t.group == 3 for turn in t.turns):
        turn.behavior_logp -= 3.0  # words that B seldom says: clip centres beyond 1
    return [replace(t, source=REPLAY) if t.group == 3 else t for t in made]
