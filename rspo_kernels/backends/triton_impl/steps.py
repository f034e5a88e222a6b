"""GiGPO's advantages in one launch: discounted returns, the episode level, and the step level of each turn.

    G_t = r_t + γ·G_next - penalty_t       A_t = A_episode + step_weight·A_step
    A_episode: the trajectory's reward against its group      A_step: G_t against the turns with the same anchor

Nothing crosses from one group (task) to another, so a group is one program's work: of the programs, one for each
turn, that of a group's first turn takes the whole group, the others end after a look back. The group's turns may
stand anywhere in the batch; its program first copies them to a stretch of scratch memory of their own, after as many
places as there are turns in groups with lower ids. The levels are then sums over pairs of turns of the group, which
needs no sorting: at 8 trajectories of 50 turns that is less than the launch.

Memory: a few words of scratch a turn; groups·n + Σ (turns of a group)²/ROWS words from cache.

Numerics: float32, statistics and HEADROOM as in advantages.py. Sums along a trajectory double their reach in every
round, so that their rounding depends on the rewards alone and not on where the turns stand: equal turns have equal
returns, whose differences are exactly 0 and not a residue that a small deviation would blow up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .advantages import COLS, ROWS, THREADS, against_group
from .common import HEADROOM, Variant, f32, launch_options, on_device

INPUTS = ("p_rewards", "p_groups", "p_trajectories", "p_anchors", "p_valid", "p_penalties", "p_episode_rewards")

# Rows of the scratch of ids: where a turn stands in the batch, its trajectory and anchor, the first turn of its
# trajectory, whether it counts in the statistics of the episode level, and (twice: from and to) the turn that its
# sums have reached.
MEMBER, TRAJECTORY, ANCHOR, FIRST, COUNTED, NEXT = (tl.constexpr(i) for i in range(6))
ID_ROWS = 7
# Rows of the scratch of numbers: what a turn scores at each level; discounted and plain sums of rewards (twice each).
EPISODE_SCORE, STEP_SCORE, RETURN, TOTAL = (tl.constexpr(i) for i in (0, 1, 2, 4))
NUMBER_ROWS = 6


@triton.jit
def valid_turns(p_valid, o_t, b_inside):
    b_valid = b_inside
    if p_valid is not None:
        b_valid = b_valid & (tl.load(p_valid + o_t, mask=b_inside, other=0) != 0)
    return b_valid


@triton.jit
def leads_its_group(p_groups, p_valid, i_turn, group, COLS: tl.constexpr):
    """1 where no valid turn of the group stands before i_turn; looks back from it, as groups tend to stand together."""
    leads = 1
    end = i_turn
    while (leads == 1) & (end > 0):
        o_j = end - 1 - tl.arange(0, COLS)
        b_valid = valid_turns(p_valid, o_j, o_j >= 0)
        b_other = tl.load(p_groups + o_j, mask=b_valid, other=0).to(tl.int64)
        leads = 1 - tl.max((b_valid & (b_other == group)).to(tl.int32), 0)
        end -= COLS
    return leads


@triton.jit
def gather_group(
    p_rewards, p_groups, p_trajectories, p_anchors, p_valid, p_ids, p_numbers, n, group, COLS: tl.constexpr
):
    """Copy the group's turns to scratch; where they begin there, and how many they are."""
    b_lower = tl.zeros([COLS], tl.int32)
    for start in range(0, n, COLS):
        o_j = start + tl.arange(0, COLS)
        b_valid = valid_turns(p_valid, o_j, o_j < n)
        b_other = tl.load(p_groups + o_j, mask=b_valid, other=0).to(tl.int64)
        b_lower += (b_valid & (b_other < group)).to(tl.int32)
    begin = tl.sum(b_lower, 0)

    size = 0
    for start in range(0, n, COLS):
        o_j = start + tl.arange(0, COLS)
        b_valid = valid_turns(p_valid, o_j, o_j < n)
        b_member = b_valid & (tl.load(p_groups + o_j, mask=b_valid, other=0).to(tl.int64) == group)
        b_one = b_member.to(tl.int32)
        o_scratch = begin + size + tl.cumsum(b_one, 0) - 1
        tl.store(p_ids + MEMBER * n + o_scratch, o_j.to(tl.int64), mask=b_member)
        b_trajectory = tl.load(p_trajectories + o_j, mask=b_member, other=0).to(tl.int64)
        tl.store(p_ids + TRAJECTORY * n + o_scratch, b_trajectory, mask=b_member)
        b_anchor = tl.load(p_anchors + o_j, mask=b_member, other=0).to(tl.int64)
        tl.store(p_ids + ANCHOR * n + o_scratch, b_anchor, mask=b_member)
        b_reward = tl.load(p_rewards + o_j, mask=b_member, other=0.0).to(tl.float32) * HEADROOM
        tl.store(p_numbers + RETURN * n + o_scratch, b_reward, mask=b_member)
        tl.store(p_numbers + TOTAL * n + o_scratch, b_reward, mask=b_member)
        size += tl.sum(b_one, 0)
    return begin, size


@triton.jit
def load_penalty(p_penalties, b_member, b_inside):
    b_penalty = tl.zeros(b_member.shape, tl.float32)
    if p_penalties is not None:
        b_penalty = tl.load(p_penalties + b_member, mask=b_inside, other=0.0).to(tl.float32)
    return b_penalty


@triton.jit
def find_neighbors(p_ids, n, size, PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The first turn of each turn's trajectory, the next one (-1: none), and whether it counts at the episode level."""
    for start_i in range(0, size, ROWS):
        o_i = start_i + tl.arange(0, ROWS)
        b_inside = o_i < size
        b_trajectory = tl.load(p_ids + TRAJECTORY * n + o_i, mask=b_inside, other=0)
        b_first, b_next = o_i, tl.full([ROWS], 2147483647, tl.int32)
        for start_j in range(0, size, COLS):
            o_j = start_j + tl.arange(0, COLS)
            b_other = tl.load(p_ids + TRAJECTORY * n + o_j, mask=o_j < size, other=0)
            b_same = (b_trajectory[:, None] == b_other[None, :]) & (o_j < size)[None, :]
            b_after = b_same & (o_j[None, :] > o_i[:, None])
            b_first = tl.minimum(b_first, tl.min(tl.where(b_same, o_j[None, :], 2147483647), 1))
            b_next = tl.minimum(b_next, tl.min(tl.where(b_after, o_j[None, :], 2147483647), 1))
        tl.store(p_ids + FIRST * n + o_i, b_first.to(tl.int64), mask=b_inside)
        tl.store(p_ids + NEXT * n + o_i, tl.where(b_next < size, b_next, -1).to(tl.int64), mask=b_inside)
        b_counted = tl.full([ROWS], 1, tl.int64) if PER_ROW else (b_first == o_i).to(tl.int64)
        tl.store(p_ids + COUNTED * n + o_i, b_counted, mask=b_inside)


@triton.jit
def add_up(p_ids, p_numbers, n, size, gamma, COLS: tl.constexpr):
    """Discounted and plain sums of the rewards from each turn on, and in which of their two rows they end up."""
    now = 0
    decay = gamma
    unfinished = 1
    while unfinished == 1:
        unfinished = 0
        p_next, p_next_to = p_ids + (NEXT + now) * n, p_ids + (NEXT + 1 - now) * n
        p_return, p_return_to = p_numbers + (RETURN + now) * n, p_numbers + (RETURN + 1 - now) * n
        p_total, p_total_to = p_numbers + (TOTAL + now) * n, p_numbers + (TOTAL + 1 - now) * n
        for start in range(0, size, COLS):
            o_i = start + tl.arange(0, COLS)
            b_inside = o_i < size
            b_next = tl.load(p_next + o_i, mask=b_inside, other=-1)
            b_reach = b_next >= 0
            b_further = tl.load(p_next + b_next, mask=b_reach, other=-1)
            b_return = tl.load(p_return + o_i, mask=b_inside, other=0.0)
            b_return += decay * tl.load(p_return + b_next, mask=b_reach, other=0.0)
            b_total = tl.load(p_total + o_i, mask=b_inside, other=0.0)
            b_total += tl.load(p_total + b_next, mask=b_reach, other=0.0)
            tl.store(p_next_to + o_i, b_further, mask=b_inside)
            tl.store(p_return_to + o_i, b_return, mask=b_inside)
            tl.store(p_total_to + o_i, b_total, mask=b_inside)
            unfinished = tl.maximum(unfinished, tl.max((b_further >= 0).to(tl.int32), 0))
        tl.debug_barrier()
        now = 1 - now
        decay *= decay
    return now


@triton.jit
def score(
    p_ids, p_numbers, p_penalties, p_episode_rewards, p_returns, n, size, now, PER_ROW: tl.constexpr, COLS: tl.constexpr
):
    """What each turn scores at both levels."""
    for start in range(0, size, COLS):
        o_i = start + tl.arange(0, COLS)
        b_inside = o_i < size
        b_member = tl.load(p_ids + MEMBER * n + o_i, mask=b_inside, other=0)
        b_first = tl.load(p_ids + FIRST * n + o_i, mask=b_inside, other=0)
        b_penalty = load_penalty(p_penalties, b_member, b_inside) * HEADROOM
        if p_episode_rewards is not None:
            b_start = tl.load(p_ids + MEMBER * n + b_first, mask=b_inside, other=0)
            b_total = tl.load(p_episode_rewards + b_start, mask=b_inside, other=0.0).to(tl.float32) * HEADROOM
        else:
            b_total = tl.load(p_numbers + (TOTAL + now) * n + b_first, mask=b_inside, other=0.0)
        if PER_ROW:
            b_total -= b_penalty
        b_return = tl.load(p_numbers + (RETURN + now) * n + o_i, mask=b_inside, other=0.0) - b_penalty
        tl.store(p_numbers + EPISODE_SCORE * n + o_i, b_total, mask=b_inside)
        tl.store(p_numbers + STEP_SCORE * n + o_i, b_return, mask=b_inside)
        tl.store(p_returns + b_member, b_return * (1.0 / HEADROOM), mask=b_inside)


@triton.jit
def normalize(
    p_ids, p_numbers, p_penalties, p_joint, p_episode, p_step, n, size, step_weight, eps,
    STD: tl.constexpr, PER_ROW: tl.constexpr, RAW_SINGLETON: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Both levels from what the turns score, which is in units of 1/HEADROOM; without STD so are they until stored."""
    unit: tl.constexpr = 1.0 if STD else HEADROOM
    eps *= HEADROOM
    for start in range(0, size, ROWS):
        o_i = start + tl.arange(0, ROWS)
        b_inside = o_i < size
        b_member = tl.load(p_ids + MEMBER * n + o_i, mask=b_inside, other=0)

        b_score = tl.load(p_numbers + EPISODE_SCORE * n + o_i, mask=b_inside, other=0.0)
        b_counted = tl.full([ROWS], 1, tl.int64)
        b_episode, b_size = against_group(
            p_numbers + EPISODE_SCORE * n, p_ids + COUNTED * n, b_score, b_counted, b_inside, size, eps,
            1.0, STD, ROWS, COLS,
        )  # fmt: skip
        b_alone = b_score * (unit / HEADROOM) if RAW_SINGLETON else tl.zeros([ROWS], tl.float32)
        b_episode = tl.where(b_size == 1.0, b_alone, b_episode)
        if not PER_ROW:
            b_episode -= load_penalty(p_penalties, b_member, b_inside) * unit

        b_anchor = tl.load(p_ids + ANCHOR * n + o_i, mask=b_inside, other=0)
        b_score = tl.load(p_numbers + STEP_SCORE * n + o_i, mask=b_inside, other=0.0)
        b_step, b_size = against_group(
            p_numbers + STEP_SCORE * n, p_ids + ANCHOR * n, b_score, b_anchor, b_inside, size, eps,
            1.0, STD, ROWS, COLS,
        )  # fmt: skip
        b_step = tl.where(b_size == 1.0, 0.0, b_step)
        tl.store(p_episode + b_member, b_episode * (1.0 / unit), mask=b_inside)
        tl.store(p_step + b_member, b_step * (1.0 / unit), mask=b_inside)
        tl.store(p_joint + b_member, (b_episode + step_weight * b_step) * (1.0 / unit), mask=b_inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=INPUTS)
def step_advantages_kernel(
    p_rewards, p_groups, p_trajectories, p_anchors, p_valid, p_penalties, p_episode_rewards,
    p_joint, p_episode, p_step, p_returns, p_ids, p_numbers,
    n, gamma, step_weight, eps,
    STD: tl.constexpr, PER_ROW: tl.constexpr, RAW_SINGLETON: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    i_turn = tl.program_id(0)
    valid = 1
    if p_valid is not None:
        valid = (tl.load(p_valid + i_turn) != 0).to(tl.int32)
        if valid == 0:
            tl.store(p_joint + i_turn, 0.0)
            tl.store(p_episode + i_turn, 0.0)
            tl.store(p_step + i_turn, 0.0)
            tl.store(p_returns + i_turn, 0.0)
    group = tl.load(p_groups + i_turn).to(tl.int64)
    if valid * leads_its_group(p_groups, p_valid, i_turn, group, COLS) == 1:
        begin, size = gather_group(
            p_rewards, p_groups, p_trajectories, p_anchors, p_valid, p_ids, p_numbers, n, group, COLS
        )
        p_ids += begin
        p_numbers += begin
        # Each barrier: what some threads have stored, others are about to load.
        tl.debug_barrier()
        find_neighbors(p_ids, n, size, PER_ROW, ROWS, COLS)
        tl.debug_barrier()
        now = add_up(p_ids, p_numbers, n, size, f32(gamma), COLS)
        score(p_ids, p_numbers, p_penalties, p_episode_rewards, p_returns, n, size, now, PER_ROW, COLS)
        tl.debug_barrier()
        normalize(
            p_ids, p_numbers, p_penalties, p_joint, p_episode, p_step, n, size, f32(step_weight), f32(eps),
            STD, PER_ROW, RAW_SINGLETON, ROWS, COLS,
        )  # fmt: skip


def step_advantages(
    step_rewards: Tensor,
    groups: Tensor,
    trajectories: Tensor,
    anchors: Tensor,
    valid: Tensor | None,
    penalties: Tensor | None,
    episode_rewards: Tensor | None,
    gamma: float,
    step_weight: float,
    mode: str,
    rows: bool,
    singleton: str,
    eps: float,
    *,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All inputs [T] -> joint, episode and step advantages, discounted returns, float32 [T]."""
    n = step_rewards.numel()
    joint, episode, step, returns = (step_rewards.new_empty(n, dtype=torch.float32) for _ in range(4))
    if n == 0:
        return joint, episode, step, returns
    inputs = (step_rewards, groups, trajectories, anchors, valid, penalties, episode_rewards)
    ids = groups.new_empty(ID_ROWS, n, dtype=torch.int64)
    numbers = joint.new_empty(NUMBER_ROWS, n)
    tile_rows, tile_cols = tile or (ROWS, COLS)
    with on_device(step_rewards):
        step_advantages_kernel[(n,)](
            *(None if x is None else x.contiguous() for x in inputs), joint, episode, step, returns, ids, numbers,
            n, float(gamma), float(step_weight), float(eps),
            STD=mode == "mean_std_norm", PER_ROW=rows, RAW_SINGLETON=singleton == "raw",
            ROWS=tile_rows, COLS=tile_cols, **launch_options(THREADS),
        )  # fmt: skip
    return joint, episode, step, returns


def variants() -> Iterator[Variant]:
    """For compile_check: the least and the most that it computes."""
    outputs = {name: "*fp32" for name in ("p_joint", "p_episode", "p_step", "p_returns", "p_numbers")}
    special = {"p_groups": "*i64", "p_trajectories": "*i64", "p_anchors": "*i64", "p_valid": "*i1"}
    fixed = outputs | {"p_ids": "*i64", "n": "i32", "gamma": "fp32", "step_weight": "fp32", "eps": "fp32"}
    for name, given, full in (("mean_norm", INPUTS[:4], False), ("full", INPUTS, True)):
        types = fixed | {n: special.get(n, "*fp32") for n in given}
        options = {"STD": full, "PER_ROW": full, "RAW_SINGLETON": full, "ROWS": ROWS, "COLS": COLS}
        yield Variant(
            step_advantages_kernel, name, types, dict.fromkeys(n for n in INPUTS if n not in given) | options, THREADS
        )
