"""Requests and answers as bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.retrieval.wire import (
    BadReplyError,
    BadRequestError,
    Query,
    RequestLimits,
    read_request,
    read_result,
    write_request,
    write_result,
)

LIMITS = RequestLimits()
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["queries", "query", "topk", "return_scores", "user"])


def read(body: Any) -> Query:
    return read_request(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)


def test_both_forms_and_defaults() -> None:
    assert read({"queries": ["a", "b"]}) == Query(("a", "b"), 3, False)
    assert read({"query": "a", "topk": None, "return_scores": True, "user": 1}) == Query(("a",), 3, True)
    assert read({"queries": ["x" * 8192] * 512, "topk": 100}).topk == 100
    prose = "When it had rained for days, and nobody came [1], who was it that said so? "
    assert len(read({"queries": [(prose * 110)[:8192]] * 512}).queries) == 512


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["not JSON"]),
        (b"queries=city", ["not JSON"]),
        (b'{"queries": ["city"', ["not JSON"]),
        (b"\xff\xfe\xfd", ["not JSON"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"query": "a", "topk": ' + b"9" * 10_000 + b"}", ["not JSON", "too many digits"]),
        (
            b'{"query": "a", "rest": [' + b"[]," * 250_000 + b"[]]}",
            ["500004 commas", "at most 500000", "fewer queries"],
        ),
        (["city"], ["JSON object", "a list"]),
        ({}, ["'queries'", "'query'", "neither"]),
        ({"query": "a", "queries": ["a"]}, ["exactly one", "both"]),
        ({"queries": "a"}, ["'queries'", "a string"]),
        ({"queries": ["a"] * 2_501, "topk": 100}, ["2501 queries", "250100", "250000"]),
        ({"query": "a", "topk": 0}, ["'topk'", "is 0", "1 to 100"]),
        ({"query": "a", "topk": -1}, ["'topk'", "is -1"]),
        ({"query": "a", "topk": 10**6}, ["'topk'", "is 1000000"]),
        ({"query": "a", "topk": True}, ["'topk'", "is true"]),
        ({"query": "a", "topk": 3.0}, ["'topk'", "is 3.0"]),
        ({"query": "a", "topk": "3" * 500}, ["'topk'", "…"]),
        ({"query": "a", "return_scores": "true"}, ["'return_scores'", '"true"']),
        ({"query": "a", "return_scores": None}, ["'return_scores'", "null"]),
        ({"query": "a", "return_scores": 1}, ["'return_scores'", "is 1"]),
    ],
)
def test_bad_requests_get_a_sentence_with_field_value_and_limit(body: Any, words: list[str]) -> None:
    with pytest.raises(BadRequestError) as caught:
        read(body)
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300


@pytest.mark.parametrize(
    ("body", "queries", "words"),
    [
        ({"queries": []}, (), []),
        ({"queries": ["a", " \t\u3000", "b"]}, ("a", "", "b"), []),
        ({"query": ""}, ("",), []),
        ({"queries": [", [{" * 2_000] * 2_560}, (", [{" * 2_000,) * 2_560, []),
        ({"queries": ["a", 3]}, ("a", ""), ["'queries'[1]", "a number"]),
        ({"queries": [None]}, ("",), ["'queries'[0]", "null"]),
        ({"query": ["a"]}, ("",), ["'query'", "a list"]),
        ({"queries": ["x" * 100_000, "a"]}, ("", "a"), ["'queries'[0]", "100000 characters", "8192"]),
        ({"query": "half \ud800 pair"}, ("",), ["'query'", "position 5"]),
    ],
)
def test_a_query_without_hits_does_not_cost_the_others_theirs(body: Any, queries: Any, words: list[str]) -> None:
    asked = read(body)
    assert asked.queries == queries and bool(asked.problem) == bool(words)
    assert all(word in asked.problem for word in words), asked.problem


@given(st.binary(max_size=200) | st.dictionaries(FIELDS, ANY_JSON).map(lambda data: json.dumps(data).encode()))
def test_any_body_is_a_request_or_a_bad_one(body: bytes) -> None:
    try:
        asked = read_request(body, LIMITS)
    except BadRequestError:
        return
    assert 1 <= asked.topk <= 100 and isinstance(asked.return_scores, bool)
    assert all(query.strip() == query == "" or (query.strip() and len(query) <= 8192) for query in asked.queries)


@given(st.lists(st.text('ab é北"\\{\n', min_size=1).filter(str.strip), min_size=1, max_size=5), st.integers(1, 100))
def test_a_written_request_is_read_back(queries: list[str], topk: int) -> None:
    assert read_request(write_request(queries, topk), LIMITS) == Query(tuple(queries), topk, True)


DOCUMENTS = [{"id": str(i), "contents": f'"T"\nà {i} "q" \\', "more": [i]} for i in range(3)]
RAW = [json.dumps(document, ensure_ascii=False).encode() for document in DOCUMENTS]


def test_a_written_result_is_json_with_the_documents_untouched() -> None:
    body = write_result([[(2, 1.5), (0, -0.25)], []], RAW.__getitem__, True)
    assert json.loads(body) == {
        "result": [[{"document": DOCUMENTS[2], "score": 1.5}, {"document": DOCUMENTS[0], "score": -0.25}], []]
    }
    assert RAW[2] in body
    bare = write_result([[(2, 1.5), (0, -0.25)], []], RAW.__getitem__, False)
    assert json.loads(bare) == {"result": [[DOCUMENTS[2], DOCUMENTS[0]], []]}


@pytest.mark.parametrize("return_scores", [True, False])
def test_a_written_result_is_read_back(return_scores: bool) -> None:
    body = write_result([[(1, 2.0)], [(0, 1.0), (2, 0.5)]], RAW.__getitem__, return_scores)
    scores = [[2.0], [1.0, 0.5]] if return_scores else [[None], [None, None]]
    documents = [[DOCUMENTS[1]], [DOCUMENTS[0], DOCUMENTS[2]]]
    assert read_result(body, 2, 2) == [list(zip(*row, strict=True)) for row in zip(documents, scores, strict=True)]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", r"no 'result' but is \[\]"),
        (b"{}", r"no 'result' but is \{\}"),
        (b'{"result": [[], []]}', "each of 1 queries but"),
        (b'{"result": [{}]}', r"is not a list of documents but \{\}"),
        (b'{"result": [[7]]}', "no text under 'contents' but is 7"),
        (b'{"result": [[{"document": null, "score": 1}]]}', "but is null"),
        (b'{"result": [[{"document": ["a"]}]]}', r'but is \["a"\]'),
        (b'{"result": [[{"id": "1"}]]}', "no text"),
        (b'{"result": [[{"id": "1", "contents": null}]]}', "no text"),
        (b'{"result": [[{"contents": ' + b"[" * 700 + b"]" * 700 + b"}]]}", "no text"),
    ],
)
def test_bad_replies_are_told(body: bytes, word: str) -> None:
    with pytest.raises(BadReplyError, match=word) as caught:
        read_result(body, 1, 1)
    assert len(str(caught.value)) < 250


def test_an_empty_result_is_no_hit_of_one_query_and_nothing_for_several() -> None:
    assert read_result(b'{"result": []}', 1, 3) == [[]]
    with pytest.raises(BadReplyError, match="each of 2 queries"):
        read_result(b'{"result": []}', 2, 3)


ITEMS = ["a", {"contents": "a"}, {"document": "a", "score": 2}, {"document": {"contents": "a", "id": None}}]


@pytest.mark.parametrize("item", ITEMS)
def test_ids_come_from_the_text(item: Any) -> None:
    body = json.dumps({"result": [[item, {"contents": "b"}, 7]]}).encode()
    (((first, score), (second, _)),) = read_result(body, 1, 2)
    assert score == (2.0 if isinstance(item, dict) and "score" in item else None)
    assert first == {"contents": "a", "id": hashlib.sha256(b"a").hexdigest()[:32]} and second["id"] != first["id"]


def test_half_a_character_in_a_text_has_an_id() -> None:
    (((document, _),),) = read_result(b'{"result": [["x\\ud800"]]}', 1, 1)
    assert document["contents"] == "x\ud800" and len(document["id"]) == 32
