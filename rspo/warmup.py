"""A start policy for household: behaviour cloning of a poor demonstrator until episodes seldom succeed.

The demonstrator takes the scripted expert's step with a small probability and a random one otherwise. The policy that
imitates it knows how actions are written and what follows what, and now and then brings a task to its end. Training
stops at the first measured success rate inside the band; measured, because the number of updates that it takes
depends on the seed. Everything follows from the seed.
"""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm

from .config import Config, ConfigError
from .envs.base import BatchedEnv
from .evaluate import play
from .models import Policy, tiny_policy
from .randomness import named_generator, named_seed
from .rollout import Episodes
from .trajectory import Batch, Trajectory, Turn


def warm_up(env: BatchedEnv, config: Config, *, progress: bool = True) -> tuple[Policy, float]:
    """A fresh tiny policy, cloned to `config.warmup.band`, and its success rate.

    Raises ConfigError for an environment without an expert and vocabulary, or when no measurement fell into the band.
    """
    if not hasattr(env, "expert_actions") or not hasattr(env, "random_actions"):
        raise ConfigError(
            f"{type(env).__name__} has no scripted expert to warm up a policy with; set policy.path to a model folder"
        )
    from .envs.household import VOCABULARY

    settings = config.warmup
    policy = tiny_policy(VOCABULARY, named_seed(config.run.seed, "model"), config.policy)
    batch = Batch.from_trajectories(demonstrations(env, policy, config)).to(policy.device)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )
    rng = named_generator(config.run.seed, "warmup batches")

    measured: list[str] = []
    bar = tqdm(range(1, settings.max_updates + 1), desc="warm-up", disable=not progress, leave=False)
    for step in bar:
        rows = torch.from_numpy(rng.choice(batch.num_rows, size=min(settings.batch_rows, batch.num_rows), replace=False))
        logp, _ = policy.logprobs(batch.select(rows.to(policy.device)), temperature=1.0)
        loss = -logp.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % settings.check_every:
            continue
        success = measure_success(policy, env, config)
        measured.append(f"{success:.2%}")
        bar.set_postfix(loss=f"{loss.item():.3f}", success=measured[-1])
        if settings.band[0] <= success <= settings.band[1]:
            bar.close()
            return policy, success
        if success > settings.band[1]:
            break
    raise ConfigError(
        f"warm-up measured success rates {', '.join(measured)}, none in warmup.band={settings.band}; change"
        " warmup.expert_rate, warmup.check_every, warmup.max_updates or run.seed"
    )


def measure_success(policy: Policy, env: BatchedEnv, config: Config) -> float:
    """Success on training tasks at the rollout temperature: what training will see.

    A few episodes first: early policies never succeed, and that shows soon.
    """
    settings = config.warmup
    for episodes in (-(-settings.check_episodes // 8), settings.check_episodes):
        trajectories = play(
            policy, env, config, split="train", episodes=episodes, temperature=config.rollout.temperature
        )
        success = float(np.mean([t.won for t in trajectories]))
        if success < settings.band[0]:
            break
    return success


def demonstrations(env: BatchedEnv, policy: Policy, config: Config) -> list[Trajectory]:
    """Episodes on training tasks in which a step is the expert's with probability `warmup.expert_rate`."""
    settings = config.warmup
    rng = named_generator(config.run.seed, "demonstrations")
    tasks = env.tasks("train")
    chosen = [tasks[i] for i in rng.integers(len(tasks), size=settings.trajectories)]
    seeds = rng.integers(2**31, size=settings.trajectories).tolist()
    episodes = Episodes(env, chosen, seeds, config.env.history_length)
    trajectories = [Trajectory(task=info["task"], group=i, index=0) for i, info in enumerate(episodes.infos)]
    while episodes.running:
        acting = list(episodes.running)
        prompts = policy.encode(episodes.prompts())
        anchors = [episodes.infos[i]["anchor"] for i in acting]
        expert, random = env.expert_actions(), env.random_actions(rng)  # type: ignore[attr-defined]
        take_expert = rng.random(len(expert)) < settings.expert_rate
        actions = [expert[i] if take_expert[i] else random[i] for i in acting]
        responses = policy.encode(actions)
        rewards, _, infos = episodes.step(actions)
        for i, prompt, response, anchor, action in zip(acting, prompts, responses, anchors, actions, strict=True):
            trajectories[i].turns.append(
                Turn(
                    prompt_ids=prompt,
                    response_ids=response,
                    behavior_logp=np.zeros(len(response), dtype=np.float32),
                    reward=float(rewards[i]),
                    dense_reward=float(infos[i].get("dense_reward", 0.0)),
                    anchor=anchor,
                    action=action,
                    is_action_valid=infos[i]["is_action_valid"],
                )
            )
            trajectories[i].won = infos[i]["won"]
    return trajectories
