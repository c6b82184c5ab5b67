"""Milvus Lite: filled from a corpus, searched, and killed in the middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pymilvus", reason="the extra 'milvus' is not installed")
pytest.importorskip("milvus_lite", reason="the extra 'milvus' is not installed")

from spear_envs.core.errors import SpearError
from spear_envs.retrieval import milvus
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.milvus import Milvus, MilvusRetriever, fill_collection
from spear_envs.retrieval.retriever import FaultKind, RetrieverFault
from tests.spear_envs.retrieval.conftest import WORDS, make_documents, write_corpus
from tests.spear_envs.retrieval.engines.engines import plain, read_ids

QUERIES = [f"{one} {other}" for one in WORDS for other in WORDS]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus.open(write_corpus(tmp_path / "corpus.jsonl", make_documents(300)))


@pytest.fixture
def place(tiny_model: Path, tmp_path: Path) -> Milvus:
    return Milvus(uri=str(tmp_path / "passages.db"), encoder=str(tiny_model), deadline_s=30)


def find_exactly(place: Milvus, corpus: Corpus, k: int) -> list[list[str]]:
    """Ids of the nearest passages of each query, by comparing all."""
    encoder = place.open_encoder()
    documents = [corpus.document(row) for row in range(len(corpus))]
    vectors = encoder.encode_passages([document["contents"] for document in documents])
    scores = encoder.encode_queries(QUERIES) @ vectors.T
    return [[documents[row]["id"] for row in (-row_scores).argsort(kind="stable")[:k]] for row_scores in scores]


def test_a_filled_collection_finds_what_comparing_all_finds(place: Milvus, corpus: Corpus) -> None:
    assert fill_collection(place, corpus) == 300
    assert fill_collection(place, corpus) == 0
    backend = MilvusRetriever(place)
    answers = backend.search(QUERIES, 5)
    exact = find_exactly(place, corpus, 5)
    shared = sum(len({*read_ids(hits)} & {*ids}) for hits, ids in zip(answers, exact, strict=True))
    assert shared >= 0.99 * 5 * len(QUERIES)
    assert answers[0][0].raw == corpus.raw(int(read_ids(answers[0])[0][1:]))
    assert all(
        [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True) and hits[0].score <= 1.000001
        for hits in answers
    )
    assert backend.passages == 300 and backend.lengths(["river"]) == [3]
    fingerprint = backend.fingerprint
    assert MilvusRetriever(place.model_copy(update={"ef_search": 64})).fingerprint != fingerprint
    backend.close()
    again = MilvusRetriever(place)
    assert again.fingerprint == fingerprint and plain(again.search(QUERIES[:3], 5)) == plain(answers[:3])
    again.close()
    with pytest.raises(RetrieverFault) as caught:
        again.search(["river"], 3)
    assert caught.value.kind == FaultKind.UNAVAILABLE.value


def test_collections_of_others_and_unfinished_ones_are_refused(
    place: Milvus, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpearError, match="spear retriever fill"):
        MilvusRetriever(place)
    monkeypatch.setattr(milvus, "ROWS", 100)

    def stop(_: str, done: int, total: int) -> None:
        if done == 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_collection(place, corpus, stop)
    with pytest.raises(SpearError, match="has 200 of 300 passages"):
        MilvusRetriever(place)
    other = Corpus.in_memory(make_documents(20, seed=1))
    with pytest.raises(SpearError, match="another corpus or model"):
        fill_collection(place, other)
    long = Corpus.in_memory([{"id": "1", "contents": "x" * 70_000}])
    with pytest.raises(SpearError, match="row 0 has 70,0"):
        fill_collection(place.model_copy(update={"collection": "long"}), long)
    assert fill_collection(place, corpus) == 100


FILL = """
import sys
from pathlib import Path
from spear_envs.retrieval import milvus
from spear_envs.retrieval.corpus import Corpus
milvus.ROWS = 20
place = milvus.Milvus(uri=sys.argv[1], encoder=sys.argv[2])
milvus.fill_collection(place, Corpus.open(Path(sys.argv[3])), lambda what, done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_a_fill_that_is_killed_goes_on(place: Milvus, corpus: Corpus) -> None:
    command = [sys.executable, "-c", FILL, place.uri, place.encoder, str(corpus.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as filling:
        try:
            assert filling.stdout is not None
            done = [int(filling.stdout.readline()) for _ in range(7)][-1]
        finally:
            filling.kill()
    added = fill_collection(place, corpus)
    assert 0 < added <= 300 - done, "what was stored before the kill is lost"
    backend = MilvusRetriever(place)
    stored = {name for hits in backend.search(QUERIES, 100) for name in read_ids(hits)}
    assert len(stored) > 200 and backend.passages == 300
    exact = find_exactly(place, corpus, 3)
    found = [read_ids(hits) for hits in backend.search(QUERIES, 3)]
    assert sum(len({*a} & {*b}) for a, b in zip(found, exact, strict=True)) >= 0.99 * 3 * len(QUERIES)
