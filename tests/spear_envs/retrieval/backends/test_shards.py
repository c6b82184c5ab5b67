"""Merging the answers of shards, and shards that fail."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.backend import EmbeddedBackend
from spear_envs.retrieval.backends.shards import Merge, ShardsBackend, merge_hits
from spear_envs.retrieval.bm25 import BM25Retriever
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault, RetrieverRefusal
from tests.spear_envs.retrieval.backends.engines import ListBackend, read_ids, write_document

DEAD = RetrieverFault(FaultKind.TIMEOUT, "nobody there")
# Few scores, so that there are ties.
SHARDS = st.lists(st.lists(st.integers(0, 4).map(float), max_size=6), min_size=1, max_size=4)


@given(SHARDS, st.integers(1, 12))
def test_by_score_shards_answer_as_the_whole_would(scores: list[list[float]], k: int) -> None:
    names = [[(f"{shard}/{row}", score) for row, score in enumerate(part)] for shard, part in enumerate(scores)]
    backends = [ListBackend(part) for part in names]
    whole = sorted((hit for part in names for hit in part), key=lambda hit: -hit[1])  # ties: shard, then row
    (found,) = ShardsBackend(backends, Merge.SCORE, partial=False).search(["q"], k)
    assert [(json.loads(raw)["id"], score) for raw, score in found] == whole[:k]  # type: ignore[arg-type]


@given(SHARDS, st.integers(1, 12))
def test_by_rank_shards_take_turns(scores: list[list[float]], k: int) -> None:
    names = [[(f"{shard}/{row}", score) for row, score in enumerate(part)] for shard, part in enumerate(scores)]
    lists = [[name for name, _ in sorted(part, key=lambda hit: -hit[1])] for part in names]
    turns = [part[rank] for rank in range(6) for part in lists if rank < len(part)]
    (found,) = ShardsBackend([ListBackend(part) for part in names], Merge.RANK, partial=False).search(["q"], k)
    assert read_ids(found) == turns[:k]
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


@given(st.lists(st.permutations("abcde"), min_size=1, max_size=4), st.sampled_from(Merge))
def test_a_passage_of_several_shards_stands_once(orders: list[list[str]], merge: Merge) -> None:
    shards = [[(write_document(name), float(-rank)) for rank, name in enumerate(order)] for order in orders]
    found = merge_hits(shards, 10, merge)
    assert sorted(read_ids(found)) == list("abcde")
    if merge is Merge.RANK:
        ranks = {name: sum(1 / (60 + order.index(name) + 1) for order in orders) for name in "abcde"}
        assert [score for _, score in found] == pytest.approx(sorted(ranks.values(), reverse=True))


def test_equal_ids_of_different_passages_are_different_passages() -> None:
    other = json.dumps({"id": "a", "contents": "something else"}).encode()
    assert len(merge_hits([[(write_document("a"), 1.0)], [(other, 1.0)]], 10, Merge.SCORE)) == 2


def test_embedded_corpora_are_shards() -> None:
    corpora = [
        Corpus.in_memory([{"id": f"{part}{row}", "contents": f'"T"\nriver {part} word{row}'} for row in range(5)])
        for part in "xy"
    ]
    shards = [EmbeddedBackend(corpus, BM25Retriever(corpus)) for corpus in corpora]
    backend = ShardsBackend(shards, Merge.SCORE, partial=False)
    assert backend.passages == 10 and backend.scale == "bm25"
    assert read_ids(backend.search(["word3 river"], 4)[0])[:2] == ["x3", "y3"]


def test_shards_are_asked_side_by_side() -> None:
    meeting = threading.Barrier(3, timeout=20)

    class Meeting(ListBackend):
        def search(self, queries, k):  # type: ignore[no-untyped-def]
            meeting.wait()  # broken unless all three are here at a time
            return super().search(queries, k)

    shards = [Meeting([(name, 1.0)]) for name in "abc"]
    assert read_ids(ShardsBackend(shards, Merge.SCORE, partial=False).search(["q"], 3)[0]) == ["a", "b", "c"]


def test_a_dead_shard_is_an_error_or_left_out_and_counted() -> None:
    shards = [ListBackend([("a", 1.0)]), ListBackend([("b", 2.0)])]
    shards[1].error = DEAD
    with pytest.raises(RetrieverFault, match="shard 1: nobody there"):
        ShardsBackend(shards, Merge.SCORE, partial=False).search(["q"], 3)
    partial = ShardsBackend(shards, Merge.SCORE, partial=True)
    assert [read_ids(hits) for hits in partial.search(["q", "r"], 3)] == [["a"], ["a"]]
    assert partial.counts()["left_out"] == 2 and partial.counts()["requests"] == 6
    shards[0].error = DEAD
    with pytest.raises(RetrieverFault, match="shard 0"):
        partial.search(["q"], 3)
    shards[0].error = RetrieverRefusal("the budget is spent")
    with pytest.raises(RetrieverRefusal, match="spent"):
        partial.search(["q"], 3)
    partial.close()
    assert all(shard.closed for shard in shards)


def test_scores_of_different_scales_are_not_compared() -> None:
    one, other = ListBackend(), ListBackend()
    other.scale = None
    for shards in ([one, other], [other, other]):
        with pytest.raises(SpearError, match="merge: rank"):
            ShardsBackend(shards, Merge.SCORE, partial=False)
    assert ShardsBackend([one, other], Merge.RANK, partial=False).scale is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    backend = ShardsBackend([ListBackend([("a", 1.0)])], Merge.SCORE, partial=False)
    backend.search(["q"], 1)
    child = os.fork()
    if not child:
        os._exit(0 if read_ids(backend.search(["q"], 1)[0]) == ["a"] else 1)
    assert os.waitpid(child, 0)[1] == 0
