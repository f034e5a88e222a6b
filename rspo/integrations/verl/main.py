"""`python -m rspo.integrations.verl.main`: RSPO on verl's Ray trainer, with verl's own command line.

Settings are verl's (`ppo_trainer.yaml`) and the section `rspo`; both are overridden as `section.field=value`.
"""

from __future__ import annotations

import hydra
import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import run_ppo
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.device import auto_set_device

from .settings import rspo_config
from .trainer import RSPORayTrainer
from .worker import SwapWorker


class TaskRunner(BaseTaskRunner):
    """The driver process: makes verl's workers and trains."""

    def run(self, config: DictConfig) -> None:
        """Train as configured."""
        OmegaConf.resolve(config)
        self.add_actor_rollout_worker(config)
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(SwapWorker)
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        trainer = RSPORayTrainer(
            config,
            tokenizer=model.tokenizer,
            processor=model.processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
        )
        trainer.init_workers()
        trainer.fit()


@hydra.main(config_path="config", config_name="rspo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Check the configuration and train."""
    auto_set_device(config)
    check(config)
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(TaskRunner))


def check(config: DictConfig) -> None:
    """Everything that can be known to be wrong before anything starts. Raises ConfigError, or verl's own errors."""
    rspo_config(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


if __name__ == "__main__":
    main()
