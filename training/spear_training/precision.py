"""The type that rollouts and trainer compute in on a CPU. Master weights, losses and log-probs are always float32."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from spear_envs.core.errors import SpearError

AUTO = "auto"
DTYPES = ("float32", "bfloat16")
TINY = 20 * 2**20
"""Bytes of weights below which bfloat16 saves nothing."""
_ROLLOUT = "actor_rollout_ref.rollout.dtype"
_TRAINER = "fsdp_config.mixed_precision.param_dtype"


def measure_weights(folder: Path) -> int:
    """Bytes of the weights in a Hugging Face folder, which may be absent."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def choose_dtype(chosen: str, weights: float) -> str:
    """What ``chosen`` means for a model on this CPU.

    ``auto`` is bfloat16 on a CPU that multiplies matrices of it (AMX), where it is several times as fast; without AMX
    it is half as fast as float32. A tiny model stays float32, and so does one that is not made yet.

    Args:
        chosen: ``auto``, ``float32`` or ``bfloat16``.
        weights: bytes of the model's weights; 0 for one that is not made yet.

    Raises:
        SpearError: no such type.
    """
    if chosen in DTYPES:
        return chosen
    if chosen != AUTO:
        raise SpearError(f"no dtype {chosen!r} on a CPU: take {AUTO}, {' or '.join(DTYPES)}")
    return DTYPES[weights >= TINY and has_amx()]


def resolve_dtype(config: DictConfig, weights: float) -> None:
    """Write what ``auto`` means for the rollouts into a configuration; on a GPU it is the trainer's type."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu":
        rollout.dtype = choose_dtype(str(rollout.dtype), weights)
    elif rollout.dtype == AUTO:
        rollout.dtype = "bfloat16"


def has_amx() -> bool:
    """Whether this CPU multiplies matrices of bfloat16."""
    from torch.cpu import get_capabilities

    return bool(get_capabilities().get("amx_bf16"))


def check_precision(config: DictConfig) -> None:
    """Check that rollouts and trainer of a training on a CPU compute alike.

    Raises:
        SpearError: they do not.
    """
    node = config.actor_rollout_ref
    names = {"fp32": "float32", "bf16": "bfloat16"}
    for part, settings in (("actor", node.actor.fsdp_config), ("ref", node.ref.fsdp_config)):
        given = str(settings.mixed_precision.param_dtype)
        if names.get(given, given) != node.rollout.dtype:
            raise SpearError(
                f"the trainer would compute in {given} and the rollouts in {node.rollout.dtype}: set {_ROLLOUT} alone, "
                f"which actor_rollout_ref.{part}.{_TRAINER} follows"
            )
