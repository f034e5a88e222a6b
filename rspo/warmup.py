"""A start policy: behaviour cloning of a poor demonstrator until episodes seldom succeed.

The demonstrator takes the scripted expert's step with some probability and a random one otherwise. The policy that
imitates it knows how actions are written and what follows what, and now and then brings a task to its end. Training
stops when the success rate is measured inside the band: the number of updates that it takes depends on the seed.
Everything follows from the seed.
"""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm

from .batch import Batch
from .config import Config, ConfigError, decay
from .engines import ScriptedEngine, expert_of
from .envs.base import BatchedEnv
from .evaluate import play
from .layouts import make_layout
from .model_checks import check_attention_device, check_attention_dtype
from .models import Policy
from .randomness import named_generator, named_seed
from .rollout import rollout
from .small_models import piece_tokenizer, small_policy, word_tokenizer
from .trajectory import Trajectory

BISECTIONS = 8
NO_START = "to start from another policy, set policy.path to a model folder"
"""What else can be done in an environment without an expert."""
TEXTS = 256
"""Demonstrations that a tokenizer is learned from."""
BELOW, INSIDE, ABOVE = -1, 0, 1


def warm_up(env: BatchedEnv, config: Config, *, progress: bool = True) -> tuple[Policy, float]:
    """A fresh small policy, cloned to `config.warmup.band`, and its measured success rate.

    Raises ConfigError for an environment without an expert, or when the band was not reached.
    """
    settings = config.warmup
    policy = fresh_policy(env, config)
    played = demonstrations(env, policy, config)
    batch = Batch.from_trajectories(played, config.env.layout).to(policy.device)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )
    rng = named_generator(config.run.seed, "warmup batches")

    below = _weights(policy)
    success = 0.0
    with tqdm(total=settings.max_updates, desc="warm-up", disable=not progress, leave=False) as bar:
        for start in range(0, settings.max_updates, settings.check_every):
            for update in range(start, start + settings.check_every):
                factor = decay(settings.schedule, min(update / settings.max_updates, 1.0))
                optimizer.param_groups[0]["lr"] = settings.learning_rate * factor
                _clone(policy, batch, optimizer, settings.batch_rows, rng)
            success, side = measure(policy, env, config)
            bar.set_postfix(success=f"{success:.2%}", refresh=False)
            bar.update(settings.check_every)
            if side == ABOVE:
                success, side = _step_back(policy, below, env, config)
            if side == INSIDE:
                return policy, success
            below = _weights(policy)
    raise ConfigError(
        f"warm-up reached a success rate of {success:.2%} in {settings.max_updates} updates, not"
        f" warmup.band={settings.band} (held out: {settings.held_out_band}); raise warmup.max_updates or"
        " warmup.expert_rate"
    )


def _clone(policy: Policy, batch: Batch, optimizer: torch.optim.Optimizer, size: int, rng: np.random.Generator) -> None:
    """One step towards the demonstrator on `size` random rows."""
    rows = torch.from_numpy(rng.choice(batch.num_rows, size=min(size, batch.num_rows), replace=False))
    logp, _ = policy.logprobs(batch.select(rows.to(policy.device)), temperature=1.0)
    optimizer.zero_grad(set_to_none=True)
    (-logp.mean()).backward()
    optimizer.step()


def _step_back(policy: Policy, below: list[torch.Tensor], env: BatchedEnv, config: Config) -> tuple[float, int]:
    """Draw the weights back towards those `below` the band until success is inside it, by bisection: success rises
    steeply once it rises, and can pass the whole band between two checks. Returns the last measurement."""
    low, high = below, _weights(policy)
    success, side = 0.0, ABOVE
    for _ in range(BISECTIONS):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(policy.model.parameters(), middle, strict=True):
                parameter.copy_(value)
        success, side = measure(policy, env, config)
        if side == INSIDE:
            break
        low, high = (middle, high) if side == BELOW else (low, middle)
    return success, side


def _weights(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def measure(policy: Policy, env: BatchedEnv, config: Config) -> tuple[float, int]:
    """Success on training tasks at the rollout temperature, and whether that and the success on the held-out episodes
    of evaluations are inside their bands (or BELOW, or ABOVE)."""
    settings = config.warmup

    def rate(split: str, episodes: int) -> float:
        trajectories = play(policy, env, config, split=split, episodes=episodes, temperature=config.rollout.temperature)
        return float(np.mean([trajectory.won for trajectory in trajectories]))

    # Early policies never succeed, which a few episodes show as well as many.
    if rate("train", -(-settings.check_episodes // 8)) == 0 < settings.band[0]:
        return 0.0, BELOW
    success = rate("train", settings.check_episodes)
    side = _side(success, settings.band)
    if side == INSIDE:
        side = _side(rate("eval", config.evaluation.episodes), settings.held_out_band)
    return success, side


def _side(success: float, band: tuple[float, float]) -> int:
    return BELOW if success < band[0] else ABOVE if success > band[1] else INSIDE


def fresh_policy(env: BatchedEnv, config: Config) -> Policy:
    """An untrained policy of `warmup.width` and `warmup.layers` over the environment's words; where it does not list
    them, over `warmup.pieces` pieces of text, learned from demonstrations. Raises ConfigError where it could not run
    here."""
    check_attention_device(config.policy)  # a device that will not do is said before a dtype
    check_attention_dtype(config.policy)
    settings = config.warmup
    seed = named_seed(config.run.seed, "model")
    words = env.vocabulary()
    if words is not None:
        tokenizer = word_tokenizer(words)
    else:
        by_bytes = small_policy(piece_tokenizer([], 0), seed, config.policy, width=16, layers=1)
        played = demonstrations(env, by_bytes, config, min(settings.trajectories, TEXTS))
        turns = [turn for trajectory in played for turn in trajectory.turns]
        prompts = by_bytes.decode([turn.prompt_ids for turn in turns])
        responses = by_bytes.decode([turn.response_ids for turn in turns])
        tokenizer = piece_tokenizer([*prompts, *responses], settings.pieces)
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return small_policy(tokenizer, seed, config.policy, width=settings.width, layers=settings.layers, max_length=length)


def demonstrations(env: BatchedEnv, policy: Policy, config: Config, count: int | None = None) -> list[Trajectory]:
    """`count` (or `warmup.trajectories`) episodes on training tasks in which a step is the expert's with probability
    `warmup.expert_rate`. Raises ConfigError for an environment without an expert."""
    settings = config.warmup
    expert = expert_of(env, NO_START)
    count = settings.trajectories if count is None else count
    rng = named_generator(config.run.seed, "demonstrations")
    tasks = env.tasks("train")
    chosen = [tasks[i] for i in rng.integers(len(tasks), size=count)]
    seeds = rng.integers(2**31, size=count).tolist()
    engine = ScriptedEngine(expert, policy, config.rollout, settings.expert_rate, rng)
    layout = make_layout(config.env.layout, policy, env)
    played: list[Trajectory] = []
    for start in range(0, count, size := env.episodes_at_once or count):
        part = slice(start, start + size)
        played += rollout(
            env, engine, layout, chosen[part], seeds[part], group_size=1, history_length=config.env.history_length
        )
    return played
