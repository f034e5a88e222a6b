"""Generation by vLLM in this process, on GPUs that training may use in turn.

vLLM is started at the first rollout from a folder with the policy. Later weights come the same way: they are written,
and all of vLLM's workers call `reload_weights`, which works for any number of GPUs. Between rollouts vLLM sleeps (level
1): its weights go to the CPU's memory, its cache is dropped.

Written against vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config, ConfigError, RolloutConfig
from ..models.policy import Policy
from .base import Backend, EngineError, Generation, PolicyEngine, check_prompts
from .weight_push import WeightPush


class VLLMBackend(Backend):
    """vLLM, and whose weights it holds.

    Args:
        config: sections `engine`, `rollout` (lengths), `policy` (dtype) and `run` (seed).
        folder: of the run; the weights pass through it unless `engine.push_folder` names another place. None: through
            the system's temporary folder.

    Raises ConfigError where vLLM is not installed or finds no GPU.
    """

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        try:
            self.vllm = import_module("vllm")
        except ImportError as error:
            raise ConfigError(f"engine.name='vllm' needs a package: pip install 'rspo[vllm]' ({error})") from error
        gpus = torch.cuda.device_count()
        if gpus < config.engine.tensor_parallel:
            raise ConfigError(
                f"engine.tensor_parallel={config.engine.tensor_parallel} needs as many GPUs with engine.name='vllm',"
                f" {gpus} are here"
            )
        self.config = config
        self.weights = WeightPush(self._load, config.engine, folder)
        self.llm: Any = None
        self._sleeps = False

    @contextmanager
    def engine(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> Iterator[VLLMEngine]:
        if self._sleeps:
            self.llm.wake_up()
            self._sleeps = False
        self.weights.push(policy)
        try:
            yield VLLMEngine(self, policy, config, generator, temperature)
        finally:
            if self.config.engine.sleep:
                self.llm.sleep(level=1)
                self._sleeps = True

    def _load(self, path: Path) -> None:
        if self.llm is None:
            self.llm = self._start(path)
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            self.llm.reset_prefix_cache()

    def _start(self, path: Path) -> Any:
        settings, rollout = self.config.engine, self.config.rollout
        return self.vllm.LLM(
            model=str(path),
            dtype=self.config.policy.dtype,
            tensor_parallel_size=settings.tensor_parallel,
            gpu_memory_utilization=settings.gpu_memory,
            enable_sleep_mode=settings.sleep,
            max_model_len=rollout.max_prompt_tokens + rollout.max_response_tokens,
            logprobs_mode="processed_logprobs",  # at the temperature that is sampled at
            generation_config="vllm",  # not the model's own, which may cut the distribution
            seed=self.config.run.seed,
            trust_remote_code=False,
        )

    def close(self) -> None:
        """vLLM's processes end, and its memory is free, once nothing refers to it."""
        self.llm = None


class VLLMEngine(PolicyEngine):
    """An engine on vLLM with a policy's weights; the policy's tokenizer reads the responses.

    backend: vLLM, awake.
    """

    def __init__(
        self,
        backend: VLLMBackend,
        policy: Policy,
        config: RolloutConfig,
        generator: torch.Generator,
        temperature: float | None = None,
    ) -> None:
        super().__init__(policy, config, generator, temperature)
        self.backend = backend

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt. Raises ConfigError for a prompt that is empty or too long."""
        check_prompts(prompts, self.policy, self.config)
        sampling = [
            self.backend.vllm.SamplingParams(
                temperature=self.temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=self.config.max_response_tokens,
                stop_token_ids=list(self.policy.eos_token_ids),
                logprobs=0,  # of the token that was drawn, and no other
                detokenize=False,
                seed=seed,
            )
            for seed in self.seeds(len(prompts))
        ]
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = self.backend.llm.generate(asked, sampling, use_tqdm=False)
        drawn = [_tokens(output.outputs[0]) for output in outputs]
        texts = self.policy.decode([ids for ids, _ in drawn])
        return [Generation(text, ids, logp, logp) for text, (ids, logp) in zip(texts, drawn, strict=True)]


def _tokens(completion: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [T] of a completion and their log-probs float32 [T]. Raises EngineError where some are missing."""
    ids = np.array(completion.token_ids, dtype=np.int64)
    if not len(ids) or completion.logprobs is None or len(completion.logprobs) != len(ids):
        raise EngineError(f"expected tokens with a log-prob for each of vLLM, got {completion!r:.200}")
    logp = [of_position[token].logprob for token, of_position in zip(ids.tolist(), completion.logprobs, strict=True)]
    return ids, np.array(logp, dtype=np.float32)
