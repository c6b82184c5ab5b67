"""The type that rollouts and trainer compute in on a CPU. Master weights, losses and log-probs are always float32."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import read_yaml_text


def load_earlier(path: Path, key: str | None = None) -> DictConfig:
    """Load the configuration in ``path``, which must have ``key`` if given, a setting that only its kind of run has.

    Raises SpearError if it cannot be read or is of another kind of run: a training and a fine-tuning would replace each
    other's checkpoints.
    """
    try:
        read_yaml_text(path)
        config = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise SpearError(f"{path} cannot be read ({first_line(error)}): name another folder") from error
    if not isinstance(config, DictConfig):
        raise SpearError(f"{path} is not a configuration: name another folder")
    if key is not None and OmegaConf.select(config, key) is None:
        raise SpearError(f"{path} lacks {key}, so the folder is not of this kind of run: name another")
    return config


AUTO = "auto"
DTYPES = ("float32", "bfloat16")
TINY = 20 * 2**20
"""Bytes of weights below which bfloat16 saves nothing."""
WORTH = 1.25
"""Times as fast as float32 that bfloat16 must be to be chosen."""
_ROLLOUT = "actor_rollout_ref.rollout.dtype"
_TRAINER = "fsdp_config.mixed_precision.param_dtype"


def measure_weights(folder: Path) -> int:
    """Bytes of the weights in a Hugging Face folder, which may be absent."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def choose_dtype(chosen: str, weights: float) -> str:
    """What ``chosen`` (``auto``, ``float32`` or ``bfloat16``) means for a model on this CPU.

    ``auto`` is bfloat16 where this CPU multiplies matrices of it faster than those of float32, which a short trial
    tells. A tiny model stays float32, and so does one that is not made yet (0 bytes of ``weights``). Raises SpearError
    for another type.
    """
    if chosen in DTYPES:
        return chosen
    if chosen != AUTO:
        raise SpearError(f"no dtype {chosen!r} on a CPU: take {AUTO}, {' or '.join(DTYPES)}")
    return DTYPES[weights >= TINY and prefers_bfloat16()]


def resolve_dtype(config: DictConfig, weights: float, earlier: Path | None = None) -> None:
    """Write what ``auto`` means for the rollouts into a configuration; on a GPU it is the trainer's type.

    ``weights`` are bytes. The choice of ``earlier``, the configuration of a resumed run, stays.
    """
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu":
        rollout.dtype = choose_dtype(keep_dtype(str(rollout.dtype), _ROLLOUT, earlier), weights)
    elif rollout.dtype == AUTO:
        rollout.dtype = "bfloat16"


def keep_dtype(chosen: str, key: str, earlier: Path | None) -> str:
    """``chosen``, or for ``auto`` what the configuration ``earlier`` has at ``key``, if there is one."""
    if chosen != AUTO or earlier is None or not earlier.is_file():
        return chosen
    return str(OmegaConf.select(load_earlier(earlier), key, default=AUTO))


@lru_cache(maxsize=1)
def prefers_bfloat16() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 clearly faster than those of float32.

    It is tried, since the instructions that a CPU has do not tell: of two with AVX-512's and without AMX, bfloat16 was
    half as fast on one and twice on the other.
    """
    import torch

    def time_product(dtype: torch.dtype) -> float:
        left, right = (torch.ones(512, 1024).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            torch.mm(left, right.T)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return WORTH * time_product(torch.bfloat16) <= time_product(torch.float32)


def check_precision(config: DictConfig) -> None:
    """Raise SpearError unless rollouts and trainer of a training on a CPU compute alike."""
    node = config.actor_rollout_ref
    names = {"fp32": "float32", "bf16": "bfloat16"}
    for settings in (node.actor.fsdp_config, node.ref.fsdp_config):
        given = str(settings.mixed_precision.param_dtype)
        if names.get(given, given) != node.rollout.dtype:
            raise SpearError(f"the trainer computes in {given}, the rollouts in {node.rollout.dtype}: set {_ROLLOUT}")
