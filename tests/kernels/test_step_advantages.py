"""step_advantages (GiGPO): its float64 reference, verl-agent's own values, and the hazards of its statistics."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import assert_close

from rspo_kernels import anchor_ids, group_advantages, reference, step_advantages

OPTIONS = st.fixed_dictionaries({
    "mode": st.sampled_from(["mean_std_norm", "mean_norm"]),
    "rows": st.booleans(),
    "singleton": st.sampled_from(["zero", "raw"]),
    "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    "step_weight": st.sampled_from([0.0, 1.0, -0.3]),
})  # fmt: skip
NUMBERS = ("penalties", "episode_rewards")


def batch(seed, n, *, groups=3, trajectories=3, anchors=3):
    """Turns of interleaved trajectories: rewards and ids, some of them large or negative."""
    rng = torch.Generator().manual_seed(seed)
    group, trajectory, anchor = (torch.randint(0, k, (n,), generator=rng) for k in (groups, trajectories, anchors))
    return torch.randn(n, generator=rng), group * 10**10, trajectory - 1, anchor.int()


@given(n=st.integers(0, 24), options=OPTIONS, given_numbers=st.sets(st.sampled_from([*NUMBERS, "valid"])),
       double=st.booleans(), seed=st.integers(0, 2**31))  # fmt: skip
def test_agrees_with_the_float64_reference(place, n, options, given_numbers, double, seed):
    device, backend = place
    rng = torch.Generator().manual_seed(seed)
    rewards, *ids = batch(seed, n)
    if double and backend == "torch":
        rewards = rewards.double()
    extra = {name: torch.rand(n, generator=rng) for name in NUMBERS if name in given_numbers}
    valid = torch.rand(n, generator=rng) < 0.7 if "valid" in given_numbers else None

    def dirty(x):
        return (x if valid is None else torch.where(valid, x, torch.nan)).to(device)

    actual = step_advantages(
        dirty(rewards), *(x.to(device) for x in ids), valid=None if valid is None else valid.to(device),
        **{name: dirty(x) for name, x in extra.items()}, backend=backend, **options,
    )  # fmt: skip
    expected = reference.step_advantages(
        rewards.double(), *ids, valid=valid, **{name: x.double() for name, x in extra.items()}, **options
    )
    for name, a, e in zip(actual._fields, actual, expected, strict=True):
        assert a.dtype == rewards.dtype
        assert_close(name, a, e, rtol=0, atol=1e-5 * (1.0 + (float(e.abs().max()) if n else 0.0)))
        assert valid is None or (a.cpu()[~valid] == 0).all()


THEIR_ROUNDING = {"rtol": 2e-6, "atol": 4e-5}
"""verl-agent rounds scores of 10 - 0.1 to float32 (5e-7) and divides by deviations down to 0.03; it divides raw scores
by 1 + 1e-6; the file has six decimals."""


def verl_agent_cases():
    directory = Path(os.environ.get("RSPO_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = directory / "gigpo" / "cases.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent; RSPO_TEST_DATA names the directory with gigpo/cases.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_case(case, device, **options):
    groups, trajectories = (anchor_ids(case[name], [0] * len(case[name])) for name in ("group", "trajectory"))
    anchors = anchor_ids(case["anchor"], groups)
    return step_advantages(
        torch.tensor(case["step_reward"]).float().to(device), groups.to(device), trajectories.to(device),
        anchors.to(device), gamma=case["gamma"], step_weight=case["step_weight"], mode=case["mode"],
        penalties=0.1 * torch.tensor(case["invalid"]).float().to(device), singleton="raw", **options,
    ), groups  # fmt: skip


def test_verl_agent_cases(place):
    """Row statistics and raw singletons."""
    device, backend = place
    cases = verl_agent_cases()
    names = {"returns": "step_return", "episode": "episode_advantage_rows", "advantages": "advantage"}
    for case in cases if backend == "torch" or device != "cpu" else cases[::10]:
        actual, _ = of_case(case, device, rows=True, backend=backend)
        for name, theirs in names.items():
            assert_close(name, getattr(actual, name), torch.tensor(case[theirs]), **THEIR_ROUNDING)


def test_verl_agent_cases_over_trajectories():
    """Without invalid rows the two agree; their statistics count a trajectory's first penalty as its reward."""
    compared = 0
    for case in verl_agent_cases():
        if case["mode"] == "mean_norm":
            continue
        actual, groups = of_case(case, "cpu")
        theirs, invalid = torch.tensor(case["episode_advantage_trajectories"]), torch.tensor(case["invalid"])
        for group in groups.unique():
            same = groups == group
            if not invalid[same].any():
                assert_close("episode", actual.episode[same], theirs[same], **THEIR_ROUNDING)
                compared += 1
    assert compared > 20


def test_hand_values(place):
    """A task of two trajectories, ended by 4 and by 0, that share their start; a task of one trajectory."""
    device, backend = place
    rewards = torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0, 2.0], device=device)
    groups = torch.tensor([7, 7, 7, 7, 7, 3], device=device)
    trajectories = torch.tensor([0, 1, 0, 1, 1, 0], device=device)
    anchors = torch.tensor([5, 5, 6, 8, 6, 5], device=device)

    def call(**options):
        result = step_advantages(rewards, groups, trajectories, anchors, gamma=0.5, backend=backend, **options)
        return [x.tolist() for x in result]

    joint, episode, step, returns = call(mode="mean_norm", step_weight=0.5)
    assert returns == [2.0, 0.0, 4.0, 0.0, 0.0, 2.0]
    assert episode == [2.0, -2.0, 2.0, -2.0, -2.0, 0.0], "over the two trajectories, whose mean is 2"
    assert step == [1.0, -1.0, 2.0, 0.0, -2.0, 0.0], "the start, and anchor 6; anchor 8 and the other task are alone"
    assert joint == [2.5, -2.5, 3.0, -2.0, -3.0, 0.0]

    half = 0.5**0.5
    _, episode, step, _ = call()
    assert episode == pytest.approx([half, -half, half, -half, -half, 0.0], rel=1e-5)
    assert step == pytest.approx([half, -half, half, 0.0, -half, 0.0], rel=1e-5)

    # Over the five rows of the first task the mean is 8/5; its raw singleton keeps its reward.
    _, episode, _, _ = call(mode="mean_norm", rows=True, singleton="raw")
    assert episode == pytest.approx([2.4, -1.6, 2.4, -1.6, -1.6, 2.0], rel=1e-6)
    _, episode, _, _ = call(mode="mean_norm", episode_rewards=torch.tensor([10.0, 1, 9, 9, 9, 9], device=device))
    assert episode == [4.5, -4.5, 4.5, -4.5, -4.5, 0.0], "read at the first turn of the trajectory"


def test_a_penalty_is_its_own_turns_alone(place):
    """It is in no other turn's return, and without variance it stays what it is; over rows it becomes -8.8."""
    device, backend = place
    rewards = torch.zeros(80, device=device)
    rewards[9::10] = 10.0  # eight trajectories of ten turns, all of them won
    groups = torch.zeros(80, dtype=torch.int64, device=device)
    trajectories = torch.arange(80, device=device) // 10
    anchors = torch.arange(80, device=device)
    penalties = torch.zeros(80, device=device)
    penalties[34] = 0.1

    def call(**options):
        return step_advantages(rewards, groups, trajectories, anchors, penalties=penalties, backend=backend, **options)

    ours = call()
    free = step_advantages(rewards, groups, trajectories, anchors, backend=backend)
    assert float(ours.episode[34]) == pytest.approx(-0.1)
    assert (ours.episode.cpu()[torch.arange(80) != 34] == 0).all()
    assert_close("returns", ours.returns, free.returns - penalties, rtol=0, atol=1e-6)
    assert float(call(rows=True).episode[34]) == pytest.approx(-79 / 80**0.5, rel=1e-3)


def test_equal_trajectories_differ_by_exactly_nothing(place):
    """Wherever their turns stand: a residue of the sums, divided by its own deviation, would look like an advantage."""
    device, backend = place
    torch.manual_seed(0)
    dense = torch.rand(7) + 0.1
    # Trajectories 0 and 1 turn about, 2 follows in one piece.
    trajectories = torch.cat([torch.tensor([0, 1]).repeat(7), torch.full((7,), 2)])
    position = torch.cat([torch.arange(7).repeat_interleave(2), torch.arange(7)])
    for mode in ("mean_std_norm", "mean_norm"):
        result = step_advantages(
            dense[position].to(device), torch.zeros(21, dtype=torch.int64, device=device), trajectories.to(device),
            position.to(device), mode=mode, backend=backend,
        )  # fmt: skip
        assert (result.advantages == 0).all()


def test_more_turns_than_a_tile():
    """Groups that are longer than any block of the kernel, and a look back over several of them."""
    kernel = pytest.importorskip("rspo_kernels.backends.triton_impl.steps", reason="needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rewards, *ids = batch(1, 50, groups=2, trajectories=4)
    valid = torch.arange(50) % 7 != 0
    settings = {"gamma": 0.9, "step_weight": 1.0, "mode": "mean_std_norm", "rows": False, "singleton": "zero"}
    inputs = [x.to(device) for x in (rewards, *ids, valid)]
    actual = kernel.step_advantages(*inputs, None, None, *settings.values(), 1e-6, tile=(2, 8))
    expected = reference.step_advantages(rewards.double(), *ids, valid=valid, **settings)
    for a, e in zip(actual, expected, strict=True):
        assert_close("step advantages", a, e, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")  # numpy, in the interpreter
def test_a_number_that_is_not_finite_is_named(place):
    device, backend = place
    rewards, *ids = (x.to(device) for x in batch(3, 6))
    rewards[4] = torch.inf
    where = rf"at position 4 \(group {int(ids[0][4])}, trajectory {int(ids[1][4])}\)"
    with pytest.raises(ValueError, match=f"step_rewards must be finite, got inf {where}"):
        step_advantages(rewards, *ids, backend=backend)
    with pytest.raises(ValueError, match=f"penalties must be finite, got inf {where}"):
        step_advantages(torch.zeros_like(rewards), *ids, penalties=rewards, backend=backend)
    step_advantages(rewards, *ids, valid=torch.arange(6, device=device) != 4, backend=backend)
    unchecked = step_advantages(rewards, *ids, validate=False, backend=backend).advantages
    assert unchecked[ids[0] != ids[0][4]].isfinite().all()


def test_anchor_ids():
    anchors = ["a room", "a hall", "a room", "a room"]
    assert anchor_ids(anchors, [0, 0, 0, 1]).tolist() == [0, 1, 0, 2]
    assert anchor_ids(anchors, torch.tensor([5, 5, 6, 5])).tolist() == [0, 1, 2, 0]
    assert anchor_ids([(1, 2), (1, 2)], ["x", "x"]).tolist() == [0, 0], "anything hashable"
    assert anchor_ids([], []).tolist() == []


def test_similar_anchors_join_the_first_cluster_they_resemble():
    """Compared with a cluster's first member only: the chain below does not pull its ends together."""
    chain = ["aaaaaaaaaa", "aaaaaaaaab", "aaaaaaaabb", "aaaaaaaaab"]
    assert anchor_ids(chain, [0] * 4, similarity=0.9).tolist() == [0, 0, 1, 0]
    assert anchor_ids(chain, [0, 0, 1, 1], similarity=0.9).tolist() == [0, 0, 1, 1]
    assert anchor_ids(chain, [0] * 4, similarity=1.0).tolist() == anchor_ids(chain, [0] * 4).tolist()
    with pytest.raises(TypeError, match="anchors must be strings with similarity, got int"):
        anchor_ids([1, 2], [0, 0], similarity=0.9)
    with pytest.raises(ValueError, match=r"similarity must lie in \(0, 1\] or be None, got 95"):
        anchor_ids(chain, [0] * 4, similarity=95)
    with pytest.raises(ValueError, match="groups must have an entry for each of the 4 anchors, got 2"):
        anchor_ids(chain, [0, 0])


def test_siblings_of_a_branch_node(place):
    """BPO: node 0 branches into three continuations, one of which branches again at node 1."""
    device, backend = place
    returns = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0], device=device)
    nodes = torch.tensor([0, 0, 0, 1, 1], device=device)
    advantages = group_advantages(returns, nodes, baseline="leave_one_out", scale=None, backend=backend)
    assert advantages.tolist() == [0.75, -0.75, 0.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step_rewards": torch.zeros(2, 2)}, ValueError, r"step_rewards must be \[T\], got \[2, 2\]"),
        ({"step_rewards": [0.0]}, TypeError, "step_rewards must be a tensor, got list"),
        ({"groups": torch.zeros(4)}, TypeError, "groups must be int32 or int64, got torch.float32"),
        ({"trajectories": torch.zeros(3).long()}, ValueError, r"trajectories must have the shape of step_rewards, \[4"),
        ({"anchors": ["a"] * 4}, TypeError, "anchors must be a tensor, got list"),
        ({"penalties": torch.zeros(1)}, ValueError, r"penalties must have the shape of step_rewards, \[4\], got \[1"),
        ({"episode_rewards": torch.zeros(4).long()}, TypeError, "episode_rewards must be float32"),
        ({"valid": torch.ones(5)}, ValueError, r"valid must have the shape of step_rewards, \[4\], got \[5\]"),
        ({"gamma": 2}, ValueError, r"gamma must be a number in \[0, 1\], got 2"),
        ({"step_weight": float("nan")}, ValueError, "step_weight must be a finite number, got nan"),
        ({"mode": "std"}, ValueError, "mode must be one of 'mean_std_norm', 'mean_norm', got 'std'"),
        ({"singleton": "one"}, ValueError, "singleton must be one of 'zero', 'raw', got 'one'"),
        ({"eps": 0.0}, ValueError, "eps must be a finite number > 0, got 0.0"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    ids = torch.zeros(4, dtype=torch.int64)
    arguments = {"step_rewards": torch.zeros(4), "groups": ids, "trajectories": ids, "anchors": ids} | change
    with pytest.raises(error, match=message):
        step_advantages(**arguments)
