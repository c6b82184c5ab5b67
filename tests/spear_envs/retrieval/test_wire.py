"""Requests and answers as bytes."""

from __future__ import annotations

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
        ({"queries": []}, ["'queries'", "0 entries", "1 to 512"]),
        ({"queries": ["a"] * 513}, ["'queries'", "513", "512"]),
        ({"queries": ["a", 3]}, ["'queries'[1]", "a number"]),
        ({"queries": [None]}, ["'queries'[0]", "null"]),
        ({"queries": ["a", " \t\u3000"]}, ["'queries'[1]", "blank"]),
        ({"query": ""}, ["'query'", "blank"]),
        ({"query": ["a"]}, ["'query'", "a list"]),
        ({"query": "x" * 100_000}, ["'query'", "100000 characters", "8192"]),
        ({"query": "half \ud800 pair"}, ["'query'", "position 5"]),
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


@given(st.binary(max_size=200) | st.dictionaries(FIELDS, ANY_JSON).map(lambda data: json.dumps(data).encode()))
def test_any_body_is_a_request_or_a_bad_one(body: bytes) -> None:
    try:
        asked = read_request(body, LIMITS)
    except BadRequestError:
        return
    assert 1 <= len(asked.queries) <= 512 and 1 <= asked.topk <= 100 and isinstance(asked.return_scores, bool)
    assert all(query.strip() and len(query) <= 8192 for query in asked.queries)


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
    assert read_result(body, 2, 2) == [[DOCUMENTS[1]], [DOCUMENTS[0], DOCUMENTS[2]]]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "'result'"),
        (b"{}", "'result'"),
        (b'{"result": [[], []]}', "1 rows"),
        (b'{"result": [{}]}', "no list"),
        (b'{"result": [[{"id": "1", "contents": "a"}, {"id": "2", "contents": "b"}]]}', "at most 1"),
        (b'{"result": [["text"]]}', "no object"),
        (b'{"result": [[{"document": null, "score": 1}]]}', "no object"),
        (b'{"result": [[{"contents": "a"}]]}', "lacks"),
        (b'{"result": [[{"id": "1", "contents": null}]]}', "lacks"),
    ],
)
def test_bad_replies_are_told(body: bytes, word: str) -> None:
    with pytest.raises(BadReplyError, match=word):
        read_result(body, 1, 1)
