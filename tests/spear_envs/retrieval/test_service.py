"""The service over HTTP, in this process: its contract, its limits, its faults and those of its peers."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("uvicorn", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.client import read_result, write_request
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.indexes import open_index
from spear_envs.retrieval.limits import BatchLimits, RequestLimits, ServiceSettings
from spear_envs.retrieval.retriever import Passage, Retriever
from spear_envs.retrieval.service import (
    Asked,
    BadRequestError,
    RetrievalService,
    read_request,
    write_result,
)
from tests.commands import wait_until
from tests.spear_envs.retrieval.service import ScriptedIndex, make_documents, make_service, run_service


def ask(url: str, body: Any, method: str = "POST", path: str = "/retrieve", **headers: str) -> tuple[int, Any, Any]:
    """Status, content and headers of one request; the content is read as JSON where it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    is_json = response.headers.get("content-type") == "application/json"
    return response.status, json.loads(content) if is_json and content else content.decode(), response.headers


def ids(row: list[dict[str, Any]]) -> list[str]:
    return [item.get("document", item)["id"] for item in row]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """BM25 over the small corpus, without a cache."""
    corpus = Corpus.in_memory(make_documents())
    with run_service(make_service(open_index("bm25", corpus), cache_bytes=0)) as base:
        yield base


QUERIES = [
    "amber fox",
    "black bear",
    "北京 heron",
    "the copper crow or eel",
    "dun",
    "goat",
    "no such words zzz",
    "ibex",
]


LIMITS = RequestLimits()
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["queries", "query", "topk", "return_scores", "user"])


def read(body: Any) -> Asked:
    return read_request(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)


class TestBodies:
    def test_both_forms_and_defaults(self) -> None:
        assert read({"queries": ["a", "b"]}) == Asked(("a", "b"), 3, False)
        assert read({"query": "a", "topk": None, "return_scores": True, "user": 1}) == Asked(("a",), 3, True)
        assert read({"queries": ["x" * 8192] * 512, "topk": 100}).topk == 100
        prose = "When it had rained for days, and nobody came [1], who was it that said so? "
        assert len(read({"queries": [(prose * 110)[:8192]] * 512}).queries) == 512

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", ["not JSON"]),
            (b'{"queries": ["city"', ["not JSON"]),
            (b"\xff\xfe\xfd", ["not JSON"]),
            (b"[" * 100_000, ["not JSON"]),
            (b'{"query": "a", "topk": ' + b"9" * 10_000 + b"}", ["not JSON"]),
            (b'{"query": "a", "rest": [' + b"[]," * 250_000 + b"[]]}", ["500004 commas", "at most 500000"]),
            (["city"], ["the body", "city"]),
            ({}, ["exactly one", "'queries'", "'query'"]),
            ({"query": "a", "queries": ["a"]}, ["exactly one"]),
            ({"queries": "a"}, ["queries", "list", "'a'"]),
            ({"queries": ["a"] * 2_501, "topk": 100}, ["2501 queries", "250000"]),
            ({"query": "a", "topk": 0}, ["topk", "is 0", "equal to 1"]),
            ({"query": "a", "topk": 10**6}, ["topk 1000000", "100"]),
            ({"query": "a", "topk": True}, ["topk", "is True"]),
            ({"query": "a", "topk": 3.0}, ["topk", "is 3.0"]),
            ({"query": "a", "topk": "3" * 500}, ["topk", "…"]),
            ({"query": "a", "return_scores": "true"}, ["return_scores", "'true'"]),
            ({"query": "a", "return_scores": None}, ["return_scores", "None"]),
            ({"query": "a", "return_scores": 1}, ["return_scores", "is 1"]),
        ],
    )
    def test_bad_ones_get_a_sentence_with_field_value_and_limit(self, body: Any, words: list[str]) -> None:
        with pytest.raises(BadRequestError) as caught:
            read(body)
        sentence = str(caught.value)
        assert all(word in sentence for word in words), sentence
        assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300

    @pytest.mark.parametrize("end", [b"", b'"', b"\\"])
    def test_a_text_that_is_never_closed_is_refused_in_linear_time(self, end: bytes) -> None:
        start = time.process_time()
        with pytest.raises(BadRequestError, match=r"not JSON|commas"):
            read(b'{"query": "' + b"," * 600_000 + b'\\"' * 200_000 + end)
        assert time.process_time() - start < 2, "seconds; a search from each quote would take an hour"

    @pytest.mark.parametrize(
        ("body", "queries", "words"),
        [
            ({"queries": []}, (), []),
            ({"queries": ["a", " \t\u3000", "b"]}, ("a", "", "b"), []),
            ({"query": ""}, ("",), []),
            ({"queries": [", [{" * 2_000] * 2_560}, (", [{" * 2_000,) * 2_560, []),
            ({"queries": ["a", 3]}, ("a", ""), ["queries.1", "not 3"]),
            ({"queries": [None]}, ("",), ["queries.0", "null"]),
            ({"query": ["a"]}, ("",), ["a string"]),
            ({"queries": ["x" * 100_000, "a"]}, ("", "a"), ["queries.0", "100000 characters", "8192"]),
            ({"query": "half \ud800 pair"}, ("",), ["position 5"]),
        ],
    )
    def test_a_query_without_hits_does_not_cost_the_others_theirs(
        self, body: Any, queries: Any, words: list[str]
    ) -> None:
        asked = read(body)
        assert asked.queries == queries and bool(asked.problem) == bool(words)
        assert all(word in asked.problem for word in words), asked.problem

    @given(st.binary(max_size=200) | st.dictionaries(FIELDS, ANY_JSON).map(lambda data: json.dumps(data).encode()))
    def test_any_body_is_a_request_or_a_bad_one(self, body: bytes) -> None:
        try:
            asked = read_request(body, LIMITS)
        except BadRequestError:
            return
        assert 1 <= asked.topk <= 100 and isinstance(asked.return_scores, bool)
        assert all(query.strip() == query == "" or (query.strip() and len(query) <= 8192) for query in asked.queries)

    @given(st.lists(st.text('ab é北"\\{\n', min_size=1).filter(str.strip), min_size=1, max_size=5), st.integers(1, 100))
    def test_a_written_request_is_read_back(self, queries: list[str], topk: int) -> None:
        assert read_request(write_request(queries, topk), LIMITS) == Asked(tuple(queries), topk, True)

    @pytest.mark.parametrize("return_scores", [True, False])
    def test_a_written_result_has_the_documents_untouched_and_is_read_back(self, return_scores: bool) -> None:
        documents = [{"id": str(i), "contents": f'"T"\nà {i} "q" \\', "more": [i]} for i in range(3)]
        raws = [json.dumps(document, ensure_ascii=False).encode() for document in documents]
        rows = [[Passage(raws[2], 1.5), Passage(raws[0], -0.25)], []]
        body = write_result(rows, return_scores)
        assert raws[2] in body
        found = read_result(body, 2, 2)
        scores = [1.5, -0.25] if return_scores else [1.0, 0.5]
        assert [(json.loads(hit.raw), hit.score) for hit in found[0]] == list(
            zip([documents[2], documents[0]], scores, strict=True)
        )
        assert found[1] == []


class TestContract:
    def test_a_batch_equals_its_parts_in_order_with_scores_and_without(self, url: str) -> None:
        parts = [ask(url, {"query": query, "topk": 4, "return_scores": True})[1]["result"][0] for query in QUERIES]
        assert parts[0][0]["document"] == make_documents()[5]
        assert len({json.dumps(part) for part in parts}) == len(QUERIES)
        for queries, expected in ((QUERIES, parts), (QUERIES[::-1], parts[::-1])):
            _, scored, _ = ask(url, {"queries": queries, "topk": 4, "return_scores": True})
            _, bare, _ = ask(url, {"queries": queries, "topk": 4})
            assert scored["result"] == expected
            assert bare["result"] == [[item["document"] for item in row] for row in expected]
        for row in parts:
            scores = [item["score"] for item in row]
            assert scores == sorted(scores, reverse=True) and all(isinstance(score, float) for score in scores)

    @pytest.mark.parametrize(
        ("queries", "hits"),
        [([], []), (["amber fox", "", "black bear"], [3, 0, 3]), (["  "], [0]), (["fox"] * 9_000, [3] * 9_000)],
    )
    def test_what_search_r1_sends_has_a_row_for_each_query(self, url: str, queries: list[str], hits: list[int]) -> None:
        status, found, _ = ask(url, {"queries": queries, "topk": 3, "return_scores": True})
        assert status == 200 and list(map(len, found["result"])) == hits

    def test_more_queries_than_may_wait(self, url: str) -> None:
        status, found, _ = ask(url, {"queries": [f"fox {i}" for i in range(4_200)], "topk": 1})
        assert status == 200 and len(found["result"]) == 4_200

    def test_a_refused_query_does_not_cost_the_others_their_hits(self, url: str) -> None:
        status, found, _ = ask(url, {"queries": ["amber fox", "x" * 9_000, "black bear"], "topk": 1})
        assert status == 422 and "queries.1: " in found["detail"]
        assert [ids(row) for row in found["result"]] == [["d5"], [], ["d10"]]

    def test_64_concurrent_requests_each_get_their_own_rows(self, url: str) -> None:
        documents = {document["id"]: document["contents"] for document in make_documents()}
        expected = {query: ids(ask(url, {"query": query, "topk": 100})[1]["result"][0]) for query in QUERIES}

        def request(number: int) -> None:
            topk = 1 + number % 40
            queries = [QUERIES[(number + step) % len(QUERIES)] for step in range(1 + number % 3)]
            status, found, _ = ask(url, {"queries": queries, "topk": topk, "return_scores": bool(number % 2)})
            assert status == 200
            assert [ids(row) for row in found["result"]] == [expected[query][:topk] for query in queries]
            for item in (item for row in found["result"] for item in row):
                document = item.get("document", item)
                assert document["contents"] == documents[document["id"]]

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(request, range(256)))
        assert ask(url, None, "GET", "/health")[0] == 200


class TestFaultsOfPeers:
    """What Search-R1's own server gets wrong, by name."""

    @pytest.mark.parametrize("body", [{"queries": ["a"], "topk": 0}, {"queries": ["\ud800"]}])
    def test_bad_requests_are_refused_with_a_sentence(self, url: str, body: dict[str, Any]) -> None:
        status, answer, _ = ask(url, body)
        assert status == 422 and answer["detail"].endswith(".")
        assert answer["result"] == [[]]  # Search-R1's client reads nothing else

    def test_more_hits_than_passages_repeat_none(self, url: str) -> None:
        _, found, _ = ask(url, {"query": "that is seen", "topk": 100, "return_scores": True})
        rows = ids(found["result"][0])
        assert len(rows) == len(set(rows)) == 72

    def test_back_pressure(self) -> None:
        retriever = ScriptedIndex()
        retriever.gate.clear()
        with (
            run_service(make_service(retriever, batches=BatchLimits(pending=8))) as base,
            ThreadPoolExecutor(9) as pool,
        ):
            waiting = [pool.submit(ask, base, {"query": str(i)}) for i in range(8)]
            wait_until(lambda: "spear_retriever_queue_length 8.0" in ask(base, None, "GET", "/metrics")[1])
            status, answer, headers = ask(base, {"query": "9"})
            assert status == 503 and headers["retry-after"] == "1" and "at most 8" in answer["detail"]
            retriever.gate.set()
            assert [future.result()[0] for future in waiting] == [200] * 8
            assert ask(base, {"query": "9"})[0] == 200


class TestOtherAnswers:
    def test_paths_and_methods(self, url: str) -> None:
        status, answer, headers = ask(url, None, "GET")
        assert status == 405 and "use POST" in answer["detail"] and headers["allow"] == "POST"
        status, answer, _ = ask(url, {"query": "a"}, path="/retrieve_all")
        assert status == 404 and "/retrieve_all" in answer["detail"]
        assert ask(url, {}, path="/health")[0] == 405
        assert ask(url, None, "GET", "/docs")[0] == 404

    def test_health_says_what_is_served(self, url: str) -> None:
        status, health, _ = ask(url, None, "GET", "/health")
        assert status == 200 and (health["status"], health["passages"]) == ("ok", 72)
        assert health["retriever"]["kind"] == "bm25" and len(health["fingerprint"]) == 64
        assert health["limits"]["pending"] == 4096
        assert ask(url, None, "HEAD", "/health")[0] == 200  # how some load balancers ask

    def test_a_body_larger_than_any_request_is_refused_while_it_comes(self) -> None:
        limits = RequestLimits(body_bytes=10_000)
        with run_service(make_service(ScriptedIndex(), requests=limits)) as base:
            status, answer, _ = ask(base, b'{"query": "' + b"x" * 9_000_000 + b'"}')
            assert status == 413 and "more than 10000 bytes" in answer["detail"]
            assert ask(base, {"query": "1"})[0] == 200

    def test_the_deadline_answers_504(self) -> None:
        retriever = ScriptedIndex()
        retriever.gate.clear()
        with run_service(make_service(retriever, batches=BatchLimits(deadline_s=0.2))) as base:
            status, answer, _ = ask(base, {"query": "1"})
            assert status == 504 and "0.2 s" in answer["detail"]
            retriever.gate.set()
            wait_until(lambda: ask(base, {"query": "2"})[0] == 200)

    def test_a_retriever_that_fails_answers_500_to_its_own_request_only(self) -> None:
        retriever = ScriptedIndex()
        retriever.gate.clear()
        with run_service(make_service(retriever)) as base, ThreadPoolExecutor(3) as pool:
            first = pool.submit(ask, base, {"query": "1"})
            assert retriever.entered.wait(10)
            futures = [pool.submit(ask, base, {"query": query}) for query in ("poison", "7")]
            wait_until(lambda: ask(base, None, "GET", "/health")[1]["waiting"] == 3)
            retriever.gate.set()
            assert first.result()[0] == 200
            (bad, answer, _), (good, _, _) = (future.result() for future in futures)
            assert (bad, good) == (500, 200) and "RuntimeError: the retriever choked" in answer["detail"]

    def test_callers_that_hang_up_in_their_body_are_no_errors(self, caplog: pytest.LogCaptureFixture) -> None:
        service = make_service(ScriptedIndex())
        with run_service(service) as base:
            parts = urlsplit(base)
            for reset in (False, True):
                with socket.create_connection((str(parts.hostname), parts.port or 0)) as caller:
                    head = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
                    caller.sendall(head + b'{"query": ')
                    if reset:
                        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_until(
                lambda: (
                    service.metrics.registry.get_sample_value("spear_retriever_answers_total", {"status": "499"}) == 2
                )
            )
            assert ask(base, {"query": "1"})[0] == 200
        assert not caplog.records

    def test_callers_that_hang_up_are_not_computed(self) -> None:
        retriever = ScriptedIndex()
        retriever.gate.clear()
        service = make_service(retriever)
        with run_service(service) as base, ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, base, {"query": "1"})
            assert retriever.entered.wait(10)
            parts = urlsplit(base)
            with socket.create_connection((str(parts.hostname), parts.port or 0)) as caller:
                body = b'{"query": "2"}'
                caller.sendall(
                    b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                wait_until(lambda: ask(base, None, "GET", "/health")[1]["waiting"] == 2)
            wait_until(lambda: ask(base, None, "GET", "/health")[1]["waiting"] == 1)
            retriever.gate.set()
            assert first.result()[0] == 200
            wait_until(lambda: service.metrics.read("skipped") == 1)
            assert retriever.computed == ["1"]


class TestToken:
    def test_requests_without_the_token_are_refused(self) -> None:
        with run_service(make_service(ScriptedIndex(), token="s3cret")) as base:
            for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
                status, answer, sent = ask(base, {"query": "1"}, **headers)
                assert status == 401 and "Bearer" in answer["detail"] and sent["www-authenticate"] == "Bearer"
            assert ask(base, {"query": "1"}, Authorization="bearer s3cret")[0] == 200
            assert ask(base, None, "GET", "/metrics")[0] == 401
            assert ask(base, None, "GET", "/health")[0] == 200  # for load balancers

    def test_the_token_is_in_no_description(self) -> None:
        service = make_service(ScriptedIndex(), token="s3cret")
        assert "s3cret" not in repr(service.settings) and "s3cret" not in json.dumps(service.describe())


class TestLoading:
    def test_requests_are_turned_away_until_the_index_is_there(self) -> None:
        gate = threading.Event()

        def load() -> dict[str, Retriever]:
            gate.wait(10)
            return {"default": ScriptedIndex()}

        with run_service(RetrievalService(load, ServiceSettings()), wait=False) as base:
            status, answer, headers = ask(base, {"query": "1"})
            assert status == 503 and "loaded" in answer["detail"] and headers["retry-after"] == "1"
            assert ask(base, {"query": "", "topk": 0})[0] == 422
            status, health, _ = ask(base, None, "GET", "/health")
            assert (status, health["status"]) == (503, "loading")
            gate.set()
            wait_until(lambda: ask(base, {"query": "1"})[0] == 200)

    def test_an_index_that_cannot_be_opened_ends_the_start(self) -> None:
        def fail() -> dict[str, Retriever]:
            raise SpearError("a damaged index")

        with pytest.raises(SpearError, match="damaged"), run_service(RetrievalService(fail, ServiceSettings())):
            pass


class TestMetrics:
    def test_counts_are_told(self) -> None:
        with run_service(make_service(ScriptedIndex())) as base:
            ask(base, {"queries": ["1", "2", "1"]})
            ask(base, {"queries": ["1"]})
            ask(base, {})
            status, page, headers = ask(base, None, "GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        prefix = "spear_retriever_"
        wanted = {"queries": 4, "hits": 1, "joined": 1, "batches": 1, "rejected": 0, "timeouts": 0}
        assert {name: float(values[f"{prefix}{name}_total"]) for name in wanted} == wanted
        assert float(values[f'{prefix}answers_total{{status="200"}}']) == 2
        assert float(values[f'{prefix}answers_total{{status="422"}}']) == 1
        assert float(values[f"{prefix}batch_queries_sum"]) == 2
        assert float(values[f"{prefix}request_seconds_count"]) == 3
        buckets = [float(value) for name, value in values.items() if name.startswith(f"{prefix}request_seconds_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == 3
        assert float(values["process_resident_memory_bytes"]) > 0


def test_memory_stays_flat_without_a_cache() -> None:
    """Entries, tickets and tasks of past requests are let go."""

    def count() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        alive = sum(type(item).__module__ == "spear_envs.retrieval.batching" for item in objects)
        return alive, sum(issubclass(type(item), asyncio.Task) and not item.done() for item in objects)

    retriever = ScriptedIndex()
    with run_service(make_service(retriever, cache_bytes=0)) as base:
        ask(base, {"queries": ["0"]})
        before = count()
        for _ in range(50):
            ask(base, {"queries": [str(i) for i in range(50)]})
        alive, tasks = count()
    assert alive - before[0] < 120 and tasks - before[1] < 10
