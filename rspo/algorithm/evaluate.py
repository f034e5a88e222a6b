"""Success of a policy on fixed episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Config
from ..data.layouts import make_layout
from ..data.trajectory import Trajectory, intact
from ..engines import LOCAL, Backend
from ..envs.base import BatchedEnv
from ..models.policy import Policy
from ..models.processes import ALONE, Ranks, play_groups
from ..models.randomness import named_seed
from .metrics import SuccessRate, identical_states, success_by_type, trajectory_metrics
from .progress import episode_bar
from .rollout import rollout

EVALUATION_SEED = 1_000_003
"""First episode seed of an evaluation; training draws others."""


@dataclass(frozen=True)
class Evaluation:
    """What a policy did on the same episodes at one or several temperatures.

    split: of the tasks.  episodes: by temperature, the main one first.
    """

    split: str
    episodes: dict[float, list[Trajectory]]

    @property
    def main(self) -> tuple[float, list[Trajectory]]:
        """The main temperature and its episodes."""
        return next(iter(self.episodes.items()))

    def metrics(self) -> dict[str, float]:
        """Plain names for the main temperature, `name@T` for the others; `success_low` and `success_high` bound the
        success rate (95 %, Wilson), `success/type/<kind>` is that of one kind of tasks."""
        values: dict[str, float] = {}
        for temperature, trajectories in self.episodes.items():
            low, high = SuccessRate.of(trajectories).interval
            found = trajectory_metrics(trajectories) | {"success_low": low, "success_high": high}
            found |= {f"success/type/{kind}": rate.value for kind, rate in success_by_type(trajectories).items()}
            found |= identical_states(trajectories)
            suffix = "" if temperature == self.main[0] else f"@{temperature:g}"
            values |= {f"{name}{suffix}": value for name, value in found.items()}
        return values

    def rates(self) -> dict[str, dict[float, SuccessRate]]:
        """Success of all episodes ("all") and of each kind of tasks, by temperature."""
        table: dict[str, dict[float, SuccessRate]] = {"all": {}}
        for temperature, trajectories in self.episodes.items():
            table["all"][temperature] = SuccessRate.of(trajectories)
            for kind, rate in success_by_type(trajectories).items():
                table.setdefault(kind, {})[temperature] = rate
        return table

    def to_json(self) -> dict[str, Any]:
        """`metrics`, and all success rates with their intervals, one entry for each kind of tasks and temperature."""
        rates = [
            {
                "type": kind,
                "temperature": temperature,
                "episodes": rate.episodes,
                "successes": rate.successes,
                "success": rate.value,
                "success_low": rate.interval[0],
                "success_high": rate.interval[1],
            }
            for kind, row in self.rates().items()
            for temperature, rate in row.items()
        ]
        return {**self.metrics(), "split": self.split, "rates": rates}

    def table(self) -> str:
        """Success rates with their intervals, then the other metrics; temperatures are columns."""
        rates = self.rates()
        width = max(len("invalid actions, %"), *map(len, rates))
        lines = [
            f"{len(self.main[1])} episodes (split {self.split!r}); success in % with a 95 % interval (Wilson)",
            "",
            f"{'':<{width}}{'episodes':>10}" + "".join(f"{f'T = {t:g}':>22}" for t in self.episodes),
        ]
        for kind, row in rates.items():
            count = next(iter(row.values())).episodes
            cells = "".join(f"{_percent(rate):>22}" for rate in row.values())
            lines.append(f"{kind:<{width}}{count:>10}{cells}")
        lines.append("")
        columns = [trajectory_metrics(t) | identical_states(t) for t in self.episodes.values()]
        for name, label, scale in _OTHERS:
            lines.append(f"{label:<{width}}{'':>10}" + "".join(f"{scale * column[name]:>22.2f}" for column in columns))
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = []
        for temperature, trajectories in self.episodes.items():
            low, high = SuccessRate.of(trajectories).interval
            rate = SuccessRate.of(trajectories).value
            parts.append(f"{rate:.1%} ({100 * low:.1f} to {100 * high:.1f}) at temperature {temperature:g}")
        return f"success {', '.join(parts)}; {len(trajectories)} episodes ({self.split})"


_OTHERS = (
    ("reward", "reward", 1),
    ("dense_return", "dense return", 1),
    ("turns", "turns", 1),
    ("truncated", "truncated, %", 100),
    ("invalid_actions", "invalid actions, %", 100),
)


def _percent(rate: SuccessRate) -> str:
    low, high = rate.interval
    return f"{100 * rate.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def play(
    policy: Policy,
    env: BatchedEnv,
    config: Config,
    *,
    split: str,
    episodes: int,
    temperature: float,
    on_turn: Callable[[int, int], None] | None = None,
    ranks: Ranks = ALONE,
    backend: Backend = LOCAL,
) -> list[Trajectory]:
    """`episodes` episodes over the tasks of a split in turn, one each. The same episodes at every call (by as many
    processes), less those that were lost with their environment's worker."""
    tasks = env.tasks(split)
    generator = torch.Generator(policy.device)
    generator.manual_seed(named_seed(config.run.seed, ranks.own_name("evaluation")))
    mine = ranks.share(episodes)

    def play_mine() -> list[Trajectory]:
        with backend.engine(policy, config.rollout, generator, temperature) as engine:
            return rollout(
                env,
                engine,
                make_layout(config.env.layout, policy, env),
                [tasks[i % len(tasks)] for i in mine],
                [EVALUATION_SEED + i for i in mine],
                group_size=1,
                history_length=config.env.history_length,
                on_turn=on_turn,
            )

    return intact(play_groups(ranks, play_mine))


def evaluate(
    policy: Policy,
    env: BatchedEnv,
    config: Config,
    *,
    progress: bool = False,
    ranks: Ranks = ALONE,
    backend: Backend = LOCAL,
) -> Evaluation:
    """Play the held-out episodes that the configuration asks for, at each of its temperatures."""
    settings = config.evaluation
    own = len(ranks.share(settings.episodes))
    played: dict[float, list[Trajectory]] = {}
    for temperature in settings.temperatures:
        with episode_bar(f"evaluating at temperature {temperature:g}", own, progress) as on_turn:
            played[temperature] = play(
                policy,
                env,
                config,
                split=settings.split,
                episodes=settings.episodes,
                temperature=temperature,
                on_turn=on_turn,
                ranks=ranks,
                backend=backend,
            )
    return Evaluation(settings.split, played)
