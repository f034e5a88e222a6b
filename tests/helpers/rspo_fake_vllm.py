"""A stand-in for the package vllm, which needs a GPU: the few names that `rspo.engines.vllm_engine` uses, with the
parameters that vLLM 0.33 gives them, and a policy in place of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rspo.config import PolicyConfig, RolloutConfig
from rspo.engines import TransformersEngine
from rspo.models.policy import Policy


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    """Fails where the real one would: asleep, or with a prompt longer than max_model_len."""

    made: list[LLM]

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.92,
        seed: int = 0,
        trust_remote_code: bool = False,
        enable_sleep_mode: bool = False,
        max_model_len: int | None = None,
        logprobs_mode: str = "raw_logprobs",
        generation_config: str = "auto",
    ) -> None:
        self.policy = Policy.load(model, PolicyConfig(dtype=dtype))
        self.max_model_len = max_model_len
        self.logprobs_mode = logprobs_mode
        self.generation_config = generation_config
        self.enable_sleep_mode = enable_sleep_mode
        self.asleep = False
        self.calls: list[str] = []
        type(self).made.append(self)

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        assert not self.asleep
        self.calls.append("generate")
        outputs = []
        for prompt, sampling in zip(prompts, sampling_params, strict=True):
            ids = np.array(prompt["prompt_token_ids"], dtype=np.int64)
            assert sampling.max_tokens is not None
            assert self.max_model_len is None or len(ids) + sampling.max_tokens <= self.max_model_len
            config = RolloutConfig(max_prompt_tokens=len(ids), max_response_tokens=sampling.max_tokens)
            generator = torch.Generator().manual_seed(sampling.seed or 0)
            (drawn,) = TransformersEngine(self.policy, config, generator, sampling.temperature).generate([ids])
            tokens = drawn.response_ids.tolist()
            logprobs = [{token: Logprob(value)} for token, value in zip(tokens, drawn.logp.tolist(), strict=True)]
            outputs.append(RequestOutput([CompletionOutput(tokens, None if sampling.logprobs is None else logprobs)]))
        return outputs

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        assert not self.asleep
        assert method == "reload_weights"
        assert Path(kwargs["weights_path"]).is_dir()
        self.calls.append("reload")
        self.policy = Policy.load(kwargs["weights_path"], PolicyConfig())
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def sleep(self, level: int = 1) -> None:
        assert self.enable_sleep_mode
        assert not self.asleep
        self.calls.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert self.asleep
        self.calls.append("wake")
        self.asleep = False
        return True
