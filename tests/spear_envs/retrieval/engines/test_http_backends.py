"""Backends over HTTP against servers that answer well, badly and not at all."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("httpx", reason="the extra 'search' is not installed")
pytest.importorskip("yaml", reason="the extra 'search' is not installed")

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import FaultKind, Retriever, RetrieverFault, RetrieverRefusal
from tests.scripted_server import Torn, reply, serve
from tests.spear_envs.retrieval.engines.engines import (
    KEYS,
    KINDS,
    SECRET,
    answer_well,
    open_kind,
    read_ids,
    write_answer,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
WEB = ("serper", "brave", "searxng")
OTHERS = tuple(kind for kind in KINDS if kind != "service")
"""Of these. ``test_client.py`` has what a service of our own contract may answer."""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KEYS.values():
        monkeypatch.setenv(variable, SECRET)


def fail(backend: Retriever) -> RetrieverFault:
    with pytest.raises(RetrieverFault) as caught:
        backend.search(["a"], 3)
    return caught.value


@every_kind
def test_passages_are_those_of_the_engine_in_its_order(kind: str) -> None:
    with serve(answer_well(kind)) as server:
        backend = open_kind(kind, server.url)
        first, second = backend.search(["Zürich", "b & c"], 3)
        line, headers, _ = server.requests[0]
    assert read_ids(first) == ["Zürich/0", "Zürich/1", "Zürich/2"] and read_ids(second)[0] == "b & c/0"
    assert json.loads(first[0].raw)["contents"] == '"Zürich 0"\nabout Zürich'
    scores = [hit.score for hit in first]
    assert scores == ([1, 1 / 2, 1 / 3] if kind in WEB else [9.5, 8.5, 7.5])
    expected = {
        "serper": ("POST /search", "x-api-key", SECRET),
        "brave": ("GET /res/v1/web/search", "x-subscription-token", SECRET),
        "searxng": ("GET /search", "user-agent", "spear-envs"),
        "opensearch": ("POST /_msearch", "authorization", f"ApiKey {SECRET}"),
        "service": ("POST /retrieve", "content-type", "application/json"),
    }[kind]
    assert line.startswith(expected[0]) and headers[expected[1]] == expected[2]
    assert backend.counts()["requests"] == (2 if kind in WEB else 1)


@every_kind
def test_what_passes_is_tried_again(kind: str) -> None:
    bad = [
        reply(429, {"message": "slow down"}),
        None,
        Torn(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        answer_well(kind),
    ]
    with serve(*bad) as server:
        assert len(open_kind(kind, server.url).search(["a"], 2)[0]) == 2
        assert len(server.requests) == 4


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("answer", [reply(500, {"detail": "broken"}), None], ids=["500", "closed"])
def test_a_server_that_stays_broken_is_a_fault_after_all_tries(kind: str, answer: bytes | None) -> None:
    with serve(answer) as server:
        fault = fail(open_kind(kind, server.url, tries=2))
        assert len(server.requests) == 2
    assert fault.kind == FaultKind.UNAVAILABLE.value
    assert ("broken" if answer else "cannot be reached") in fault.message and "2 of 2 tries" in fault.message


def take_out(kind: str, field: str) -> bytes:
    """An answer whose results lack a field."""
    text = json.dumps(write_answer(kind, ["a"], 2))
    assert f'"{field}"' in text
    return text.replace(f'"{field}"', '"other"').encode()


FIELDS = {
    "serper": ("link", "organic"),
    "brave": ("title",),  # an answer of Brave's without results has no list
    "searxng": ("url", "results"),
    "opensearch": ("hits", "_source", "_score", "responses"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_rubbish_and_missing_fields_are_a_bad_reply(kind: str) -> None:
    bodies = [b"<html>welcome</html>", b"[1, 2]", *(take_out(kind, field) for field in FIELDS[kind])]
    for body in bodies if kind == "brave" else [*bodies, b"{}"]:
        with serve(reply(200, body)) as server:
            assert fail(open_kind(kind, server.url)).kind == FaultKind.BAD_REPLY.value, body
            assert len(server.requests) == 1


@pytest.mark.parametrize("score", ["NaN", "1e999", "1" + "0" * 400, '"high"', "null"])
def test_a_score_that_is_no_finite_number_is_a_bad_reply(score: str) -> None:
    body = json.dumps(write_answer("opensearch", ["a"], 2)).replace("9.5", score)
    with serve(reply(200, body.encode())) as server:
        assert fail(open_kind("opensearch", server.url)).kind == FaultKind.BAD_REPLY.value


@every_kind
def test_no_answer_in_time_is_a_timeout(kind: str) -> None:
    over = threading.Event()

    def sleep(*_: Any) -> None:
        over.wait(30)

    with serve(sleep) as server:
        start = time.monotonic()
        fault = fail(open_kind(kind, server.url, deadline_s=0.3))
        assert fault.kind == FaultKind.TIMEOUT.value and time.monotonic() - start < 10
        over.set()


@every_kind
@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_refused_at_once_and_shown_nowhere(
    kind: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SPEAR_RETRIEVER_TOKEN", SECRET)
    status = 401 if kind == "service" else status  # 403 refuses a request
    with serve(reply(status, {"message": "Unauthorized."})) as server:
        backend = open_kind(kind, server.url)
        with pytest.raises(RetrieverRefusal) as caught:
            backend.search(["a"], 1)
        assert len(server.requests) == 1
    wanted = {"searxng": "format 'json'", "service": "SPEAR_RETRIEVER_TOKEN"}.get(kind) or KEYS[kind]
    assert wanted in str(caught.value)
    if kind != "service":  # whose fingerprint is asked for
        assert SECRET not in backend.fingerprint
    assert SECRET not in str(caught.value) + json.dumps(backend.describe()) + caplog.text


@pytest.mark.parametrize("kind", ["serper", "brave", "opensearch"])
def test_a_key_that_is_not_set_is_named_and_nothing_is_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS[kind])
    with serve(answer_well(kind)) as server:
        backend = open_kind(kind, server.url)
        with pytest.raises(RetrieverRefusal, match=f"{KEYS[kind]} is not set"):
            backend.search(["a"], 1)
        assert not server.requests and not backend.counts()["requests"]


@every_kind
def test_a_request_that_is_refused_is_not_tried_again(kind: str) -> None:
    with serve(reply(400, {"detail": "Not enough credits"})) as server:
        with pytest.raises(RetrieverRefusal, match="Not enough credits"):
            open_kind(kind, server.url).search(["a"], 1)
        assert len(server.requests) == 1


@pytest.mark.parametrize("kind", WEB)
def test_a_spent_budget_is_refused_and_tries_count(kind: str) -> None:
    with serve(reply(503, {}), answer_well(kind)) as server:
        backend = open_kind(kind, server.url, max_requests=3, cost_per_request=0.5)
        backend.search(["a"], 1)
        backend.search(["b"], 1)
        assert backend.counts() == {"requests": 3, "cost": 1.5}
        with pytest.raises(RetrieverRefusal, match="max_requests is 3"):
            backend.search(["c"], 1)
        assert len(server.requests) == 3
        dear = open_kind(kind, server.url, max_cost=0.25, cost_per_request=0.1)
        for query in "ab":
            dear.search([query], 1)
        with pytest.raises(RetrieverRefusal, match=r"spent by 2 requests"):
            dear.search(["c"], 1)


def test_an_answer_of_brave_without_results_is_an_empty_one() -> None:
    with serve(reply(200, {"type": "search", "query": {}})) as server:
        assert open_kind("brave", server.url).search(["a"], 3) == [[]]


def test_brave_gets_no_longer_query_than_it_takes() -> None:
    with serve(answer_well("brave")) as server:
        backend = open_kind("brave", server.url)
        for query in ("word " * 200, "letters" * 200):
            backend.search([query], 1)
        sent = [parse_qs(urlsplit(line.split()[1]).query)["q"][0] for line, _, _ in server.requests]
    assert all(len(query) <= 400 and len(query.split()) <= 50 for query in sent)


def test_a_query_that_opensearch_refuses_ends_no_run() -> None:
    good = write_answer("opensearch", ["a"], 1)["responses"][0]
    refused = {"error": {"type": "search_phase_execution_exception", "reason": "too_many_clauses"}, "status": 400}
    with serve(*(reply(200, {"responses": [part]}) for part in (good, refused))) as server:
        backend = open_kind("opensearch", server.url)
        backend.search(["a"], 1)
        assert "too_many_clauses" in fail(backend).message


def test_a_failing_part_of_an_opensearch_answer_says_what_it_is() -> None:
    missing = {"error": {"type": "index_not_found_exception", "reason": "no such index [wiki]"}, "status": 404}
    busy = {"error": {"type": "es_rejected_execution_exception", "reason": "queue is full"}, "status": 429}
    partial = write_answer("opensearch", ["a"], 1)["responses"][0] | {"_shards": {"failed": 1}}
    with serve(*(reply(200, {"responses": [part]}) for part in (missing, busy, partial))) as server:
        backend = open_kind("opensearch", server.url)
        with pytest.raises(RetrieverRefusal, match="no such index"):
            backend.search(["a"], 1)
        assert "queue is full" in fail(backend).message
        assert "did not answer" in fail(backend).message


def test_opensearch_takes_a_password_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OS_PASSWORD", "s3cret")
    with serve(answer_well("opensearch")) as server:
        login = {"username": "admin", "password_variable": "OS_PASSWORD", "api_key_variable": None}
        open_kind("opensearch", server.url, **login).search(["a"], 1)
        assert server.requests[0][1]["authorization"] == "Basic YWRtaW46czNjcmV0"


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(SpearError, match="name or password"):
        open_kind("searxng", "http://me:secret@127.0.0.1:1")
