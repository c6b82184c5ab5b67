"""Texts of recorded token ids, for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_agents.engines.stops import Decoder
from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_regular

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def open_decoder(settings: Mapping[str, Any], folder: Path, chosen: Path | None = None) -> Decoder:
    """The decoder of a model's tokens: of the folder ``chosen``, or else of ``settings["model"]``.

    A relative path is also resolved in the evaluation's ``folder`` and those above it. Raises SpearError if the
    tokenizer is missing or cannot be read.
    """
    wanted = chosen or settings.get("model")
    if not wanted:
        raise SpearError("the tokenizer of these tokens is unknown: give --tokenizer DIR")
    for place in (Path(), folder, *folder.resolve().parents):
        path = place / str(wanted) / "tokenizer.json"
        if path.is_file():
            return _read_tokenizer(path)
    raise SpearError(f"{wanted} does not contain tokenizer.json: give --tokenizer DIR")


def _read_tokenizer(path: Path) -> Decoder:
    try:
        from tokenizers import Tokenizer

        decoder: Decoder = Tokenizer.from_buffer(read_regular(path))
    except ImportError as error:
        raise SpearError("the package tokenizers is not installed: pip install 'spear-agents[hf]' brings it") from error
    except Exception as error:  # what tokenizers raises for a broken file is a plain Exception
        raise SpearError(f"{path} is not a tokenizer: {error}") from error
    return decoder


def split_text(decoder: Decoder, token_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Split the text of ``token_ids`` into pieces, each with its number of tokens.

    Tokens that form one character together (bytes of an emoji) make one piece. Each piece is decoded after the piece
    before it, since many tokenizers write a token differently at the beginning of a text.
    """
    pieces: list[tuple[str, int]] = []
    before, start = 0, 0
    for end in range(1, len(token_ids) + 1):
        known = _decode(decoder, token_ids[before:start])
        text = _decode(decoder, token_ids[before:end])
        if text.endswith(_UNFINISHED) and end < len(token_ids) and end - start < 8:
            continue
        pieces.append((text[len(known) :], end - start))
        before, start = start, end
    return pieces


def _decode(decoder: Decoder, token_ids: Sequence[int]) -> str:
    return decoder.decode(list(token_ids), skip_special_tokens=False)
