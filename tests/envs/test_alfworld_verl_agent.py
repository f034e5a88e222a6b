"""ALFWorld in verl-agent's style: observations as the game says them, and the prompts and responses on top."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from alfworld_games import generated_games, needs_alfworld, one_of_each_type, play

from rspo.envs import PromptContext, make_env
from rspo.envs.alfworld import AlfworldEnv
from rspo.envs.alfworld.env import GREETING
from rspo.envs.wording import HOW_TO_ANSWER

pytestmark = needs_alfworld


@pytest.fixture
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_games(tmp_path_factory.getbasetemp())


def household(games: Path, **options: Any) -> AlfworldEnv:
    env = make_env("alfworld", data=games, prompt_style="verl-agent", **options)
    assert isinstance(env, AlfworldEnv)
    return env


def expert(env: AlfworldEnv, *_: Any) -> list[str]:
    return env.expert_actions()


@pytest.mark.parametrize("fast", [True, False])
def test_observations_are_as_the_game_says_them(games: Path, fast: bool) -> None:
    env, readable = household(games, fast=fast), AlfworldEnv(games)
    tasks = one_of_each_type(env.tasks())[: 6 if fast else 1]
    shown, plain = (play(one, tasks, [0] * len(tasks), expert, 8) for one in (env, readable))
    for rows, others in zip(shown, plain, strict=True):
        (first, info), (room, _) = rows[0], others[0]
        assert first.startswith(f"{GREETING}\n\n{room}\n\nYour task is to: {info['task']}")
        assert [row[0] for row in rows[1:]] == [row[0] for row in others[1:]]
        for row in rows:
            assert row[-1]["anchor"] == row[0]
            assert "help" not in row[-1]["admissible_actions"]
        assert [row[-1]["admissible_actions"] for row in rows] == [row[-1]["admissible_actions"] for row in others]


def test_copies_of_an_episode_are_in_the_same_style(games: Path) -> None:
    env = household(games)
    (first,), _ = env.reset(env.tasks()[:1], [0])
    (episode,) = env.episodes
    assert pickle.loads(pickle.dumps(episode)).observation == first
    before = env.snapshot()
    env.step(["look"])
    assert env.restore(before)[0] == [first]


def test_prompts_quote_the_actions_one_a_line_and_tell_no_rules(games: Path) -> None:
    env = household(games)
    (observation,), (info,) = env.reset(env.tasks()[:1], [0])
    admissible = tuple(info["admissible_actions"])
    listed = "\n".join(f"'{action}'" for action in admissible)
    prompt = env.render_prompt(PromptContext(info["task"], (), observation, admissible, 0))
    role = prompt.partition("\n")[0]
    assert prompt == (
        f"{role}\nYou observe: {observation}\nYour admissible actions now:\n{listed}\n\n{HOW_TO_ANSWER}"
    ), "the observation says the task, and no rules come before it"
    history = (("A room.", "look"), ("A desk.", "go to desk 1"))
    prompt = env.render_prompt(PromptContext(info["task"], history, "Nothing happens.", admissible, 5))
    assert prompt.startswith(f"{role}\nYour task: {info['task']}\nSteps taken so far: 5.")
    assert (
        "[Observation 4: 'A room.', Action 4: 'look']\n[Observation 5: 'A desk.', Action 5: 'go to desk 1']" in prompt
    )
    assert "Now, at step 6, you observe: Nothing happens.\n" in prompt
    reply = env.render_reply(PromptContext(info["task"], (), "A desk.", admissible, 1))
    assert reply == f"You observe: A desk.\nYour admissible actions now:\n{listed}\n\n{HOW_TO_ANSWER}"


def test_responses_and_refused_actions(games: Path) -> None:
    env = household(games)
    env.reset(env.tasks()[:1], [0])
    said = "well, I would rather go somewhere ELSE"
    assert env.project(said) == (said.lower()[-30:], False)
    assert env.project("<think>a</think><action>Eat the desk</action>") == ("eat the desk", True)
    (observation,), _, _, _, (info,) = env.step(["eat the desk"])
    assert (observation, info["is_action_valid"]) == ("Nothing happens.", False)


def test_turns_and_reward_are_the_papers(games: Path) -> None:
    env = household(games)
    assert (env.max_turns, env.outcome_scale) == (50, 10.0)
