"""verl's Ray worker group with two processes on the CPU: what the trainer asks of it, over real remote calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from verl_import import real_verl
from verl_loops import engine_of, labelled, make_trainer, weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    real_verl()
    import ray

    variables = {
        "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_platform",
        "OMP_NUM_THREADS": "1",
    }
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            runtime_env={"env_vars": variables},
        )
    except Exception as error:  # within the 30 s that Ray gives itself, which a busy machine may not manage
        pytest.skip(f"Ray does not start here: {error}")
    yield
    ray.shutdown()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Rows dealt to two processes, loss and weights shared: the update is that of one process; A comes back."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl_ray_worker import CpuSwapWorker

    from rspo.models.randomness import RandomStreams

    one, *_ = make_trainer(tmp_path, "rspo.optimizer.minibatch_rows=1000")
    two, *_ = make_trainer(tmp_path, "rspo.optimizer.minibatch_rows=1000")
    worker = RayClassWithInitArgs(cls=ray.remote(CpuSwapWorker), config=two.config.actor_rollout_ref, role="actor")
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls({"actor": worker}),
        device_name="cpu",
        use_gpu=False,
    ).spawn(prefix_set={"actor"})["actor"]
    group.init_model()
    two.actor_rollout_wg = group
    two.set_loss()
    assert two._processes == 2
    held = group.shard_size()
    assert sum(held) == sum(p.numel() for p in engine_of(one).module.parameters())

    before = group.full_weights()[0]
    group.keep_agent(False)
    two.random = RandomStreams(7)
    two._update(labelled())
    assert any(not torch.equal(value, before[name]) for name, value in group.full_weights()[0].items())
    group.restore_agent()
    assert all(torch.equal(value, before[name]) for name, value in group.full_weights()[0].items())

    stats = []
    for trainer in (one, two):
        trainer.random = RandomStreams(0)
        stats.append(trainer._update(labelled(), 0.25))
    after = group.full_weights()[0]
    for name, value in weights(engine_of(one)).items():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-4)
    for name in ("loss", "grad_norm", "lr", "center_max"):
        assert stats[1][name] == pytest.approx(stats[0][name], rel=1e-4, abs=1e-6), name
