"""Keyword arguments of chat templates: which are taken, and that every prompt is made with them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_servers import StandIn
from rspo_toys import ParityEnv, small_config
from transformers import PreTrainedTokenizerBase

from rspo import RSPOTrainer
from rspo.cli import main
from rspo.config import RESERVED_TEMPLATE_NAMES, Config, ConfigError
from rspo.config.files import apply_flags, load_config, save_config
from rspo.data.chat_templates import template_names
from rspo.data.layouts import make_layout
from rspo.data.texts import Texts
from rspo.engines import open_backend
from rspo.envs.base import PromptContext
from rspo.models.policy import Policy
from rspo.models.tiny import piece_tokenizer
from rspo.models.tiny import small_policy as fresh_policy

THINKING = (
    "{#- nobody reads verbosity -#}{%- set tone = 'plain' -%}{{- tone and '' -}}"
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}<eos>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>"
    "{%- if enable_thinking is defined and enable_thinking is false -%}<think></think>{%- endif -%}{%- endif -%}"
)
"""As Qwen3's: a response that must not think begins with an empty thought."""
NO_THOUGHT = {"enable_thinking": False}


def thinker(template: str | None = THINKING, **kwargs: Any) -> Policy:
    """A fresh policy with a tokenizer of pieces; kwargs: its template's."""
    fresh = fresh_policy(piece_tokenizer(["go fridge take apple"], 280), 0, Config().policy, width=32, max_length=4096)
    fresh.tokenizer.chat_template = template
    return Policy(fresh.model, fresh.tokenizer, chat_template_kwargs=kwargs)


def shown(policy: Policy, ids: np.ndarray) -> str:
    return str(policy.tokenizer.decode(ids.tolist()))


def test_names_that_are_taken_are_all_of_transformers() -> None:
    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    assert taken <= set(RESERVED_TEMPLATE_NAMES)


def test_names_that_a_template_reads() -> None:
    assert template_names(THINKING) == {"enable_thinking"}
    assert template_names("{% if not day is defined %}{% set day = 'Monday' %}{% endif %}{{ day }}") == {"day"}
    loop = (
        "{% for m in messages %}{%- generation -%}{{ m.content }}{{ style }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert template_names(loop) == {"style"}
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        template_names("{% if %}")


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
def test_every_prompt_is_made_with_them(layout: str) -> None:
    policy = thinker(**NO_THOUGHT).copy()  # a copy, as agent B is one
    made = make_layout(layout, policy, ParityEnv())
    context = PromptContext(task="pick", history=(), observation="hall", admissible_actions=(), turn=1)
    (first,) = made.prompts([context], [None])
    assert shown(policy, first).endswith("<eos><assistant><think></think>")
    (said,) = policy.encode_responses(["go"])
    (second,) = made.prompts([context], [(first, said)])
    assert shown(policy, second).endswith("<eos><assistant><think></think>")
    if layout == "conversation":
        assert second[: len(first)].tolist() == first.tolist()


def test_without_them_a_template_does_as_it_does() -> None:
    policy = thinker()
    assert shown(policy, policy.encode(["go"])[0]) == "<user>go<eos><assistant>"
    thinking = thinker(enable_thinking=True)
    assert np.array_equal(thinking.encode(["go"])[0], policy.encode(["go"])[0])


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (
            THINKING,
            {"enable_thoughts": False},
            r"does not read 'enable_thoughts', .* may be given is 'enable_thinking'",
        ),
        (THINKING, {"verbosity": 1}, "does not read 'verbosity'"),
        (THINKING, {"tone": "rude"}, "does not read 'tone'"),
        (THINKING, {"think": True}, "does not read 'think'"),
        (None, NO_THOUGHT, "needs a chat template, and the tokenizer .* has none"),
    ],
)
def test_what_no_template_reads_is_refused(template: str | None, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.chat_template_kwargs.* {message}"):
        thinker(template, **kwargs)


def test_texts_without_a_template_take_none() -> None:
    with pytest.raises(ConfigError, match=r"needs prompts in a chat template, got policy\.chat='off'"):
        Texts(thinker().tokenizer, chat=False, chat_template_kwargs=NO_THOUGHT)


def test_settings(tmp_path: Path) -> None:
    config = apply_flags(Config(), ["policy.chat_template_kwargs.enable_thinking=false"])
    assert config.policy.chat_template_kwargs == NO_THOUGHT
    more = apply_flags(config, ["policy.chat_template_kwargs.tools_in_user_message=true"])
    assert more.policy.chat_template_kwargs == {**NO_THOUGHT, "tools_in_user_message": True}
    save_config(more, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == more
    (tmp_path / "c.yaml").write_text("policy:\n  chat_template_kwargs: {enable_thinking: false}\n")
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("={tokenize: true}", r"\.tokenize cannot be set"),
        (".add_generation_prompt=false", r"\.add_generation_prompt cannot be set"),
        (".messages=[]", r"\.messages cannot be set"),
        ("={1: 2}", r": 1 cannot be the name of an argument"),
        (".day=2026-01-01", r"\.day must be a plain value"),
        (".heat=.nan", r"\.heat must be a plain value"),
        ("=no", " must be of type dict"),
    ],
)
def test_settings_that_cannot_be_are_refused(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.chat_template_kwargs{message}"):
        apply_flags(Config(), [f"policy.chat_template_kwargs{flag}"])


def test_they_need_chat() -> None:
    with pytest.raises(ConfigError, match=r"needs prompts in a chat template, got policy\.chat='off'"):
        apply_flags(Config(), ["policy.chat=off", "policy.chat_template_kwargs.enable_thinking=false"])


def test_a_chat_server_is_sent_them() -> None:
    pytest.importorskip("openai")
    policy = thinker(**NO_THOUGHT)
    server = StandIn(policy, "chat")
    flags = ("engine.name=openai", f"engine.url={server.url}", "engine.server=chat", "engine.retries=0")
    config = small_config(*flags)
    with open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine:
        engine.generate(policy.encode(["go fridge"]))
    with open_backend(config).engine(thinker(), config.rollout, torch.Generator()) as engine:
        engine.generate(thinker().encode(["go fridge"]))
    server.close()
    with_them, without = server.asked
    assert with_them["chat_template_kwargs"] == NO_THOUGHT
    assert "chat_template_kwargs" not in without
    assert with_them["messages"] == without["messages"] == [{"role": "user", "content": "go fridge"}]


RUN = (
    "env.options={max_turns: 2}", "rollout.tasks=2", "rollout.group_size=2", "swap.k=1", "swap.alpha=0.5",
    "swap.buffer_tasks=1", "run.steps=1", "evaluation.every=0", "evaluation.episodes=2",
    "rollout.max_prompt_tokens=2000", "rollout.max_response_tokens=2",
)  # fmt: skip


@pytest.mark.parametrize("given", ["folder", "model", "policy"])
def test_a_run_keeps_them(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = thinker(**NO_THOUGHT)
    policy.save(tmp_path / "model")
    prompts: list[str] = []
    encode = Texts.encode

    def seen(self: Texts, texts: Any) -> list[np.ndarray]:
        made = encode(self, texts)
        prompts.extend(self.tokenizer.decode(ids.tolist()) for ids in made)
        return made

    monkeypatch.setattr(Texts, "encode", seen)
    model = {"folder": tmp_path / "model", "model": policy.model, "policy": policy}[given]
    flag = [] if given == "policy" else ["policy.chat_template_kwargs.enable_thinking=false"]
    trainer = RSPOTrainer(
        model, small_config(*RUN, *flag), processing_class=policy.tokenizer if given == "model" else None,
        output_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    trainer.train()
    trainer.close()
    assert load_config(tmp_path / "run" / "config.yaml").policy.chat_template_kwargs == NO_THOUGHT
    assert main(["eval", str(tmp_path / "run")]) == 0
    collected = ["collect", "--run", str(tmp_path / "run"), "--trajectories", "2", "--out", str(tmp_path / "collected")]
    assert main(collected) == 0
    assert len(prompts) > 8
    assert all(prompt.endswith("<assistant><think></think>") for prompt in prompts)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    assert "policy.chat_template_kwargs={'enable_thinking': False}" in capsys.readouterr().out


def test_a_policy_object_has_its_own(tmp_path: Path) -> None:
    config = small_config(*RUN, "policy.chat_template_kwargs.enable_thinking=true")
    with pytest.raises(ConfigError, match=r"but the model is a Policy with \{'enable_thinking': False\}"):
        RSPOTrainer(thinker(**NO_THOUGHT), config, output_dir=tmp_path)


def test_models_without_a_template_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = ["--set", "policy.chat_template_kwargs.enable_thinking=false"]
    assert main(["train", "--out", str(tmp_path / "small"), *flag]) != 0
    assert "needs a chat template, and the small model has none" in capsys.readouterr().err
    for name, template, message in (
        ("bare", None, "has none"),
        ("other", THINKING.replace("thinking", "t"), "not read"),
    ):
        thinker(template).save(tmp_path / name)
        assert main(["train", "--dry-run", "--policy", str(tmp_path / name), *flag]) == 1
        assert message in capsys.readouterr().out
    assert main(["train", "--dry-run", *flag]) == 1
    assert "needs a chat template" in capsys.readouterr().out
