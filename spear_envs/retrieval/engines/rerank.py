"""Reranking the passages of a retriever with a cross-encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import digest_plain
from spear_envs.retrieval.manifest import describe_model, find_model
from spear_envs.retrieval.retriever import Passage, Retriever

DIGITS = 4
"""Of a score; the composition of batches only changes later ones."""


class Reranker(Retriever):
    """The first passages of another retriever, ordered by a cross-encoder's score of query and contents.

    A list has at most ``depth`` passages. Ties keep the other's order.

    Args:
        inner: finds the candidates; closed with this one.
        model: folder of a sentence-transformers cross-encoder with one output.

    Raises:
        SpearError: the model is missing or cannot be read.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(self, inner: Retriever, model: str | Path, *, depth: int, batch: int, device: str) -> None:
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
    def fingerprint(self) -> str:  # type: ignore[override]
        """Return that of the other, the model and the depth."""
        return digest_plain([self._inner.fingerprint, self._digest, self._depth])

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return those of the other."""
        return self._inner.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""
        found = [list(hits[: self._depth]) for hits in self._inner.search(queries, self._depth)]
        pairs = [
            (query, json.loads(passage.raw)["contents"])
            for query, hits in zip(queries, found, strict=True)
            for passage in hits
        ]
        if not pairs:
            return found
        with self._lock:
            scores = self._model.predict(pairs, batch_size=self._batch, show_progress_bar=False)
        left = iter([round(float(score), DIGITS) for score in scores])
        scored = [[Passage(passage.raw, next(left)) for passage in hits] for hits in found]
        return [sorted(hits, key=lambda hit: -hit.score)[:k] for hits in scored]

    def describe(self) -> dict[str, Any]:
        """Describe the other and the reranking."""
        return {**self._inner.describe(), "rerank": self._settings}

    def counts(self) -> Mapping[str, float]:
        """Return those of the other."""
        return self._inner.counts()

    def close(self) -> None:
        """Close the other."""
        self._inner.close()
