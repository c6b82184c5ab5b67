"""Tokenising line by line, with a cache of lines, where that gives the tokens of the full text.

A line of fields (``… [SEP] Red shoes [SEP] $12.99 …``) is cut at these too: products recur more often than pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

REMEMBERED_LINES = 16_384
LONGEST_REMEMBERED = 1024
"""Characters of a line."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which tokenizers of Llama 3 cut a text before they merge bytes.

A piece that holds a line break ends in one, since ``\\s*[\\r\\n]+`` goes before ``\\s+``.
"""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
"""The same of Qwen2, Qwen2.5 and Qwen3."""
_LINE = re.compile(r".*?\n(?=[!-~])|.+", re.DOTALL)
"""Up to a line break before a visible ASCII character, which no later one joins or composes with."""

_FIELD = " ["
"""Start of a field. After a visible ASCII character its blank begins a piece in all of these patterns: only pieces of
blanks extend over one.
"""

Encode = Callable[[str], tuple[int, ...]]


def encode_by_line(encode: Encode, backend: Any) -> Encode:
    """``encode``, with a cache of lines if ``backend`` (a ``tokenizers.Tokenizer``) tokenises each by itself."""
    if not cuts_at_lines(json.loads(backend.to_str())):
        return encode
    remembered = lru_cache(REMEMBERED_LINES)(encode)

    def encode_lines(text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for line in _LINE.findall(text):
            for part in _cut_at_fields(line) if _FIELD in line else (line,):
                ids += remembered(part) if len(part) <= LONGEST_REMEMBERED else encode(part)
        return tuple(ids)

    return encode_lines


def _cut_at_fields(line: str) -> list[str]:
    """Split a line before its fields, each with the blank before its bracket."""
    first, *fields = line.split(_FIELD)
    parts = [first]
    for field in fields:
        if "!" <= parts[-1][-1:] <= "~":
            parts.append(_FIELD + field)
        else:
            parts[-1] += _FIELD + field
    return parts


def cuts_at_lines(description: dict[str, Any]) -> bool:
    """Whether a tokenizer (``tokenizer.json``) gives a text the tokens of its lines one after the other."""
    normalizer, cutter = description.get("normalizer"), description.get("pre_tokenizer") or {}
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return False
    if any(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or "\n" in token["content"]
        or _FIELD in token["content"]
        for token in description.get("added_tokens", ())
    ):
        return False
    match cutter.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern in (LLAMA3, QWEN2) and (description.get("model") or {}).get("type") == "BPE"
    return False
