"""The agent loop "rspo_env": `rspo.algorithm.rollout` plays an episode, verl's servers generate."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerClient

from ...algorithm.rollout import rollout
from ...algorithm.timing import PhaseTimer
from ...config import ConfigError
from ...data.layouts import make_layout
from ...data.texts import Texts
from ...data.trajectory import Trajectory
from ...engines.base import Generation
from ...envs import BatchedEnv, make_env
from ...envs.base import EnvironmentValueError
from ...envs.losses import LossLog, place_of

logger = logging.getLogger(__name__)
_failures = LossLog(logger)

MAX_EPISODES = 1024
"""Episodes of one worker process that run at once; each holds a thread, which mostly waits for its response."""


class EnvAgentLoop(AgentLoopBase):
    """Plays one episode of the environment `rspo.env` for a row of `EnvTasks`.

    The padded prompt and response of its output are those of the last turn, for verl's logs and validation. All turns
    are in the output's field "trajectory", a `rspo.data.trajectory.Trajectory`, which is what RSPO trains on. The score
    is the outcome reward; "acc" in verl's records is success.

    An episode in which the environment fails comes back as a trajectory that is `lost`, with the traceback in the log.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play the episode. kwargs: the row's task_index, split and seed.

        Raises ConfigError where a prompt is longer than `rollout.prompt_length`, or where the chat template does not
        read what `data.apply_chat_template_kwargs` gives it.
        """
        timer, loop = PhaseTimer(), asyncio.get_running_loop()
        trajectory = await loop.run_in_executor(_threads(), self._play, sampling_params, kwargs, loop, timer)
        prompt = response = [int(self.tokenizer.pad_token_id or 0)]
        if trajectory.turns:
            prompt, response = trajectory.turns[-1].prompt_ids.tolist(), trajectory.turns[-1].response_ids.tolist()
        info = {"acc": float(trajectory.won), "task_score": trajectory.task_score}
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=[int(bool(trajectory.turns))] * len(response),
            reward_score=trajectory.outcome,
            num_turns=len(trajectory),
            metrics=AgentLoopMetrics(
                generate_sequences=timer.seconds["generation"], tool_calls=timer.seconds["environment"]
            ),
            extra_fields={"trajectory": trajectory, "reward_extra_info": info},
        )

    def _play(
        self, sampling_params: dict[str, Any], row: dict[str, Any], loop: asyncio.AbstractEventLoop, timer: PhaseTimer
    ) -> Trajectory:
        settings = self.config.rspo.env
        engine = ServerEngine(self.server_manager, self.tokenizer, sampling_params, self.rollout_config, loop)
        texts = Texts(self.tokenizer, chat_template_kwargs=self.apply_chat_template_kwargs)
        pool = EnvPool.of(settings.name, json.dumps(OmegaConf.to_container(settings.options), sort_keys=True))
        env = pool.take()
        try:
            return rollout(
                env,
                engine,
                make_layout(settings.layout, texts, env),
                [env.tasks(row["split"])[int(row["task_index"])]],
                [int(row["seed"])],
                group_size=1,
                history_length=settings.history_length,
                timer=timer,
            )[0]
        except Exception as error:
            if engine.failed or isinstance(error, EnvironmentValueError):
                raise
            text = f"an episode of task {row['task_index']} was lost: {error!r}"
            _failures.warn((type(error).__name__, place_of(error)), text, traceback.format_exc())
            return Trajectory(task=str(row["task_index"]), group=0, index=0, truncated=True, lost=True)
        finally:
            pool.give_back(env)


class ServerEngine:
    """verl's servers as the engine of a rollout in a thread.

    Log-probs are the server's; where it gives none they are NaN. RSPO takes those of the training model instead.

    Args:
        client: asked on `loop`, while the thread waits.
        tokenizer: decodes responses.
        sampling_params: verl's.
        config: verl's section `rollout`; its lengths are limits. A longer prompt is an error, it is never cut.
        loop: the event loop that the client lives on.
    """

    def __init__(
        self,
        client: LLMServerClient,
        tokenizer: PreTrainedTokenizerBase,
        sampling_params: dict[str, Any],
        config: Any,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.sampling_params = {**sampling_params, "max_tokens": config.response_length}
        self.max_prompt_tokens = config.prompt_length
        self.loop = loop
        self.failed = False
        self.request_id = uuid4().hex  # one for the episode, so that its turns meet the same server's cache

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt. Raises ConfigError for a prompt that is too long, and what the server raises;
        `failed` is then True."""
        self.failed = True
        for ids in prompts:
            if len(ids) > self.max_prompt_tokens:
                raise ConfigError(
                    f"a prompt has {len(ids)} tokens, data.max_prompt_length={self.max_prompt_tokens} allows"
                    f" that many: {self.tokenizer.decode(ids.tolist())[:80]!r}"
                )
        generations = [asyncio.run_coroutine_threadsafe(self._ask(ids), self.loop).result() for ids in prompts]
        self.failed = False
        return generations

    async def _ask(self, prompt: np.ndarray) -> Generation:
        output = await self.client.generate(
            request_id=self.request_id, prompt_ids=prompt.tolist(), sampling_params=self.sampling_params
        )
        ids = np.array(output.token_ids, dtype=np.int64)
        logp = np.full(len(ids), np.nan) if not output.log_probs else np.array(output.log_probs)
        return Generation(
            self.tokenizer.decode(output.token_ids, skip_special_tokens=True), ids, logp.astype(np.float32)
        )


class EnvPool:
    """Environments of one kind that are not in use; an episode takes one, so that what they have loaded is loaded
    seldom."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.options = options
        self._idle: list[BatchedEnv] = []
        self._lock = threading.Lock()

    @staticmethod
    @cache
    def of(name: str, options: str) -> EnvPool:
        """The process's pool of an environment with these options, JSON."""
        return EnvPool(name, json.loads(options))

    def take(self) -> BatchedEnv:
        """An idle environment, or a new one."""
        with self._lock:
            # Making one under the lock lets the first fill the caches that the others find.
            return self._idle.pop() if self._idle else make_env(self.name, **self.options)

    def give_back(self, env: BatchedEnv) -> None:
        """The episode is over."""
        with self._lock:
            self._idle.append(env)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_EPISODES, thread_name_prefix="rspo-episode")
