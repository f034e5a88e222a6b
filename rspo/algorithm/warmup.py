"""A start policy: behaviour cloning of a poor demonstrator until episodes seldom succeed.

The demonstrator takes the scripted expert's step with some probability and a random one otherwise. The policy that
imitates it knows how actions are written and what follows what, and now and then brings a task to its end. Training
stops when the success rate is measured inside the band: the number of updates that it takes depends on the seed.
Everything follows from the seed. What a warm-up has come to is kept at each measurement, and one that was broken off
goes on from there.
"""

from __future__ import annotations

import io
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ..config import Config, ConfigError, decay
from ..config.files import flat_settings
from ..config.storage import write_bytes
from ..data.batch import Batch
from ..data.layouts import make_layout
from ..data.trajectory import Trajectory
from ..engines import ScriptedEngine, expert_of
from ..envs.base import BatchedEnv
from ..models.checks import check_attention_device, check_attention_dtype
from ..models.policy import Policy
from ..models.randomness import named_generator, named_seed
from ..models.tiny import piece_tokenizer, small_policy, word_tokenizer
from .evaluate import play
from .rollout import rollout

BISECTIONS = 8
NO_START = "to start from another policy, set policy.path to a model folder"
"""What else can be done in an environment without an expert."""
GOES_ON = "; it may be broken off, and the same command goes on from the last measurement"
TEXTS = 256
"""Demonstrations that a tokenizer is learned from."""
BELOW, INSIDE, ABOVE = -1, 0, 1


def warm_up(
    env: BatchedEnv, config: Config, *, progress: bool = True, state: Path | None = None
) -> tuple[Policy, float]:
    """A fresh small policy, cloned to `config.warmup.band`, and its measured success rate.

    progress: say beforehand how long it takes, and show a bar.
    state: a file that is written at each measurement. One that is there, of the same settings, is gone on from.

    Raises ConfigError for an environment without an expert, or when the band was not reached.
    """
    settings = config.warmup
    _say(
        f"there is no model to start from (policy.path), so a small one first imitates the environment's expert:"
        f" {settings.trajectories} episodes are played, then up to {settings.max_updates} updates are made",
        progress,
    )
    policy = fresh_policy(env, config)
    began = time.monotonic()
    played = demonstrations(env, policy, config)
    seconds_an_episode = (time.monotonic() - began) / len(played)
    batch = Batch.from_trajectories(played, config.env.layout).to(policy.device)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )
    rng = named_generator(config.run.seed, "warmup batches")

    done = _load_state(state, config, policy, optimizer, rng)
    below = _weights(policy)
    goes_on = GOES_ON if state is not None and settings.check_every < settings.max_updates else ""
    success = 0.0
    with tqdm(total=settings.max_updates, initial=done, desc="warm-up", disable=not progress, leave=False) as bar:
        for start in range(done, settings.max_updates, settings.check_every):
            end = min(start + settings.check_every, settings.max_updates)
            for update in range(start, end):
                if update == done + 1:  # the first one is slower
                    began = time.monotonic()
                elif update == done + 2:
                    left = _seconds(config, settings.max_updates - done, time.monotonic() - began, seconds_an_episode)
                    _say(f"at most about {_length(left)}{goes_on}", progress)
                factor = decay(settings.schedule, min(update / settings.max_updates, 1.0))
                optimizer.param_groups[0]["lr"] = settings.learning_rate * factor
                _clone(policy, batch, optimizer, settings.batch_rows, rng)
            success, side = measure(policy, env, config)
            bar.set_postfix(success=f"{success:.2%}", refresh=False)
            bar.update(end - start)
            if side == ABOVE:
                success, side = _step_back(policy, below, env, config)
            if side == INSIDE:
                return policy, success
            below = _weights(policy)
            _save_state(state, config, end, policy, optimizer, rng)
    if state is not None:
        state.unlink(missing_ok=True)
    raise ConfigError(
        f"warm-up reached a success rate of {success:.2%} in {settings.max_updates} updates, not"
        f" warmup.band={settings.band} (held out: {settings.held_out_band}); raise warmup.max_updates or"
        " warmup.expert_rate"
    )


def _seconds(config: Config, updates: int, seconds_an_update: float, seconds_an_episode: float) -> float:
    """About how long so many updates take, with the measurements between them. Of most measurements an eighth of the
    episodes is enough."""
    checks = -(-updates // config.warmup.check_every)
    episodes = checks * config.warmup.check_episodes / 8 + config.warmup.check_episodes + config.evaluation.episodes
    return updates * seconds_an_update + episodes * seconds_an_episode


def _length(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _say(text: str, progress: bool) -> None:
    if progress:
        tqdm.write(f"warm-up: {text}", file=sys.stderr)


def _load_state(
    state: Path | None, config: Config, policy: Policy, optimizer: torch.optim.Optimizer, rng: np.random.Generator
) -> int:
    """Take up a warm-up of the same settings; how many of its updates are made, 0 without one."""
    if state is None or not state.is_file():
        return 0
    try:
        saved = torch.load(state, weights_only=True, map_location=policy.device)
    except Exception as error:  # torch has its own words for a damaged file
        warnings.warn(f"{state} cannot be read ({type(error).__name__}), so the warm-up begins anew", stacklevel=3)
        return 0
    if saved["settings"] != _identity(config):
        return 0
    policy.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rng.bit_generator.state = json.loads(saved["rng"])
    return int(saved["updates"])


def _save_state(
    state: Path | None,
    config: Config,
    updates: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> None:
    if state is None:
        return
    content = io.BytesIO()
    saved = {
        "settings": _identity(config),
        "updates": updates,
        "model": policy.model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": json.dumps(rng.bit_generator.state),
    }
    torch.save(saved, content)
    write_bytes(state, content.getvalue())


def _identity(config: Config) -> str:
    """What a warm-up depends on, as text."""
    kept = ("run.seed", "env.", "policy.", "rollout.", "warmup.", "evaluation.")
    return json.dumps({name: value for name, value in flat_settings(config).items() if name.startswith(kept)})


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
