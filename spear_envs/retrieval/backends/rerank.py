"""Reranking the passages of a backend with a cross-encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import digest_plain
from spear_envs.retrieval.backend import Backend, Found, Passage
from spear_envs.retrieval.models import describe_model, find_model

DIGITS = 4
"""Of a score; the composition of batches only changes later ones."""


class RerankBackend:
    """The first passages of a backend, ordered by a cross-encoder's score of query and contents.

    A list has at most ``depth`` passages. Ties keep the backend's order.

    Args:
        inner: finds the candidates; closed with this backend.
        model: folder of a sentence-transformers cross-encoder with one output.

    Raises:
        SpearError: the model is missing or cannot be read.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    scale: str | None = "cross-encoder"

    def __init__(self, inner: Backend, model: str | Path, *, depth: int, batch: int, device: str) -> None:
        from sentence_transformers import CrossEncoder

        folder = find_model(model)
        spec = describe_model(folder)
        try:
            self._model = CrossEncoder(str(folder), device=device, local_files_only=True)
        except Exception as error:  # the library lacks a base class of its errors
            raise SpearError(f"{folder} cannot be read as a cross-encoder ({error}): check the model.") from error
        if self._model.config.num_labels != 1:
            raise SpearError(f"{folder} has {self._model.config.num_labels} outputs: give a cross-encoder with one.")
        self._inner = inner
        self._depth = depth
        self._batch = batch
        self._lock = Lock()
        self._settings = {"model": spec.model, "depth": depth}
        self._digest = spec.fingerprint
        self.passages = inner.passages
        self.load = inner.load

    @property
    def fingerprint(self) -> str:
        """Of the backend, the model and the depth."""
        return digest_plain([self._inner.fingerprint, self._digest, self._depth])

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """As of the backend."""
        return self._inner.lengths(queries)

    def read(self, passage: Passage) -> bytes:
        """As the backend reads it."""
        return self._inner.read(passage)

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`."""
        found = [hits[: self._depth] for hits in self._inner.search(queries, self._depth)]
        pairs = [
            (query, json.loads(self._inner.read(passage))["contents"])
            for query, hits in zip(queries, found, strict=True)
            for passage, _ in hits
        ]
        if not pairs:
            return found
        with self._lock:
            scores = self._model.predict(pairs, batch_size=self._batch, show_progress_bar=False)
        left = iter([round(float(score), DIGITS) for score in scores])
        scored = [[(passage, next(left)) for passage, _ in hits] for hits in found]
        return [sorted(hits, key=lambda hit: -hit[1])[:k] for hits in scored]

    def describe(self) -> dict[str, Any]:
        """Describe the backend and the reranking."""
        return {**self._inner.describe(), "rerank": self._settings}

    def counts(self) -> Mapping[str, float]:
        """As of the backend."""
        return self._inner.counts()

    def close(self) -> None:
        """Close the backend."""
        self._inner.close()
