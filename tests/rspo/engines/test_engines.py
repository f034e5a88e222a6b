"""Engines that are not the training model: servers, vLLM, weights on their way there, mismatch, importance weights.

The servers here are stand-ins that speak each server's protocol with a real policy behind it, whose answers are known
from the transformers engine; and transformers' own server.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rspo_fake_vllm
import torch
from rspo_servers import KEY, MODEL, StandIn, transformers_serve
from rspo_toys import make_trajectory, small_config, small_policy

from rspo.algorithm.mismatch import check_mismatch, engine_mismatch, importance_weights
from rspo.algorithm.update import Mixture, prepare, rescore
from rspo.cli import main
from rspo.config import Config, ConfigError, EngineConfig, default_config
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.trajectory import trajectory_from_json, trajectory_to_json
from rspo.engines import EngineError, TransformersEngine, open_backend
from rspo.engines.servers import SERVERS, Sampling, prompt_text
from rspo.envs.household import VOCABULARY
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.models.processes import Ranks
from rspo.models.tiny import piece_tokenizer
from rspo.models.tiny import small_policy as fresh_policy
from rspo.runs.records import read_metrics, without_timings
from rspo.start import open_run

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def serve() -> Iterator[Callable[..., StandIn]]:
    """Start stand-ins that end with the test."""
    pytest.importorskip("openai")
    started: list[StandIn] = []

    def start(policy: Policy, speaks: str = "vllm") -> StandIn:
        started.append(StandIn(policy, speaks))
        return started[-1]

    yield start
    for server in started:
        server.close()


TINY = (
    "env.options={max_turns: 3}",
    "rollout.tasks=2",
    "rollout.group_size=2",
    "swap.k=1",
    "swap.alpha=0.5",
    "swap.buffer_tasks=1",
    "optimizer.minibatches=1",
    "estimator.invalid_penalty=0.1",  # rewards that differ, where nothing succeeds
    "evaluation.episodes=2",
    "evaluation.temperatures=[1.0]",
)
"""A run that makes few requests."""


def engine_config(url: str, *flags: str, server: str = "vllm", method: str = "rspo") -> Config:
    """Settings at a size for tests, with a server."""
    settings = ("engine.name=openai", f"engine.url={url}", f"engine.server={server}", "engine.retries=0")
    return small_config(*TINY, *settings, *flags, method=method)


def chat_policy() -> Policy:
    """A fresh policy with a tokenizer of pieces and a chat template."""
    policy = fresh_policy(piece_tokenizer(["go fridge take apple"], 280), 0, Config().policy, width=32)
    policy.tokenizer.chat_template = CHAT
    return policy


def prompts_of(policy: Policy, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return policy.encode([" ".join(rng.choice(VOCABULARY, size=3 + i % 4)) for i in range(count)])


# What servers are asked, and what is made of their answers


@pytest.mark.parametrize("speaks", ["vllm", "llama.cpp"])
def test_token_ids_and_logprobs_are_the_servers(speaks: str, serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy, speaks)
    config = engine_config(server.url, "rollout.max_response_tokens=6", "engine.concurrency=3", server=speaks)
    backend = open_backend(config)
    prompts = prompts_of(policy, 9)
    with backend.engine(policy, config.rollout, torch.Generator().manual_seed(7), 0.7) as engine:
        found = engine.generate(prompts)
    backend.close()
    assert server.most_at_once <= 3
    by_prompt = {tuple(body["prompt"]): body for body in server.asked}
    for prompt, generation in zip(prompts, found, strict=True):
        seed = by_prompt[tuple(prompt.tolist())]["seed"]
        (expected,) = TransformersEngine(policy, config.rollout, torch.Generator().manual_seed(seed), 0.7).generate(
            [prompt]
        )
        np.testing.assert_array_equal(generation.response_ids, expected.response_ids)
        np.testing.assert_array_equal(generation.logp, expected.logp)
        np.testing.assert_array_equal(generation.engine_logp, expected.logp)
        assert generation.text == expected.text
    assert len({body["seed"] for body in server.asked}) == 9
    for body in server.asked:
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 1.0, 0, 0.0)
        assert (body["model"], body["max_tokens"]) == (MODEL, 6)


def test_text_is_cut_into_the_policys_tokens(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy, "completions")
    config = engine_config(server.url, "rollout.max_response_tokens=12", server="completions")
    prompts = prompts_of(policy, 16)
    with (
        pytest.warns(UserWarning, match="another number of tokens"),
        open_backend(config).engine(policy, config.rollout, torch.Generator().manual_seed(0)) as engine,
    ):
        found = engine.generate(prompts)
    ends = [generation.response_ids[-1] in policy.eos_token_ids for generation in found]
    assert {len(generation.response_ids) < 12 for generation in found} == {True, False}, "of both kinds"
    by_prompt = {tuple(body["prompt"]): body["seed"] for body in server.asked}
    for prompt, generation, ended in zip(prompts, found, ends, strict=True):
        generator = torch.Generator().manual_seed(by_prompt[tuple(prompt.tolist())])
        (drawn,) = TransformersEngine(policy, config.rollout, generator).generate([prompt])
        special = set(policy.tokenizer.all_special_ids)
        assert ended == (drawn.response_ids[-1] in policy.eos_token_ids)
        # Of the tokens that were drawn, those are lost that a text does not show.
        shown = [token for token in drawn.response_ids.tolist() if token not in special]
        assert generation.response_ids.tolist() == shown + list(policy.eos_token_ids) * ended
        assert generation.engine_logp is None
        assert not generation.logp.any()


def test_warns_where_text_becomes_other_tokens(serve: Callable[..., StandIn]) -> None:
    policy = chat_policy()  # of bytes, which by chance are no text
    server = serve(policy, "completions")
    config = engine_config(server.url, "rollout.max_response_tokens=8", server="completions")
    backend = open_backend(config)
    with (
        pytest.warns(UserWarning, match="% of the responses of a rollout have another number of tokens"),
        backend.engine(policy, config.rollout, torch.Generator().manual_seed(0)) as engine,
    ):
        engine.generate(policy.encode(["go fridge", "take apple"]))


def test_chat_servers_are_sent_the_users_message(serve: Callable[..., StandIn]) -> None:
    policy = chat_policy()
    server = serve(policy, "chat")
    config = engine_config(server.url, server="chat")
    message = "go fridge\n <user> take"
    with open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine:
        (generation,) = engine.generate(policy.encode([message]))
        assert server.asked[0]["messages"] == [{"role": "user", "content": message}]
        assert len(generation.response_ids) > 0
        follow_up = np.concatenate([policy.encode([message])[0], policy.encode_responses(["go"])[0]])
        with pytest.raises(ConfigError, match="one message of a user"):
            engine.generate([follow_up])


def test_prompts_as_text() -> None:
    """What a server makes of the text are the ids, also where its tokenizer puts a token in front by itself."""
    policy = chat_policy()
    (ids,) = policy.encode(["go fridge"])
    assert prompt_text(policy, ids) == "<user>go fridge<eos><assistant>"
    from tokenizers.processors import TemplateProcessing

    begin = policy.tokenizer.unk_token_id
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", begin)]
    )
    with_begin = np.concatenate([[begin], ids])
    text = prompt_text(policy, with_begin)
    assert policy.tokenizer(text)["input_ids"] == with_begin.tolist()
    with pytest.raises(ConfigError, match="does not come back from its text"):
        prompt_text(policy, ids)


# Training through a server


def test_training_pushes_the_weights_of_who_acts(start: Path, tmp_path: Path, serve: Callable[..., StandIn]) -> None:
    """RSPO with two agents by turns: what the server says of its tokens is what the training model says, at every
    rollout of A and of B."""
    server = serve(small_policy(seed=5))
    config = engine_config(
        server.url,
        f"policy.path={start}",
        "engine.push_weights=vllm",
        "engine.mismatch_limit=1e-4",
        "loss.kl_coef=0.01",
    )
    trainer = open_run(config, tmp_path / "run", progress=False)
    trainer.train()
    pushed = [path for path, _ in server.posted]
    trainer.close()
    # In each of the two loops B, B after its update, and A; A at the last evaluation. In the first, A is the start.
    assert pushed.count("/collective_rpc") == pushed.count("/reset_prefix_cache") == 8
    assert not list((tmp_path / "run" / "engine").iterdir())
    for kind in ("dense", "collect", "update"):
        for record in read_metrics(tmp_path / "run", kind):
            assert record["engine/logp_gap_mean"] < 1e-5
            assert record["engine/logp_gap_max"] < 1e-4
            assert abs(record["engine/k1"]) < 1e-5
            assert abs(record["engine/k3"]) < 1e-6
            assert record["engine/ess"] == pytest.approx(1.0, abs=1e-6)
    trained = trainer.agent.policy.model.state_dict()
    for name, weight in server.policy.model.state_dict().items():
        assert torch.equal(weight, trained[name]), "the last evaluation was of A as it is now"
    assert any(not torch.equal(a, b) for a, b in zip(trained.values(), _weights(start), strict=True))


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(Policy.load(folder, Config().policy).model.state_dict().values())


def test_a_server_that_dies_stops_the_run_which_goes_on(
    start: Path, tmp_path: Path, serve: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    """...to the end of a run whose server has lived, as this one's answers follow from the seeds."""
    flags = [f"policy.path={start}", "engine.push_weights=vllm", "run.save_every=1", "run.steps=3"]
    first = serve(small_policy())
    whole = open_run(engine_config(first.url, *flags), tmp_path / "whole", progress=False)
    whole.train()
    whole.close()

    second = serve(small_policy())
    config = engine_config(second.url, *flags)
    trainer = open_run(config, tmp_path / "run", progress=False)
    rollouts, played = 0, trainer._rollout

    def dies_in_the_middle(*args: Any) -> Any:
        nonlocal rollouts
        rollouts += 1
        if rollouts == 5:
            second.refusals = [500] * 1000
        return played(*args)

    trainer._rollout = dies_in_the_middle  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"refused /v1/completions with status 500: .*refused"):
        trainer.train()
    trainer.close()

    third = serve(small_policy())
    arguments = ["train", "--resume", "--out", str(tmp_path / "run"), "--quiet", "--set"]
    second.close()
    assert main([*arguments, f"engine.url={second.url}"]) == 2
    assert f"engine.url='{second.url}': no server answers there" in capsys.readouterr().err
    resumed = open_run(engine_config(third.url, *flags), tmp_path / "run", resume=True, progress=False)
    resumed.train()
    resumed.close()
    last = Path("checkpoints") / "step-000003" / "model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    assert without_timings(read_metrics(tmp_path / "run")) == without_timings(read_metrics(tmp_path / "whole"))


def test_the_command_says_how_to_go_on(
    start: Path, tmp_path: Path, serve: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(small_policy())
    server.refusals = [429] * 1000
    flags = [f"engine.url={server.url}", "engine.name=openai", "engine.push_weights=vllm", "engine.retries=0"]
    settings = [part for flag in [*flags, *TINY, f"policy.path={start}"] for part in ("--set", flag)]
    assert main(["train", "--out", str(tmp_path / "run"), "--quiet", *settings]) == 1
    error = capsys.readouterr().err
    assert "status 429" in error
    assert f"rspo train --resume --out {tmp_path / 'run'}" in error


def test_mismatch_limit_finds_other_weights(start: Path, tmp_path: Path, serve: Callable[..., StandIn]) -> None:
    """A server that takes weights and does not use them."""
    server = serve(small_policy(seed=5))
    server._load = lambda path: None  # type: ignore[method-assign]
    flags = (f"policy.path={start}", "engine.push_weights=vllm", "evaluation.episodes=1")
    trainer = open_run(engine_config(server.url, *flags, "engine.mismatch_limit=0.05"), tmp_path / "a", progress=False)
    with pytest.raises(EngineError, match=r"nats/token on average in a rollout, more than engine.mismatch_limit=0.05"):
        trainer.train()
    trainer.close()
    trainer = open_run(engine_config(server.url, *flags), tmp_path / "b", progress=False)
    with pytest.warns(UserWarning, match="does it have the same weights"):
        trainer._rollout(trainer.agent, 2)
    trainer.close()


def test_sglang_push(start: Path, serve: Callable[..., StandIn]) -> None:
    policy = Policy.load(start, Config().policy)
    server = serve(small_policy(seed=5), "sglang")
    config = engine_config(server.url, "engine.push_weights=sglang", server="completions")
    backend = open_backend(config)
    with backend.engine(policy, config.rollout, torch.Generator()):
        pass
    with backend.engine(policy, config.rollout, torch.Generator()):
        pass
    assert [path for path, _ in server.posted] == ["/update_weights_from_disk"], "the same weights go once"
    for a, b in zip(server.policy.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
    server.speaks = "chat"
    policy.weights_changed()
    with pytest.raises(EngineError, match="refused /update_weights_from_disk with status 404"):
        backend.engine(policy, config.rollout, torch.Generator()).__enter__()


def test_weights_are_told_apart() -> None:
    config = small_config()
    agent = Agent(small_policy(), config)
    twin = agent.branch()
    assert twin.policy.version != agent.policy.version
    seen = {agent.policy.version, twin.policy.version}
    for which in (agent, twin, agent):
        which.policy.logprobs(Batch.from_trajectories([make_trajectory()]), 1.0)[0].sum().backward()
        which.step()
        assert which.policy.version not in seen
        seen.add(which.policy.version)


# Evaluation and collection by a server that keeps its weights


def test_eval_and_collect_leave_the_servers_weights(
    start: Path, tmp_path: Path, serve: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(small_policy(seed=5))
    flags = ["--set", "engine.name=openai", "--set", f"engine.url={server.url}"]
    assert main(["eval", str(start), "--episodes", "4", "--temperature", "1.0", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["rates"][0]["episodes"] == 4
    command = ["collect", "--set", f"policy.path={start}", "--policy", str(start), "--trajectories", "3", "--quiet"]
    assert main([*command[:1], *command[3:], "--out", str(tmp_path), *flags]) == 0
    assert server.asked
    assert not server.posted
    for line in (tmp_path / "trajectories.jsonl").read_text().splitlines():
        trajectory = trajectory_from_json(json.loads(line))
        for turn in trajectory.turns:
            np.testing.assert_array_equal(turn.engine_logp, turn.behavior_logp)


# Errors


def test_refusals_are_tried_again(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy)
    config = engine_config(server.url, "engine.retries=2")
    server.refusals = [429, 503]
    with open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine:
        assert len(engine.generate(prompts_of(policy, 1))) == 1
        assert len({json.dumps(body) for body in server.asked}) == 1
        assert len(server.asked) == 3
        server.refusals = [500] * 3
        with pytest.raises(EngineError, match=f"engine.url='{server.url}' refused /v1/completions with status 500"):
            engine.generate(prompts_of(policy, 1))
        server.refusals = [400]
        with pytest.raises(EngineError, match="status 400"):
            engine.generate(prompts_of(policy, 1))
        assert len(server.asked) == 7, "what is wrong is not asked again"


def test_other_servers_are_told_apart(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy, "completions")
    for name in ("vllm", "llama.cpp", "chat"):
        config = engine_config(server.url, server=name)
        with (
            open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine,
            pytest.raises(EngineError, match=f"does not answer as engine.server='{name}' does"),
        ):
            engine.generate(prompts_of(policy, 1))


def test_a_server_that_does_not_understand_says_what_was_assumed(
    start: Path, tmp_path: Path, serve: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(small_policy(seed=5))
    server.refusal = {"detail": f"Unexpected fields in the request: {'x' * 1000}"}  # no OpenAI form
    flags = ["--set", "engine.name=openai", "--set", f"engine.url={server.url}"]
    kinds = r"engine.server='vllm' is; the other kinds are 'llama.cpp', 'completions', 'transformers', 'chat'$"
    server.refusals = [422] * 100
    assert main(["eval", str(start), "--episodes", "2", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"rspo: evaluation stopped: the server at engine.url='{server.url}' refused /v1/")
    assert re.search(r"status 422: .*Unexpected fields in the request: x+; it was asked as " + kinds, error.strip())
    assert len(error) < 1000
    server.refusals = [400] * 100
    assert main(["collect", "--policy", str(start), "--out", str(tmp_path), "--quiet", *flags]) == 1
    assert capsys.readouterr().err.startswith("rspo: collection stopped: ")
    server.refusals = [503] * 100
    assert main(["eval", str(start), "--episodes", "2", *flags, "--set", "engine.retries=0"]) == 1
    assert "engine.server" not in capsys.readouterr().err, "a server that is busy may be of the right kind"


def test_weights_that_no_endpoint_takes(
    start: Path, tmp_path: Path, serve: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(small_policy(), "chat")
    flags = [f"engine.url={server.url}", "engine.name=openai", "engine.push_weights=vllm"]
    settings = [part for flag in [*flags, *TINY, f"policy.path={start}"] for part in ("--set", flag)]
    assert main(["train", "--out", str(tmp_path / "run"), "--quiet", *settings]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rspo: training stopped: ")
    assert "refused /collective_rpc with status 404" in error
    assert "engine.push_weights='vllm' needs a vLLM server that was started with VLLM_SERVER_DEV_MODE=1" in error


def test_slow_servers(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy)
    server.answers.clear()
    config = engine_config(server.url, "engine.timeout=2.0")
    with (
        open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine,
        pytest.raises(EngineError, match=r"has not answered in engine.timeout=2 s"),
    ):
        engine.generate(prompts_of(policy, 1))


def test_a_failure_waits_for_no_other_request(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    server = serve(policy)
    server.answers.clear()
    server.refusals = [400]
    config = engine_config(server.url, "engine.concurrency=2")
    with (
        open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine,
        pytest.raises(EngineError, match="status 400"),
    ):
        engine.generate(prompts_of(policy, 5))
    assert len(server.asked) <= 2, "what was not sent yet is not sent"


def test_what_cannot_be_opened(serve: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = serve(small_policy())
    with pytest.raises(ConfigError, match=r"engine.model must be one that is served at .*'tiny'; got 'huge'"):
        open_backend(engine_config(server.url, "engine.model=huge"))
    with pytest.raises(ConfigError, match=r"/models gave"):
        open_backend(engine_config(server.url + "/elsewhere"))
    with pytest.raises(ConfigError, match=r"engine.api_key_env='RSPO_TEST_KEY'.*not set"):
        open_backend(engine_config(server.url, "engine.api_key_env=RSPO_TEST_KEY"))
    server.needs_key = True
    with pytest.raises(ConfigError, match="the server wants another key"):
        open_backend(engine_config(server.url))
    monkeypatch.setenv("RSPO_TEST_KEY", KEY)
    open_backend(engine_config(server.url, "engine.api_key_env=RSPO_TEST_KEY")).close()
    with pytest.raises(ConfigError, match=r"engine.push_weights must be 'vllm' or 'sglang' for training"):
        open_run(engine_config(server.url, "engine.api_key_env=RSPO_TEST_KEY"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists(), "found before the start policy is made"
    server.close()
    with pytest.raises(ConfigError, match="no server answers there"):
        open_backend(engine_config(server.url))
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'rspo\[openai\]'"):
        open_backend(engine_config(server.url))


def test_several_processes_and_sharded_weights_have_no_other_engine(tmp_path: Path) -> None:
    two = Ranks()
    two.size = 2
    for flags in (["engine.name=vllm"], ["engine.name=openai", "engine.url=http://localhost:1/v1"]):
        with pytest.raises(ConfigError, match="must be 'transformers' where 2 processes train together"):
            open_backend(small_config(*flags), tmp_path, two)
        with pytest.raises(ConfigError, match=r"must be 'transformers' with parallel\.shard='fsdp'"):
            open_backend(small_config(*flags, "parallel.shard=fsdp"), tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["engine.name=sglang"], "engine.name must be one of 'transformers', 'vllm', 'openai', got 'sglang'"),
        (["engine.name=openai"], "engine.url must be given with engine.name='openai'"),
        (["engine.url=http://localhost"], "engine.url must be given with engine.name='openai' and with no other"),
        (["engine.name=openai", "engine.url=localhost:80"], "engine.url must begin with http"),
        (["engine.push_weights=vllm"], "engine.push_weights must be 'off' without a server"),
        (["engine.name=vllm", "engine.gpu_memory=1.5"], r"engine.gpu_memory must be in \[0, 1\]"),
        (["engine.timeout=0"], "engine.timeout must be > 0"),
        (["engine.concurrency=0"], "engine.concurrency must be >= 1"),
        (["engine.importance_cap=-1"], "engine.importance_cap must be > 0"),
        (["engine.importance_cap=2"], "rollout.rescore must be 'on', got 'auto'"),
        (["engine.name=vllm", "rollout.rescore=off"], "rollout.rescore must not be 'off' with engine.name='vllm'"),
        (
            ["engine.name=openai", "engine.url=http://a", "engine.server=chat", "engine.importance_cap=2"],
            "engine.server='chat' does not give",
        ),
    ],
)
def test_settings_that_cannot_be(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_flags(default_config("rspo"), flags)


def test_prompts_are_never_cut(serve: Callable[..., StandIn]) -> None:
    policy = small_policy()
    config = engine_config(serve(policy).url, "rollout.max_prompt_tokens=3")
    with (
        open_backend(config).engine(policy, config.rollout, torch.Generator()) as engine,
        pytest.raises(ConfigError, match=r"a prompt has 4 tokens, rollout.max_prompt_tokens=3"),
    ):
        engine.generate([np.array([3, 4, 5]), np.array([3, 4, 5, 6])])


# vLLM in process


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[rspo_fake_vllm.LLM]:
    rspo_fake_vllm.LLM.made = []
    monkeypatch.setitem(sys.modules, "vllm", rspo_fake_vllm)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return rspo_fake_vllm.LLM


def test_vllm_in_process(start: Path, tmp_path: Path, fake_vllm: type[rspo_fake_vllm.LLM]) -> None:
    config = small_config(*TINY, "engine.name=vllm", f"policy.path={start}", "engine.mismatch_limit=1e-4")
    trainer = open_run(config, tmp_path / "run", progress=False)
    assert not fake_vllm.made, "it takes its memory when it is needed"
    trainer.train()
    (llm,) = fake_vllm.made
    assert llm.asleep
    assert (llm.logprobs_mode, llm.generation_config) == ("processed_logprobs", "vllm")
    assert llm.calls.count("reload") == llm.calls.count("reset") == 7
    assert llm.calls.count("wake") == llm.calls.count("sleep 1") - 1 == 7
    records = [record for kind in ("dense", "collect", "update") for record in read_metrics(tmp_path / "run", kind)]
    assert len(records) == 6
    assert all(record["engine/logp_gap_mean"] < 1e-5 for record in records)
    trained = trainer.agent.policy.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in llm.policy.model.state_dict().items())
    trainer.close()
    assert not list((tmp_path / "run" / "engine").iterdir())


def test_vllm_answers_as_the_transformers_engine(fake_vllm: type[rspo_fake_vllm.LLM], tmp_path: Path) -> None:
    policy = small_policy()
    config = small_config("engine.name=vllm", "engine.sleep=false", f"engine.push_folder={tmp_path}")
    backend = open_backend(config)
    prompts = prompts_of(policy, 5)
    with backend.engine(policy, config.rollout, torch.Generator().manual_seed(1), 0.5) as engine:
        found = engine.generate(prompts)
    seeds = torch.randint(2**31 - 1, (5,), generator=torch.Generator().manual_seed(1)).tolist()
    for prompt, seed, generation in zip(prompts, seeds, found, strict=True):
        generator = torch.Generator().manual_seed(seed)
        (expected,) = TransformersEngine(policy, config.rollout, generator, 0.5).generate([prompt])
        np.testing.assert_array_equal(generation.response_ids, expected.response_ids)
        np.testing.assert_array_equal(generation.engine_logp, expected.logp)
        assert generation.text == expected.text
    assert fake_vllm.made[0].calls == ["generate"]


def test_vllm_needs_its_package_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"engine.name='vllm' needs a package: pip install 'rspo\[vllm\]'"):
        open_backend(small_config("engine.name=vllm"))
    monkeypatch.setitem(sys.modules, "vllm", rspo_fake_vllm)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel=2 needs as many GPUs .* 1 are here"):
        open_backend(small_config("engine.name=vllm", "engine.tensor_parallel=2"))


# Mismatch and importance weights


def test_mismatch_against_float64_by_hand() -> None:
    trajectories = [make_trajectory(0, 0), make_trajectory(0, 1), make_trajectory(1, 0)]
    rng = np.random.default_rng(3)
    gaps: list[float] = []
    for trajectory in trajectories[:2]:
        for turn in trajectory.turns:
            turn.engine_logp = (turn.behavior_logp - rng.normal(0, 0.3, len(turn.behavior_logp))).astype(np.float32)
            gaps += [float(a) - float(b) for a, b in zip(turn.behavior_logp, turn.engine_logp, strict=True)]
    found = engine_mismatch(trajectories)
    weights = [math.exp(gap) for gap in gaps]
    assert found["engine/logp_gap_mean"] == pytest.approx(sum(map(abs, gaps)) / len(gaps), rel=1e-12)
    assert found["engine/logp_gap_max"] == pytest.approx(max(map(abs, gaps)), rel=1e-12)
    assert found["engine/k1"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-12)
    k3 = sum(weight - 1 - gap for weight, gap in zip(weights, gaps, strict=True)) / len(gaps)
    assert found["engine/k3"] == pytest.approx(k3, rel=1e-9)
    ess = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    assert found["engine/ess"] == pytest.approx(ess, rel=1e-12)
    assert engine_mismatch(trajectories[2:]) == {}
    check_mismatch(trajectories[2:], EngineConfig(mismatch_limit=1e-9))
    with pytest.raises(EngineError, match=r"engine.mismatch_limit=0.01"):
        check_mismatch(trajectories, EngineConfig(mismatch_limit=0.01))
    np.testing.assert_allclose(
        importance_weights(trajectories[:2], 1.2), [min(weight, 1.2) for weight in weights], rtol=1e-6
    )
    with pytest.raises(EngineError, match="trajectory 0 of group 1"):
        importance_weights(trajectories, 1.2)


def test_log_probs_that_are_not_numbers_stop() -> None:
    trajectory = make_trajectory()
    for turn in trajectory.turns:
        turn.engine_logp = np.full_like(turn.behavior_logp, np.nan)
    with pytest.raises(EngineError, match="nan nats/token"):
        check_mismatch([trajectory], EngineConfig(mismatch_limit=10.0))


@pytest.mark.parametrize("fused", ["on", "off"])
def test_importance_weights_in_the_loss_and_gradient(fused: str) -> None:
    """Against the formula in float64: Σ min(exp(d), cap)·loss_t / N, on-policy and replayed tokens alike."""
    flags = ("rollout.rescore=on", "engine.importance_cap=1.1", "loss.center_cap=null", "swap.mixture=pooled")
    config = small_config(*flags)
    fresh = small_policy()
    agent = Agent(Policy(fresh.model, fresh.tokenizer, fused=fused), config)
    trajectories = [make_trajectory(g, i, advantage=(-1.0) ** i * (1 + g)) for g in range(2) for i in range(2)]
    trajectories[-1].source = "replay"
    rescore(agent.policy, trajectories, config)
    rng = np.random.default_rng(0)
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        turn.engine_logp = (turn.behavior_logp - rng.normal(0.05, 0.2, len(turn.behavior_logp))).astype(np.float32)
    with torch.no_grad():  # on the way, so that ratios are not 1
        for parameter in agent.policy.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    batch = prepare(agent, Batch.from_trajectories(trajectories), trajectories, config, None)
    mixture = Mixture.of(batch, config.loss, 0.25, pooled=True)
    loss = agent.policy.module(batch, lambda predictions: mixture.loss(predictions, 1.0, config.loss)[0])
    parameters = list(agent.policy.model.parameters())
    gradients = torch.autograd.grad(loss, parameters)

    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    gap = np.concatenate([turn.behavior_logp.astype(np.float64) - turn.engine_logp for turn in turns])
    weight = torch.from_numpy(np.minimum(np.exp(gap), 1.1))
    assert (weight == 1.1).any()
    assert (weight < 1.0).any()
    current = agent.policy.logprobs(batch, 1.0)[0].double()
    ratio = torch.exp(current - batch.behavior_logp.double())
    center = torch.exp(batch.old_logp.double() - batch.behavior_logp.double())
    advantages = batch.advantages.double()
    clipped = torch.maximum(torch.minimum(ratio, center + config.loss.clip_high), center - config.loss.clip_low)
    expected = -(weight * torch.minimum(ratio * advantages, clipped * advantages)).sum() / len(weight)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)
    part = batch.select(torch.tensor([1, 4]))
    assert part.weights is not None
    np.testing.assert_allclose(part.weights, weight[torch.isin(batch.token_row, torch.tensor([1, 4]))], rtol=1e-6)


def test_training_with_importance_weights(start: Path, tmp_path: Path, serve: Callable[..., StandIn]) -> None:
    """A server whose log-probs are all off by the same gap weights every token's loss by exp(gap)."""
    norms = []
    for offset, cap in ((0.0, 9.0), (-0.5, 9.0), (-0.5, 1.25)):
        server = serve(small_policy())
        server.logp_offset = offset
        flags = (f"policy.path={start}", "engine.push_weights=vllm", f"engine.importance_cap={cap}", "run.steps=1")
        folder = tmp_path / f"{offset} {cap}"
        trainer = open_run(engine_config(server.url, *flags, method="grpo"), folder, progress=False)
        if offset:
            with pytest.warns(UserWarning, match="differ by 0.5 nats/token"):
                trainer.train()
        else:
            trainer.train()
        trainer.close()
        (record,) = read_metrics(folder, "update")
        norms.append(record["gradient_norm"])
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0] * math.exp(0.5), rel=1e-4)
    assert norms[2] == pytest.approx(norms[0] * 1.25, rel=1e-4)


def test_engine_logp_survives_json() -> None:
    trajectory = make_trajectory()
    trajectory.turns[0].engine_logp = trajectory.turns[0].behavior_logp - np.float32(0.1)
    values = json.loads(json.dumps(trajectory_to_json(trajectory)))
    assert "engine_logp" not in values["turns"][1], "files without an engine are as they were"
    back = trajectory_from_json(values)
    np.testing.assert_array_equal(back.turns[0].engine_logp, trajectory.turns[0].engine_logp)
    assert back.turns[0].engine_logp.dtype == np.float32
    assert back.turns[1].engine_logp is None


def test_rescoring_keeps_what_generation_said() -> None:
    """With the transformers engine the mismatch is that of generation and training passes."""
    config = small_config("rollout.rescore=on")
    policy = small_policy()
    trajectory = make_trajectory()
    said = [turn.behavior_logp.copy() for turn in trajectory.turns]
    rescore(policy, [trajectory], config)
    for turn, before in zip(trajectory.turns, said, strict=True):
        np.testing.assert_array_equal(turn.engine_logp, before)
        assert not np.array_equal(turn.behavior_logp, before)


# transformers' own server


@pytest.mark.slow
def test_transformers_serve(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real server: near temperature 0 it answers what the policy itself would, and episodes are played by it."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    policy = chat_policy()
    policy.save(tmp_path / "model")
    with transformers_serve(tmp_path / "model", tmp_path / "log") as server:
        flags = ("rollout.max_response_tokens=5", "engine.concurrency=4")
        config = engine_config(server.url, *flags, server="transformers")
        backend = open_backend(config)
        prompts = policy.encode(["go fridge", "take apple", "apple apple", "go go go"])
        with backend.engine(policy, config.rollout, torch.Generator(), 1e-3) as engine:
            found = engine.generate(prompts)
        expected = TransformersEngine(policy, config.rollout, torch.Generator(), 1e-3).generate(prompts)
        assert [generation.text for generation in found] == [generation.text for generation in expected]
        assert len({generation.text for generation in found}) > 1
        server.kill()
        with (
            backend.engine(policy, config.rollout, torch.Generator()) as engine,
            pytest.raises(EngineError, match="cannot be reached, after 1 tries"),
        ):
            engine.generate(prompts)
        backend.close()


def test_every_server_has_a_kind() -> None:
    from rspo.config import SERVERS as NAMES

    assert set(SERVERS) == set(NAMES)
    sampling = Sampling(temperature=1.0, max_tokens=4, seed=3)
    policy = small_policy()
    (prompt,) = policy.encode(["go fridge"])
    for server in SERVERS.values():
        request = server.request(policy, prompt, sampling)
        assert (request["top_p"], request["temperature"], request["seed"]) == (1.0, 1.0, 3)
        assert "trust_remote_code" not in request
