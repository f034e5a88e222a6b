"""Environments that fail in the ways that real ones do, in worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rspo_parity import ParityEnv

from rspo.envs.base import Info, StepResult


class FaultyEnv(ParityEnv):
    """Fails in the process that plays `task`, when its `method` is called for the `turn`-th time since reset (from 0).

    fault: "raise" an exception, "exit" the process, "hang", or "unpicklable": a result that cannot be sent.
    marker: a file; the fault comes only while it is missing, and makes it. "" for a fault that comes every time.
    """

    def __init__(self, fault: str, method: str = "step", turn: int = 0, task: str = "go", marker: str = "") -> None:
        super().__init__()
        self.fault, self.method, self.turn, self.task, self.marker = fault, method, turn, task, marker
        self._steps = 0

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        self._steps = 0
        observations, infos = super().reset(tasks, seeds)
        self._fail("reset", infos)
        return observations, infos

    def step(self, actions: Sequence[str]) -> StepResult:
        result = super().step(actions)
        self._fail("step", result[-1])
        self._steps += 1
        return result

    def _fail(self, method: str, infos: list[Info]) -> None:
        if method != self.method or self._steps != self.turn or self.task not in self._tasks:
            return
        if self.marker:
            try:  # two workers may come to it at once
                Path(self.marker).touch(exist_ok=False)
            except FileExistsError:
                return
        if self.fault == "raise":
            raise ZeroDivisionError("this environment is broken")
        if self.fault == "exit":
            os._exit(7)
        if self.fault == "hang":
            time.sleep(3600)
        infos[0]["secret"] = lambda: None
