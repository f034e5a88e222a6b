"""Environments in worker processes: the same episodes, and what is left of them when a worker dies, hangs or raises."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import ParityEnv, make_trajectory, small_config, small_policy

from rspo.algorithm.rollout import rollout
from rspo.config import Config, ConfigError
from rspo.config.files import apply_flags
from rspo.data.layouts import PerTurn
from rspo.data.trajectory import intact
from rspo.engines import TransformersEngine
from rspo.envs import BatchedEnv, make_env, register_env
from rspo.envs.base import WorkerError
from rspo.envs.household import HouseholdEnv
from rspo.envs.workers import WorkerEnv
from rspo.runs.records import read_metrics, without_timings
from rspo.runs.setting import build_env
from rspo.start import open_run

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = ["pick", "clean", "go", "open", "take", "put"]
FAULTY = "rspo_faulty_envs:FaultyEnv"
# Episodes of ParityEnv with these seeds last 4, 4, 3, 4, 4, 1 turns.
SEEDS = [3, 7, 2, 3, 3, 0]


@pytest.fixture(scope="module")
def household() -> Iterator[WorkerEnv]:
    with WorkerEnv("household", {"prompt_style": "chat"}, workers=3) as env:
        yield env


def transcript(env: BatchedEnv, tasks: Any, seeds: Any, turns: int) -> list[Any]:
    """All that an environment says when it is played by a fixed rule."""
    observations, infos = env.reset(tasks, seeds)
    said: list[Any] = [(observations, infos)]
    for turn in range(turns):
        number = [zlib.crc32(f"{turn} {observation}".encode()) for observation in observations]
        actions = [(i["admissible_actions"] or ["go", "what"])[n % 2] for n, i in zip(number, infos, strict=True)]
        observations, rewards, terminated, truncated, infos = env.step(actions)
        said.append((observations, rewards.tolist(), terminated.tolist(), truncated.tolist(), infos))
    return said


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_household_episodes_are_the_same_in_workers(household: WorkerEnv, count: int) -> None:
    """Fewer episodes than workers, as many, and more, which do not divide evenly."""
    inner = HouseholdEnv(prompt_style="chat")
    tasks = list(inner.tasks()[: 40 * count : 40])
    expected = transcript(inner, tasks, list(range(count)), 12)
    assert transcript(household, tasks, range(count), 12) == expected
    assert household.tasks("eval") == inner.tasks("eval")
    assert (household.max_turns, household.has_dense_reward, household.has_snapshots) == (12, True, True)
    answer = "<think>x</think><action>go desk</action>"
    assert household.project(answer) == inner.project(answer)


def test_parity_episodes_are_the_same_in_workers() -> None:
    expected = transcript(ParityEnv(), TASKS, SEEDS, 4)
    with WorkerEnv("rspo_toys:ParityEnv", {}, workers=2) as env:
        assert transcript(env, TASKS, SEEDS, 4) == expected


def test_snapshots_pass_through(household: WorkerEnv) -> None:
    tasks, actions = list(household.tasks()[:5]), ["go desk", "go sink", "go fridge", "go table", "go bed"]
    household.reset(tasks, range(5))
    household.step(actions)
    state = household.snapshot()
    after = household.step(actions[::-1])
    before = household.restore(state)
    again = household.step(actions[::-1])
    assert before[0] != after[0]
    assert (after[0], after[4]) == (again[0], again[4])

    household.restore(state)
    kill(household, 0)
    lost = household.step(actions)
    assert lost[3].tolist() == [True, True, False, False, False]
    assert household.restore(state) == before, "a new worker takes up the snapshot of a lost one"
    assert household.step(actions)[3].tolist() == [False] * 5
    with pytest.raises(TypeError, match="state must be a WorkerSnapshot"):
        household.restore({})  # type: ignore[arg-type]


def kill(env: WorkerEnv, worker: int) -> int:
    pid = int(env.workers[worker].process.pid)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_worker_costs_its_unfinished_episodes_and_nothing_else(
    household: WorkerEnv, caplog: pytest.LogCaptureFixture
) -> None:
    inner = HouseholdEnv(prompt_style="chat")
    tasks = list(inner.tasks()[:6])
    before, lost = household.lost_episodes, slice(2, 4)
    for env in (inner, household):
        env.reset(tasks, range(6))
        expert = inner.expert_actions()
        first = env.step(expert)
    pid = kill(household, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            observations, rewards, terminated, truncated, infos = household.step(["go desk"] * 6)
            expected = inner.step(["go desk"] * 6)
            assert truncated.tolist() == [False, False, True, True, False, False]
            assert not terminated.any()
            assert not rewards.any()
            assert observations[lost] == first[0][lost]
            assert observations[:2] + observations[4:] == expected[0][:2] + expected[0][4:]
            assert infos[:2] + infos[4:] == expected[4][:2] + expected[4][4:]
            for info, last in zip(infos[lost], first[4][lost], strict=True):
                assert info == {**last, "won": False, "lost_worker": True, "dense_reward": 0.0}
    assert household.lost_episodes - before == 2
    (warning,) = caplog.messages
    assert "environment worker 1 is gone (exit code -9); 2 unfinished episodes are cut off" in warning
    assert household.workers[1].process.pid != pid
    assert transcript(household, tasks, range(6), 3) == transcript(inner, tasks, list(range(6)), 3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "ZeroDivisionError: this environment is broken"),
        ("exit", "is gone (exit code 7)"),
        ("hang", "has not answered for 0.5 s"),
        ("unpicklable", "Can't pickle"),
    ],
)
def test_faults_in_step(fault: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker of "go" and "open" fails at its second step, when an episode of the others has ended."""
    options = {"fault": fault, "turn": 1, "marker": str(tmp_path / "marker")}
    with WorkerEnv(FAULTY, options, workers=3) as env:
        env.reset(TASKS, SEEDS)
        env.step(["what"] * 6)
        env.timeout = 0.5
        with caplog.at_level(logging.WARNING):
            truncated, infos = env.step(["what"] * 6)[3:]
        assert said in caplog.text.replace("Can't get local object", "Can't pickle")
        assert [info.get("lost_worker", False) for info in infos] == [False, False, True, True, False, False]
        assert truncated.tolist() == [False, False, True, True, False, True]
        env.timeout = 300.0
        assert transcript(env, TASKS, SEEDS, 4) == transcript(ParityEnv(), TASKS, SEEDS, 4)
        assert env.lost_episodes == 2


def test_an_ended_episode_keeps_its_result_when_its_worker_is_lost() -> None:
    with WorkerEnv("rspo_toys:ParityEnv", {}, workers=1) as env:
        env.reset(["pick", "pick"], [0, 3])
        _, rewards, terminated, _, _ = env.step(["pick", "pick"])
        assert (rewards.tolist(), terminated.tolist()) == ([10.0, 0.0], [True, False])
        kill(env, 0)
        _, rewards, terminated, truncated, infos = env.step(["pick", "pick"])
        assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([0, 0], [True, False], [False, True])
        assert [(info["won"], info.get("lost_worker", False)) for info in infos] == [(True, False), (False, True)]


def test_a_worker_that_dies_in_reset_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"fault": "exit", "method": "reset", "marker": str(tmp_path / "marker")}
    with WorkerEnv(FAULTY, options, workers=2) as env:
        assert transcript(env, TASKS, SEEDS, 4) == transcript(ParityEnv(), TASKS, SEEDS, 4)
        assert "its episodes begin again" in caplog.text
        assert env.lost_episodes == 0


def test_faults_that_will_not_go_away_are_errors() -> None:
    with WorkerEnv(FAULTY, {"fault": "raise", "method": "reset"}, workers=2) as env:
        with pytest.raises(WorkerError, match=r"worker 0, episodes 0 to 2:(.|\n)*ZeroDivisionError: this environment"):
            env.reset(TASKS, SEEDS)
        assert env.reset(["pick", "take"], [0, 0])[0] == ["ok", "ok"], "other tasks can be played"
    three_times = pytest.raises(WorkerError, match=r"worker 0 is gone .*lost 3 times in a row without a finished step")
    with WorkerEnv(FAULTY, {"fault": "exit", "method": "reset"}, workers=1) as env, three_times:
        env.reset(TASKS, SEEDS)
    with WorkerEnv(FAULTY, {"fault": "raise"}, workers=1) as env:
        for _ in range(2):
            env.reset(TASKS, SEEDS)
            assert env.step(["what"] * 6)[3].all()
        env.reset(TASKS, SEEDS)
        with pytest.raises(WorkerError, match=r"ZeroDivisionError(.|\n)*lost 3 times in a row"):
            env.step(["what"] * 6)


def test_arguments_are_checked_as_by_the_environment(household: WorkerEnv) -> None:
    task = household.tasks()[0]
    with pytest.raises(ValueError, match=r"seeds must be as many as tasks \(2\); got 1"):
        household.reset([task, task], [0])
    with pytest.raises(ValueError, match="at least one task"):
        household.reset([], [])
    with pytest.raises(TypeError, match=r"tasks\[0\] must be a HouseholdTask; got 'eat' \(in .* 1, episodes 1 to 1\)"):
        household.reset([task, "eat", task], [0, 1, 2])
    with pytest.raises(RuntimeError, match="call reset before step"):
        household.step(["go desk"] * 3)
    household.reset([task, task], [0, np.int32(1)])
    with pytest.raises(ValueError, match=r"actions must be as many as episodes \(2\); got 1"):
        household.step(["go desk"])
    with pytest.raises(TypeError, match="sequence of strings"):
        household.step("go")
    with pytest.raises(ValueError, match="split must be one of train, eval"):
        household.tasks("test")


def test_wrong_constructor_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="workers must be an integer of at least 1; got 0"):
        WorkerEnv("household", workers=0)
    with pytest.raises(ValueError, match="timeout must be above 0 seconds; got 0"):
        WorkerEnv("household", timeout=0)
    with pytest.raises(ValueError, match="max_turns must be an integer"):
        WorkerEnv("household", {"max_turns": 0})
    monkeypatch.setattr("rspo.envs._REGISTRY", {})
    register_env("mine", lambda: HouseholdEnv())
    with pytest.raises(ValueError, match="'mine' cannot be sent to worker processes; register it under a class path"):
        WorkerEnv("mine")
    with pytest.raises(ConfigError, match=r"env\.workers must be >= 0, got -1"):
        apply_flags(Config(), ["env.workers=-1"])
    with pytest.raises(ConfigError, match=r"env\.worker_timeout must be > 0, got 0"):
        apply_flags(Config(), ["env.worker_timeout=0"])
    with pytest.raises(ConfigError, match="available: mine"):
        build_env(apply_flags(Config(), ["env.workers=2"]))


def is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_nothing_is_left_after_close() -> None:
    env = WorkerEnv(FAULTY, {"fault": "hang"}, workers=2)
    env.reset(TASKS, SEEDS)
    pids = [worker.process.pid for worker in env.workers]
    assert all(map(is_running, pids))
    env.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "neither running nor waiting to be read"
    env.close()
    with pytest.raises(RuntimeError, match="reset was called after close"):
        env.reset(TASKS, SEEDS)
    with pytest.raises(RuntimeError, match="step was called after close"):
        env.step(["what"] * 6)


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also one that hangs in a step."""
    said = tmp_path / "said"
    program = (
        "import os, signal, threading\n"
        "from rspo.envs.workers import WorkerEnv\n"
        f"env = WorkerEnv('{FAULTY}', {{'fault': 'hang'}}, workers=2)\n"
        f"env.reset({TASKS}, {SEEDS})\n"
        f"print(*[w.process.pid for w in env.workers], file=open({str(said)!r}, 'w'), flush=True)\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "env.step(['what'] * 6)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=600)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in said.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_lost_trajectories_are_marked_and_left_out() -> None:
    policy = small_policy()
    config = small_config().rollout
    with WorkerEnv(FAULTY, {"fault": "raise", "turn": 1}, workers=2) as env:
        engine = TransformersEngine(policy, config, torch.Generator().manual_seed(0))
        layout = PerTurn(policy, env)
        played = rollout(env, engine, layout, ["pick", "go"], [3, 3], group_size=2, history_length=2)
    assert [(t.lost, t.truncated and t.final_prompt_ids is None, len(t)) for t in played[2:]] == [(True, True, 2)] * 2
    assert not any(t.won for t in played[2:])
    assert [t.lost for t in played[:2]] == [False, False]
    assert all(t.won or t.final_prompt_ids is not None for t in played[:2])
    assert intact(played) == played[:2]
    lost = make_trajectory()
    lost.lost = True
    with pytest.raises(WorkerError, match="all 1 episodes of a batch were lost"):
        intact([lost])


def test_a_run_goes_on_when_a_worker_is_lost_and_is_else_the_same_as_without(tmp_path: Path) -> None:
    start = tmp_path / "start"
    small_policy().save(start)
    parity = ["env.name=rspo_toys:ParityEnv", f"policy.path={start}", "evaluation.temperatures=1.0"]

    def run(name: str, *flags: str) -> list[dict[str, Any]]:
        trainer = open_run(small_config(*parity, *flags), tmp_path / name, progress=False)
        try:
            trainer.train()
        finally:
            trainer.close()
        return without_timings(read_metrics(tmp_path / name))

    alone = run("alone")
    assert run("workers", "env.workers=2") == alone
    options = {"fault": "exit", "turn": 1, "task": make_env("rspo_toys:ParityEnv").tasks()[0]}
    options["marker"] = str(tmp_path / "marker")
    lossy = run("lossy", "env.workers=2", f"env.name={FAULTY}", f"env.options={options}")
    assert [(r["kind"], r["step"]) for r in lossy] == [(r["kind"], r["step"]) for r in alone]
    assert sum(record["lost_episodes"] for record in lossy) > 0
    assert sum(record["lost_episodes"] for record in alone) == 0
    assert lossy[-1]["trajectories"] == alone[-1]["trajectories"], "lost ones were paid for all the same"


def test_a_failure_of_a_kind_has_one_traceback_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    with WorkerEnv(FAULTY, {"fault": "raise", "turn": 1}, workers=2) as env, caplog.at_level(logging.WARNING):
        for _ in range(3):
            env.reset(TASKS, SEEDS)
            env.step(["x"] * len(TASKS))
            env.step(["x"] * len(TASKS))
    said = [message for message in caplog.messages if "ZeroDivisionError: this environment is broken" in message]
    assert ["Traceback" in message for message in said] == [True, False, False]
    assert ["number 2 of this kind" in message for message in said] == [False, True, False]


def test_closing_just_after_a_worker_was_lost_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """The worker that was started in its place is still building its environment."""
    for delay in (0.0, 0.3):
        env = WorkerEnv("household", {}, workers=2)
        env.reset(env.tasks()[:4], range(4))
        kill(env, 0)
        env.step(["go desk"] * 4)
        time.sleep(delay)
        env.close()
    assert "Traceback" not in capfd.readouterr().err
