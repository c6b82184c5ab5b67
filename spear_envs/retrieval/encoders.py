"""Texts to vectors: sentence-transformers on torch, or its export on ONNX Runtime, without torch.

Vectors are float32 of length 1. Both ways cut and pad texts equally, and their vectors only differ by rounding.
"""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError, first_line
from spear_envs.retrieval.manifest import EncoderSpec

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


class Encoder(ABC):
    """Makes vectors of texts."""

    spec: EncoderSpec
    dimension: int
    """D."""
    backend: str
    """For people."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Tokens of each query for the model."""
        return self._count_tokens(self._prepare(self.spec.query_prefix, queries))

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors of queries as one batch."""
        return self._encode(self.spec.query_prefix, texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Vectors of passages as one batch."""
        return self._encode(self.spec.passage_prefix, texts)

    def _encode(self, prefix: str, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        vectors = np.asarray(self._run(self._prepare(prefix, texts)), np.float32)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))

    def _prepare(self, prefix: str, texts: Sequence[str]) -> list[str]:
        limit = self.spec.max_length * CHARACTERS_PER_TOKEN
        # Tokenizers do not accept lone surrogates, which JSON can contain.
        return [prefix + text.strip()[:limit].encode("utf-8", "replace").decode("utf-8") for text in texts]

    @abstractmethod
    def _count_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each prepared text."""

    @abstractmethod
    def _run(self, texts: list[str]) -> npt.NDArray[Any]:
        """Vectors of prepared texts, (N, D), of any length."""


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
