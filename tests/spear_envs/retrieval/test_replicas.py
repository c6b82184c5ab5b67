"""``spear retriever serve --replicas``: processes of a local Ray over one mapped index."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")
pytest.importorskip("httpx", reason="needs the extra 'search'")

from spear_envs import cli
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.searcher import RetrieverFault
from tests.commands import wait_until
from tests.spear_envs.retrieval.service import make_documents, run_command, write_corpus


def find_replicas(pid: int) -> list[int]:
    """Processes among the descendants that Ray Serve names so."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
            if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                found.append(parent)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return sorted(found)


@pytest.mark.slow
def test_a_replica_that_dies_is_replaced_and_nobody_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="needs the extra 'serve'", exc_type=ImportError)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # as for a user, who has not set it
    corpus, index = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["index", "build", "--corpus", str(corpus), "--out", str(index), "--type", "bm25"])
    arguments = ["--corpus", str(corpus), "--index", str(index), "--replicas", "2"]
    with run_command(*arguments, HOME=str(tmp_path / "home"), SPEAR_RETRIEVER_TOKEN="s3cret") as running:
        assert running.line.startswith("ready: 72 passages, bm25, 2 replicas, at http://127.0.0.1:")
        client = RetrieverClient(running.url, token="s3cret", deadline_s=10, tries=1)
        assert client.search("amber fox", 1) == [make_documents()[5]]
        first = find_replicas(running.process.pid)
        assert len(first) == 2
        for pid in first:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert str(corpus) in maps and str(index) in maps
        os.kill(first[0], signal.SIGKILL)
        failed = answered = 0
        while len(find_replicas(running.process.pid)) < 2 or answered < 50:
            try:
                assert client.search("amber fox", 1)[0]["id"] == "d5"
                answered += 1
            except RetrieverFault:
                failed += 1
        # Only what the dead replica was working on may have failed, and this client asks one thing at a time.
        assert failed <= 1
        wait_until(lambda: client.search("black bear", 1)[0]["id"] == "d10")
        assert first[0] not in find_replicas(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == 0
        assert not (tmp_path / "home" / ".ray").exists(), "no token is left behind"


def test_what_cannot_be_opened_is_one_clear_error_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray.serve", reason="needs the extra 'serve'", exc_type=ImportError)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1"}\n')
    with pytest.raises(SystemExit) as caught:
        cli.main(["retriever", "serve", "--corpus", str(corpus), "--port", "0", "--replicas", "2"])
    err = capsys.readouterr().err
    assert caught.value.code == 1 and err.startswith("Error: ") and err.count("\n") == 1 and "line 1" in err
