"""Backends asked concurrently, with a merged answer."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import digest_plain
from spear_envs.retrieval.backend import Backend, DocumentBackend, Found, Load
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault

logger = logging.getLogger(__name__)

CONSTANT = 60
"""Of reciprocal rank fusion: rank r, from 1, gives 1 / (60 + r)."""


class Merge(str, Enum):
    """Order of passages of several shards."""

    SCORE = "score"
    """Their scores, which must be of one scale."""
    RANK = "rank"
    """Their ranks: the first of each shard, then the second of each."""


def merge_hits(shards: Sequence[Sequence[tuple[bytes, float]]], k: int, merge: Merge) -> list[tuple[bytes, float]]:
    """Merge several answers to one query into the best ``k``.

    Ties go to the earlier shard, and within it to the earlier passage. The same passage (id and contents) of several
    shards counts once: with its best score, or by rank with their sum, as in reciprocal rank fusion.

    Args:
        merge: see :class:`Merge`; by rank, scores are Σ 1/(60 + rank).
    """
    scores: dict[tuple[str, str], float] = {}
    documents: dict[tuple[str, str], bytes] = {}
    for hits in shards:
        seen = set()
        for rank, (raw, score) in enumerate(hits, start=1):
            document = json.loads(raw)
            key = str(document["id"]), document["contents"]
            if key in seen:
                continue
            seen.add(key)
            documents.setdefault(key, raw)
            if merge is Merge.RANK:
                scores[key] = scores.get(key, 0.0) + 1 / (CONSTANT + rank)
            else:
                scores[key] = max(scores.get(key, score), score)
    best = sorted(scores, key=lambda key: -scores[key])[:k]  # stable: ties keep the order of shards and ranks
    return [(documents[key], scores[key]) for key in best]


class ShardsBackend(DocumentBackend):
    """Parts of a corpus, or several sources, as one.

    Args:
        shards: at least one; closed with this backend.
        partial: a shard that fails is left out of an answer and counted, as long as one answers.

    Raises:
        SpearError: scores have different scales.
    """

    def __init__(self, shards: Sequence[Backend], merge: Merge, *, partial: bool) -> None:
        scales = {shard.scale for shard in shards}
        if merge is Merge.SCORE and (len(scales) > 1 or None in scales):
            kinds = ", ".join(str(shard.describe()["kind"]) for shard in shards)
            raise SpearError(f"scores of {kinds} cannot be compared: set merge: rank.")
        self._shards = list(shards)
        self._merge = merge
        self._partial = partial
        self._left_out = 0
        sizes = [shard.passages for shard in shards]
        self.passages = sum(size or 0 for size in sizes) if None not in sizes else None
        self.scale = scales.pop() if merge is Merge.SCORE else None
        self.load = Load(min(shard.load.calls for shard in shards), min(shard.load.queries for shard in shards))
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0

    @property
    def fingerprint(self) -> str:
        """Of the shards and the merge."""
        return digest_plain([self._merge.value, *(shard.fingerprint for shard in self._shards)])

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """The greatest over the shards."""
        return [max(lengths) for lengths in zip(*(shard.lengths(queries) for shard in self._shards), strict=True)]

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`."""
        pool = self._find_pool()
        futures = [pool.submit(_ask, shard, queries, k) for shard in self._shards]
        answers: list[list[list[tuple[bytes, float]]]] = []
        faults: list[RetrieverFault] = []
        for number, future in enumerate(futures):
            try:
                answers.append(future.result())
            except RetrieverFault as error:
                faults.append(RetrieverFault(FaultKind(error.kind), f"shard {number}: {error.message}"))
        if faults and (not self._partial or not answers):
            raise faults[0]
        if faults:
            self._left_out += len(queries)
            logger.warning("%d of %d shards left out: %s", len(faults), len(self._shards), faults[0].message)
        return [merge_hits(parts, k, self._merge) for parts in zip(*answers, strict=True)]

    def _find_pool(self) -> ThreadPoolExecutor:
        """The pool of this process, with a thread for each call, so that shards do not wait for each other."""
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(self.load.calls * len(self._shards), thread_name_prefix="shard")
            self._pool_pid = os.getpid()
        return self._pool

    def describe(self) -> dict[str, Any]:
        """Describe the merge and the shards."""
        return {
            "kind": "shards",
            "merge": self._merge.value,
            "partial": self._partial,
            "shards": [shard.describe() for shard in self._shards],
        }

    def counts(self) -> Mapping[str, float]:
        """Counts of the shards, and answers that lack one."""
        total: Counter[str] = Counter({"left_out": self._left_out})
        for shard in self._shards:
            total.update(shard.counts())
        return dict(total)

    def close(self) -> None:
        """Close the shards."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        for shard in self._shards:
            shard.close()


def _ask(shard: Backend, queries: Sequence[str], k: int) -> list[list[tuple[bytes, float]]]:
    answers = shard.search(queries, k)
    return [[(shard.read(passage), score) for passage, score in hits] for hits in answers]
