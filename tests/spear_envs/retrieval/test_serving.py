"""``spear retriever serve`` as a process: start, signals, ports, tokens, broken input, death."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")
pytest.importorskip("httpx", reason="needs the extra 'search'")

import httpx

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.retriever import RetrieverFault, find_documents
from spear_envs.retrieval.service import serve
from spear_sandbox.web.listening import bind_socket
from tests.commands import run_main
from tests.spear_envs.retrieval.service import (
    ScriptedIndex,
    make_documents,
    make_service,
    run_command,
    write_corpus,
)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return str(write_corpus(tmp_path / "corpus.jsonl"))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_serving_a_file_until_a_signal(corpus: str) -> None:
    for number, host in ((signal.SIGTERM, "127.0.0.1"), (signal.SIGINT, "0.0.0.0")):
        with run_command("--corpus", corpus, "--host", host) as running:
            assert running.line.startswith("ready: 72 passages, bm25, at http://")
            found = find_documents(RetrieverClient(f"http://127.0.0.1:{running.port}"), "amber fox", 1)
            assert found == [make_documents()[5]]
            running.process.send_signal(number)
            code, out, err = finish(running.process)
            assert (code, out) == (0, "") and ("anyone who reaches" in err) == bool(err) == (host == "0.0.0.0")


def test_settings_of_a_dense_index_are_served_and_told(
    make_corpus: Callable[..., Corpus], build_index: Callable[..., Path], tiny_model: Path
) -> None:
    corpus = make_corpus(200)
    lists = str(build_index(corpus, "ivf8-flat", "lists"))
    arguments = ["--corpus", str(corpus.path), "--encoder", str(tiny_model), "--threads", "2", "--nprobe", "5"]
    few = ["--max-pending", "99", "--cache-mb", "3", "--deadline", "5", "--batch-queries", "7", "--batch-tokens", "123"]
    with run_command(*arguments, *few, "--retriever", "hybrid", "--index", lists) as running:
        health = httpx.get(f"{running.url}/health").json()
        found = find_documents(RetrieverClient(running.url), "river city album", 3)
    (_, dense) = health["retriever"]["parts"]
    expected = {"kind": "dense", "index": "IVF8,Flat", "nprobe": 5, "threads": 2, "encoder": "tiny-encoder"}
    assert expected.items() <= dense.items()
    names = ("pending", "deadline_s", "batch_queries", "batch_tokens")
    assert [health["limits"][name] for name in names] == [99, 5.0, 7, 123] and health["cache_bytes"] == 3 << 20
    assert len(found) == 3


def test_requests_under_way_are_answered_after_the_signal(corpus: str) -> None:
    with run_command("--corpus", corpus) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as caller:
            body = json.dumps({"query": "amber fox", "topk": 1}).encode()
            head = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
            caller.sendall(head + body[:5])
            time.sleep(1.0)  # until it is read
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            caller.sendall(body[5:])
            caller.settimeout(20)
            answer = caller.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200") and b'"d5"' in answer
        assert finish(running.process)[0] == 0


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command in this process, for starts that fail: code, standard output and error."""
    return run_main(capsys, "retriever", "serve", *arguments)


class TestFailedStarts:
    def test_a_taken_port_is_one_clear_error(self, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            found = run(capsys, "--corpus", corpus, "--port", str(port))
        sentence = f"cannot listen on 127.0.0.1 port {port} (another program listens there)"
        assert found == (1, "", f"Error: {sentence}: choose another --port.\n")

    def test_a_broken_corpus_ends_the_start_with_its_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "corpus.jsonl"
        path.write_text('{"id": "1", "contents": "a"}\n{"id": "2"}\n')
        code, out, err = run(capsys, "--corpus", str(path), "--port", "0")
        assert (code, out) == (1, "") and err.startswith("Error: ") and err.count("\n") == 1 and "line 2" in err

    def test_dense_without_an_index_is_one_clear_error(self, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run(capsys, "--corpus", corpus, "--port", "0", "--retriever", "dense")
        assert code == 1 and err.startswith("Error: ") and err.count("\n") == 1

    @pytest.mark.parametrize("arguments", [("--ef-search", "64"), ("--nprobe", "8"), ("--encoder", "x")])
    def test_settings_without_effect_are_refused(
        self, corpus: str, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = run(capsys, "--corpus", corpus, "--port", "0", *arguments)
        assert code == 1 and arguments[0][2:].replace("-", "_") in err and "leave them out" in err

    @pytest.mark.parametrize(
        "arguments", [("--port", "70000"), ("--retriever", "magic"), ("--corpus", "/no/such/file"), ("--deadline", "0")]
    )
    def test_bad_arguments_are_usage_errors(
        self, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and arguments[0] in err

    def test_a_token_that_no_header_carries_is_refused(
        self, corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPEAR_RETRIEVER_TOKEN", "ü x")
        code, _, err = run(capsys, "--corpus", corpus, "--port", "0")
        assert code == 1 and "SPEAR_RETRIEVER_TOKEN" in err


def test_the_token_is_asked_for_and_given(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_command("--corpus", corpus, "--host", "0.0.0.0", SPEAR_RETRIEVER_TOKEN="s3cret") as running:
        url = f"http://127.0.0.1:{running.port}"
        with pytest.raises(SpearError, match="SPEAR_RETRIEVER_TOKEN"):
            find_documents(RetrieverClient(url), "fox", 1)
        monkeypatch.setenv("SPEAR_RETRIEVER_TOKEN", "s3cret")
        assert find_documents(RetrieverClient(url), "amber fox", 1)[0]["id"] == "d5"
        running.process.terminate()
        assert finish(running.process) == (0, "", "")  # nor is it warned of the open address


def test_a_server_that_hangs_or_is_killed_is_a_fault_and_its_successor_answers(corpus: str) -> None:
    with run_command("--corpus", corpus) as running:
        port = running.port
        client = RetrieverClient(running.url, tries=2, deadline_s=10)
        os.kill(running.process.pid, signal.SIGSTOP)
        with pytest.raises(RetrieverFault) as late:
            find_documents(RetrieverClient(running.url, deadline_s=0.3), "fox", 1)
        assert late.value.kind == "retriever_timeout"
        os.kill(running.process.pid, signal.SIGCONT)
        assert find_documents(client, "amber fox", 1)[0]["id"] == "d5"
        os.kill(running.process.pid, signal.SIGSTOP)  # so that the request is under way for certain
        caught: list[BaseException] = []

        def search() -> None:
            try:
                find_documents(client, "black bear", 1)
            except RetrieverFault as fault:
                caught.append(fault)

        thread = threading.Thread(target=search)
        thread.start()
        time.sleep(0.3)
        running.process.kill()
        thread.join(30)
    assert [fault.kind for fault in caught if isinstance(fault, RetrieverFault)] == ["retriever_unavailable"]
    patient = RetrieverClient(f"http://127.0.0.1:{port}", deadline_s=30)
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(find_documents(patient, "black bear", 1)[0]["id"]))
    waiting.start()
    with run_command("--corpus", corpus, "--port", str(port)):
        waiting.join(30)
    assert answers == ["d10"]


def test_what_is_loaded_is_in_no_garbage_collection() -> None:
    before, found = gc.get_freeze_count(), []

    def stop() -> None:
        found.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        serve(make_service(ScriptedIndex()), bind_socket("127.0.0.1", 0), stop)
    finally:
        gc.unfreeze()
    assert found[0] > before
