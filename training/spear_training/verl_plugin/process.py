"""The process a training runs in: ``python -m spear_training.verl_plugin.process RUN_FOLDER``.

It brings verl up with the plugin loaded everywhere, runs verl's own task runner, and takes Ray down again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.job_config import JobConfig
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from spear_training.run.launch import read_run
from spear_training.run.supervise import SECRETS_VARIABLE, die_with_parent, divide_variables, write_secrets
from spear_training.run.to_verl import to_verl

OWN_RAY = "local"
"""``RAY_ADDRESS`` of a training that starts Ray by itself."""
OF_A_NODE = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")
"""Options that Ray takes when it starts a node, and refuses from a process that joins one."""


def configure(out: Path, variables: Mapping[str, str]) -> DictConfig:
    """Return verl's configuration of the run in ``out``, as a process with the environment ``variables`` starts it."""
    config = to_verl(read_run(out), out)
    OmegaConf.set_struct(config, True)
    address = variables.get("RAY_ADDRESS")
    with open_dict(config):
        environment = config.ray_kwargs.ray_init.runtime_env
        # Workers of a cluster that was started before, and on other nodes, do not inherit this process's environment.
        plain, secret = divide_variables(variables)
        if secret and address != OWN_RAY:
            plain[SECRETS_VARIABLE] = str(write_secrets(out.resolve(), secret))
        if address not in (None, OWN_RAY):
            for key in OF_A_NODE:
                config.ray_kwargs.ray_init.pop(key, None)
        environment.env_vars = {**plain, **(environment.get("env_vars") or {})}
    return config


def run_here(config: DictConfig) -> Any:
    """Run verl's task runner in this process: as the Ray actor that verl makes of it, it imports everything again."""
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars  # which the actor would have
    os.environ.update({**get_ppo_ray_runtime_env(config)["env_vars"], **variables})
    TaskRunnerV1.__ray_actor_class__().run(config)
    return ray.put(None)


def main() -> None:
    """Run the training that ``RUN_FOLDER/config.yaml`` describes."""
    die_with_parent()
    # Ray would put the current folder before all others in its workers, where a datasets.py breaks them.
    JobConfig._runtime_env_has_working_dir = lambda self: True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = configure(Path(sys.argv[1]), os.environ)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    runner: Any = TaskRunnerV1
    if config.trainer.device == "cpu":
        handle = SimpleNamespace(run=SimpleNamespace(remote=run_here))  # what run_ppo calls of an actor
        runner = SimpleNamespace(remote=lambda: handle)
    try:
        run_ppo(config, task_runner_class=runner)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
