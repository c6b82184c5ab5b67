"""The tokenizer that a GGUF file describes, as a fast one of Hugging Face.

The conversion in transformers knows one pre-tokenizer for all byte-level vocabularies and mistakes the end token for
the start token; vocabularies of that kind are put together here, SentencePiece ones are left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spear_agents.line_encoding import LLAMA3, QWEN2
from spear_envs.core.errors import SpearError

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens (``tokenizer.ggml.token_type``) that are never made by merges."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names of Hugging Face and of GGUF."""

_PRE = pre_tokenizers


def _split_words(pattern: str) -> Any:
    return _PRE.Sequence(
        [_PRE.Split(Regex(pattern), "isolated"), _PRE.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


SPLITTERS: dict[str, Callable[[], Any]] = {
    "default": lambda: _PRE.ByteLevel(add_prefix_space=False),
    "gpt-2": lambda: _PRE.ByteLevel(add_prefix_space=False),
    "smollm": lambda: _PRE.Sequence([_PRE.Digits(individual_digits=True), _PRE.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": lambda: _split_words(LLAMA3),
    "qwen2": lambda: _split_words(QWEN2),
}
"""How a text falls into words before merges, by ``tokenizer.ggml.pre``."""


def build_tokenizer(path: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, from its metadata ``fields``. Raises SpearError for none or an unknown splitter."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise SpearError(f"{path} holds no tokenizer: take a GGUF file of a whole language model")
    special = {
        f"{role}_token": tokens[index]
        for role, name in ROLES.items()
        if (index := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None and index < len(tokens)
    }
    if "eos_token" not in special:
        raise SpearError(f"{path} names no token that ends a text (tokenizer.ggml.eos_token_id): take another file")
    special.setdefault("pad_token", special["eos_token"])
    if fields.get("tokenizer.ggml.model") == "gpt2":
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
            tokenizer_object=_build_byte_level(path, fields), **special
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        for role, token in special.items():
            setattr(tokenizer, role, token)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    tokenizer.model_max_length = int(fields.get(f"{fields['general.architecture']}.context_length", 2**31))
    return tokenizer


def _build_byte_level(path: Path, fields: Mapping[str, Any]) -> Tokenizer:
    tokens, name = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTERS:
        raise SpearError(
            f"{path} splits texts as {name!r}, which is not known here ({', '.join(SPLITTERS)} are): "
            "take the Hugging Face folder of this model"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type") or ()
    for index, kind in enumerate(kinds):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(tokens[index], normalized=False, special=kind == CONTROL)])
    if fields.get("tokenizer.ggml.add_bos_token"):
        start = tokens[fields["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, fields["tokenizer.ggml.bos_token_id"])]
        )
    return tokenizer
