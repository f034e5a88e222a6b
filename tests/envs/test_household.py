"""The household environment: contract, rules, rewards, expert, prompts, and the registry it is found in."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rspo.envs import BatchedEnv, PromptContext, available_envs, make_env, register_env
from rspo.envs.household import (
    ACTIONS,
    COMPACT_PROMPT_WORDS,
    PLACES,
    PROMPT_STYLES,
    VOCABULARY,
    DenseRewards,
    HouseholdEnv,
    HouseholdTask,
)
from rspo.envs.household_world import KINDS, OBJECTS, OPENABLE_PLACES, USUAL_PLACES

ALL_TASKS = HouseholdEnv().tasks("train") + HouseholdEnv().tasks("eval")
INFO_KEYS = {
    "task", "task_type", "anchor", "admissible_actions", "is_action_valid", "won", "task_score", "dense_reward",
}  # fmt: skip
# Of the held-out tasks, the vocabulary and 576 start layouts: results and checkpoints depend on them.
SPLIT_CHECKSUM = 2704062435
VOCABULARY_CHECKSUM = 3571583529
LAYOUT_CHECKSUM = 3735358003

Transcript = list[tuple[Any, ...]]


def choose(observation: str, admissible: list[str], turn: int) -> str:
    """An arbitrary policy that depends on nothing but what its own episode shows; some of its actions are invalid."""
    number = zlib.crc32(f"{turn} {observation}".encode())
    return "go nowhere" if number % 7 == 0 or not admissible else admissible[number % len(admissible)]


def transcripts(env: HouseholdEnv, tasks: list[HouseholdTask], seeds: list[int], turns: int = 12) -> list[Transcript]:
    """What each episode shows when `choose` plays it."""
    observations, infos = env.reset(tasks, seeds)
    out: list[Transcript] = [[(o, i)] for o, i in zip(observations, infos, strict=True)]
    for turn in range(turns):
        actions = [choose(o, i["admissible_actions"], turn) for o, i in zip(observations, infos, strict=True)]
        observations, rewards, terminated, truncated, infos = env.step(actions)
        for n, row in enumerate(zip(observations, rewards.tolist(), terminated, truncated, infos, strict=True)):
            out[n].append(row)
    return out


def play_expert(env: HouseholdEnv, tasks: list[HouseholdTask], seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each episode was won, and its dense return."""
    _, infos = env.reset(tasks, seeds)
    dense = np.zeros(len(tasks))
    for _ in range(env.max_turns):
        infos = env.step(env.expert_actions())[-1]
        dense += [info["dense_reward"] for info in infos]
    return np.array([info["won"] for info in infos]), dense


def one(env: HouseholdEnv, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Step an env of one episode."""
    observations, rewards, terminated, truncated, infos = env.step([action])
    return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos[0]


def easy_start(kind: str, destination: str = "desk", thing: str = "apple") -> tuple[HouseholdTask, int]:
    """A task and a seed at which the object lies openly in its likeliest place."""
    task = HouseholdTask(kind, thing, destination)
    env = HouseholdEnv()
    for seed in range(100):
        env.reset([task], [seed])
        if f"take {thing}" in one(env, f"go {USUAL_PLACES[thing][0]}")[4]["admissible_actions"]:
            return task, seed
    raise AssertionError("no such seed")


# World and splits


def test_world_is_what_the_recipe_says() -> None:
    assert (len(PLACES), len(OPENABLE_PLACES), len(OBJECTS), len(KINDS)) == (12, 5, 12, 4)
    assert all(sum(place in usual for usual in USUAL_PLACES.values()) == 3 for place in PLACES)
    assert all(sum(place in OPENABLE_PLACES for place in usual) <= 2 for usual in USUAL_PLACES.values())
    assert len(ACTIONS) == len(set(ACTIONS))
    assert all(len(action.split()) == 2 for action in ACTIONS)


def test_splits_are_disjoint_and_complete() -> None:
    train, held_out = HouseholdEnv().tasks("train"), HouseholdEnv().tasks("eval")
    assert (len(train), len(held_out)) == (461, 115)
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {HouseholdTask(k, o, p) for k in KINDS for o in OBJECTS for p in PLACES}
    # What is held out are combinations: all their pairs occur in training.
    assert {(t.kind, t.object) for t in train} == {(k, o) for k in KINDS for o in OBJECTS}
    assert {(t.kind, t.destination) for t in train} == {(k, p) for k in KINDS for p in PLACES}


def test_split_and_vocabulary_are_the_same_in_every_version() -> None:
    words = " ".join(task.words for task in HouseholdEnv().tasks("eval"))
    assert zlib.crc32(words.encode()) == SPLIT_CHECKSUM
    assert zlib.crc32(" ".join(VOCABULARY).encode()) == VOCABULARY_CHECKSUM


def test_layout_is_the_same_in_every_version() -> None:
    env = HouseholdEnv()
    n = len(ALL_TASKS)
    env.reset(ALL_TASKS, [0] * (n - 3) + [-1, 2**63, 2**70])
    assert zlib.crc32(env.snapshot().location.astype("<i8").tobytes()) == LAYOUT_CHECKSUM


def test_objects_start_at_usual_places_and_never_at_the_goal() -> None:
    env = HouseholdEnv()
    seen: dict[str, set[str]] = {thing: set() for thing in OBJECTS}
    first = 0
    for seed in range(5):
        env.reset(ALL_TASKS, [seed] * len(ALL_TASKS))
        state = env.snapshot()
        for task, places in zip(ALL_TASKS, state.location.tolist(), strict=True):
            for thing, place in zip(OBJECTS, places, strict=True):
                seen[thing].add(PLACES[place])
            first += PLACES[places[0]] == USUAL_PLACES["apple"][0]
            assert PLACES[places[OBJECTS.index(task.object)]] != task.destination
    assert seen == {thing: set(usual) for thing, usual in USUAL_PLACES.items()}
    assert 0.45 < first / (5 * len(ALL_TASKS)) < 0.55


# Contract


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_infos_have_the_keys_and_types_of_the_contract(style: str) -> None:
    env = HouseholdEnv(prompt_style=style)
    assert isinstance(env, BatchedEnv)
    assert env.has_dense_reward
    assert env.has_snapshots
    observations, infos = env.reset(ALL_TASKS[:3], [1, 2, 3])
    for step in range(2):
        assert all(isinstance(observation, str) for observation in observations)
        for info in infos:
            assert set(info) == INFO_KEYS
            assert isinstance(info["task"], str)
            assert isinstance(info["anchor"], str)
            assert isinstance(info["admissible_actions"], list)
            assert info["admissible_actions"]
            assert info["is_action_valid"] is True
            assert info["won"] is False
            assert type(info["task_score"]) is float
            assert type(info["dense_reward"]) is float
        if step == 0:
            observations, rewards, terminated, truncated, infos = env.step(["go desk"] * 3)
            assert rewards.dtype == np.float32
            assert rewards.shape == (3,)
            assert terminated.dtype == np.bool_
            assert truncated.dtype == np.bool_


@settings(max_examples=25, deadline=None)
@given(
    episodes=st.lists(
        st.tuples(st.integers(0, len(ALL_TASKS) - 1), st.integers(-(2**64), 2**64)), min_size=1, max_size=6
    ),
    style=st.sampled_from(PROMPT_STYLES),
)
def test_an_episode_does_not_depend_on_the_batch(episodes: list[tuple[int, int]], style: str) -> None:
    tasks, seeds = [ALL_TASKS[i] for i, _ in episodes], [seed for _, seed in episodes]
    together = transcripts(HouseholdEnv(prompt_style=style), tasks, seeds)
    backwards = transcripts(HouseholdEnv(prompt_style=style), tasks[::-1], seeds[::-1])[::-1]
    alone = [transcripts(HouseholdEnv(prompt_style=style), [t], [s])[0] for t, s in zip(tasks, seeds, strict=True)]
    assert together == backwards == alone


def test_group_members_start_alike_and_seeds_differ() -> None:
    env = HouseholdEnv()
    task = ALL_TASKS[0]
    env.reset([task] * 8 + [task] * 8, [5] * 8 + list(range(100, 108)))
    location = env.snapshot().location
    assert (location[:8] == location[0]).all()
    assert len(np.unique(location[8:], axis=0)) > 1


def test_outcome_comes_with_the_win_and_only_then() -> None:
    env = HouseholdEnv(outcome_scale=3.0)
    task, seed = easy_start("heat")
    env.reset([task], [seed])
    way = ["go table", "take apple", "go microwave", "heat apple", "go desk"]
    for action in way:
        _, reward, terminated, truncated, info = one(env, action)
        assert (reward, terminated, truncated, info["won"], info["task_score"]) == (0.0, False, False, False, 0.0)
    _, reward, terminated, truncated, info = one(env, "put apple")
    assert (reward, terminated, truncated, info["won"], info["task_score"]) == (3.0, True, False, True, 1.0)


def test_an_unready_object_at_its_destination_is_no_win() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("clean")
    env.reset([task], [seed])
    for action in ("go table", "take apple", "go fridge", "cool apple", "go desk", "put apple"):
        _, reward, terminated, _, info = one(env, action)
        assert info["is_action_valid"]
        assert not terminated
        assert reward == 0.0
    assert "cold apple" in info["anchor"]
    # The latest processing counts, so a wrong one is put right by the right one, here and now.
    for action in ("take apple", "go sink", "clean apple", "go desk", "put apple"):
        _, reward, terminated, _, info = one(env, action)
    assert terminated
    assert info["won"]
    assert reward == 10.0


def test_a_pick_task_takes_any_condition() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("pick", destination="microwave")
    env.reset([task], [seed])
    for action in ("go table", "take apple", "go microwave", "heat apple", "open microwave", "put apple"):
        _, _, terminated, _, info = one(env, action)
    assert terminated
    assert info["won"]


def test_the_turn_limit_truncates_and_a_win_on_the_last_turn_terminates() -> None:
    task, seed = easy_start("pick")
    way = ["go table", "take apple", "go desk", "put apple"]
    for limit, ending in ((3, (0.0, False, True)), (4, (10.0, True, False))):
        env = HouseholdEnv(max_turns=limit)
        env.reset([task], [seed])
        for action in way[: limit - 1]:
            assert one(env, action)[1:4] == (0.0, False, False)
        assert one(env, way[limit - 1])[1:4] == ending


def test_ended_episodes_stay_ended() -> None:
    env = HouseholdEnv(max_turns=4)
    task, seed = easy_start("pick")
    env.reset([task, task], [seed, seed])
    for won_way, lost_way in zip(
        ("go table", "take apple", "go desk", "put apple"), ("go table", "take apple", "go desk", "fly"), strict=True
    ):
        observations, rewards, terminated, truncated, infos = env.step([won_way, lost_way])
    assert rewards.tolist() == [10.0, 0.0]
    assert not infos[1]["is_action_valid"]
    before = env.snapshot()
    for action in ("take apple", "nonsense"):
        later, rewards, again_terminated, again_truncated, later_infos = env.step([action, "put apple"])
        assert later == observations
        assert rewards.tolist() == [0.0, 0.0]
        assert terminated.tolist() == again_terminated.tolist() == [True, False]
        assert truncated.tolist() == again_truncated.tolist() == [False, True]
        for info, earlier in zip(later_infos, infos, strict=True):
            assert info["is_action_valid"]
            assert info["dense_reward"] == 0.0
            assert info["admissible_actions"] == []
            assert all(info[key] == earlier[key] for key in ("anchor", "won", "task_score", "task"))
    assert (env.snapshot().location == before.location).all()
    assert (env.snapshot().turn == before.turn).all()
    assert env.expert_actions() == env.random_actions(np.random.default_rng(0)) == ["", ""]


def test_returned_arrays_and_lists_are_the_callers_own() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("pick")
    _, infos = env.reset([task], [seed])
    infos[0]["admissible_actions"].clear()
    _, _, terminated, truncated, infos = env.step(["go table"])
    terminated[:] = True
    truncated[:] = True
    assert one(env, "go desk")[2:4] == (False, False)
    env.reset([task], [seed])
    assert len(one(env, "go desk")[4]["admissible_actions"]) >= 11


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), moment=st.integers(0, 11))
def test_a_restored_snapshot_replays_identically(seed: int, moment: int) -> None:
    env = HouseholdEnv()
    rng = np.random.default_rng(seed)
    tasks = [ALL_TASKS[i] for i in rng.integers(len(ALL_TASKS), size=16)]
    observations, infos = env.reset(tasks, list(range(16)))
    for _ in range(moment):
        mixed = zip(env.expert_actions(), env.random_actions(rng, admissible=False), rng.random(16), strict=True)
        observations, _, _, _, infos = env.step([e if u < 0.7 else r for e, r, u in mixed])
    state = env.snapshot()
    actions = [env.random_actions(rng) for _ in range(3)]

    def rest() -> list[Any]:
        return [[part.tolist() if isinstance(part, np.ndarray) else part for part in env.step(a)] for a in actions]

    first = rest()
    for other in (env, env, HouseholdEnv()):
        assert other.restore(state) == (observations, infos)
        env = other
        assert rest() == first


def test_a_step_costs_far_less_than_a_model() -> None:
    """The design asks for 10,000 steps a second; a machine that is busy elsewhere still does many times that."""
    env = HouseholdEnv()
    tasks = list(ALL_TASKS[:128])
    best = float("inf")
    for _ in range(3):
        env.reset(tasks, [0] * len(tasks))
        for _ in range(env.max_turns):
            actions = env.random_actions(np.random.default_rng(0))
            start = time.perf_counter()
            env.step(actions)
            best = min(best, time.perf_counter() - start)
    assert len(tasks) / best > 10_000


# Actions


def test_admissible_actions_are_exactly_those_that_are_valid() -> None:
    env = HouseholdEnv(max_turns=100)
    rng = np.random.default_rng(0)
    tasks = list(ALL_TASKS[::40])
    _, infos = env.reset(tasks, list(range(len(tasks))))
    for turn in range(30):
        state = env.snapshot()
        valid: list[list[str]] = [[] for _ in tasks]
        for action in ACTIONS:
            env.restore(state)
            for n, info in enumerate(env.step([action] * len(tasks))[-1]):
                if info["is_action_valid"]:
                    valid[n].append(action)
        for n, info in enumerate(infos):
            expected = [] if info["won"] else valid[n]  # an ended episode takes no action and finds fault with none
            assert sorted(info["admissible_actions"]) == sorted(expected)
        env.restore(state)
        infos = env.step(env.expert_actions() if turn % 3 == 0 else env.random_actions(rng))[-1]


@pytest.mark.parametrize(
    "action",
    ["", "go", "go hall", "go desk now", "GO desk", " go desk", "go  desk", "desk go", "take apple", "open sink", "ö"],
)
def test_an_invalid_action_changes_nothing_but_the_turn(action: str) -> None:
    env, chat = HouseholdEnv(), HouseholdEnv(prompt_style="chat")
    task, seed = easy_start("pick")
    for env_of_style, note in ((env, "failed "), (chat, "Nothing happens. ")):
        _, before = env_of_style.reset([task], [seed])
        observation, reward, terminated, truncated, info = one(env_of_style, action)
        assert observation.startswith(note)
        assert (reward, terminated, truncated, info["is_action_valid"]) == (0.0, False, False, False)
        assert info["dense_reward"] == DenseRewards().invalid
        assert info["anchor"] == before[0]["anchor"]
        assert info["admissible_actions"] == before[0]["admissible_actions"]
        assert not one(env_of_style, "go desk")[0].startswith(note)


def test_closed_places_hide_what_is_in_them() -> None:
    env = HouseholdEnv()
    egg = HouseholdTask("pick", "egg", "desk")
    inside = next(
        s for s in range(100) if env.reset([egg], [s]) and env.snapshot().location[0, OBJECTS.index("egg")] == 0
    )
    env.reset([egg], [inside])
    observation, *_, info = one(env, "go fridge")
    assert "closed" in observation
    assert "egg" not in observation
    assert "egg" not in info["anchor"]
    assert not one(env, "take egg")[4]["is_action_valid"]
    observation, *_, info = one(env, "open fridge")
    assert "egg" in observation
    assert "take egg" in info["admissible_actions"]
    assert not one(env, "open fridge")[4]["is_action_valid"]
    one(env, "go desk")
    assert "egg" in one(env, "go fridge")[0], "what was opened stays open"


def test_one_thing_at_a_time() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("pick")
    env.reset([task], [seed])
    one(env, "go table")
    one(env, "take apple")
    for place in PLACES[5:]:
        info = one(env, f"go {place}")[4]
        assert not any(action.startswith("take") for action in info["admissible_actions"])


# Dense reward


def test_a_win_without_detours_pays_the_same_dense_return_everywhere() -> None:
    won, dense = play_expert(HouseholdEnv(), list(ALL_TASKS), [3] * len(ALL_TASKS))
    assert won.all()
    expected = [1.6 if task.kind == "pick" else 2.1 for task in ALL_TASKS]
    np.testing.assert_allclose(dense, expected, rtol=1e-12)


def test_dense_constants_are_the_callers() -> None:
    env = HouseholdEnv(dense_rewards=DenseRewards(1.0, 10.0, 100.0, 1000.0, -1.0, 10000.0))
    task, seed = easy_start("cool")
    env.reset([task], [seed])
    way = ["fly", "go table", "take apple", "go fridge", "cool apple", "go desk", "put apple"]
    assert [one(env, action)[4]["dense_reward"] for action in way] == [-1.0, 0.0, 1.0, 100.0, 10.0, 1000.0, 10000.0]


def test_carrying_pays_once() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("clean")
    env.reset([task], [seed])
    way = ["go table", "take apple", "go sink", "go shelf", "go sink", "clean apple", "go desk", "go sink", "go desk"]
    assert [one(env, action)[4]["dense_reward"] for action in way] == [0, 0.4, 0.1, 0, 0, 0.4, 0.2, 0, 0]


def test_the_dense_reward_can_be_exploited_by_taking_and_putting() -> None:
    """Never winning, and paid more than a win."""
    env = HouseholdEnv()
    for kind in KINDS:
        task, seed = easy_start(kind)
        won, winning = play_expert(env, [task], [seed])
        env.reset([task], [seed])
        way = ["go table", *["take apple", "put apple"] * 5, "take apple"]
        steps = [one(env, action) for action in way]
        assert won[0]
        assert steps[-1][3], "the loop ends at the turn limit"
        assert sum(step[1] for step in steps) == 0.0, "the outcome reward is not fooled"
        assert sum(step[4]["dense_reward"] for step in steps) > winning[0]


def test_the_dense_reward_can_be_exploited_by_processing_again_and_again() -> None:
    """From wherever the object starts, on the average."""
    env = HouseholdEnv()
    tasks = [task for task in ALL_TASKS if task.kind != "pick"]
    _, winning = play_expert(env, tasks, [0] * len(tasks))
    env.reset(tasks, [0] * len(tasks))
    looping = np.zeros(len(tasks))
    for _ in range(env.max_turns):
        state = env.snapshot()
        washes = (state.held == state.goal) & state.is_ready
        verbs = zip(env.expert_actions(), washes.tolist(), tasks, strict=True)
        infos = env.step([f"{task.kind} {task.object}" if w else expert for expert, w, task in verbs])[-1]
        looping += [info["dense_reward"] for info in infos]
    assert not any(info["won"] for info in infos)
    assert looping.mean() > winning.mean()


# Expert and random play


def test_the_expert_always_wins_in_about_seven_turns() -> None:
    env = HouseholdEnv()
    turns = []
    for seed in range(10):
        won, _ = play_expert(env, list(ALL_TASKS), [seed] * len(ALL_TASKS))
        assert won.all()
        turns.append(env.snapshot().turn)
    taken = np.concatenate(turns)
    print(f"expert: {taken.mean():.2f} turns on average, {taken.min()} to {taken.max()}")
    assert taken.max() <= 11
    assert 6.7 < taken.mean() < 7.3


@pytest.mark.parametrize("admissible", [True, False])
def test_the_expert_wins_from_wherever_random_play_has_led(admissible: bool) -> None:
    env = HouseholdEnv(max_turns=60)
    rng = np.random.default_rng(0)
    env.reset(ALL_TASKS, [0] * len(ALL_TASKS))
    for _ in range(40):
        infos = env.step(env.random_actions(rng, admissible=admissible))[-1]
    # At most: open, put down another thing; 3 walks and 2 doors; take, carry, process, carry, open, put. One to spare.
    for _ in range(14):
        infos = env.step(env.expert_actions())[-1]
    assert all(info["won"] for info in infos)


def test_the_expert_is_a_function_of_task_and_observation() -> None:
    """So that it can be cloned from prompts: without detours no two of its actions for one of these differ."""
    env = HouseholdEnv()
    chosen: dict[tuple[str, str], str] = {}
    for seed in range(10):
        observations, infos = env.reset(ALL_TASKS, [seed] * len(ALL_TASKS))
        for _ in range(env.max_turns):
            actions = env.expert_actions()
            for observation, info, action in zip(observations, infos, actions, strict=True):
                if action:
                    assert action in info["admissible_actions"]
                    assert chosen.setdefault((info["task"], observation), action) == action
            observations, _, _, _, infos = env.step(actions)


def test_random_actions_are_admissible_uniform_and_seeded() -> None:
    env = HouseholdEnv()
    n = 6000
    _, infos = env.reset([ALL_TASKS[0]] * n, [0] * n)
    actions = env.random_actions(np.random.default_rng(1))
    assert actions == env.random_actions(np.random.default_rng(1))
    counts = np.array([actions.count(action) for action in infos[0]["admissible_actions"]])
    assert counts.sum() == n
    assert np.abs(counts - n / len(counts)).max() < 5 * np.sqrt(n / len(counts))
    assert set(env.random_actions(np.random.default_rng(1), admissible=False)) == set(ACTIONS)


# Prompts and projection


def test_compact_prompts_are_words_of_the_vocabulary_and_of_one_length() -> None:
    env = HouseholdEnv(max_turns=30)
    rng = np.random.default_rng(0)
    words: set[str] = set()
    tasks = list(ALL_TASKS[::3])
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 40
    observations, infos = env.reset(tasks, list(range(len(tasks))))
    history: list[list[tuple[str, str]]] = [[] for _ in tasks]
    for turn in range(30):
        for n, observation in enumerate(observations):
            context = PromptContext(infos[n]["task"], tuple(history[n][-2:]), observation, (), turn)
            prompt = env.render_prompt(context).split(" ")
            assert len(prompt) == COMPACT_PROMPT_WORDS
            words.update(prompt)
        actions = env.random_actions(rng, admissible=turn % 5 > 0)
        if turn % 7 == 0:  # what a model may write that is no action
            actions = [("", "apple", "go go", "xyzzy plugh", "go desk and stay")[n % 5] for n in range(len(tasks))]
        projected = [env.project(action)[0] for action in actions]
        for n, (observation, action) in enumerate(zip(observations, projected, strict=True)):
            history[n].append((observation, action))
        observations, _, _, _, infos = env.step(projected)
    assert words <= set(VOCABULARY)
    assert {word for action in ACTIONS for word in action.split()} <= set(VOCABULARY)


def test_compact_prompt_by_example() -> None:
    env = HouseholdEnv()
    task, seed = easy_start("cool")
    observations, infos = env.reset([task], [seed])
    history: list[tuple[str, str]] = []
    prompts = []
    for turn, action in enumerate(("go table", "take apple", "go fridge", "cool apple")):
        prompts.append(
            env.render_prompt(PromptContext(infos[0]["task"], tuple(history[-2:]), observations[0], (), turn))
        )
        history.append((observations[0], action))
        observations, _, _, _, infos = env.step([action])
    gap = "none " * 9
    assert prompts[0] == f"cool apple desk {gap}none none ok hall none none none none none"
    assert prompts[1].startswith("cool apple desk none none ok hall none none none none none go table ok table ")
    assert prompts[2].startswith("cool apple desk go table ok table ")
    assert prompts[2].endswith(" plain apple")
    assert prompts[3].endswith(" go fridge ok fridge closed none none plain apple")
    assert observations[0] == "ok fridge closed none none cold apple"


@pytest.mark.parametrize("length", range(5))
def test_compact_prompts_take_a_history_of_any_length(length: int) -> None:
    env = HouseholdEnv()
    observation = env.reset([ALL_TASKS[0]], [0])[0][0]
    context = PromptContext(ALL_TASKS[0].words, ((observation, "go desk"),) * length, observation, (), length)
    assert len(env.render_prompt(context).split()) == COMPACT_PROMPT_WORDS


def test_many_things_in_one_place_never_hide_the_goal_object() -> None:
    env = HouseholdEnv()
    env.reset(ALL_TASKS, [0] * len(ALL_TASKS))
    state = env.snapshot()
    state.location[:] = PLACES.index("desk")
    state.place[:] = PLACES.index("desk")
    observations, infos = env.restore(state)
    for task, observation, info in zip(ALL_TASKS, observations, infos, strict=True):
        assert task.object in observation.split()
        assert len(observation.split()) == 7
        assert all(thing in info["anchor"] for thing in OBJECTS)


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_one_anchor_is_one_visible_state(style: str) -> None:
    """Within a task an anchor determines what can be done and the observation, but for the note of a failed action."""
    env = HouseholdEnv(prompt_style=style)
    rng = np.random.default_rng(0)
    tasks = list(ALL_TASKS[::97])
    shown: dict[tuple[str, str], tuple[str, list[str]]] = {}
    anchors: dict[tuple[str, str], str] = {}
    for _ in range(30):
        env.reset(tasks, [1] * len(tasks))
        for _ in range(env.max_turns - 1):
            mixed = zip(
                env.expert_actions(), env.random_actions(rng, admissible=False), rng.random(len(tasks)), strict=True
            )
            observations, _, terminated, _, infos = env.step([e if u < 0.7 else r for e, r, u in mixed])
            for observation, info, ended in zip(observations, infos, terminated, strict=True):
                plain = observation.removeprefix("failed ").removeprefix("ok ").removeprefix("Nothing happens. ")
                key = (info["task"], info["anchor"])
                if not ended:
                    assert shown.setdefault(key, (plain, info["admissible_actions"])) == (
                        plain,
                        info["admissible_actions"],
                    )
                if style == "chat":
                    assert anchors.setdefault((info["task"], plain), info["anchor"]) == info["anchor"]


@pytest.mark.parametrize(
    ("response", "action", "well_formed"),
    [
        ("go desk", "go desk", True),
        (" Go  DESK\n", "go desk", True),
        ("go hall", "go hall", False),
        ("go apple", "go apple", False),
        ("go", "go", False),
        ("go desk now", "go desk now", False),
        ("", "", False),
        ("<action>go desk</action>", "<action>go desk</action>", False),
    ],
)
def test_compact_projection(response: str, action: str, well_formed: bool) -> None:
    assert HouseholdEnv().project(response) == (action, well_formed)


@pytest.mark.parametrize(
    ("response", "action", "well_formed"),
    [
        ("<think>it is there</think><action>go desk</action>", "go desk", True),
        ("<THINK>It is there</THINK>\n<ACTION> Go\n Desk </ACTION> thanks", "go desk", True),
        ("<think>a</think><action>go desk</action><action>go sink</action>", "go desk", True),
        ("<action>go desk</action>", "go desk", False),
        ("<think>unfinished <action>go desk</action>", "go desk", False),
        ("<think>a</think><action></action>", "", False),
        ("<think>a</think><action> \n </action>", "", False),
        ("<think>a</think> I shall, after much thought, Go Desk", " after much thought, go desk"[-30:], False),
        ("<think>a</think><action>go desk", "<think>a</think><action>go desk"[-30:], False),
        ("go desk", "go desk", False),
        ("", "", False),
    ],
)
def test_chat_projection(response: str, action: str, well_formed: bool) -> None:
    projected, formed = HouseholdEnv(prompt_style="chat").project(response)
    assert formed is well_formed
    assert projected.endswith(action)
    assert len(projected) == 30 or projected == action


def test_chat_prompt_has_every_part() -> None:
    env = HouseholdEnv(prompt_style="chat")
    task, seed = easy_start("heat")
    observations, infos = env.reset([task], [seed])
    history: list[tuple[str, str]] = []
    for turn, action in enumerate(("go table", "take apple", "go microwave")):
        admissible = tuple(infos[0]["admissible_actions"])
        prompt = env.render_prompt(
            PromptContext(infos[0]["task"], tuple(history[-2:]), observations[0], admissible, turn)
        )
        assert "Heat the apple, then put it in or on the desk." in prompt
        assert f"Actions taken so far: {turn}." in prompt
        assert ("most recent turns" in prompt) == (turn > 0)
        for observation, earlier in history[-2:]:
            assert f"Observation: {observation} Action: {earlier}" in prompt
        assert f"Turn {turn + 1}, now. Observation: {observations[0]}" in prompt
        assert "".join(f"\n'{action}'" for action in admissible) in prompt
        assert all(tag in prompt for tag in ("<think>", "</think>", "<action>", "</action>"))
        history.append((observations[0], action))
        observations, _, _, _, infos = env.step([action])


# Errors


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_turns": 0}, "max_turns must be an integer of at least 1; got 0"),
        ({"max_turns": 2.5}, "max_turns must be an integer of at least 1; got 2.5"),
        ({"max_turns": True}, "max_turns must be an integer of at least 1; got True"),
        ({"outcome_scale": 0.0}, "outcome_scale must be finite and above 0; got 0.0"),
        ({"outcome_scale": float("nan")}, "outcome_scale must be finite and above 0; got nan"),
        ({"outcome_scale": "10"}, "outcome_scale must be a number; got '10'"),
        ({"prompt_style": "prose"}, "prompt_style must be one of compact, chat; got 'prose'"),
        ({"dense_rewards": 0.4}, "dense_rewards must be a DenseRewards; got 0.4"),
    ],
)
def test_bad_constructor_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HouseholdEnv(**kwargs)


def test_bad_calls_say_what_is_wrong() -> None:
    env = HouseholdEnv()
    task = ALL_TASKS[0]
    arguments: dict[str, tuple[Any, ...]] = {
        "step": (["go desk"],),
        "snapshot": (),
        "expert_actions": (),
        "random_actions": (np.random.default_rng(0),),
    }
    for method, args in arguments.items():
        with pytest.raises(RuntimeError, match=f"call reset .*before {method}"):
            getattr(env, method)(*args)
    with pytest.raises(ValueError, match="split must be one of train, eval; got 'test'"):
        env.tasks("test")
    with pytest.raises(ValueError, match=r"seeds must be as many as tasks \(2\); got 1"):
        env.reset([task, task], [0])
    with pytest.raises(ValueError, match="at least one task"):
        env.reset([], [])
    with pytest.raises(TypeError, match=r"tasks\[1\] must be a HouseholdTask; got 'heat apple desk'"):
        env.reset([task, "heat apple desk"], [0, 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"seeds\[0\] must be an integer; got 0.5"):
        env.reset([task], [0.5])  # type: ignore[list-item]
    env.reset([task, task], [0, np.int32(1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"actions must be as many as episodes \(2\); got 1"):
        env.step(["go desk"])
    with pytest.raises(TypeError, match="sequence of strings"):
        env.step(["go desk", None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="sequence of strings"):
        env.step("go")
    with pytest.raises(TypeError, match="state must be a HouseholdState"):
        env.restore({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be one of pick, clean, heat, cool; got 'eat'"):
        HouseholdTask("eat", "apple", "desk")


# Registry


def test_registry_makes_environments_by_name_and_by_class_path() -> None:
    assert "household" in available_envs()
    for name in ("household", "rspo.envs.household:HouseholdEnv"):
        env = make_env(name, max_turns=5)
        assert isinstance(env, HouseholdEnv)
        assert env.max_turns == 5


def test_registry_takes_new_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rspo.envs._REGISTRY", {})
    register_env("mine", HouseholdEnv)
    register_env("by-path", "rspo.envs.household:HouseholdEnv")
    assert available_envs() == ("by-path", "mine")
    assert isinstance(make_env("by-path"), HouseholdEnv)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_env("mine", HouseholdEnv)
    register_env("mine", lambda **kwargs: HouseholdEnv(max_turns=3, **kwargs), overwrite=True)
    assert make_env("mine", outcome_scale=1.0).max_turns == 3


def test_registry_errors_name_what_is_available() -> None:
    with pytest.raises(ValueError, match=r"unknown environment 'houshold'; available: .*household"):
        make_env("houshold")
    with pytest.raises(ValueError, match="has no class 'Missing'"):
        make_env("rspo.envs.household:Missing")
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        make_env("rspo.envs.household:")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        make_env("no_such_package:Env")
    with pytest.raises(TypeError, match="must be a BatchedEnv; got dict"):
        make_env("builtins:dict")
    with pytest.raises(ValueError, match="without a colon"):
        register_env("a:b", HouseholdEnv)
    with pytest.raises(TypeError, match="factory must be callable"):
        register_env("number", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        register_env("broken", "rspo.envs.household")
