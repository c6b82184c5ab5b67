"""The process a training runs in: ``python -m training.process RUN_FOLDER``, started by :mod:`training.supervise`.

It brings verl up with the plugin loaded everywhere, runs verl's own task runner, and takes Ray down again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CONFIG_FILE = "config.yaml"
METRICS_FOLDER = "metrics"


def build_environment(out: Path, device: str) -> dict[str, str]:
    """Variables that every process of the run needs, whichever node it is on."""
    launches = len(list((out / METRICS_FOLDER).glob("*.jsonl")))
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "training.verl_plugin",
        # verl's file logger truncates; a file a launch keeps what earlier launches wrote.
        "VERL_FILE_LOGGER_PATH": str(out / METRICS_FOLDER / f"{launches:04d}.jsonl"),
        "TENSORBOARD_DIR": str(out / "tensorboard"),
        "HYDRA_FULL_ERROR": "1",
    }
    if device == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        variables |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    for name in ("RAY_AUTH_MODE", "SPEAR_TRAIN_THREADS", "SPEAR_ROLLOUT_THREADS"):
        if name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _die_with_parent() -> None:
    """Ask Linux to end this process when the supervisor is killed; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> None:
    """Run the training that ``RUN_FOLDER/config.yaml`` describes."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = Path(sys.argv[1]).resolve()
    from omegaconf import OmegaConf, open_dict

    config = OmegaConf.load(out / CONFIG_FILE)
    device = config.trainer.device
    (out / METRICS_FOLDER).mkdir(exist_ok=True)
    variables = build_environment(out, device)
    os.environ.update(variables)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if device == "cpu":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # an empty value makes Ray refuse logical GPUs
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    OmegaConf.set_struct(config, True)
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = variables
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
