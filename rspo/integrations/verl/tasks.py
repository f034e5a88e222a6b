"""The tasks of an environment as verl's dataset: a row says which one; its prompt is made when it is played."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from ...envs import make_env


class EnvTasks(Dataset):
    """The tasks of one split of the environment `config.env`; `data.custom_cls` names this class.

    Args:
        data_files: the split, "train" or "eval" (`data.train_files`, `data.val_files`).
        config: verl's section `data`, with `env.name` and `env.options`.
        max_samples: so many of the tasks, evenly spaced; -1: all. More than there are repeat them with other seeds.
        tokenizer, processor: not used.
    """

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.split = data_files if isinstance(data_files, str) else data_files[0]
        self.env = config.env.name
        env = make_env(config.env.name, **dict(config.env.options))
        try:
            count = len(env.tasks(self.split))
        finally:
            env.close()
        wanted = count if max_samples < 0 else max_samples
        self.tasks = [i * count // wanted if wanted <= count else i % count for i in range(wanted)]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row. The seed is for validation; training draws one for each group."""
        return {
            "agent_name": "rspo_env",
            "data_source": self.env,
            "raw_prompt": [],
            "split": self.split,
            "task_index": self.tasks[index],
            "seed": index,
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl counts rows by a tensor
        }
