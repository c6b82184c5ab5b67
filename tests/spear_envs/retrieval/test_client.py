"""The client against a server of the test that answers by a script, byte by byte."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the client needs httpx (extra 'search' or 'data')")

from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.retrieval.client import BadReplyError, RetrieverClient, read_result
from spear_envs.retrieval.retriever import FaultKind, RetrieverFault, find_documents
from spear_sandbox.web.endpoints import Backoff
from tests.scripted_server import ScriptedServer, Torn, find_free_port, reply, serve

QUICK = Backoff(first=0.01, longest=0.05)


def answer_rows(_: str, __: dict[str, str], body: bytes) -> bytes:
    """As the service would: a document that repeats the query."""
    asked = json.loads(body)
    rows = [[{"document": {"id": q, "contents": f'"T"\n{q}'}, "score": 1.0}][: asked["topk"]] for q in asked["queries"]]
    return reply(200, {"result": rows})


def make_client(*servers: ScriptedServer | str, **keywords: Any) -> RetrieverClient:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return RetrieverClient(urls, **{"backoff": QUICK, "deadline_s": 20.0, **keywords})


def test_a_search_sends_the_contract_and_reads_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with serve(answer_rows) as server:
        client = make_client(server)
        assert find_documents(client, "à 北京", 3) == [{"id": "à 北京", "contents": '"T"\nà 北京'}]
        line, headers, body = server.requests[0]
    assert line == "POST /retrieve HTTP/1.1"
    assert headers["content-type"] == "application/json" and "authorization" not in headers
    assert json.loads(body) == {"queries": ["à 北京"], "topk": 3, "return_scores": True}


def test_connections_are_used_again_by_all_clients() -> None:
    with serve(answer_rows) as server:
        for _ in range(3):
            assert make_client(server).search(["b", "c"], 1)[1][0].score == 1.0
        assert len(server.requests) == 3 and server.connections == 1


def test_answers_of_many_threads_do_not_mix() -> None:
    found: dict[str, str] = {}
    with serve(answer_rows) as server:
        client = make_client(server)

        def ask(name: str) -> None:
            found[name] = find_documents(client, name, 1)[0]["id"]

        threads = [threading.Thread(target=ask, args=(f"t{i}",)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {f"t{i}": f"t{i}" for i in range(24)}


def test_the_token_comes_from_the_keyword_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(answer_rows) as server:
        find_documents(make_client(server, token="abc"), "a", 1)
        monkeypatch.setenv("SPEAR_RETRIEVER_TOKEN", "xyz")
        find_documents(make_client(server), "a", 1)
        sent = [headers["authorization"] for _, headers, _ in server.requests]
    assert sent == ["Bearer abc", "Bearer xyz"]


@pytest.mark.parametrize("status", [429, 502, 503])
def test_passing_failures_are_tried_again(status: int) -> None:
    with serve(reply(status, {"detail": "soon"}), None, answer_rows) as server:
        assert find_documents(make_client(server), "a", 1)[0]["id"] == "a"
        assert len(server.requests) == 3


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(form: str) -> None:
    later = datetime.now(timezone.utc) + timedelta(seconds=2)
    value = "1" if form == "seconds" else format_datetime(later, usegmt=True)
    with serve(reply(503, {}, Retry_After=value), answer_rows) as server:
        start = time.monotonic()
        find_documents(make_client(server), "a", 1)
        assert time.monotonic() - start >= 0.9


def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    with serve(reply(503, {"detail": "full"}, Retry_After="60")) as server:
        start = time.monotonic()
        with pytest.raises(RetrieverFault, match=r"503: full; after 1 of 8 tries"):
            find_documents(make_client(server), "a", 1)
        assert time.monotonic() - start < 5 and len(server.requests) == 1


def test_nobody_there_is_unavailable() -> None:
    client = make_client(f"http://127.0.0.1:{find_free_port()}", tries=3)
    with pytest.raises(RetrieverFault, match=r"cannot be reached .* after 3 of 3 tries") as caught:
        find_documents(client, "a", 1)
    assert caught.value.kind == "retriever_unavailable" and isinstance(caught.value, EnvFault)


@pytest.mark.parametrize(
    ("answer", "kind", "tries"),
    [
        (reply(503, {"detail": "full"}), FaultKind.UNAVAILABLE, 3),
        (None, FaultKind.UNAVAILABLE, 3),
        (Torn(b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n{"), FaultKind.UNAVAILABLE, 3),
        (reply(504, {"detail": "late"}), FaultKind.TIMEOUT, 1),
    ],
)
def test_faults_have_kinds(answer: bytes | None, kind: FaultKind, tries: int) -> None:
    with serve(answer) as server:
        with pytest.raises(RetrieverFault) as caught:
            find_documents(make_client(server, tries=3, deadline_s=2.0), "a", 1)
        assert caught.value.kind == kind.value and server.url in caught.value.message
        assert len(server.requests) == tries
    assert pickle.loads(pickle.dumps(caught.value)).kind == kind.value


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (reply(500, {"detail": "crash"}), FaultKind.UNAVAILABLE, "500"),
        (reply(501, b"no POST"), FaultKind.UNAVAILABLE, "501"),
        (reply(200, b"<html>"), FaultKind.BAD_REPLY, "not JSON"),
        (reply(200, {"result": [[], []]}), FaultKind.BAD_REPLY, "a row for each of 1 queries"),
        (reply(200, {"result": [[{"id": "1"}]]}), FaultKind.BAD_REPLY, "no text under 'contents'"),
        (reply(404, {"detail": "no"}), FaultKind.BAD_REPLY, "404"),
        (reply(302, b"", Location="http://127.0.0.1:1/"), FaultKind.BAD_REPLY, "302"),
    ],
)
def test_what_a_server_answers_for_ever_ends_the_run_and_once_is_a_fault(
    answer: bytes, kind: FaultKind, words: str
) -> None:
    with serve(answer) as server:
        with pytest.raises(SpearError, match=words) as caught:
            find_documents(make_client(server), "a", 1)
        assert not isinstance(caught.value, EnvFault) and server.url in str(caught.value)
    with serve(answer_rows, answer, answer_rows) as server:
        client = make_client(server)
        find_documents(client, "a", 1)
        with pytest.raises(RetrieverFault, match=words) as fault:
            find_documents(pickle.loads(pickle.dumps(client)), "b", 1)
        assert fault.value.kind == kind.value and len(server.requests) == 2
        assert find_documents(client, "c", 1)[0]["id"] == "c"


def test_each_server_must_answer_rightly_once() -> None:
    with serve(answer_rows) as one, serve(reply(200, {"passages": []})) as two:
        client = make_client(one, two)
        with pytest.raises(SpearError, match="'result'") as caught:
            for _ in range(2):
                find_documents(client, "a", 1)
        assert two.url in str(caught.value) and not isinstance(caught.value, EnvFault)


def test_a_server_that_fails_at_first_may_answer_a_plain_query() -> None:
    with serve(reply(500, {}), None, answer_rows) as server:  # and closes the connection
        with pytest.raises(RetrieverFault, match="500"):
            find_documents(make_client(server), "a", 1)
        assert [json.loads(body)["queries"] for _, _, body in server.requests] == [["a"], ["Paris"], ["Paris"]]


@pytest.mark.parametrize(
    ("status", "word"), [(422, "'topk' is 0"), (400, "refused"), (401, "SPEAR_RETRIEVER_TOKEN"), (403, "'topk' is 0")]
)
def test_what_a_user_must_mend_is_no_fault(status: int, word: str) -> None:
    with serve(reply(status, {"detail": "'topk' is 0"})) as server:
        with pytest.raises(SpearError, match=word) as caught:
            find_documents(make_client(server), "a", 0)
        assert not isinstance(caught.value, EnvFault) and len(server.requests) == 1


def test_the_deadline_covers_all_tries() -> None:
    over = threading.Event()

    def hang(*_: Any) -> bytes:
        over.wait(30)
        return reply(200, {})

    with serve(reply(503, {}), hang) as server:
        start = time.monotonic()
        with pytest.raises(RetrieverFault, match=r"within 0\.5 s, at try 2") as caught:
            find_documents(make_client(server, deadline_s=0.5), "a", 1)
        assert caught.value.kind == "retriever_timeout" and time.monotonic() - start < 10
        over.set()


def test_a_dead_server_among_several_costs_no_answer() -> None:
    with serve(None) as dead, serve(answer_rows) as one, serve(answer_rows) as two:
        client = make_client(dead, one, two, backoff=Backoff(first=30.0, longest=30.0))
        for i in range(20):
            assert find_documents(client, str(i), 1)[0]["id"] == str(i)
        assert abs(len(one.requests) - len(two.requests)) <= 1 and len(one.requests) + len(two.requests) == 20
        assert len(dead.requests) == 1, "it is left out from then on"


def test_a_server_that_comes_back_is_asked_again() -> None:
    with serve(reply(503, {}), answer_rows) as one, serve(answer_rows) as two:
        client = make_client(one, two)
        for i in range(6):
            find_documents(client, str(i), 1)
            time.sleep(0.06)
        assert len(one.requests) >= 2


def search_in_child(client: RetrieverClient, pipe: Any) -> None:
    pipe.send((os.getpid(), find_documents(client, "child", 1)[0]["id"]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_client_works_in_child_processes(method: str) -> None:
    with serve(answer_rows) as server:
        client = make_client(server)
        find_documents(client, "parent", 1)
        context = multiprocessing.get_context(method)
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=search_in_child, args=(client, send))
        child.start()
        assert receive.poll(60)
        pid, found = receive.recv()
        child.join(10)
        assert child.exitcode == 0 and pid != os.getpid() and found == "child"
        assert find_documents(client, "parent again", 1)[0]["id"] == "parent again"


FORK = """
import os, threading, time, httpx
from spear_envs.retrieval.client import share_session

real, begun = httpx.AsyncClient, threading.Event()

def make_slowly(**settings):
    begun.set()
    time.sleep(1)
    return real(**settings)

httpx.AsyncClient = make_slowly
threading.Thread(target=share_session).start()
begun.wait()
httpx.AsyncClient = real
child = os.fork()
share_session()
os._exit(0) if child == 0 else print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_the_session_is_being_made_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n", done.stderr


def test_without_httpx_the_extra_is_named() -> None:
    program = "import sys; sys.modules['httpx'] = None; from spear_envs.retrieval.client import share_session as s; s()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "SpearError" in done.stderr and "pip install 'spear-envs[retriever]'" in done.stderr


def health(fingerprint: str | None) -> bytes:
    return reply(200, {"status": "ok"} if fingerprint is None else {"fingerprint": fingerprint})


def test_the_fingerprint_is_the_services() -> None:
    with serve(reply(503, {"status": "loading"}, Retry_After="0"), health("f1")) as one:
        client = make_client(one)
        assert client.fingerprint == client.fingerprint == "f1"
        assert len(one.requests) == 2


def test_servers_with_different_indexes_are_refused() -> None:
    with serve(health("f1")) as one, serve(health("f2")) as two:
        client = make_client(one, two)
        with pytest.raises(SpearError, match="do not have the same index"):
            _ = client.fingerprint


@pytest.mark.parametrize("status", [403, 404, 501])
def test_a_service_that_says_nothing_of_itself_is_known_by_its_address(status: int) -> None:
    with serve(reply(status, {"detail": "no such path"})) as server:
        assert make_client(server).fingerprint == f"unidentified:{server.url}"


@pytest.mark.parametrize("keywords", [{"deadline_s": 0}, {"tries": 0}])
def test_senseless_limits_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(SpearError, match="at least 1 try"):
        RetrieverClient("http://127.0.0.1:1", **keywords)


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
        (b'{"result": [[{"document": "a", "score": NaN}]]}', "not a finite number but NaN"),
        (b'{"result": [[{"document": "a", "score": 1' + b"0" * 400 + b"}]]}", "not a finite number"),
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
    (row,) = read_result(body, 1, 2)
    first, second = (json.loads(hit.raw) for hit in row)
    assert row[0].score == (2.0 if isinstance(item, dict) and "score" in item else 1.0) and row[1].score == 0.5
    assert first == {"contents": "a", "id": hashlib.sha256(b"a").hexdigest()[:32]} and second["id"] != first["id"]


def test_half_a_character_in_a_text_has_an_id() -> None:
    ((hit,),) = read_result(b'{"result": [["x\\ud800"]]}', 1, 1)
    document = json.loads(hit.raw)
    assert document["contents"] == "x\ud800" and len(document["id"]) == 32
