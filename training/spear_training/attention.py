"""The trainer's attention implementation, chosen and checked before Ray starts.

PyPI has flash-attention only as a source package; without it, rows without padding use
:mod:`spear_training.verl_plugin.attention`, called ``sdpa`` in configurations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from spear_envs.core.errors import SpearError, first_line
from spear_envs.doctor import Finding, Verdict

AUTO = "auto"
FLASH = "flash_attention_2"
SDPA = "sdpa"
PACKAGE = "flash_attn"
"""Not a dependency: PyPI has only its sources."""
EXCHANGES = (FLASH, SDPA)
"""Kinds that gather full rows under Ulysses. Any other would silently attend within a rank's part only."""
ACTOR, CRITIC = "actor_rollout_ref.model", "critic.model"
_KEY = "override_config.attn_implementation"
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
        raise SpearError(f"{ACTOR}.{_KEY}={FLASH}: {fault}; take {AUTO} for torch's own attention")
    return wanted


def resolve_attention(config: DictConfig, *nodes: str, device: str) -> None:
    """Write the choice into the models of a configuration, by default those of verl's PPO trainer."""
    with open_dict(config):
        for node in nodes or (ACTOR, CRITIC):
            wanted = OmegaConf.select(config, f"{node}.{_KEY}")
            OmegaConf.update(config, f"{node}.{_KEY}", choose_attention(str(wanted or AUTO), device))


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
                check_exchange(str(OmegaConf.select(config, f"{node}.{_KEY}")), size, vision=vision)
                if not OmegaConf.select(config, f"{node}.use_remove_padding"):
                    raise SpearError(f"{key}={size} takes rows without padding: set {node}.use_remove_padding=true")
                if (Path(model) / "config.json").is_file():
                    _check_heads(Path(model) / "config.json", key, size)


def check_exchange(attention: str, size: int, *, vision: bool = False) -> None:
    """Raise SpearError if ``attention`` does not exchange rows among the ``size`` ranks of a sequence."""
    kinds = (FLASH,) if vision else EXCHANGES
    if size > 1 and attention not in kinds:
        raise SpearError(f"ulysses_sequence_parallel_size={size} needs {_KEY}={' or '.join(kinds)}, not {attention}")


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
