"""What one of two processes does in the test of data parallelism; started by torch.distributed.run with a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from trl_toys import (
    TOKENIZER,
    Watched,
    loss_gradients_metrics,
    made_up_inputs,
    small_model,
    swap_trainer,
    trainer_of,
)

from rspo.integrations.trl import FusedGRPOTrainer


def check_gradients(folder: Path, loss_type: str) -> None:
    """Two rows in each process have the gradient of four rows in one."""
    inputs = made_up_inputs()
    inputs["completion_mask"][3] = 1  # every row has something to learn from
    alone = trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), folder, loss_type=loss_type)
    _, expected, _ = loss_gradients_metrics(alone, inputs)
    # The number of tokens is that of all processes, over which a mean is to come.
    scale = 2 if loss_type == "dapo" else 1
    ours = trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), folder, loss_type=loss_type)
    model = ours.accelerator.prepare_model(ours.model)
    first = 2 * ours.accelerator.process_index
    mine = {name: x if x.dim() == 0 else x[first : first + 2] for name, x in inputs.items()}
    ours._compute_loss(model, mine).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            ours.model.get_parameter(name).grad * scale, gradient, rtol=1e-5, atol=1e-6, msg=name
        )


def check_swap(folder: Path) -> None:
    """Both processes have one agent A, one buffer, and different completions of their own."""
    trainer = swap_trainer(folder, Watched, per_device_train_batch_size=4)
    trainer.train()
    assert len(trainer.loops) == 2
    for loop in trainer.loops:
        assert all(torch.equal(x, y) for x, y in zip(loop["before"], loop["after"], strict=True))
        assert len(loop["buffer"]) == 32
        texts = [[entry.turns[0].response_ids.tolist() for entry in loop["buffer"]]]
        both = gather_object(texts)
        assert both[0] == both[1]
    weights = [sum(p.double().sum().item() for p in trainer.model.parameters())]
    both = gather_object(weights)
    assert both[0] == both[1]
    mine = [sum(len(part.part.completions) for part in replay) for _, replay in trainer.replays]
    assert mine == [3] * 4, "as many in each process"


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for kind in ("dapo", "grpo"):
        check_gradients(out, kind)
    check_swap(out)
    (out / f"done-{torch.distributed.get_rank()}").touch()
