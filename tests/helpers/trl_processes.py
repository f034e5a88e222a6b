"""What one of two processes does in the test of data parallelism; started by torch.distributed.run with a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
from rspo.integrations.trl.agents import Snapshot


def check_gradients(folder: Path, loss_type: str, sharded: bool) -> None:
    """Two rows in each process, with DDP or FSDP2, have the gradient of four rows in one."""
    inputs = made_up_inputs()
    inputs["completion_mask"][3] = 1  # every row has something to learn from
    alone = trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), folder, loss_type=loss_type)
    _, expected, _ = loss_gradients_metrics(alone, inputs)
    # The number of tokens is that of all processes, over which a mean is to come.
    scale = 2 if loss_type == "dapo" else 1
    ours = trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), folder, loss_type=loss_type)
    model = shard(ours.model) if sharded else ours.accelerator.prepare_model(ours.model)
    first = 2 * ours.accelerator.process_index
    mine = {name: x if x.dim() == 0 else x[first : first + 2] for name, x in inputs.items()}
    assert isinstance(ours.model.lm_head.weight, DTensor) == sharded
    before = Snapshot(ours.model, torch.optim.SGD(ours.model.parameters()))
    ours._compute_loss(model, mine).backward()
    for name, gradient in expected.items():
        made = whole(ours.model.get_parameter(name).grad)
        torch.testing.assert_close(made * scale, gradient, rtol=1e-5, atol=1e-6, msg=name)

    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.add_(1.0)
    before.restore()
    for name, weight in alone.model.named_parameters():
        assert torch.equal(whole(ours.model.get_parameter(name).detach()), weight), name


def shard(model: Any) -> Any:
    """With FSDP2 as accelerate would, which does it on accelerators only."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole(x: Any) -> Any:
    """All of a tensor that may be spread over the processes."""
    return x.full_tensor() if isinstance(x, DTensor) else x


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
    mine = [sum(len(part.part.completions) for part in replay) for _, replay, _ in trainer.replays]
    assert mine == [3] * 4, "as many in each process"


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for kind in ("dapo", "grpo"):
        check_gradients(out, kind, sharded=False)
        check_gradients(out, kind, sharded=True)
    check_swap(out)
    (out / f"done-{torch.distributed.get_rank()}").touch()
