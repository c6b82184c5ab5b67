"""Commands where descriptors, the network, a home, root's rights or the clock are not as usual; a short siege."""

import ast
import asyncio
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.parts.siege import Injury, run_siege
from spear_envs.core.errors import EnvFault
from spear_envs.retrieval.batching import BatchLimits
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.retriever import find_documents
from spear_sandbox.client import HttpExecutor
from spear_sandbox.protocol import Limits, RunStatus
from spear_sandbox.web import endpoints as replies
from tests.rooms import ROOT, find_modules
from tests.sandbox import service as sandbox_service
from tests.sandbox.service import need_isolation
from tests.spear_envs.retrieval.service import ScriptedIndex, make_service, run_service

USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
CONDITIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "few descriptors": (["prlimit", "--nofile=256:256"], {}),
    "no network": (["unshare", "-n"], {}),
    "dead proxies": ([], PROXIES),
    "no home": ([], {"HOME": "/nonexistent"}),
    "a home that is read only": ([], {"HOME": "/proc/1"}),
    "another user": (USER, {}),
    "spaces": ([], {}),
    "250 characters": ([], {}),
}
PLAYED = {"spear/Sokoban-v1": ["--env", "modality=text"], "spear/ALFWorld-v0": [], "spear/WebShop-v0": []}


def list_commands(folder: Path) -> list[list[str]]:
    index = ["--index", str(folder / "index"), "--corpus", str(folder / "corpus.jsonl")]
    return [
        *(
            ["eval", env, "--engine", "expert", "--tasks", "2", "--out", str(folder / env[6:9]), *more]
            for env, more in PLAYED.items()
        ),
        ["view", str(folder / "Sok"), "--port", "0"],
        ["rescore", str(folder / "Sok")],
        ["index", "build", "--corpus", str(folder / "corpus.jsonl"), "--out", str(folder / "index")],
        ["retriever", "serve", *index, "--port", "0"],
        ["data", "list"],
        ["models", "list"],
        ["sandbox", "run", str(folder / "program.py")],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_commands_work_or_say_why_not(name: str, tmp_path: Path) -> None:
    prefix, variables = CONDITIONS[name]
    folder = tmp_path
    if name == "spaces":
        folder = tmp_path / "a folder with spaces é"
    while name == "250 characters" and len(str(folder)) < 250:
        folder /= "d" * min(100, max(1, 249 - len(str(folder))))
    folder.mkdir(parents=True, exist_ok=True)
    rows = ({"id": str(number), "contents": f"text {number}"} for number in range(50))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "program.py").write_text("print(6 * 7)\n")
    if name == "another user":
        for place in (folder, *folder.iterdir(), *list(folder.parents)[:2]):
            place.chmod(0o777)
    able = [*prefix, sys.executable, "-c", f"import os; assert os.access({str(folder)!r}, os.W_OK)"]
    if prefix and (
        shutil.which(prefix[0]) is None or subprocess.run(able, capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{prefix[0]} is not allowed here")
    bare = {key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "SPEAR_DATA")}
    for command in list_commands(folder):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "spear_envs.cli", *command],
            env={**bare, "HOME": str(folder), **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        text = ""
        if "--port" in command:
            while "http://" not in text:
                line = process.stdout.readline()
                assert line, text
                text += line
            process.send_signal(signal.SIGTERM)
        text += process.communicate(timeout=120)[0]
        weak = command[:2] == ["sandbox", "run"] and process.returncode == 78 and "isolation" in text
        ended = process.returncode == 0 or (process.returncode == -signal.SIGTERM and "--port" in command)
        assert (ended or weak) and "Traceback" not in text, (command, text)


# The time of day, and what it is for there.
MAY_ASK = {
    "agents/spear_agents/gateway/responses_wire.py": "a field of OpenAI's answers",
    "agents/spear_agents/gateway/openai_wire.py": "OpenAI's field `created`",
    "sandbox/spear_sandbox/web/endpoints.py": "a server that names a time to come again; the wait is bounded",
    "spear_envs/retrieval/build.py": "the date of an index",
}
ASKS = ("time.time", "time.time_ns", "time", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime")


def test_the_time_of_day_is_asked_for_nowhere_else() -> None:
    faults, found = [], set()
    for path in find_modules():
        text, shown = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
        if not any(f"{name}(" in text for name in ASKS):
            continue
        bare = "from time import time" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in ASKS:
                if called == "time" and not bare:
                    continue
                found.add(shown)
                if shown not in MAY_ASK:
                    faults.append(f"{shown}:{node.lineno} calls {called}")
    assert not faults, "take time.monotonic:\n" + "\n".join(faults)
    assert found == set(MAY_ASK)


@pytest.fixture
def leaping(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Every look at the time of day finds it a day later or earlier."""
    days = itertools.cycle([0, 1, -1, 400, -400])

    def leap(real: Callable[[], float] = time.time) -> float:
        return real() + 86_400 * next(days)

    monkeypatch.setattr(time, "time", leap)
    monkeypatch.setattr(replies, "time", leap)
    return leap


def test_programs_run_as_long_as_they_may(leaping: Callable[[], float]) -> None:
    need_isolation()

    async def run(url: str) -> None:
        client = HttpExecutor(url)
        try:
            outcomes = await asyncio.gather(*(client.run(f"print({n})") for n in range(12)))
            assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(12)]
            assert all(0 <= outcome.wall_s < 30 and outcome.queue_s >= 0 for outcome in outcomes)
            late = await client.run("while True: pass", limits=Limits(wall_s=0.5))
            assert late.status is RunStatus.TIME_LIMIT and 0.5 <= late.wall_s < 20
        finally:
            await client.close()

    with sandbox_service.run_local(Limits(wall_s=20.0), 4) as running:
        asyncio.run(run(running.url))


def test_who_waits_for_a_place_is_told_in_time(leaping: Callable[[], float]) -> None:
    with sandbox_service.run_scripted(max_running=1, queue_wait_s=0.3) as (running, executor):
        executor.open = False
        parts = urlsplit(running.url)
        holder = http.client.HTTPConnection(str(parts.hostname), parts.port)
        holder.request("POST", "/run_code", json.dumps({"code": "hold"}))
        sandbox_service.wait_until(lambda: bool(executor.started))
        start = time.monotonic()
        assert sandbox_service.ask(running.url, {"code": "1"})[0] == 504
        assert 0.3 <= time.monotonic() - start < 10
        executor.open = True
        assert holder.getresponse().status == 200
        holder.close()


def test_searches_end_at_their_deadline(leaping: Callable[[], float]) -> None:
    retriever = ScriptedIndex()
    with run_service(make_service(retriever, batches=BatchLimits(deadline_s=0.3))) as url:
        client = RetrieverClient([url], deadline_s=20.0)
        assert [document["id"] for document in find_documents(client, "7", 2)] == ["7", "8"]
        retriever.gate.clear()
        start = time.monotonic()
        with pytest.raises(EnvFault) as caught:
            find_documents(client, "9", 2)
        assert caught.value.kind == "retriever_timeout" and 0.3 <= time.monotonic() - start < 15
        retriever.gate.set()


def test_a_server_whose_clock_is_wrong_is_asked_again_soon() -> None:
    import httpx

    later = httpx.Response(503, headers={"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"})
    assert replies.read_retry_after(later.headers) == replies.LONGEST_BY_DATE_S


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_wrong_whatever_is_killed() -> None:
    need_isolation()
    report = run_siege(seconds=30.0, clients=64, interval_s=1.5, jobs=16)
    assert report.lost == [] and report.wrong == []
    assert set(report.injuries) == {injury.value for injury in Injury}
    assert report.most_held == 64 and report.episodes > 64
    assert set(report.faults) <= {
        "sandbox_unavailable", "sandbox_timeout", "retriever_unavailable", "retriever_timeout"
    }  # fmt: skip
