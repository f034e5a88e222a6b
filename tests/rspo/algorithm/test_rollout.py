"""Rollouts and the engine: log-probs that training agrees with, padding that changes nothing, no wasted turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import ParityEnv, small_policy
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2ForCausalLM

from rspo.algorithm.rollout import rollout
from rspo.config import RolloutConfig
from rspo.data.batch import Batch
from rspo.data.layouts import PerTurn
from rspo.data.trajectory import Trajectory, trajectory_from_json, trajectory_to_json
from rspo.engines import Engine, Generation, TransformersEngine
from rspo.envs import BatchedEnv, make_env
from rspo.models.heads import Head
from rspo.models.policy import Policy, score

SEEDS = range(8)


def engine_of(policy: Policy, seed: int = 0, **settings: object) -> TransformersEngine:
    config = RolloutConfig(**{"max_response_tokens": 3, **settings})  # type: ignore[arg-type]
    return TransformersEngine(policy, config, torch.Generator().manual_seed(seed))


def play(env: BatchedEnv, engine: Engine, policy: Policy, *episodes: Any, **settings: Any) -> list[Trajectory]:
    return rollout(env, engine, PerTurn(policy, env), *episodes, **settings)


def parity_rollout(policy: Policy, **settings: object) -> list[Trajectory]:
    env = ParityEnv()
    tasks = [env.tasks()[i % 6] for i in SEEDS]
    return play(env, engine_of(policy, **settings), policy, tasks, SEEDS, group_size=2, history_length=2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy()


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_recorded_logprobs_are_those_of_the_training_forward(policy: Policy, temperature: float) -> None:
    trajectories = parity_rollout(policy, temperature=temperature)
    batch = Batch.from_trajectories(trajectories)
    assert len({len(turn.prompt_ids) for t in trajectories for turn in t.turns}) > 3, "prompts must need padding"
    scored = score(policy, batch, temperature, max_tokens=64)
    torch.testing.assert_close(scored, batch.behavior_logp, atol=1e-4, rtol=0)


def test_household_logprobs_agree_too(policy: Policy) -> None:
    env = make_env("household")
    engine = engine_of(policy, max_response_tokens=2)
    trajectories = play(env, engine, policy, env.tasks()[:4], range(4), group_size=2, history_length=2)
    batch = Batch.from_trajectories(trajectories)
    scored = score(policy, batch, 1.0, max_tokens=4096)
    torch.testing.assert_close(scored, batch.behavior_logp, atol=1e-4, rtol=0)


def test_left_padding_does_not_change_logprobs(policy: Policy) -> None:
    """The short prompt gets the same next-token distribution alone and beside a longer one."""
    short, long = "pick apple table", "heat egg desk ok hall none none none none go fridge"

    def next_logits(prompts: list[str]) -> torch.Tensor:
        engine = engine_of(policy)
        seen: list[torch.Tensor] = []
        sample = engine._sample
        engine._sample = lambda logits: (seen.append(logits), sample(logits))[1]  # type: ignore[method-assign]
        engine.generate(policy.encode(prompts))
        return seen[0]

    together, alone = next_logits([long, short]), next_logits([short])
    torch.testing.assert_close(together[1], alone[0], atol=1e-5, rtol=1e-5)


def test_models_that_cap_their_logits_are_scored_with_the_cap() -> None:
    """A cap on logits near 0 changes them by little, and must be noticed all the same."""
    plain = small_policy()
    words = len(plain.tokenizer)
    config = Gemma2Config(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=2.0,
    )
    capped = Policy(Gemma2ForCausalLM(config), plain.tokenizer)
    batch = Batch.from_prompts([np.arange(3, 8), np.arange(5, 7)])
    for policy in (capped, plain):
        with torch.no_grad():
            expected = policy.model(batch.input_ids).logits[batch.token_row, batch.token_column]
            seen, hidden = policy.logits_and_hidden(batch)
            torch.testing.assert_close(seen, expected)
            assert hidden is not None
            logits = policy.model.get_output_embeddings()(hidden)
        torch.testing.assert_close(2 * torch.tanh(logits / 2) if policy is capped else logits, expected)
    for policy, softcap in ((capped, 2.0), (plain, None)):
        assert policy.module.head == Head(policy.model.get_output_embeddings(), softcap)


def test_equal_rows_are_computed_once_with_the_right_gradient(policy: Policy) -> None:
    batch = Batch.from_prompts([np.array([4, 5, 6]), np.array([7, 8]), np.array([4, 5, 6]), np.array([4, 5, 6])])
    upstream = torch.randn(4, len(policy.tokenizer))
    weight = policy.model.get_input_embeddings().weight
    expected = policy.model(batch.input_ids).logits[batch.token_row, batch.token_column]
    seen, _ = policy.logits_and_hidden(batch)
    torch.testing.assert_close(seen, expected)
    (grad,) = torch.autograd.grad((seen * upstream).sum(), weight)
    (grad_expected,) = torch.autograd.grad((expected * upstream).sum(), weight)
    # The two add up in different orders; a row counted once too little would be off by its whole share.
    size = float(grad_expected.abs().max())
    torch.testing.assert_close(grad, grad_expected, rtol=1e-4, atol=1e-5 * size)


def test_responses_end_at_the_end_of_sequence_token(policy: Policy) -> None:
    (eos,) = policy.eos_token_ids
    generations = engine_of(policy, max_response_tokens=40).generate(policy.encode(["pick apple table"] * 64))
    lengths = [len(g.response_ids) for g in generations]
    assert min(lengths) < 40, "some response should have ended"
    for generation in generations:
        inner, last = generation.response_ids[:-1], generation.response_ids[-1]
        assert eos not in inner
        assert last == eos or len(generation.response_ids) == 40
        assert np.isfinite(generation.logp).all()


def test_sampling_follows_the_seed(policy: Policy) -> None:
    first, again = ([t.turns[0].response_ids.tolist() for t in parity_rollout(policy)] for _ in range(2))
    assert first == again


class CountingEngine:
    """Answers everything with one word and counts the prompts of each turn."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.batches: list[int] = []

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        self.batches.append(len(prompts))
        ids = np.array([1], dtype=np.int64)
        return [Generation(self.word, ids, np.zeros(1, dtype=np.float32)) for _ in prompts]


def test_finished_episodes_leave_the_batch_and_add_no_turn(policy: Policy) -> None:
    env, engine = ParityEnv(), CountingEngine("pick")
    trajectories = play(env, engine, policy, ["pick"] * 4, [0, 1, 2, 3], group_size=2, history_length=1)
    assert [len(t) for t in trajectories] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert engine.batches == [8, 6, 4, 2]
    assert all(t.won and not t.truncated and t.outcome == 10 for t in trajectories)
    assert [(t.group, t.index) for t in trajectories[:3]] == [(0, 0), (0, 1), (1, 0)]
    assert [turn.anchor for turn in trajectories[-1].turns] == ["turn 0", "turn 1", "turn 2", "turn 3"]


def test_turn_limit_is_truncation_and_keeps_what_would_have_been_read_next(policy: Policy) -> None:
    trajectories = play(ParityEnv(), CountingEngine("put"), policy, ["pick"], [0], group_size=2, history_length=1)
    for trajectory in trajectories:
        assert trajectory.truncated
        assert not trajectory.won
        assert trajectory.final_prompt_ids is not None
        # Task, the first observation, and the one that came with the end.
        assert policy.decode([trajectory.final_prompt_ids]) == ["pick ok ok failed"]
    (won,) = play(ParityEnv(), CountingEngine("pick"), policy, ["pick"], [0], group_size=1, history_length=1)
    assert won.final_prompt_ids is None


def test_history_keeps_the_last_pairs(policy: Policy) -> None:
    prompts: list[np.ndarray] = []

    class Recorder(CountingEngine):
        def generate(self, batch: Sequence[np.ndarray]) -> list[Generation]:
            prompts.extend(batch)
            return super().generate(batch)

    play(ParityEnv(), Recorder("go"), policy, ["pick"], [3], group_size=1, history_length=2)
    assert [len(prompt) for prompt in prompts] == [2, 4, 5, 6]


def test_too_long_prompts_are_an_error(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"3 tokens, rollout\.max_prompt_tokens=2"):
        engine_of(policy, max_prompt_tokens=2).generate(policy.encode(["pick apple table"]))


def test_trajectories_survive_json_exactly(policy: Policy) -> None:
    (trajectory, *_) = parity_rollout(policy)
    trajectory.advantages = np.array([0.1] * len(trajectory), dtype=np.float32)
    restored = trajectory_from_json(trajectory_to_json(trajectory))
    assert restored.advantages is not None
    assert restored.advantages.tobytes() == trajectory.advantages.tobytes()
    for before, after in zip(trajectory.turns, restored.turns, strict=True):
        assert before.behavior_logp.tobytes() == after.behavior_logp.tobytes()
        assert (before.anchor, before.response_ids.tolist()) == (after.anchor, after.response_ids.tolist())


def test_batch_rows_and_selection() -> None:
    from rspo_toys import make_trajectory

    trajectories = [make_trajectory(0, i, turns=2 + i, advantage=float(i)) for i in range(3)]
    batch = Batch.from_trajectories(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
    assert (batch.num_rows, batch.num_tokens) == (9, sum(len(turn.response_ids) for turn in turns))
    assert batch.targets.tolist() == [int(x) for turn in turns for x in turn.response_ids]
    rows = torch.tensor([1, 4, 8])
    part = batch.select(rows)
    assert part.targets.tolist() == [int(x) for i in rows for x in turns[i].response_ids]
    assert part.input_ids.shape[1] == int(batch.row_lengths[rows].max())
    for token in range(part.num_tokens):
        row, column = int(part.token_row[token]), int(part.token_column[token])
        assert part.input_ids[row, column + 1] == part.targets[token]
    assert part.turn_index.tolist() == [1, 2, 3]
    pieces = batch.micro_batches(max_tokens=12)
    assert sorted(torch.cat(pieces).tolist()) == list(range(9))
    assert all(len(p) == 1 or len(p) * int(batch.row_lengths[p].max()) <= 12 for p in pieces)


def test_prompts_are_encoded_as_the_tokenizer_encodes_them() -> None:
    """Also where the tokenizer adds tokens of its own, and after someone made it cut and pad."""
    policy = small_policy()
    backend = policy.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    prompts = ["go kitchen", "take", "go kitchen", "no such words here"]
    expected = policy.tokenizer(prompts)["input_ids"]
    assert expected[0][0] == 1
    backend.enable_truncation(2)
    backend.enable_padding()
    assert [row.tolist() for row in policy.encode(prompts)] == expected
    assert policy.tokenizer(prompts)["input_ids"] == expected
