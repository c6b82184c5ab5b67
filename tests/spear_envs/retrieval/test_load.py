"""Ten thousand requests to the real command, without one error."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")

from spear_envs.search.embedded import open_base
from tests.spear_envs.retrieval.service import run_command

REQUESTS = 10_000
CONCURRENCY = 64


async def send_all(port: int, questions: list[str]) -> dict[int, bytes]:
    """Bodies of the answers by number of the request; each must be a 200."""
    answers: dict[int, bytes] = {}
    numbers = iter(range(REQUESTS))

    async def talk() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            body = json.dumps({"queries": [questions[number % len(questions)]], "topk": 1 + number % 5}).encode()
            asked = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
            writer.write(asked % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            answers[number] = await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(talk() for _ in range(CONCURRENCY)))
    return answers


@pytest.mark.slow
def test_no_error_in_ten_thousand_requests() -> None:
    questions = [question.question for split in open_base().questions.values() for question in split]
    with run_command() as running:
        answers = asyncio.run(send_all(running.port, questions))
    assert len(answers) == REQUESTS
    # A question asked again, of the cache by now, finds what it found before.
    found: dict[str, list[str]] = {}
    for number, body in sorted(answers.items()):
        (row,) = json.loads(body)["result"]
        ids = [document["id"] for document in row]
        assert len(ids) <= 1 + number % 5
        before = found.setdefault(questions[number % len(questions)], ids)
        shorter = min(len(before), len(ids))
        assert before[:shorter] == ids[:shorter]
        if len(ids) > len(before):
            found[questions[number % len(questions)]] = ids
