"""Layouts and packing: what the model is trained on is what it read, and neither padding nor packing is seen by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rspo_toys import ParityEnv, copies, make_trajectory, small_config, small_policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

from rspo.algorithm.rollout import rollout
from rspo.algorithm.warmup import demonstrations
from rspo.config import ConfigError, RolloutConfig
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.layouts import make_layout
from rspo.data.texts import Texts
from rspo.data.trajectory import Trajectory
from rspo.engines import TransformersEngine
from rspo.envs import make_env
from rspo.envs.base import BatchedEnv
from rspo.envs.household import HouseholdEnv
from rspo.models.policy import Policy, score

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def sampled(
    policy: Policy, env: BatchedEnv, layout: str, tasks: int = 4, texts: Texts | None = None
) -> list[Trajectory]:
    config = RolloutConfig(max_response_tokens=3, max_prompt_tokens=400)
    engine = TransformersEngine(policy, config, torch.Generator().manual_seed(0))
    chosen = [env.tasks()[i] for i in range(tasks)]
    made = make_layout(layout, texts or policy, env)
    return rollout(env, engine, made, chosen, range(tasks), group_size=2, history_length=2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy()


@pytest.fixture(scope="module")
def conversations(policy: Policy) -> list[Trajectory]:
    return sampled(policy, ParityEnv(), "conversation")


def test_a_conversation_grows_by_response_and_observation(policy: Policy, conversations: list[Trajectory]) -> None:
    assert max(map(len, conversations)) >= 3
    for trajectory in conversations:
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            said = np.concatenate([before.prompt_ids, before.response_ids])
            assert turn.prompt_ids[: len(said)].tolist() == said.tolist()
            assert policy.decode([turn.prompt_ids[len(said) :]])[0] in ("ok", "ok failed")
        if trajectory.truncated:
            said_in_all = len(trajectory.turns[-1].prompt_ids) + len(trajectory.turns[-1].response_ids)
            assert trajectory.final_prompt_ids is not None
            assert len(trajectory.final_prompt_ids) > said_in_all


def test_a_conversation_is_one_row_and_its_logprobs_are_those_of_the_rollout(
    policy: Policy, conversations: list[Trajectory]
) -> None:
    batch = Batch.from_trajectories(conversations, "conversation")
    assert batch.num_rows == len(conversations)
    assert len(batch.turn_lengths) == sum(map(len, conversations))
    assert batch.num_tokens == sum(t.num_tokens for t in conversations)
    torch.testing.assert_close(score(policy, batch, 1.0, 64), batch.behavior_logp, atol=1e-4, rtol=0)


def test_both_layouts_train_on_the_same_tokens(conversations: list[Trajectory]) -> None:
    """Per turn, a conversation's turns are rows of their own with the same responses, log-probs and advantages."""
    for i, trajectory in enumerate(conversations):
        trajectory.advantages = np.arange(len(trajectory), dtype=np.float32) + i
    one, many = (Batch.from_trajectories(conversations, layout) for layout in ("conversation", "per_turn"))
    assert many.num_rows == len(many.turn_lengths) > one.num_rows
    for name in ("targets", "behavior_logp", "advantages", "turn_lengths", "turn_index", "turn_trajectory"):
        assert torch.equal(getattr(one, name), getattr(many, name)), name


def test_prompts_made_anew_are_no_conversation(policy: Policy) -> None:
    trajectories = sampled(policy, ParityEnv(), "per_turn")
    with pytest.raises(ValueError, match=r"prompt of turn 1 of trajectory \d of group \d .* conversation layout"):
        Batch.from_trajectories(trajectories, "conversation")


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
def test_selecting_rows_selects_their_turns_and_tokens(conversations: list[Trajectory], layout: str) -> None:
    batch = Batch.from_trajectories(conversations, layout)
    rows = torch.tensor([5, 0, 3])
    part = batch.select(rows)
    tokens = torch.cat([(batch.token_row == row).nonzero().squeeze(-1) for row in rows])
    assert part.targets.tolist() == batch.targets[tokens].tolist()
    assert part.row_lengths.tolist() == batch.row_lengths[rows].tolist()
    assert part.input_ids.shape[1] == int(part.row_lengths.max())
    turns = torch.cat([(batch.turn_row == row).nonzero().squeeze(-1) for row in rows])
    assert part.turn_index.tolist() == batch.turn_index[turns].tolist()
    for token in range(part.num_tokens):
        row, column = int(part.token_row[token]), int(part.token_column[token])
        assert part.input_ids[row, column + 1] == part.targets[token]
    assert part.token_turn.tolist() == sorted(part.token_turn.tolist())
    assert part.segments().num_sequences == 3


def test_a_rows_last_token_ends_its_trajectory(conversations: list[Trajectory]) -> None:
    for layout in ("per_turn", "conversation"):
        batch = Batch.from_trajectories(conversations, layout)
        counts = np.cumsum([t.num_tokens for t in conversations]) - 1
        assert batch.last_tokens([0, 2, 5]).tolist() == counts[[0, 2, 5]].tolist()


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_do_not_see_each_other(conversations: list[Trajectory], layout: str, attention: str) -> None:
    padded = small_policy()
    padded.model.set_attn_implementation(attention)
    packed = Policy(padded.model, padded.tokenizer, packs=True)
    batch = Batch.from_trajectories(conversations, layout)
    assert len(set(batch.row_lengths.tolist())) > 2, "rows must differ in length"
    gradients = []
    for policy in (padded, packed):
        logp, entropy = policy.logprobs(batch, 1.0)
        (gradient,) = torch.autograd.grad((logp * torch.linspace(1, 2, len(logp))).sum() + entropy.sum(),
                                          policy.model.get_input_embeddings().weight)  # fmt: skip
        gradients.append((logp.detach(), gradient))
    torch.testing.assert_close(gradients[1][0], gradients[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[1][1], gradients[0][1], atol=1e-4, rtol=1e-4)


def test_packing_works_for_models_with_windows_and_caps() -> None:
    """Gemma 2: a sliding window in every other layer, and capped logits, so that the whole model runs."""
    plain = small_policy()
    config = Gemma2Config(
        vocab_size=len(plain.tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config)
    model.set_attn_implementation("eager")
    batch = Batch.from_trajectories([make_trajectory(0, i, turns=4 + i) for i in range(3)])
    with torch.no_grad():
        padded, packed = (Policy(model, plain.tokenizer, packs).logprobs(batch, 1.0)[0] for packs in (False, True))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_packed_micro_batches_count_real_tokens_only() -> None:
    batch = Batch.from_trajectories([make_trajectory(0, i, turns=3) for i in range(6)])
    assert int(batch.row_lengths.max()) > int(batch.row_lengths.min())
    for packed in (False, True):
        pieces = batch.micro_batches(20, packed)
        assert sorted(torch.cat(pieces).tolist()) == list(range(batch.num_rows))
        for piece in pieces:
            lengths = batch.row_lengths[piece]
            size = int(lengths.sum()) if packed else len(piece) * int(lengths.max())
            assert size <= 20
    assert len(batch.micro_batches(20, packed=True)) <= len(batch.micro_batches(20))


def chatting(policy: Policy) -> Policy:
    """A copy whose tokenizer has a chat template that closes every message with the end-of-sequence token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=policy.tokenizer._tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return Policy(policy.model, tokenizer)


def test_chat_templates_close_a_response_once(policy: Policy) -> None:
    """Whether or not the model wrote the end of its message, the conversation goes on with exactly one."""
    chat = chatting(policy)
    (eos,) = chat.eos_token_ids
    (opening,), (reply,) = chat.encode(["pick apple"]), chat.encode_replies(["ok hall"])
    assert reply[0] == eos
    layout = make_layout("conversation", chat, ParityEnv())
    words = chat.encode_replies(["go table"])[0]
    word = int(words[2])

    def next_prompt(response: list[int]) -> list[int]:
        context = _context("ok hall")
        return layout.prompts([context], [(opening, np.array(response, dtype=np.int64))])[0].tolist()

    cut, ended = next_prompt([word]), next_prompt([word, eos])
    assert cut == ended
    assert cut == [*opening.tolist(), word, *reply.tolist()]
    # Opening, response and reply are together what the template makes of the whole conversation.
    messages = [("user", "pick apple"), ("assistant", chat.decode([np.array([word])])[0]), ("user", "ok hall")]
    whole = chat.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], add_generation_prompt=True, tokenize=False
    )
    assert chat.tokenizer(whole, add_special_tokens=False)["input_ids"] == cut


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
def test_a_layout_needs_no_model(policy: Policy, layout: str) -> None:
    chat = chatting(policy)
    whole = sampled(chat, ParityEnv(), layout)
    without = sampled(chat, ParityEnv(), layout, texts=Texts(chat.tokenizer))
    read = [
        [turn.prompt_ids.tolist() for trajectory in played for turn in trajectory.turns] for played in (whole, without)
    ]
    assert read[0] == read[1]


def test_white_space_before_the_end_of_a_message_is_no_second_end(policy: Policy) -> None:
    """As in Llama 2's template, where the end is a space away from the response: a byte-level tokenizer sees it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(["<pad>", "<eos>", *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = Policy(policy.model, tokenizer)
    layout = make_layout("conversation", chat, ParityEnv())
    (opening,), (eos,) = chat.encode(["pick"]), chat.eos_token_ids
    said = chat.encode_responses(["go"])[0]

    def next_prompt(response: list[int]) -> str:
        before = (opening, np.array(response, dtype=np.int64))
        return tokenizer.decode(layout.prompts([_context("ok")], [before])[0])

    assert next_prompt([*said]) == "<user> pick <eos> <assistant> go <eos> <user> ok <eos> <assistant> "
    assert next_prompt([*said, eos]) == "<user> pick <eos> <assistant> go<eos> <user> ok <eos> <assistant> "


def test_a_template_that_drops_responses_is_refused(policy: Policy) -> None:
    """Otherwise the conversation would go on without the reply."""
    chat = chatting(policy)
    chat.tokenizer.chat_template = CHAT_TEMPLATE.replace("for message in messages", "for message in messages[-1:]")
    with pytest.raises(ConfigError, match=r"chat template of .* must repeat earlier responses as they are"):
        chat.encode_replies(["ok hall"])


def test_responses_must_have_tokens_and_a_logprob_for_each() -> None:
    """As of an engine of a user's own: everything after the turn would be out of step."""
    for tokens, logps in ((0, 0), (2, 1)):
        made = [make_trajectory(0, i) for i in range(2)]
        made[1].turns[1].response_ids = np.arange(3, 3 + tokens)
        made[1].turns[1].behavior_logp = np.zeros(logps, dtype=np.float32)
        said = rf"turn 1 of trajectory 1 of group 0 .* got {tokens} tokens and {logps} log-probs"
        with pytest.raises(ValueError, match=said):
            Batch.from_trajectories(made)


def _context(observation: str):
    from rspo.envs.base import PromptContext

    return PromptContext(task="pick", history=(), observation=observation, admissible_actions=(), turn=1)


def test_household_conversations(policy: Policy) -> None:
    """Household speaks in conversations too, and the chat style offers its actions in every reply."""
    trajectories = sampled(policy, make_env("household"), "conversation", tasks=2)
    batch = Batch.from_trajectories(trajectories, "conversation")
    torch.testing.assert_close(score(policy, batch, 1.0, 4096), batch.behavior_logp, atol=1e-4, rtol=0)
    env = HouseholdEnv(prompt_style="chat")
    env.reset(env.tasks()[:1], [0])
    reply = env.render_reply(replace(_context("You are at the sink."), admissible_actions=("go table",)))
    assert reply.startswith("Observation: You are at the sink.")
    assert "go table" in reply
    assert "<action>" in reply


def test_demonstrations_follow_the_layout(policy: Policy) -> None:
    config = apply_flags(small_config(), ["env.layout=conversation", "warmup.trajectories=3"])
    env = make_env("household")
    assert isinstance(env, HouseholdEnv)
    batch = Batch.from_trajectories(demonstrations(env, policy, config), "conversation")
    assert batch.num_rows == 3


def test_copies_are_batched_like_their_originals(conversations: list[Trajectory]) -> None:
    first, second = (Batch.from_trajectories(t, "conversation") for t in (conversations, copies(conversations)))
    assert torch.equal(first.input_ids, second.input_ids)
