"""The paper's recipes hold the paper's settings, and a dry run of any configuration says what it needs, and stops."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rspo_toys import small_policy

from rspo.cli import main
from rspo.config import ConfigError, default_config, paper_config
from rspo.config.files import apply_flags, flat_settings, load_config, save_config

RECIPES = Path(__file__).parents[3] / "recipes"
PAPER = sorted((RECIPES / "paper").glob("*.yaml"))
SMALL = [RECIPES / "alfworld-small.yaml", RECIPES / "webshop-small.yaml"]
ANY_MODEL = RECIPES / "household-chat.yaml"
PROCESSES = {("webshop", "1.5b"): 2, ("webshop", "7b"): 8, ("alfworld", "1.5b"): 8, ("alfworld", "7b"): 16}
"""GPUs of the paper (appendix A.2), which trained PPO with 1.5B on WebShop on 4."""
SERVER, VLLM = "engine={name: openai, url: 'http://localhost:1/v1'}", "engine.name=vllm"
WEIGHTS = {"1.5b": 1_543_714_304, "7b": 7_615_616_512}


def parts(recipe: Path) -> tuple[str, str, str, bool]:
    """Environment, size, base method, and whether RSPO is on top, by a recipe's name."""
    env, model, method = recipe.stem.split("_")
    return env, model.removeprefix("qwen2.5-"), method.removeprefix("rspo-"), method.startswith("rspo-")


def expected(env: str, size: str, base: str, swaps: bool) -> dict[str, Any]:
    """All settings of the paper's run: the preset's, and what differs between its rows."""
    alfworld, ppo = env == "alfworld", base == "ppo"
    processes = 4 if (env, size, base) == ("webshop", "1.5b", "ppo") else PROCESSES[env, size]
    settings = flat_settings(paper_config("rspo", base) if swaps else paper_config(base))
    settings |= {
        "env.name": env,
        "env.options": {"prompt_style": "verl-agent", "max_turns": 50 if alfworld else 15},
        "policy.path": f"Qwen/Qwen2.5-{size.upper()}-Instruct",
        "policy.dtype": "bfloat16",
        "policy.attention": "flash_attention_2",
        "policy.device": "cuda",
        "rollout.tasks": 128 if ppo else 16,
        "rollout.group_size": 1 if ppo else 8,
        "rollout.max_prompt_tokens": 2048 if alfworld else 4096,
        "rollout.max_response_tokens": 512,
        "rollout.max_batch": 32,
        "parallel.processes": processes,
        "parallel.shard": "fsdp",
        "estimator.std": base != "gigpo" or alfworld,
        "estimator.invalid_penalty": 0.1,
        "estimator.invalid_penalty_on": "format",
        "optimizer.learning_rate": 1e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.minibatch_rows": 256 if alfworld else 64,
        "optimizer.micro_batch_tokens": 16384,
        "critic.learning_rate": 1e-5,
        "loss.kl_coef": 0.01,
        "loss.entropy_coef": 0.001,
        "loss.dual_clip": 3.0,
        "loss.center_cap": None,
        "run.steps": 150,
        "run.seed": 0,
        "evaluation.every": 5,
        "evaluation.episodes": 128,
        "evaluation.temperatures": (0.4,),
    }
    if swaps:
        settings |= {"swap.k": 3, "swap.alpha": 0.125, "swap.buffer_tasks": 224 if ppo else 28}
        settings |= {"rewards.dense": f"model:runs/reward-model-{env}"}
    return settings


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to run in, without data, without a network."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a dry run must not use the network")

    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


STOPS = "this would stop the run here:\n"


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a dry run prints, whose last line and exit status agree with what it lists."""
    status = main(["train", "--dry-run", *map(str, arguments)])
    text = capsys.readouterr().out
    count = len(problems(text))
    if count:
        assert text.endswith(f"\n\n{count} thing{'s' if count > 1 else ''} would stop the run here\n")
    else:
        assert text.endswith("\n\nnothing that would stop the run was found\n")
    assert status == (1 if count else 0)
    return text


def problems(text: str) -> list[str]:
    """What a dry run lists as stopping the run."""
    return re.findall(r"^  - (.*)$", text.partition(STOPS)[2], re.MULTILINE)


def stops(text: str, *beginnings: str) -> None:
    """These, and no others, in this order."""
    found = problems(text)
    assert len(found) == len(beginnings), found
    for problem, beginning in zip(found, beginnings, strict=True):
        assert beginning in problem


# The recipes


def test_there_is_one_for_each_row_of_table_1() -> None:
    rows = [(e, s, b, r) for e in ("alfworld", "webshop") for s in ("1.5b", "7b") for b in ("gigpo", "grpo", "ppo")
            for r in (False, True)]  # fmt: skip
    assert sorted(parts(recipe) for recipe in PAPER) == sorted(rows)


@pytest.mark.parametrize("recipe", PAPER, ids=lambda path: path.stem)
def test_settings_are_the_papers(recipe: Path) -> None:
    assert flat_settings(load_config(recipe)) == expected(*parts(recipe))


@pytest.mark.parametrize("recipe", PAPER, ids=lambda path: path.stem)
def test_first_lines_say_what_it_is(recipe: Path) -> None:
    """The command names this file, and the number is the README's."""
    text = recipe.read_text(encoding="utf-8")
    env, size, base, swaps = parts(recipe)
    assert f"--config recipes/paper/{recipe.name}" in text
    assert text.startswith(f"# {'RSPO+' if swaps else ''}{ {'gigpo': 'GiGPO'}.get(base, base.upper()) } on ")
    assert f"Qwen2.5-{size.upper()}-Instruct" in text.splitlines()[0]
    number = re.search(r"(\d+\.\d ± \d+\.\d) % success, seeds 0, 200, 400", text)
    assert number is not None
    assert f"[{number[1]}](paper/{recipe.name})" in (RECIPES / "README.md").read_text(encoding="utf-8")
    assert {"alfworld": "ALFWORLD_DATA", "webshop": "WEBSHOP_DATA"}[env] in text


def test_readme_links_to_every_recipe_once() -> None:
    links = re.findall(r"\]\(([\w./-]+\.yaml)\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert sorted(links) == sorted(str(path.relative_to(RECIPES)) for path in [*PAPER, *SMALL, ANY_MODEL])


@pytest.mark.parametrize("recipe", PAPER, ids=lambda path: path.stem)
def test_a_dry_run_of_each_paper_recipe(recipe: Path, nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env, size, base, swaps = parts(recipe)
    text = dry_run(capsys, "--config", recipe)
    config = load_config(recipe)
    assert text.startswith(f"{config.title} on {env}, 150 updates of A, seed 0\n")
    assert f"{WEIGHTS[size]:,} weights in bfloat16" in text
    assert f"env.name={env!r}" in text, "no data is a line, not a crash"
    assert "is not a folder: --policy FOLDER" in text
    turns, length = (50, 2560) if env == "alfworld" else (15, 4608)
    assert f"its rows: 128 to {128 * turns:,}, of {length:,} tokens at most" in text
    if swaps:
        assert f"sampled for 3 updates of A: 896 trajectories, 384 by {base} alone" in text
        assert "and 16 replayed ones (α = 0.125)" in text
        assert f"runs/reward-model-{env}" in text
    else:
        assert "agent B" not in text
        assert "sampled in the run: 19,200 trajectories" in text
    processes = config.parallel.processes
    assert f"asked for cuda, {processes} processes; here" in text
    assert f"--num_processes {processes} " in recipe.read_text(encoding="utf-8")
    assert f"start: accelerate launch --num_processes {processes} -m rspo train" in text
    if not torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is None:
        expected = [
            "policy.device='cuda' cannot be used",
            "policy.attention='flash_attention_2' needs the package flash-attn",
            f"parallel.processes={processes} need a device each, and this machine has 0",
            f"env.name={env!r}",
            *([f"rewards.dense='model:runs/reward-model-{env}'"] if swaps else []),
            f"policy.path={config.policy.path!r} is not a folder",
        ]
        stops(text, *expected)
    assert list(nothing_here.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("recipe", SMALL, ids=lambda path: path.stem)
def test_a_dry_run_of_the_small_recipes(recipe: Path, nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "--config", recipe)
    assert "a small one, made and warmed up before training" in text
    assert "sampled for 3 updates of A: 448 trajectories, 192 by grpo alone" in text
    assert "which cannot be opened here" in text
    stops(text, "env.name=")
    assert list(nothing_here.iterdir()) == []


def test_a_dry_run_of_the_recipe_for_any_model(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lengths are those of full sentences."""
    assert load_config(ANY_MODEL, default_config("rspo")).env.options == {"prompt_style": "chat"}
    assert "its rows: 64 to 768, of 1,088 tokens at most" in dry_run(capsys, "--config", ANY_MODEL)


def test_as_a_command(tmp_path: Path) -> None:
    recipe = RECIPES / "paper" / "webshop_qwen2.5-7b_rspo-gigpo.yaml"
    command = [sys.executable, "-m", "rspo", "train", "--config", str(recipe), "--dry-run"]
    root = str(RECIPES.parent)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": root, "PATH": ""})
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("RSPO+GiGPO on webshop, 150 updates of A, seed 0")
    assert done.stdout.endswith("would stop the run here\n")
    assert list(tmp_path.iterdir()) == []


# What a dry run finds


def test_household_needs_nothing(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys)
    assert "environment: household, 461 training tasks, 115 of split 'eval', at most 12 turns" in text
    assert "84,992 weights in float32" in text
    assert text.endswith("nothing that would stop the run was found\n")
    assert list(nothing_here.iterdir()) == []


def test_a_local_model_is_counted(start: Path, nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "--policy", start)
    assert f"model: {start}, a local folder: {small_policy().num_parameters:,} weights in float32" in text
    assert "nothing that would stop" in text


def test_a_name_on_a_hub_is_not_fetched(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "Qwen/Qwen2.5-0.5B-Instruct", "--set", "policy.allow_download=true")
    text = dry_run(capsys, *flags, "--set", "optimizer.micro_batch_tokens=130", "--set", "rollout.max_batch=1")
    assert "494,032,768 weights in float32" in text
    assert "is not a folder" not in text
    text = dry_run(capsys, "--policy", "nobody/nothing")
    assert "model: nobody/nothing, of unknown shape: no estimate of its memory" in text
    assert "policy.path='nobody/nothing' is not a folder" in text
    assert "its rows: 128 to 1,536" in text, "the arithmetic needs no model"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["rewards.dense=model:runs/none"], "rewards.dense='model:runs/none': 'runs/none' must be a reward model"),
        (["rewards.dense=nowhere.to_be_found:reward"], "rewards.dense='nowhere.to_be_found:reward' cannot be imported"),
        (["run.report_to=nowhere.to_be_found:Reporter"], "run.report_to: 'nowhere.to_be_found:Reporter'"),
        (["base=nowhere.to_be_found:Estimator"], "nowhere.to_be_found"),
        (["evaluation.split=moon"], "evaluation.split='moon'"),
        (["env.name=nowhere.to_be_found:Env"], "env.name='nowhere.to_be_found:Env'"),
        (["env.options={max_turns: 0}"], "max_turns"),
        (["env.options={max_turn: 5}"], "unknown option 'max_turn'; the environment takes max_turns"),
        (["policy.device=cuda:99"], "policy.device='cuda:99' cannot be used"),
        (["policy.attention=flash_attention_2"], "policy.attention='flash_attention_2' needs a GPU"),
        (["policy.attention=flash_attention_2"], "needs policy.dtype 'bfloat16' or 'float16', got 'float32'"),
        (["policy.dtype=float16"], "policy.dtype must be 'float32' or 'bfloat16' where policy.path is None"),
        (["policy.device=cuda:1", "parallel.processes=2"], "policy.device='cuda:1' is one device, but parallel.proces"),
        ([SERVER, "parallel.processes=2"], "engine.name must be 'transformers' where 2 processes train together"),
        ([VLLM, "parallel.processes=2"], "engine.name must be 'transformers' where 2 processes train together"),
        ([VLLM, "parallel.shard=fsdp"], "engine.name must be 'transformers' with parallel.shard='fsdp'"),
        ([VLLM, "engine.tensor_parallel=99"], "engine.tensor_parallel=99 needs as many GPUs with engine.name='vllm'"),
        ([SERVER], "engine.push_weights must be 'vllm' or 'sglang' for training with engine.name='openai'"),
        ([SERVER, "engine.api_key_env=NOT_THERE"], "engine.api_key_env='NOT_THERE': that environment variable is not"),
        (["env.name=rspo_toys:ParityEnv"], "ParityEnv has no scripted expert; to start from another policy"),
        (["lora.rank=2", "lora.targets=nose"], "lora.targets must be 'all-linear' or name linear layers of the model"),
    ],
)
def test_what_would_stop_the_run_is_a_line(
    flags: list[str], problem: str, nothing_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dry_run(capsys, *(part for flag in flags for part in ("--set", flag)))
    assert any(problem in line for line in problems(text)), problems(text)


def test_a_folder_that_the_run_cannot_have_is_a_line(
    start: Path, nothing_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--policy", start, "--out", "run")
    stops(dry_run(capsys, *out))
    checkpoint = nothing_here / "run" / "checkpoints" / "step-000009"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    save_config(apply_flags(default_config(), [f"policy.path={start}"]), nothing_here / "run" / "config.yaml")
    stops(dry_run(capsys, *out), "run already holds a run; choose another --out")
    stops(dry_run(capsys, *out, "--resume"))
    stops(dry_run(capsys, *out, "--resume", "--seed", "1"), "run.seed of the run in run is 0 and cannot change")
    stops(dry_run(capsys, *out, "--resume", "--steps", "8"), "run.steps must be at least the 9 updates already made")
    stops(dry_run(capsys, "--policy", start, "--out", start / "config.json" / "run"), "is no folder that one may write")


def test_what_a_local_model_cannot_do_is_a_line(
    start: Path, nothing_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nothing_here / "model"
    shutil.copytree(start, model)
    flags = ("--policy", "model", "--set", "policy.chat=on", "--set", "lora={rank: 2, targets: [nose]}")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | {"eos_token_id": None}))
    (model / "model.safetensors").unlink()
    text = dry_run(capsys, *flags, "--set", "rollout.max_prompt_tokens=200")
    stops(
        text, "'model' holds no weights", "has no chat template", "nothing would end a response", "lora.targets must be"
    )
    warned = text.partition("the run would warn:\n")[2].partition("\n\n")[0]
    assert warned == (
        "  - rollout.max_prompt_tokens=200 and rollout.max_response_tokens=2 allow 202 tokens, the model has 128"
        " positions"
    )
    (model / "adapter_config.json").write_text("{}")
    assert "policy.path must be a whole model, got the LoRA adapter 'model'" in dry_run(capsys, "--policy", "model")


def test_a_replay_of_nothing_is_said(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set", "rollout.tasks=2", "--set", "rollout.group_size=2")
    said = "nothing is replayed, this is grpo alone"
    text = dry_run(capsys, *small)
    assert "swap.alpha=0.125 of rollout.tasks=2 × rollout.group_size=2 is 0.5 trajectories" in text
    assert said in text
    assert said not in dry_run(capsys, *small, "--set", "swap.alpha=0.25")
    assert said not in dry_run(capsys, *small, "--set", "swap.alpha=0")
    assert said not in dry_run(capsys, *small, "--method", "grpo")


def test_a_broken_model_folder_is_a_line(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nothing_here / "model").mkdir()
    (nothing_here / "model" / "config.json").write_text('{"model_type": "of-the-future"}')
    text = dry_run(capsys, "--policy", "model")
    assert "no causal LM that transformers knows is at 'model'" in text
    (nothing_here / "model" / "config.json").write_text('{"model_type": "vit"}')
    text = dry_run(capsys, "--policy", "model")
    assert "ViTConfig" in text
    assert "GPT2Config" not in text, "not every name that there is"


def test_what_does_not_fit_is_said(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "Qwen/Qwen2.5-32B-Instruct", "--set", "policy.allow_download=true")
    assert "GB do not fit the device's" in dry_run(capsys, *flags)


def test_what_may_not_fit_is_warned_of(
    start: Path, nothing_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--policy", "Qwen/Qwen2.5-0.5B-Instruct", "--set", "policy.allow_download=true")
    peak = memory(dry_run(capsys, *flags), "at the highest")
    monkeypatch.setattr("rspo.cli.dry_run._device_memory", lambda device: round(1.05 * peak * 10**9))
    text = dry_run(capsys, *flags)
    assert " GB: no\n" in text
    assert "the run would warn:\n  - " in text
    assert "GB free: they may not fit" in text
    monkeypatch.setattr("rspo.cli.dry_run._device_memory", lambda device: round(1.2 * peak * 10**9))
    assert "they may not fit" not in dry_run(capsys, *flags)


def test_agent_a_waits_in_the_memory_that_a_cpu_trains_in(
    nothing_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--policy", "Qwen/Qwen2.5-0.5B-Instruct", "--set", "swap.copy=offload", "--set")
    there, here = (dry_run(capsys, *flags, f"policy.device={device}") for device in ("cuda", "cpu"))
    waiting = memory(here, "in the CPU's memory, agent A")
    assert waiting > 5
    added = memory(here, "at the highest") - memory(there, "at the highest")
    assert added == pytest.approx(waiting, abs=0.2)


def test_numbers_and_launchers_are_those_of_the_run(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = (
        "--steps",
        "1",
        "--set",
        "rollout={tasks: 2, group_size: 2}",
        "--set",
        "swap.k=1",
        "--set",
        "swap.alpha=0.25",
    )
    text = dry_run(capsys, *one, "--set", "rewards.dense=model:runs/none")
    assert "1 update of A" in text
    assert "a loop: 1 update of B" in text
    assert "and 1 replayed one (α = 0.25)" in text
    assert "the process reward model at runs/none, which is not counted" in text
    assert "process reward model" not in dry_run(capsys, "--method", "grpo", "--set", "rewards.dense=model:runs/none")

    small = ("--set", "optimizer={minibatches: 1, micro_batch_tokens: 520}", "--set", "parallel.processes=2", "--set")
    here, there = (dry_run(capsys, *small, f"policy.device={device}") for device in ("cpu", "cuda"))
    assert "start: torchrun --nproc-per-node 2 -m rspo train" in here
    assert "start: accelerate launch --num_processes 2 -m rspo train" in there
    assert "micro-batches of a mini-batch, in each of 2 processes: at most 192, of 4 rows" in here


def test_memory_is_that_of_one_process(
    nothing_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so where there are several, which on a CPU share it."""
    two = ("--set", "parallel.processes=2", "--set")
    here, there = (dry_run(capsys, *two, f"policy.device={device}") for device in ("cpu", "cuda"))
    for text in (here, there):
        assert "\nmemory of a device for each of 2 processes, calculated:\n" in text
        assert re.search(r"\n  at the highest .* for each of 2 processes\n", text)
        assert "\n  one process fits, a tenth left free, into " in text
    assert re.search(r"\n  together [\d.]+ .B, where they share a machine\n", here)
    assert "together" not in there
    alone = dry_run(capsys)
    assert "each of" not in alone
    assert "\nmemory of a device, calculated:\n" in alone
    monkeypatch.setenv("LOCAL_RANK", "0")  # as torchrun sets them
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert dry_run(capsys) == here


def test_a_wrong_configuration_is_an_error(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nothing_here / "wrong.yaml").write_text("preset: paper\nrollout: {groups: 3}\n")
    assert main(["train", "--config", "wrong.yaml", "--dry-run"]) == 2
    assert "unknown setting 'rollout.groups'" in capsys.readouterr().err
    assert main(["train", "--dry-run", "--set", "swap.alpha=1"]) == 2
    capsys.readouterr()
    assert main(["train", "--dry-run", "--config", "nowhere.yaml"]) == 2
    assert "the configuration nowhere.yaml does not exist" in capsys.readouterr().err


def memory(text: str, part: str) -> float:
    """GB of a part in what a dry run prints."""
    found = re.search(rf"^  {re.escape(part)}.* ([\d.,]+) (GB|MB)", text, re.MULTILINE)
    assert found is not None, part
    return float(found[1].replace(",", "")) / (1 if found[2] == "GB" else 1000)


def test_choices_of_memory_are_seen(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES / "paper" / "webshop_qwen2.5-7b_rspo-grpo.yaml"
    alone = ("--config", recipe, "--set", "parallel={processes: 1, shard: none}")
    both = dry_run(capsys, *alone)
    assert memory(both, "agent B") == pytest.approx(16 * 7.6156, abs=0.1)
    offload = dry_run(capsys, *alone, "--set", "swap.copy=offload")
    assert "agent B" not in offload
    assert memory(offload, "in the CPU's memory, agent A") == pytest.approx(14 * 7.6156, abs=0.1)
    lora = dry_run(capsys, *alone, "--set", "lora.rank=32")
    assert memory(lora, "weights, frozen") == pytest.approx(2 * 7.6156, abs=0.1)
    assert "reference" not in lora
    adapter = dry_run(capsys, *alone, "--set", "lora.rank=32", "--set", "swap.copy=adapter")
    assert memory(adapter, "agent B") < 2 < memory(adapter, "float32 masters")
    shared = dry_run(capsys, "--config", recipe)
    assert memory(shared, "agent B") == pytest.approx(16 * 7.6156 / 8, abs=0.1)
    served = dry_run(capsys, *alone, "--set", SERVER)
    assert memory(served, "generation") == 0


# Presets of files


def test_a_file_may_name_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("preset: paper\nmethod: ppo\nswap: {k: 5}\n")
    config = load_config(path)
    assert config.rollout == paper_config("ppo").rollout
    assert (config.swap.k, config.optimizer.learning_rate) == (5, 1e-6)
    assert load_config(path, default_config("ppo")).optimizer.learning_rate == 1e-3, "a given base is the base"
    for wrong in ("best", "3", "[paper]"):
        path.write_text(f"preset: {wrong}\n")
        with pytest.raises(ConfigError, match=r"c\.yaml: preset must be one of 'default', 'paper'"):
            load_config(path)


def test_the_preset_flag_replaces_the_files(nothing_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nothing_here / "c.yaml").write_text(yaml.safe_dump({"preset": "paper", "rollout": {"tasks": 4}}))
    assert "150 updates of A" in dry_run(capsys, "--config", "c.yaml")
    text = dry_run(capsys, "--config", "c.yaml", "--preset", "default", "--method", "grpo")
    assert "GRPO on household, 54 updates of A" in text
    assert "4 tasks × 8" in text
