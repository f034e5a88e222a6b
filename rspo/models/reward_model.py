"""A learned process reward (section 4.2.3 of the paper, after SPA-RL): how much each turn adds to the outcome.

    r̂_t = tanh(MLP(h_t))        h_t: last hidden state of a causal LM at the last token of turn t's response
    R̂   = Σ_t r̂_t               trained towards the final reward R in [0, 1] by mean (R̂ - R)²

A conversation is read in one causal pass, so that h_t has seen everything up to turn t and nothing after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..config import ConfigError, PolicyConfig
from ..config.storage import reading, write_text, writing
from ..data.conversations import Reading, read_conversations
from ..data.trajectory import Trajectory
from .policy import Policy

SETTINGS_FILE = "reward_model.json"
HEAD_FILE = "head.safetensors"
FORMAT = 1


class RewardModel:
    """A causal LM and an MLP on its hidden states; a dense reward for `rspo.algorithm.rewards.relabel`.

    Args:
        policy: the LM with its tokenizer; its own head is not used.
        head_width: hidden units of the MLP; None: the model's hidden size.
        max_tokens: longest conversation read in one piece; None, or more than the model can read: what it can.
        micro_batch_tokens: of one forward pass of `score`, padding included.
    """

    def __init__(
        self,
        policy: Policy,
        head_width: int | None = None,
        max_tokens: int | None = None,
        micro_batch_tokens: int = 16384,
    ) -> None:
        self.policy = policy
        self.micro_batch_tokens = micro_batch_tokens
        text = policy.model.config.get_text_config()
        limits = [max_tokens, getattr(text, "max_position_embeddings", None)]
        self.max_tokens = min((limit for limit in limits if limit is not None), default=2**20)
        self.head_width = head_width or text.hidden_size
        out = nn.Linear(self.head_width, 1)
        # Rewards start at 0: the sum of many turns would begin far outside [0, 1] otherwise.
        nn.init.zeros_(out.weight)
        nn.init.zeros_(out.bias)
        self.head = nn.Sequential(nn.Linear(text.hidden_size, self.head_width), nn.GELU(), out).to(policy.device)

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig) -> RewardModel:
        """A folder written by `save`, on the configured device in the configured dtype; nothing is unpickled.

        Raises ConfigError where there is no complete reward model.
        """
        path = Path(path)
        settings = read_settings(path)
        # What is asked of the policy's head and template is not asked of this model.
        config = replace(config, fused="off", chat="auto", chat_template_kwargs={})
        model = cls(Policy.load(path, config, needs_head=False), settings["head_width"], settings["max_tokens"])
        with reading(str(path / HEAD_FILE)):
            model.head.load_state_dict(load_file(path / HEAD_FILE, device=str(model.policy.device)))
        return model

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write a folder: the LM as transformers loads it, the head, and last `reward_model.json`: where that is, the
        folder is complete. Raises StorageError.

        about: what else is to be known of the model.
        """
        path = Path(path)
        settings = {"format": FORMAT, "head_width": self.head_width, "max_tokens": self.max_tokens, **(about or {})}
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / SETTINGS_FILE).unlink(missing_ok=True)
            self.policy.save(path)
            save_file(self.head.state_dict(), path / HEAD_FILE)
        write_text(path / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the LM and of the head."""
        yield from self.policy.model.parameters()
        yield from self.head.parameters()

    def read(self, trajectories: Sequence[Trajectory]) -> list[Reading]:
        """Trajectories in this model's tokens. Raises ConfigError for one without texts."""
        return read_conversations(self.policy, trajectories, self.max_tokens)

    def turn_rewards(self, readings: Sequence[Reading]) -> Tensor:
        """r̂ of all turns of these readings in order, float32 [turns], from one forward pass; with a graph where grad is
        enabled."""
        rows = [row for reading in readings for row in reading.rows]
        lengths = np.array([len(row) for row in rows])
        width = int(lengths.max())
        # Padding on the right needs no mask under causal attention.
        input_ids = np.zeros((len(rows), width), dtype=np.int64)
        input_ids[np.arange(width) < lengths[:, None]] = np.concatenate(rows)
        first_rows = np.cumsum([0, *(len(reading.rows) for reading in readings)])
        positions = np.concatenate(
            [
                (first + reading.turn_row) * width + reading.turn_column
                for first, reading in zip(first_rows[:-1], readings, strict=True)
            ]
        )
        device = self.policy.device
        body = self.policy.model.base_model
        states = body(input_ids=torch.from_numpy(input_ids).to(device), use_cache=False).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, torch.from_numpy(positions).to(device))
        with torch.autocast(device.type, enabled=False):
            return torch.tanh(self.head(hidden.float())).squeeze(-1)

    def totals(self, readings: Sequence[Reading]) -> Tensor:
        """R̂ of each of these readings, float32 [readings], from one forward pass."""
        counts = torch.tensor([len(reading.turn_row) for reading in readings], device=self.policy.device)
        owner = torch.repeat_interleave(torch.arange(len(readings), device=counts.device), counts)
        rewards = self.turn_rewards(readings)
        return rewards.new_zeros(len(readings)).index_add(0, owner, rewards)

    @torch.inference_mode()
    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """r̂ of each trajectory's turns, float32 [turns] each."""
        readings = self.read(trajectories)
        rewards: dict[int, np.ndarray] = {}
        for piece in micro_batches(readings, self.micro_batch_tokens):
            values = self.turn_rewards([readings[i] for i in piece]).cpu().numpy()
            ends = np.cumsum([len(readings[i].turn_row) for i in piece])
            rewards |= zip(piece, np.split(values, ends[:-1]), strict=True)
        return [rewards[i] for i in range(len(readings))]

    def __call__(self, trajectory: Trajectory) -> np.ndarray:
        return self.score([trajectory])[0]


def micro_batches(readings: Sequence[Reading], max_tokens: int) -> list[list[int]]:
    """Indices of readings in pieces whose rows, padded, have at most `max_tokens` tokens (or one reading), like widths
    together."""
    order = sorted(range(len(readings)), key=lambda i: readings[i].width)
    pieces: list[list[int]] = []
    rows = 0
    for i in order:
        rows += len(readings[i].rows)
        if not pieces or rows * readings[i].width > max_tokens:
            pieces.append([])
            rows = len(readings[i].rows)
        pieces[-1].append(i)
    return pieces


def read_settings(path: Path) -> dict[str, Any]:
    """`reward_model.json` of a reward model's folder. Raises ConfigError where it is not one."""
    what = "a reward model (a folder written by `rspo reward-model`)"
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} must be {what}: there is no such folder")
    missing = [name for name in (SETTINGS_FILE, HEAD_FILE, "config.json") if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"{str(path)!r} must be {what}: {', '.join(missing)} missing")
    try:
        settings = json.loads((path / SETTINGS_FILE).read_text(encoding="utf-8"))
        known = settings["format"] == FORMAT and settings["head_width"] >= 1 and settings["max_tokens"] >= 2
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / SETTINGS_FILE} cannot be read ({type(error).__name__}: {error})") from error
    if not known:
        raise ConfigError(f"{path / SETTINGS_FILE} is not of format {FORMAT}, which this version reads: {settings}")
    return dict(settings)
