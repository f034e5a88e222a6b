"""Two processes do what one does. They are real ones, connected by gloo on the CPU, and compared with this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from places import HELPERS, ROOT
from rspo_processes import (
    CASES,
    CHECKPOINTED,
    RUN_FLAGS,
    WHOLE_ONLY,
    case_config,
    started,
    trained,
    updated,
    weights_of,
)
from rspo_toys import make_trajectory, small_config, small_policy
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rspo.cli import SILENCE, main
from rspo.config import ConfigError
from rspo.data.batch import Batch, cut
from rspo.engines import TransformersEngine
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.models.processes import ALONE, ProcessRanks, balanced, join, placed, play_groups
from rspo.models.randomness import RandomStreams
from rspo.runs.checkpoint import load_checkpoint, save_checkpoint
from rspo.runs.records import read_metrics, without_timings
from rspo.start import open_run

SHARDS = ("none", "fsdp")


def launch(*command: str, processes: int = 2) -> subprocess.Popen[str]:
    """Start processes as `torchrun` does, each with one thread."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(ROOT), str(HELPERS)])
    return subprocess.Popen(
        [*torchrun, *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_work(work: str, folder: Path) -> list[dict[str, Any]]:
    """The answers of both processes to a piece of work of `rspo_processes`."""
    process = launch(str(HELPERS / "rspo_processes.py"), work, str(folder))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    return [torch.load(folder / f"{work}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """Start policies: a Llama whose head is its embeddings, a Qwen2 with a head of its own, and the first in numbers
    that bfloat16 knows; and what this process alone has saved of some agents."""
    folder = tmp_path_factory.mktemp("start")
    tied = small_policy()
    tied.save(folder / "tied")
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tied.tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        eos_token_id=tied.tokenizer.eos_token_id,
    )  # fmt: skip
    Policy(Qwen2ForCausalLM(config), tied.tokenizer).save(folder / "untied")
    with torch.no_grad():  # to what bfloat16 can say, so that sharded float32 weights start from the same numbers
        for parameter in tied.model.parameters():
            parameter.copy_(parameter.bfloat16())
    tied.save(folder / "rounded")
    for name in CHECKPOINTED:
        agent, _ = updated(case_config(name), folder)
        save_checkpoint(folder / f"alone-{name}", agent, {"step": 0})
    return folder


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor], case: str) -> None:
    """Weights, up to a share of the way that they have moved: rounding of float32, or of bfloat16's gradients."""
    share = 0.05 if "bfloat16" in case else 1e-4
    assert ours.keys() == theirs.keys(), case
    for name, value in ours.items():
        moved = (theirs[name] - start[name]).norm()
        assert moved > 0, f"{case}: {name} stood still"
        assert (value - theirs[name]).norm() <= share * moved, f"{case}: {name}"


def assert_same_statistics(ours: dict[str, float], theirs: dict[str, float], case: str) -> None:
    """But for the effective sample size, a mean over micro-batches, whose make-up differs."""
    assert ours.keys() == theirs.keys(), case
    rounding = 0.05 if "bfloat16" in case else 1e-4
    for name in ours.keys() - {"ess", "replay/ess"}:
        assert ours[name] == pytest.approx(theirs[name], rel=rounding, abs=1e-6), f"{case}: {name}"


@pytest.mark.slow
def test_updates_are_those_of_one_process(start: Path) -> None:
    """With whole and with sharded weights: replay, critics, clipping, odd numbers of rows, and fewer than processes."""
    first, second = run_work("updates", start)
    for name in CASES:
        config = case_config(name)
        agent, stats = updated(config, start)
        begin = weights_of(started(config, start))
        weights = weights_of(agent)
        for case in (f"{name}/{shard}" for shard in SHARDS if f"{name}/{shard}" in first):
            assert_same(first[case][0], weights, begin, case)
            assert_same_statistics(first[case][1], stats, case)
            assert first[case][1] == second[case][1], case
            assert all(torch.equal(value, second[case][0][key]) for key, value in first[case][0].items()), case
        assert (f"{name}/fsdp" in first) == (name not in WHOLE_ONLY)
        if name in CHECKPOINTED:
            check_checkpoints(name, start, first, agent, weights)


def check_checkpoints(name: str, start: Path, answer: dict[str, Any], agent: Agent, weights: dict[str, Tensor]) -> None:
    """What the processes saved, loaded and branched after they had trained as `agent` has, with these weights."""
    trained(agent, start)
    further = weights_of(agent)
    for shard in SHARDS:
        case = f"{name}/{shard}"
        ours = answer[case][0]
        assert answer[f"loaded/{case}"], "a checkpoint of two processes, loaded by them"
        loaded = load_checkpoint(start / f"saved-{name}-{shard}", agent.config, agent.critic is not None).agent
        assert all(torch.equal(ours[key], value) for key, value in weights_of(loaded).items()), "loaded by this one"
        trained(loaded, start)
        assert_same(weights_of(loaded), further, weights, case)
        assert_same(answer[f"from-alone/{case}"], further, weights, f"{case}, this process's checkpoint")
        original, twin = answer[f"twin/{case}"]
        assert all(torch.equal(original[key], twin[key]) for key in original), case
        original, twin = answer[f"trained/{case}"]
        assert all(torch.equal(original[key], twin[key]) for key in original), "optimiser states are copied too"
        assert_same(twin, further, weights, f"{case}, agent B")


@pytest.mark.slow
def test_what_processes_exchange(start: Path) -> None:
    first, second = run_work("rest", start)
    for answer in (first, second):
        assert answer["gathered"] == ["process 0", "process 1"]
        assert answer["from main"] == 0
        assert answer["errors"] == ["'process 1'", "'process 0'"], "raised in both"
        assert answer["groups"] == [(group, index) for group in range(5) for index in range(2)]
        for shard in SHARDS:
            assert "turn 0 of trajectory 2 of group 0" in answer[f"non-finite/{shard}"]
            assert "advantage nan" in answer[f"non-finite/{shard}"]
            assert answer[f"untouched/{shard}"]
    config = case_config("replay")
    agent = started(config, start)
    for rank, answer in enumerate((first, second)):
        engine = TransformersEngine(agent.policy, config.rollout, torch.Generator().manual_seed(0))
        prompts = [np.arange(3, 6 + i + rank) for i in range(3 + 2 * rank)]
        expected = [g for _ in range(1 + rank) for g in engine.generate(prompts)]
        for shard in SHARDS:
            generated = answer[f"generated/{shard}"]
            assert [ids for ids, _ in generated] == [g.response_ids.tolist() for g in expected]
            for (_, logp), g in zip(generated, expected, strict=True):
                np.testing.assert_allclose(logp, g.logp, atol=1e-6)
    after = first["after generation/none"]
    assert_same(first["after generation/fsdp"], after, weights_of(agent), "an update after generation")


@pytest.mark.slow
def test_runs_are_resumed_to_the_same_end(start: Path) -> None:
    run_work("runs", start)
    for shard in SHARDS:
        whole, resumed = (without_timings(read_metrics(start / f"{name}-{shard}")) for name in ("run", "resumed"))
        assert whole == resumed
        kinds = [record["kind"] for record in whole]
        assert kinds.count("update") == 2
        assert kinds.count("dense") == (2 if shard == "fsdp" else 0)
        assert whole[-1]["success"] is not None
        assert list((start / f"run-{shard}").glob("checkpoints/step-*/model.safetensors"))
    # The next loop is made by this process alone.
    config = small_config(f"policy.path={start / 'tied'}", "swap.source=dense", *RUN_FLAGS, "run.steps=3")
    trainer = open_run(config, start / "run-fsdp", resume=True, progress=False)
    trainer.train()
    trainer.close()
    assert read_metrics(start / "run-fsdp", "update")[-1]["step"] == 3


@pytest.mark.slow
def test_trainers_of_all_processes_see_the_run_and_one_writes(start: Path) -> None:
    first, second = run_work("trainer", start)
    for shard in SHARDS:
        assert first[shard] == second[shard], "callbacks and results"
        seen, entries, _, _ = first[shard]
        assert seen["step"] == 2
        # `evaluate` logs twice more, and is no record.
        assert seen["log"] == entries + 2 == len(read_metrics(start / f"hf-{shard}")) + 2
        assert first[f"before/{shard}"] == second[f"before/{shard}"]
        assert first[f"before/{shard}"] == evaluated(start / f"hf-{shard}")
        begin = load_file(start / f"hf-{shard}" / "before" / "model.safetensors")
        tied = load_file(start / "tied" / "model.safetensors")
        assert all(torch.equal(begin[name], value) for name, value in tied.items())
        assert first[f"main/{shard}"]
        assert not second[f"main/{shard}"]
        saved, kept = (
            load_file(start / f"hf-{shard}" / place / "model.safetensors")
            for place in ("saved", "checkpoints/step-000002")
        )
        assert saved.keys() == kept.keys()
        assert all(torch.equal(value, kept[name]) for name, value in saved.items())
    assert "different models to start from" in first["given"]
    assert first["given"] == second["given"]
    assert first["small before"] == second["small before"]
    assert first["small before"] == evaluated(start / "hf-small")


def evaluated(folder: Path) -> Any:
    """The metrics of a run's first evaluation, rounded in its file, by the names that `RSPOTrainer.evaluate` has."""
    record = read_metrics(folder, "evaluation")[0]
    others = ("kind", "step", "lost_episodes", "skipped_tasks", "trajectories", "tokens", "seconds")
    return pytest.approx({f"eval_{name}": value for name, value in record.items() if name not in others}, rel=1e-7)


@pytest.mark.slow
def test_a_killed_run_goes_on(start: Path, tmp_path: Path) -> None:
    """`rspo train` by processes that are killed after the first of twelve loops."""
    settings = [f"--set={flag}" for flag in (*RUN_FLAGS, "rollout.tasks=4", "rollout.group_size=2", "method=grpo")]
    command = ["-m", "rspo", "train", "--quiet", "--policy", str(start / "tied"), "--steps", "12", *settings]
    runs = [launch(*command, "--out", str(tmp_path / name)) for name in ("whole", "killed")]
    while not (tmp_path / "killed" / "checkpoints" / "step-000001").is_dir():
        assert runs[1].poll() is None, runs[1].communicate()[0][-3000:]
        time.sleep(0.01)
    launcher = psutil.Process(runs[1].pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.kill()
    runs[1].communicate()
    made = len(read_metrics(tmp_path / "killed", "update"))
    assert 1 <= made < 12
    runs[1] = launch("-m", "rspo", "train", "--quiet", "--resume", "--out", str(tmp_path / "killed"))
    for run in runs:
        output, _ = run.communicate(timeout=600)
        assert run.returncode == 0, output[-3000:]
        assert output.count("run folder:") == 1, "one process reports"
    whole, resumed = (without_timings(read_metrics(tmp_path / name)) for name in ("whole", "killed"))
    assert whole == resumed


def test_processes_and_devices_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made in the run's folder."""
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join(small_config()) is ALONE
    for flag, complaint in (
        (
            "parallel.processes=8",
            r"processes=8, but 1 process runs; start them with torchrun --nproc-per-node 8 -m rspo",
        ),
        ("parallel.shard=fsdp", "parallel.shard='fsdp' needs the processes of accelerate launch or torchrun"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            open_run(small_config(flag), tmp_path / "run", progress=False)
    with pytest.raises(
        ConfigError, match=r"1 process runs; start them with accelerate launch --num_processes 2 -m rspo"
    ):
        join(small_config("parallel.processes=2", "policy.device=cuda"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"parallel.processes=2, but 4 processes run"):
        join(small_config("parallel.processes=2"))
    count = torch.cuda.device_count()
    if count < 4:
        with pytest.raises(ConfigError, match=f"policy.device='cuda': 4 processes run on this machine.*it has {count}"):
            join(small_config("policy.device=cuda"))
    with pytest.raises(ConfigError, match=r"policy.device='cuda:1' is one device, but 4 processes"):
        join(small_config("policy.device=cuda:1"))
    assert not (tmp_path / "run").exists()
    for flags, complaint in (
        (["parallel.processes=0"], "parallel.processes must be >= 1"),
        (["parallel.shard=ddp"], "'none', 'fsdp', got 'ddp'"),
        (["parallel.shard=fsdp", "lora.rank=4"], "parallel.shard must be 'none' with lora.rank=4"),
        (["parallel.shard=fsdp", "swap.copy=offload"], "parallel.shard must be 'none' with .*swap.copy='offload'"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            small_config(*flags)


@pytest.mark.parametrize(("processes", "is_left_alone"), [(1, False), (2, True)])
def test_what_accelerate_starts_alone_is_said(processes: int, is_left_alone: bool) -> None:
    """Without a GPU it starts one process, whatever number it was given."""
    pytest.importorskip("accelerate")
    program = "from rspo.models.processes import join; from rspo.config import Config; print(join(Config()).size)"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    done = subprocess.run(
        [*launcher, "--no_python", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert ("accelerate launch was to start several processes" in done.stderr) == is_left_alone


def test_an_error_of_all_processes_is_said_once(tmp_path: Path) -> None:
    process = launch("-m", "rspo", "train", "--policy", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert output.count("rspo: error: ") == 1
    assert "nowhere' is not a folder" in output


def test_an_error_of_one_process_is_said_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert waited == [SILENCE]
    assert "rspo: error: " in capsys.readouterr().err


def test_rows_are_shared_out_by_their_tokens() -> None:
    lengths = [7, 1, 9, 4, 4, 2, 30, 5]
    for count in (1, 2, 3, 12):
        shares = balanced(lengths, count)
        assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))
        assert all(share.tolist() == sorted(share.tolist()) for share in shares)
        held = [sum(lengths[i] for i in share.tolist()) for share in shares]
        assert max(held) <= max(max(lengths), sum(lengths) / count + max(lengths))
    assert [int(sum(lengths[i] for i in share.tolist())) for share in balanced(lengths, 2)] == [31, 31]
    assert cut(torch.empty(0, dtype=torch.int64), 100) == []


def test_one_process_has_everything_and_its_streams_are_as_before() -> None:
    batch = Batch.from_trajectories([make_trajectory(0, i, turns=3) for i in range(3)])
    pieces = ALONE.micro_batches(batch, 20, packed=False)
    assert [(rows.tolist(), counts) for rows, counts in pieces] == [
        (rows.tolist(), True) for rows in batch.micro_batches(20)
    ]
    played = [make_trajectory(2, 0), make_trajectory(0, 0), make_trajectory(0, 1)]
    assert [(t.group, t.index) for t in play_groups(ALONE, lambda: played)] == [(0, 0), (0, 1), (2, 0)]
    streams = RandomStreams(5)
    streams.sampling.manual_seed(3)
    state = streams.state()
    assert state["sampling_of_others"] == []
    again = RandomStreams(5)
    again.load_state({name: value for name, value in state.items() if name != "sampling_of_others"})
    assert torch.equal(torch.rand(4, generator=again.sampling), torch.rand(4, generator=streams.sampling))


def test_streams_of_another_number_of_processes_begin_anew() -> None:
    """From the seed and from where the run stands."""
    state = RandomStreams(5).state()
    of_two = {**state, "sampling_of_others": [state["sampling"]]}
    drawn = []
    for seed in (5, 5, 6):
        streams = RandomStreams(seed)
        streams.load_state(of_two)
        drawn.append(torch.rand(4, generator=streams.sampling))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    moved = RandomStreams(5)
    moved.tasks.random()
    later = {**of_two, "tasks": moved.tasks.bit_generator.state}
    streams = RandomStreams(5)
    streams.load_state(later)
    assert not torch.equal(torch.rand(4, generator=streams.sampling), drawn[0])


def test_each_process_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("policy.device=cuda")
    assert placed(config, ALONE) is config
    monkeypatch.setenv("LOCAL_RANK", "3")
    several = ProcessRanks.__new__(ProcessRanks)  # placed asks for no more than what it is
    assert placed(config, several).policy.device == "cuda:3"
    assert placed(small_config(), several).policy.device == "cpu"
