"""LoRA: adapters on one base, the base as the reference, gradients, folders, whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_updates import ALPHA, mixed_trajectories, prepared, run_update, same, train, weights
from peft import PeftModel
from rspo_storages import storages, tensors_of
from rspo_toys import small_config, small_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedModel, Qwen2Config

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import update
from rspo.cli import main
from rspo.config import Config, ConfigError
from rspo.config.files import apply_flags, save_config
from rspo.data.batch import Batch
from rspo.models.agent import Agent
from rspo.models.gradient_checkpointing import recompute_layers
from rspo.models.lora import fingerprint, merged_weights
from rspo.models.policy import Policy
from rspo.runs.records import read_metrics, without_timings
from rspo.start import open_run

pytestmark = pytest.mark.usefixtures("one_thread")

PARITY = [
    "env.name=rspo_toys:ParityEnv",
    "evaluation.transcripts=0",
    "evaluation.temperatures=1.0",
    "lora.rank=4",
    "loss.kl_coef=0.01",
    "optimizer.learning_rate=0.01",
]


QWEN2 = Qwen2Config(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
GPT2 = GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=1)


def tiny(config: Qwen2Config | GPT2Config) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def lora_config(*flags: str, method: str = "rspo") -> Config:
    return small_config("lora.rank=4", *flags, method=method)


def disturbed(policy: Policy, seed: int = 0) -> Policy:
    """The policy, with an adapter that does something: B is 0 when it is fresh."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return policy


# Two agents and a reference on one base


def test_b_learns_and_leaves_a_and_the_base_as_they_are() -> None:
    config = lora_config("optimizer.learning_rate=0.01")
    base = small_policy()
    agent = Agent(disturbed(base.adapted(config.lora, 0)), config)
    run_update(agent, config)
    before, base_before = weights(agent.policy.model), weights(base.model)
    with agent.branched() as agent_b:
        assert same(weights(agent_b.policy.model), before)
        copied = agent_b.optimizer.state_dict()["optimizer"]["state"]
        for number, state in agent.optimizer.state_dict()["optimizer"]["state"].items():
            assert all(torch.equal(state[name], copied[number][name]) for name in state)
        run_update(agent_b, config)
        after = weights(agent_b.policy.model)
    assert same(weights(agent.policy.model), before)
    assert same(weights(base.model), base_before)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if ".lora_" in name}


def test_agents_and_reference_stand_on_one_base_and_hold_adapters_alone() -> None:
    config = lora_config("base=ppo")
    base = small_policy()
    alone = storages(base.model.parameters())
    agent = Agent(base.adapted(config.lora, 0), config, has_critic=True)
    agent_b = agent.branch()
    both = storages(tensors_of(base, agent, agent_b))
    assert alone.items() <= both.items()
    # Two layers of width 64: four projections of the attention, three of the MLP, 4 · (in + out) numbers each.
    adapter = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    trained = adapter, adapter + 64 + 1  # the policy's, and those of the critic with its head
    for one in (agent, agent_b):
        assert tuple(sum(p.numel() for p in optimizer.parameters) for optimizer in one.optimizers) == trained
        assert all(p.dtype == torch.float32 for optimizer in one.optimizers for p in optimizer.parameters)
    assert sum(both.values()) == sum(alone.values()) + 2 * 4 * sum(trained)


def test_the_reference_is_the_plain_base_whatever_the_agents_learn(start: Path, tmp_path: Path) -> None:
    config = small_config(*PARITY, f"policy.path={start}")
    trainer = open_run(config, tmp_path / "run", progress=False)
    assert trainer.reference is not None
    batch = Batch.from_trajectories(mixed_trajectories())
    plain = Policy.load(start, config.policy)
    with torch.no_grad():
        expected = plain.logprobs(batch, 1.0)[0]
        # A fresh adapter adds 0 to every layer.
        assert torch.equal(trainer.agent.policy.logprobs(batch, 1.0)[0], expected)
        with torch.enable_grad():
            trainer.train()
        trainer.close()
        assert not torch.allclose(trainer.agent.policy.logprobs(batch, 1.0)[0], expected, atol=1e-3)
        assert torch.equal(trainer.reference.logprobs(batch, 1.0)[0], expected)
    assert read_metrics(tmp_path / "run", "update")[-1]["kl_ref"] > 0
    held = storages(tensors_of(trainer.agent, trainer.reference)).items()
    assert storages(trainer.reference.model.parameters()).items() <= held


def test_loss_and_gradients_are_those_of_weights_merged_by_hand() -> None:
    """Against a plain model in float64 whose weights are W + alpha/rank · B·A, with the loss term by term."""
    flags = ["lora.alpha=3", "loss.kl_coef=0.1", "loss.center_cap=null", "optimizer.minibatches=1"]
    config = lora_config(*flags, "optimizer.grad_clip=1e9", "optimizer.micro_batch_tokens=24")
    base = small_policy()
    agent = Agent(disturbed(base.adapted(config.lora, 0)), config)
    batch = prepared(agent, config, base)

    plain = small_policy().model.double()
    adapters = {
        n: p.detach().double().requires_grad_() for n, p in agent.policy.model.named_parameters() if "lora" in n
    }
    merged = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for name, a in adapters.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            merged[f"{layer}.weight"] = (
                merged[f"{layer}.weight"] + 3 / 4 * adapters[f"{layer}.lora_B.default.weight"] @ a
            )

    def logprobs(model_weights: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(plain, model_weights, (batch.input_ids,)).logits
        picked = logits[batch.token_row, batch.token_column].log_softmax(-1)
        return picked.gather(1, batch.targets[:, None]).squeeze(1)

    logp, off = logprobs(merged), batch.is_replay
    toward = logprobs({name: parameter.detach() for name, parameter in plain.named_parameters()}).detach() - logp
    # Before the first step nothing clips, and the estimator k3 of the KL is exp(d) - d - 1.
    terms = toward.exp() - toward - 1
    terms = 0.1 * terms - (logp - batch.behavior_logp.double()).exp() * batch.advantages.double()
    expected = (1 - ALPHA) * terms[~off].mean() + ALPHA * terms[off].mean()
    by_hand = torch.autograd.grad(expected, list(adapters.values()))

    agent.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    stats = update(agent, batch, mixed_trajectories(), config, ALPHA, np.random.default_rng(0), PhaseTimer())
    assert stats["loss"] == pytest.approx(expected.item(), rel=0, abs=1e-5)  # of terms of 1 and 2, which cancel
    grads = {name: p.grad for name, p in agent.policy.model.named_parameters() if p.grad is not None}
    assert grads.keys() == adapters.keys()
    for (name, grad), hand in zip(grads.items(), by_hand, strict=True):
        torch.testing.assert_close(grad.double(), hand, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert all(float(grad.abs().max()) > 1e-5 for grad in by_hand)


@pytest.mark.parametrize("fused", ["off", "on"])
def test_gradients_are_the_same_fused_and_with_layers_computed_twice(fused: str) -> None:
    """With a critic on an adapter of its own between a policy's forward and backward pass; no head gets a gradient."""
    config = lora_config("base=ppo", "optimizer.minibatches=1", "optimizer.grad_clip=1e9", "loss.entropy_coef=0.01")
    gradients: list[dict[str, Tensor]] = []
    for twice in (False, True):
        model = tiny(QWEN2)
        if twice:
            recompute_layers(model)
        base = Policy(model, small_policy().tokenizer, fused=fused if twice else "off")
        agent = Agent(disturbed(base.adapted(config.lora, 0)), config, has_critic=True)
        assert agent.critic is not None
        torch.nn.init.constant_(agent.critic.head.weight, 0.1)
        batch = prepared(agent, config)
        passes = count_forward_passes(agent.policy.model.model.layers[0].mlp)
        agent.step = lambda: None  # type: ignore[method-assign]
        update(agent, batch, mixed_trajectories(), config, ALPHA, np.random.default_rng(0), PhaseTimer())
        assert passes == [None] * (2 if twice else 1)
        gradients.append({name: p.grad for name, p in agent.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(".lora_" in name or name.startswith("critic.head") for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


def count_forward_passes(module: torch.nn.Module) -> list[None]:
    """Grows by one with each forward pass of a module."""
    passes: list[None] = []
    module.register_forward_pre_hook(lambda *_: passes.append(None))
    return passes


def test_an_adapter_of_a_bfloat16_base_is_float32_and_moves_by_small_steps(start: Path) -> None:
    config = lora_config("policy.dtype=bfloat16", "lora.learning_rate=1e-6", "optimizer.learning_rate=1")
    base = Policy.load(start, config.policy)
    agent = Agent(disturbed(base.adapted(config.lora, 0)), config)
    before = weights(agent.policy.model)
    stats = run_update(agent, config)
    assert agent.learning_rates["learning_rate"] == 1e-6
    assert stats["gradient_norm"] > 0
    for name, parameter in agent.policy.model.named_parameters():
        adapter = ".lora_" in name
        assert parameter.dtype == (torch.float32 if adapter else torch.bfloat16)
        moved = float((parameter.detach() - before[name]).abs().max())
        assert (0 < moved < 1e-5) if adapter else moved == 0
    assert not agent.optimizer.copies


def test_the_same_seed_makes_the_same_adapter_and_leaves_other_streams_alone() -> None:
    config = lora_config()
    state = torch.get_rng_state()
    one, again, other = (weights(small_policy().adapted(config.lora, seed).model) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(one, again)
    assert not same(one, other)


# The critic


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_has_its_own_adapter_or_the_policys(backbone: str, tmp_path: Path) -> None:
    config = lora_config(f"critic.backbone={backbone}", "base=ppo", "critic.learning_rate=0.01")
    base = small_policy()
    agent = Agent(disturbed(base.adapted(config.lora, 0)), config, has_critic=True)
    assert agent.critic is not None
    frozen = weights(base.model)
    for _ in range(2):  # at first the critic's head is 0, and nothing reaches its adapter
        run_update(agent, config)
    trained = {name for name, parameter in agent.critic.named_parameters() if parameter.requires_grad}
    assert {"head.weight", "head.bias"} <= trained
    assert all(".lora_" in name for name in trained - {"head.weight", "head.bias"})
    assert (len(trained) > 2) == (backbone == "own")
    assert set(agent.critic.trained_state()) == trained
    before = weights(agent.critic)
    with agent.branched() as agent_b:
        assert agent_b.critic is not None
        assert same(weights(agent_b.critic), before)
        run_update(agent_b, config)
        changed = {name for name, value in weights(agent_b.critic).items() if not torch.equal(value, before[name])}
        assert changed == trained
    assert same(weights(agent.critic), before)
    assert same(weights(base.model), frozen)


# Folders


@pytest.fixture
def adapter(start: Path, tmp_path: Path) -> tuple[Policy, Path]:
    """A policy with an adapter on the start policy, and the folder it is saved in."""
    config = lora_config()
    policy = disturbed(Policy.load(start, config.policy).adapted(config.lora, 0))
    policy.save(tmp_path / "adapter")
    return policy, tmp_path / "adapter"


def test_an_adapters_folder_is_small_and_loads_here_and_in_peft(adapter: tuple[Policy, Path], start: Path) -> None:
    policy, folder = adapter
    batch = Batch.from_trajectories(mixed_trajectories())
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "base.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    again = Policy.load(folder, Config().policy)
    assert same(weights(again.model), weights(policy.model))
    trained = [name for name, parameter in again.model.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, _ in again.model.named_parameters() if ".lora_" in name]
    with torch.no_grad():
        logits = policy.model(batch.input_ids).logits
        assert torch.equal(again.model(batch.input_ids).logits, logits)
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), folder)
        assert torch.equal(theirs(batch.input_ids).logits, logits)


def test_an_adapter_of_another_base_or_kind_or_without_a_base_is_an_error(
    adapter: tuple[Policy, Path], start: Path, tmp_path: Path
) -> None:
    _, folder = adapter
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(start.resolve())

    def altered(**changes: object) -> Path:
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
        return folder

    small_policy(seed=1).save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"trained on another model than .*other.*fingerprint"):
        Policy.load(altered(base_model_name_or_path=str(tmp_path / "other")), Config().policy)
    with pytest.raises(ConfigError, match=r"base of the LoRA adapter in .* cannot be loaded: .*gone.*not a folder"):
        Policy.load(altered(base_model_name_or_path=str(tmp_path / "gone")), Config().policy)
    with pytest.raises(ConfigError, match="is not that of a LoRA adapter"):
        Policy.load(altered(peft_type="IA3"), Config().policy)
    with pytest.raises(ConfigError, match="variant of LoRA"):
        Policy.load(altered(init_lora_weights="pissa"), Config().policy)
    with pytest.raises(ConfigError, match="does not fit its base"):
        Policy.load(altered(target_modules=["q_proj"]), Config().policy)


def test_a_weight_that_moved_a_little_makes_another_fingerprint(start: Path) -> None:
    model = Policy.load(start, Config().policy).model
    before = fingerprint(model)
    assert fingerprint(Policy.load(start, small_config("policy.dtype=bfloat16").policy).model) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 0.01
    assert fingerprint(model) != before


@pytest.mark.parametrize("shape", [QWEN2, GPT2], ids=["biases, tied", "Conv1D"])
def test_merged_weights_do_what_the_adapter_does(shape: Qwen2Config | GPT2Config) -> None:
    config = lora_config()
    policy = disturbed(Policy(tiny(shape), small_policy().tokenizer).adapted(config.lora, 0))
    plain = tiny(shape)
    plain.load_state_dict(merged_weights(policy.model))
    ids = torch.randint(0, 120, (3, 20))
    with torch.no_grad():
        expected, before = policy.model(ids).logits, tiny(shape)(ids).logits
        torch.testing.assert_close(plain(ids).logits, expected, atol=2e-6, rtol=1e-5)
    assert float((expected - before).abs().max()) > 0.01


# Whole runs


@pytest.mark.parametrize("base", ["grpo", "ppo"])
def test_a_run_trains_exports_and_evaluates(
    start: Path, tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sets = tmp_path / "run", [part for flag in PARITY for part in ("--set", flag)]
    small = ["rollout.tasks=4", "rollout.group_size=4", "swap.k=2", "swap.alpha=0.25", "swap.buffer_tasks=3"]
    sets += [part for flag in [*small, "evaluation.episodes=8", "evaluation.every=0"] for part in ("--set", flag)]
    command = ["train", "--base", base, "--steps", "2", "--policy", str(start), "--out", str(out), "--quiet", *sets]
    assert main(command) == 0
    kinds = [record["kind"] for record in read_metrics(out)]
    assert kinds == ["evaluation", "dense", "dense", "collect", "update", "update", "evaluation"]
    assert all(record["gradient_norm"] > 0 for record in read_metrics(out, "update"))
    capsys.readouterr()

    assert main(["eval", str(out), "--episodes", "4", "--json"]) == 0
    success = json.loads(capsys.readouterr().out)["success"]
    assert main(["export", str(out), "--out", str(tmp_path / "whole")]) == 0
    assert (
        main(["eval", str(tmp_path / "whole"), "--episodes", "4", "--json", "--config", str(out / "config.yaml")]) == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["success"] == success
    ids = Batch.from_trajectories(mixed_trajectories()).input_ids
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").iterdir()} >= {"config.json", "model.safetensors"}
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").eos_token is not None
    trained = Policy.load(out / "checkpoints" / "step-000002", Config().policy)
    with torch.no_grad():
        logits = trained.model(ids).logits
        torch.testing.assert_close(plain(ids).logits, logits, atol=1e-5, rtol=1e-5)
        untrained = AutoModelForCausalLM.from_pretrained(start)(ids).logits
    assert float((logits - untrained).abs().max()) > 0.01

    assert main(["export", str(out), "--out", str(tmp_path / "whole")]) == 2
    assert "exists" in capsys.readouterr().err
    adapter = out / "checkpoints" / "step-000002"
    assert main(["train", "--policy", str(adapter), "--out", str(tmp_path / "next")]) == 2
    assert "policy.path must be a whole model" in capsys.readouterr().err


def test_a_run_goes_on_where_it_and_its_base_were_moved_to(start: Path, tmp_path: Path) -> None:
    """The base is the run's own start policy, as after a warm-up."""
    config = small_config(*PARITY, "run.steps=4", "run.save_every=2", "evaluation.every=2")

    def begin(folder: Path, steps: int) -> None:
        shutil.copytree(start, folder / "start")
        save_config(config, folder / "config.yaml")  # as of a run that had only begun
        train(apply_flags(config, [f"run.steps={steps}"]), folder, resume=True)

    begin(tmp_path / "whole", 4)
    begin(tmp_path / "parts", 2)
    (tmp_path / "parts").rename(tmp_path / "moved")
    train(config, tmp_path / "moved", resume=True)
    whole, moved = (without_timings(read_metrics(tmp_path / name)) for name in ("whole", "moved"))
    assert whole == moved
    policies = [
        Policy.load(tmp_path / name / "checkpoints" / "step-000004", config.policy) for name in ("whole", "moved")
    ]
    assert same(weights(policies[0].model), weights(policies[1].model))


def test_a_base_that_is_not_the_runs_stops_the_resume(start: Path, tmp_path: Path) -> None:
    config = small_config(*PARITY, f"policy.path={start}")
    train(config, tmp_path / "run")
    small_policy(seed=3).save(tmp_path / "other")
    longer = apply_flags(config, ["run.steps=3", f"policy.path={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match="trained on another model"):
        open_run(longer, tmp_path / "run", resume=True, progress=False)
    with pytest.raises(ConfigError, match=r"lora\.rank of the run in .* is 4 and cannot change on --resume, got 8"):
        open_run(apply_flags(config, ["lora.rank=8"]), tmp_path / "run", resume=True, progress=False)


# Settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["lora.rank=-1"], r"lora\.rank must be >= 0, got -1"),
        (["lora.rank=4", "lora.alpha=0"], r"lora\.alpha must be >= 1, got 0"),
        (["lora.rank=4", "lora.targets=[]"], r"lora\.targets must name at least one"),
        (["swap.copy=adapter"], r"lora\.rank must be > 0 with swap\.copy='adapter'.*got 0"),
        (["swap.copy=adapter", "lora.rank=4", "method=grpo"], r"swap\.copy='adapter' needs an agent B.*'grpo'"),
        (["swap.copy=offload", "lora.rank=4"], r"swap\.copy must be 'device' with lora\.rank=4, got 'offload'"),
        (["swap.copy=disk"], r"swap\.copy must be one of 'device', 'offload', 'adapter', got 'disk'"),
    ],
)
def test_settings_that_cannot_be_name_what_can(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(*flags)


@pytest.mark.parametrize("target", ["query_proj", "lm_head", "embed_tokens"])
@pytest.mark.parametrize("copied", ["device", "adapter"])
def test_targets_that_the_model_does_not_have_are_found_out_before_any_rollout(
    start: Path, tmp_path: Path, target: str, copied: str
) -> None:
    flags = [f"policy.path={start}", "lora.rank=4", f"lora.targets={target}", f"swap.copy={copied}"]
    with pytest.raises(ConfigError, match=f"lora.targets must be 'all-linear' or name .*q_proj.*got '{target}'"):
        open_run(small_config(*flags), tmp_path / "run", progress=False)


def test_targets_of_the_small_model_are_checked_before_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a dry run says the same."""
    monkeypatch.setattr("rspo.start.warm_up", lambda *arguments, **names: pytest.fail("the warm-up has begun"))
    for target in ("query_proj", "layers.2.mlp.up_proj"):
        flags = ["lora.rank=4", f"lora.targets={target}"]
        with pytest.raises(ConfigError, match=f"lora.targets must be 'all-linear' or name .*got '{target}'") as said:
            open_run(small_config(*flags), tmp_path / "run", progress=False)
        assert main(["train", "--dry-run", *(part for flag in flags for part in ("--set", flag))]) == 1
        assert f"  - {said.value}\n" in capsys.readouterr().out


def test_named_targets_are_the_only_ones() -> None:
    policy = small_policy().adapted(lora_config("lora.targets=[q_proj, mlp.up_proj]").lora, 0)
    adapted = {name.split(".lora_")[0].split(".", 2)[2] for name in weights(policy.model) if ".lora_" in name}
    assert adapted == {"0.self_attn.q_proj", "0.mlp.up_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


def test_without_peft_the_error_names_the_extra(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rspo.models.lora.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora\.rank=4 needs peft: pip install 'rspo\[lora\]'"):
        open_run(lora_config(f"policy.path={start}"), tmp_path / "run", progress=False)
