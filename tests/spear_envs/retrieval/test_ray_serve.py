"""Replicas under Ray Serve, with a local Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")
pytest.importorskip("httpx", reason="needs the extra 'search'")
pytest.importorskip("ray.serve", reason="needs the extra 'serve'", exc_type=ImportError)

from spear_envs.retrieval.client import RetrieverClient
from tests.spear_envs.retrieval.service import ROOT, make_documents, write_corpus


@pytest.mark.slow
def test_two_replicas_answer_as_one_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    arguments = ["--corpus", str(corpus), "--port", str(port), "--replicas", "2", "--cpus", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "spear_envs.cli", "retriever", "scale", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("ready: 2 replicas, bm25"), line + process.stderr.read()[-3000:]
        client = RetrieverClient(f"http://127.0.0.1:{port}")
        for _ in range(20):
            assert client.search("amber fox", 1) == [make_documents()[5]]
        assert len(client.fingerprint) == 64
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_replicas_that_cannot_open_their_corpus_end_the_command(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1"}) + "\n")
    command = [sys.executable, "-m", "spear_envs.cli", "retriever", "scale", "--corpus", str(corpus), "--port", "18999"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 1 and "did not start" in done.stderr
