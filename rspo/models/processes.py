"""The processes of a run: what they share out, and what they bring together.

Every process has the whole program and, unless it is sharded (`rspo.models.sharding`), the whole model. They share out
the episodes and the rows of each mini-batch, and exchange trajectories, scores and gradients, so that each of them
knows all trajectories and takes the same steps. The divisors of the loss are those of a whole update, hence gradients
are summed over processes, never averaged.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import Config, ConfigError
from ..data.batch import Batch, cut
from ..data.trajectory import Trajectory

T = TypeVar("T")
PATIENCE = timedelta(hours=12)
"""How long a process waits for the others' episodes; one that has died is noticed at once."""
BUCKET = 2**26
"""Gradients that are exchanged at once, in numbers."""


class Ranks:
    """The processes of a run as one of them sees them; this class: it is alone.

    rank: its number, from 0.  size: of them all.
    """

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of so many things are this process's own: every `size`-th."""
        return range(self.rank, count, self.size)

    def own_name(self, name: str) -> str:
        """The name of a random stream that no two processes share; in the main process `name` itself."""
        return name if self.is_main else f"{name} of process {self.rank}"

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What each process makes, by rank; on the CPU. What is raised in one of them is raised in all."""
        return [work()]

    def from_main(self, work: Callable[[], T]) -> T:
        """What the main process makes, in all of them; so also what is raised there."""
        return work()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over processes, in place; those of sharded parameters are sums already."""

    def micro_batches(self, batch: Batch, max_tokens: int, packed: bool) -> list[tuple[Tensor, bool]]:
        """This process's rows of a batch in pieces, as by `Batch.micro_batches`, and whether a piece counts: some are
        only there to be computed because another process computes one at the time."""
        return [(rows, True) for rows in batch.micro_batches(max_tokens, packed)]


ALONE = Ranks()


class ProcessRanks(Ranks):
    """Several processes, connected by torch.distributed.

    Args:
        in_step: forward passes need all processes (sharded weights), so each makes as many as the others.
    """

    def __init__(self, in_step: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.in_step = in_step
        # Beside the devices' own group: objects are gathered on the CPU, and waiting for episodes takes long.
        self._objects = dist.new_group(backend="gloo", timeout=PATIENCE)

    def gather(self, work: Callable[[], T]) -> list[T]:
        from accelerate.utils import send_to_device

        made: list[Any] = [None] * self.size
        dist.all_gather_object(made, _attempt(lambda: send_to_device(work(), "cpu")), group=self._objects)
        return [_value(item) for item in made]

    def from_main(self, work: Callable[[], T]) -> T:
        made: list[Any] = [_attempt(work) if self.is_main else None]
        dist.broadcast_object_list(made, src=0, group=self._objects)
        return _value(made[0])

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        if not whole:
            return
        # A parameter that no process has a gradient of keeps none: it is not one with a gradient of 0.
        used = self.sum(torch.tensor([p.grad is not None for p in whole], dtype=torch.float32, device=whole[0].device))
        whole = [p for p, count in zip(whole, used.tolist(), strict=True) if count]
        for bucket in _buckets(whole):
            flat = self.sum(torch.cat([_gradient(p).flatten() for p in bucket]))
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    def micro_batches(self, batch: Batch, max_tokens: int, packed: bool) -> list[tuple[Tensor, bool]]:
        lengths = batch.row_lengths.cpu()
        shares = balanced(lengths.tolist(), self.size)
        pieces = [[share[piece] for piece in cut(lengths[share], max_tokens, packed)] for share in shares]
        mine = [(piece.to(batch.row_lengths.device), True) for piece in pieces[self.rank]]
        if self.in_step:
            shortest = batch.row_lengths.argmin().unsqueeze(0)
            mine += [(shortest, False)] * (max(map(len, pieces)) - len(mine))
        return mine


def balanced(lengths: Sequence[int], count: int) -> list[Tensor]:
    """Row indices int64 in `count` shares of about equal length in all, each in order: the longest row first, each to
    the share that has least."""
    shares: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = held.index(min(held))
        shares[least].append(row)
        held[least] += lengths[row]
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def play_groups(ranks: Ranks, play: Callable[[], list[Trajectory]]) -> list[Trajectory]:
    """The trajectories of all processes in the order of their groups, of which each has played its `share`, whole
    ones, numbered from 0 there."""
    played = []
    for rank, trajectories in enumerate(ranks.gather(play)):
        for trajectory in trajectories:
            trajectory.group = rank + trajectory.group * ranks.size
            played.append(trajectory)
    return sorted(played, key=lambda trajectory: (trajectory.group, trajectory.index))


@torch.no_grad()
def of_tokens(
    batch: Batch, max_tokens: int, packed: bool, compute: Callable[[Batch], Tensor], ranks: Ranks = ALONE
) -> Tensor:
    """Numbers of the response tokens without a graph, float32 [N], computed in micro-batches of `max_tokens`, of which
    each process takes its share."""
    result = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.targets.device)
    for rows, counts in ranks.micro_batches(batch, max_tokens, packed):
        values = compute(batch.select(rows))
        if counts:
            result[torch.isin(batch.token_row, rows)] = values
    return ranks.sum(result)


@dataclass(frozen=True)
class _Failure:
    """What was raised instead of a result."""

    error: Exception


def _attempt(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:
        try:
            pickle.dumps(error)
        except Exception:
            return _Failure(RuntimeError(f"{type(error).__name__}: {error}"))
        return _Failure(error)


def _value(made: T | _Failure) -> T:
    if isinstance(made, _Failure):
        raise made.error
    return made


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Parameters of one dtype that are exchanged at once."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        if bucket and (held + parameter.numel() > BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.numel()
    if bucket:
        yield bucket


def join(config: Config) -> Ranks:
    """The processes that this one was launched with by `accelerate launch` or `torchrun`; itself alone where it was not
    launched by them.

    Raises ConfigError where there are fewer or more processes than `parallel.processes`, or fewer devices than
    processes.
    """
    is_launched = launched()
    expected, found = config.parallel.processes, int(os.environ.get("WORLD_SIZE", 1)) if is_launched else 1
    if expected is not None and expected != found:
        raise ConfigError(
            f"parallel.processes={expected}, but {found} {'process runs' if found == 1 else 'processes run'}; start"
            f" them with {launch_command(config)}"
        )
    sharded = config.parallel.shard != "none"
    if not is_launched:
        if _left_alone():
            warnings.warn(
                "accelerate launch was to start several processes, and has started this one alone, as it does without a"
                " GPU; torchrun --nproc-per-node N -m rspo train ... starts N",
                stacklevel=2,
            )
        if sharded:
            raise ConfigError(
                f"parallel.shard={config.parallel.shard!r} needs the processes of accelerate launch or torchrun; this"
                " one was started alone"
            )
        return ALONE
    _check_devices(config)
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ConfigError(f"several processes need accelerate: pip install 'rspo[distributed]' ({error})") from error
    PartialState(cpu=torch.device(config.policy.device).type == "cpu")
    return ProcessRanks(in_step=sharded)


def _check_devices(config: Config) -> None:
    device, here = torch.device(config.policy.device), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cuda":
        return
    if device.index is not None and here > 1:
        raise ConfigError(
            f"policy.device={config.policy.device!r} is one device, but {here} processes run on this machine and each"
            " needs its own; with policy.device=cuda each takes that of its number"
        )
    if torch.cuda.device_count() < here:
        raise ConfigError(
            f"policy.device={config.policy.device!r}: {here} processes run on this machine, each needs a device of its"
            f" own, and it has {torch.cuda.device_count()}"
        )


def placed(config: Config, ranks: Ranks) -> Config:
    """The configuration with this process's own device."""
    if isinstance(ranks, ProcessRanks) and config.policy.device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        return replace(config, policy=replace(config.policy, device=device))
    return config


def is_first(variable: str) -> bool:
    """Whether this process is number 0 of all (`RANK`), or of those of its machine (`LOCAL_RANK`), or was not launched
    with others."""
    return not launched() or os.environ.get(variable, "0") == "0"


def launched() -> bool:
    """Whether this process was started by `accelerate launch` or `torchrun`."""
    return "LOCAL_RANK" in os.environ


def launch_command(config: Config) -> str:
    """How the processes of a run are started, in words; N stands for a number that the settings leave open."""
    count = config.parallel.processes or "N"
    if (
        torch.device(config.policy.device).type == "cpu"
    ):  # where accelerate launch starts one process, however many asked
        return f"torchrun --nproc-per-node {count} -m rspo train ..."
    return f"accelerate launch --num_processes {count} -m rspo train ..."


def _left_alone() -> bool:
    """Whether `accelerate launch` was asked for several processes and has started one: the address where they would
    meet is set, and no process has a number."""
    return not launched() and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()


def leave() -> None:
    """Part from the other processes at the end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
