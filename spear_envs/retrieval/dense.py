"""Passages by vectors: a sentence encoder and a faiss index, shared by processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.encoders import MODEL, Encoder, OnnxEncoder, TorchEncoder, check_device
from spear_envs.retrieval.kinds import parse_type
from spear_envs.retrieval.manifest import EXACT, EXPORT, INDEX, MEND, Manifest, Part, open_manifest
from spear_envs.retrieval.models import EncoderSpec, describe_model, find_model
from spear_envs.retrieval.retriever import Hit
from spear_envs.retrieval.vector_index import VectorIndex

PROBES = 5
PROBE_HITS = 10


class DenseRetriever:
    """Passages whose vectors have the greatest inner product with the query's.

    Args:
        index: folder with the part ``dense``, written by ``spear index build``.
        encoder: folder of the model, or the name of an installed one; only needed if the index lacks an export and the
            model has moved.
        ef_search: of an HNSW index, 128 by default.
        nprobe: lists of an IVF index to search, an eighth of them by default.
        device: of torch, for encoding queries; in float16 by the model itself except on ``"cpu"``. faiss also searches
            a flat or IVF index there, if its GPU build is installed.

    Raises:
        SpearError: the index is missing, damaged, of another corpus, model or length; passages do not find themselves
            in it; or the device is missing.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: Path,
        *,
        encoder: str | Path | None = None,
        ef_search: int | None = None,
        nprobe: int | None = None,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        check_device(device)
        manifest = open_manifest(index, Part.DENSE, corpus)
        try:
            kind = parse_type(manifest.settings["type"])
            dimension = int(manifest.settings["dimension"])
            spec = EncoderSpec.from_plain(manifest.settings["encoder"])
        except (KeyError, TypeError, ValueError) as error:
            raise SpearError(f"{manifest.folder}: the manifest is damaged ({error!r}): {MEND}.") from error
        self._encoder = _open_encoder(manifest, spec, encoder, threads, device)
        self._index = VectorIndex(
            manifest.folder / INDEX,
            kind,
            exact=manifest.folder / EXACT if kind.needs_exact else None,
            ef_search=ef_search,
            nprobe=nprobe,
            threads=threads,
            device=device,
        )
        self._threads = threads
        self.rows = len(corpus)
        found = self._index.rows, self._index.dimension, self._encoder.dimension
        if found != (self.rows, dimension, dimension):
            raise SpearError(
                f"{manifest.folder}: {found[0]:,} vectors of {found[1]} dimensions, a corpus of {self.rows:,} "
                f"documents and an encoder of {found[2]} dimensions do not belong together: {MEND}."
            )
        self._probe(corpus, manifest)
        settings = json.dumps([manifest.fingerprint, self._index.effort, self._encoder.backend, self._index.device])
        self.fingerprint = hashlib.sha256(settings.encode("ascii")).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Tokens of each query for the encoder."""
        return self._encoder.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. Scores are cosines to six digits.

        A list has no more hits than a walk through an HNSW graph keeps candidates (``ef_search``), or 128 if the index
        is coarse.
        """
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        if not queries:
            return []
        return self._index.find(self._encoder.encode_queries(queries), k)

    def describe(self) -> dict[str, Any]:
        """Kind and settings."""
        spec = self._encoder.spec
        return {
            "kind": "dense",
            "index": self._index.type.name,
            **self._index.effort,
            "reranked": self._index.reranked,
            "encoder": spec.model,
            "encoder_fingerprint": spec.fingerprint,
            "backend": self._encoder.backend,
            "searched_on": self._index.device,
            "dimension": self._encoder.dimension,
            "max_length": spec.max_length,
            "query_prefix": spec.query_prefix,
            "threads": self._threads,
        }

    def _probe(self, corpus: Corpus, manifest: Manifest) -> None:
        """Check that passages find themselves: a shifted corpus or another model would give fluent nonsense."""
        rows = sorted({round(share * (self.rows - 1) / (PROBES - 1)) for share in range(PROBES)})
        vectors = self._encoder.encode_passages([corpus.document(row)["contents"] for row in rows])
        found = self._index.find(vectors, PROBE_HITS)
        # An approximate search may miss one, and one may have many duplicates.
        missed = [row for row, hits in zip(rows, found, strict=True) if row not in {hit for hit, _ in hits}]
        if 2 * len(missed) >= len(rows):
            raise SpearError(
                f"{manifest.folder}: {len(missed)} of {len(rows)} passages do not find themselves (row {missed[0]}, "
                f"for instance): the index is of another corpus or model; {MEND}."
            )


def _open_encoder(
    manifest: Manifest, spec: EncoderSpec, model: str | Path | None, threads: int, device: str
) -> Encoder:
    """Open the export in the index (on the CPU) or the model, which must be the one of the index."""
    exported = device == "cpu" and f"{EXPORT}/{MODEL}" in manifest.files
    if model is None and exported:
        return OnnxEncoder(manifest.folder / EXPORT, spec, threads=threads)
    try:
        folder = find_model(model if model is not None else str(manifest.notes.get("model_folder", "")))
    except SpearError as error:
        if model is not None:
            raise
        raise SpearError(f"the model of {manifest.folder} is gone; name its new place as encoder: {error}") from error
    found = describe_model(
        folder, query_prefix=spec.query_prefix, passage_prefix=spec.passage_prefix, max_length=spec.max_length
    )
    if found.fingerprint != spec.fingerprint:
        others = sorted(name for name in {*found.files, *spec.files} if found.files.get(name) != spec.files.get(name))
        raise SpearError(
            f"{folder} is another model than {spec.model}, of which {manifest.folder} was made "
            f"({', '.join(others[:3])} {'differ' if len(others) > 1 else 'differs'}): give that model, or {MEND}."
        )
    if exported:
        return OnnxEncoder(manifest.folder / EXPORT, spec, threads=threads)
    return TorchEncoder(folder, spec, device=device, threads=threads)
