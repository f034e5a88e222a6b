"""verl without accelerators: its own FSDP workers and agent-loop workers in this process, on the CPU over gloo.

Not verl's are the platform (verl has none for CPUs), the transport between processes (there is one), and the server
that generates: a client that samples from the worker's own weights.
"""

from __future__ import annotations

import asyncio
import unittest.mock
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from rspo_parity import ParityEnv
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

from rspo.envs.base import StepResult
from rspo.integrations.verl import agent_loop
from rspo.integrations.verl.rows_trainer import RowsTrainer


def tiny_config(model: Path, folder: Path, *overrides: str) -> DictConfig:
    """The plug-in's configuration at the size of a test."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    small = [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.strategy=fsdp2",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.optim.lr=0.01",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=false",
        f"{rollout}.n=4",
        f"{rollout}.agent.num_workers=1",
        "data.train_batch_size=4",
        "data.val_max_samples=8",
        "data.max_prompt_length=96",
        "data.max_response_length=2",
        "rspo.env.name=rspo_parity:ParityEnv",
        "~rspo.env.options.prompt_style",
        "rspo.swap.k=2",
        "rspo.swap.alpha=0.25",
        "rspo.swap.buffer_tasks=3",
        "rspo.optimizer.minibatch_rows=24",
        "trainer.total_training_steps=4",
        "trainer.logger=[]",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder}",
    ]
    with initialize_config_module("rspo.integrations.verl.config", version_base=None):
        return compose("rspo_trainer", [*small, *overrides])


class FailingEnv(ParityEnv):
    """Raises at the first action."""

    def step(self, actions: Sequence[str]) -> StepResult:
        raise OSError("the world is gone")


class SamplingClient:
    """Generates with a worker's weights as they were at the last `take`, like a server that weights are pushed to."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.end = self.model.generation_config.eos_token_id
        self.random = torch.Generator().manual_seed(seed)

    def take(self, module: torch.nn.Module) -> None:
        """Copy the weights of an FSDP2 module."""
        self.model.load_state_dict({name: value.full_tensor() for name, value in module.state_dict().items()})

    @torch.no_grad()
    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Sample token by token, ending with the end of sequence or at the limit."""
        ids, logp = [], []
        while len(ids) < sampling_params["max_tokens"] and ids[-1:] != [self.end]:
            logits = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, -1]
            scores = torch.log_softmax(logits / (sampling_params["temperature"] or 1.0), -1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=self.random)))
            logp.append(float(scores[ids[-1]]))
        return TokenOutput(token_ids=ids, log_probs=logp)


class WorkerGroup:
    """One worker as a worker group: calls are calls. Keeps the names of those that change weights in `calls`."""

    LOGGED = ("keep_agent", "restore_agent", "update_actor", "compute_log_prob", "compute_ref_log_prob")

    def __init__(self, actor: Any, reference: Any | None, calls: list[str]) -> None:
        self.actor = actor
        self.reference = reference
        self.calls = calls
        self._dispatch_info = {"actor": [0]}

    def __getattr__(self, name: str) -> Any:
        method = self.reference.compute_log_prob if name == "compute_ref_log_prob" else getattr(self.actor, name)
        if name in self.LOGGED:
            self.calls.append(name)
        return method


class RolloutManager:
    """verl's agent-loop worker in this process. It plays one episode after the other, so that the client's draws are
    not in the order in which threads come."""

    def __init__(self, config: DictConfig, client: SamplingClient, calls: list[str]) -> None:
        self.worker = AgentLoopWorker(config, client, reward_loop_worker_handles=[])
        self.calls = calls

    def generate_sequences(self, batch: DataProto) -> DataProto:
        self.calls.append(f"generate {len(batch)}")
        batch.non_tensor_batch.setdefault("priority", torch.arange(len(batch)).numpy())
        with (
            ThreadPoolExecutor(1) as one_at_a_time,
            unittest.mock.patch.object(agent_loop, "_threads", return_value=one_at_a_time),
        ):
            return asyncio.run(self.worker.generate_sequences(batch))


class WeightTransfer:
    """Pushes the actor's weights to the client."""

    def __init__(self, group: WorkerGroup, client: SamplingClient, calls: list[str]) -> None:
        self.group, self.client, self.calls = group, client, calls

    def update_weights(self, global_steps: int) -> None:
        self.calls.append("weights to engine")
        self.client.take(self.group.actor.actor.engine.module)

    def sleep_replicas(self) -> None: ...


def attach_workers(trainer: RowsTrainer, model: Path) -> list[str]:
    """Give a trainer its workers, as `init_workers` would. Returns the list that their calls are written to."""
    from rspo.integrations.verl.worker import SwapWorker

    section = trainer.config.actor_rollout_ref
    calls: list[str] = []
    actor = SwapWorker(section, "actor")
    actor.init_model()
    reference = None
    if trainer.use_reference_policy:
        # verl's own reference worker keeps its weights in pinned memory, which needs an accelerator.
        reference = SwapWorker(section, "actor")
        reference.init_model()
    client = SamplingClient(model)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = WorkerGroup(actor, reference, calls)
    trainer.async_rollout_manager = RolloutManager(trainer.config, client, calls)
    trainer.checkpoint_manager = WeightTransfer(trainer.actor_rollout_wg, client, calls)
    return calls
