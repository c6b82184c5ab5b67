"""Tokens that end a response, from a model's folder and its tokenizer."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from spear_envs.core.errors import SpearError

_FILES = ("generation_config.json", "config.json")


class HasEnd(Protocol):
    """The part of a tokenizer used here."""

    eos_token_id: int | None


def find_end_ids(folder: str | Path, tokenizer: HasEnd | None) -> tuple[int, ...]:
    """Ids that end a response, each once: of the tokenizer, ``generation_config.json`` and ``config.json``.

    Chat models are inconsistent: Qwen2.5's tokenizer names ``<|im_end|>``, its generation settings ``<|endoftext|>``
    too; others lack one of the files. Whichever is sampled ends the response. The tokenizer's own comes first; ids that
    the model cannot write (negative, or beyond its ``vocab_size``) are left out. Empty if no source names one.
    """
    found: list[int] = []
    rows: list[int] = []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    for name in _FILES:
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            config = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
            for part in (config, config.get("text_config") or {}):
                named = part.get("eos_token_id")
                found += [i for i in (named if isinstance(named, list) else [named]) if type(i) is int]
                rows += [i for i in [part.get("vocab_size")] if type(i) is int]
    limit = max(rows, default=sys.maxsize)
    return tuple(dict.fromkeys(i for i in found if 0 <= i < limit))


def require_end_ids(folder: str | Path, tokenizer: HasEnd | None) -> tuple[int, ...]:
    """:func:`find_end_ids`. Raises SpearError if no source names an end token: no response would end."""
    found = find_end_ids(folder, tokenizer)
    if not found:
        raise SpearError(
            f"neither the tokenizer nor the settings in {folder} name an end token: set eos_token_id in its "
            "generation_config.json"
        )
    return found
