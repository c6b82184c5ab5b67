"""The page: its server, its text, and its command."""

import base64
import hashlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from spear_agents import viewer
from spear_agents.play.trajectory import TrajectoryWriter
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import (
    CONNECTIONS,
    PageServer,
    escape_json,
    export_page,
    make_policy,
    play,
    render_page,
    view,
)
from spear_envs.core.errors import SpearError
from tests.agents.replay.conftest import HOSTILE, serve
from tests.agents.test_trajectory import make_trajectory

LIBRARIES = Path(viewer.__file__).parent / "page" / "vendor"


def without_libraries(text: str) -> str:
    for file in LIBRARIES.glob("*.js"):
        text = text.replace(file.read_text(encoding="utf-8"), "")
    return text


@pytest.fixture(scope="module")
def server(sokoban_run: Path) -> Iterator[PageServer]:
    with serve(Run(sokoban_run)) as running:
        yield running


def ask(
    server: PageServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"X-Spear-Token": server.token} | fields)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("place", ["../run", "..%2frun", "-1", "99", "0x1", "%D9%A1", "9" * 400])
def test_only_a_number_names_an_episode(server: PageServer, place: str) -> None:
    assert json.loads(ask(server, "/api/episode/0")[2])["turns"]
    assert ask(server, f"/api/episode/{place}")[0] == 404


@pytest.mark.parametrize(
    ("method", "body", "headers", "status"),
    [
        ("POST", b"{}", {}, 404),  # there is no stage
        ("POST", b"{}", {"Content_Length": "-5"}, 400),
        ("POST", b"{}", {"Content_Length": "9999999999"}, 413),
        ("POST", b"{}", {"Content_Length": "9" * 5_000}, 400),
        ("PUT", b"{}", {}, 405),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    server: PageServer, method: str, body: bytes | None, headers: dict[str, Any], status: int
) -> None:
    assert ask(server, "/api/play/act", method, body, **headers)[0] == status
    assert ask(server, "/api/run")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:9000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8700", 403),
        ("", 403),
    ],
)
def test_the_page_is_for_this_host_through_any_port(server: PageServer, host: str, status: int) -> None:
    assert ask(server, "/", Host=host)[0] == ask(server, "/api/run", Host=host)[0] == status


def test_the_page_begins_with_the_mark_of_what_it_shows(server: PageServer) -> None:
    assert server.answer("GET", "/api/run", None)["mark"] == server.answer("GET", "/api/mark", None)["mark"]


def test_many_slow_connections_keep_nobody_out(server: PageServer) -> None:
    before = threading.active_count()
    dripping = [
        socket.create_connection(("127.0.0.1", server.server_port), timeout=20) for _ in range(CONNECTIONS + 20)
    ]
    try:
        for connection in dripping:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert threading.active_count() - before < 8
        assert b"503" in dripping[-1].recv(100)
    finally:
        for connection in dripping:
            connection.close()
    end = time.monotonic() + 20
    while (status := ask(server, "/api/run")[0]) == 503 and time.monotonic() < end:
        time.sleep(0.05)
    assert status == 200


def test_a_taken_port_is_one_error(server: PageServer, sokoban_run: Path) -> None:
    for port in (server.server_port, 70_000):
        with pytest.raises(SpearError, match="port"):
            PageServer(Run(sokoban_run), port=port)


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([HOSTILE, "</script", "<!--", "\u2028"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    text = escape_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()


def test_nothing_of_a_hostile_episode_stands_in_the_page_as_it_was_written(sokoban_run: Path, tmp_path: Path) -> None:
    size = export_page(Run(sokoban_run), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert size == (tmp_path / "page.html").stat().st_size
    text = without_libraries(text)
    assert "window.owned" in text  # the list has it, as data
    assert "<script>window" not in text and "<img" not in text and "<svg" not in text
    assert text.count("</script>") == 1 + 5 + 2, "data, five episodes, the libraries and our script"


@pytest.mark.timeout(60)
def test_a_long_text_with_one_dollar_is_exported_in_no_time(tmp_path: Path) -> None:
    turn = replace(make_trajectory().turns[0], observation="$" + "=" * 300_000)
    with TrajectoryWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(make_trajectory(turns=(turn,)))
    assert export_page(Run(tmp_path), tmp_path / "page.html") > 0
    assert 'id="katex"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_policy_allows_these_scripts_and_this_style_alone() -> None:
    text = render_page({"title": "x", "token": "y"})
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0])
    assert policy == make_policy()
    assert "unsafe" not in policy and "default-src 'none'" in policy
    digests = {
        tag: [
            f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        ]
        for tag in ("script", "style")
    }
    katex = (LIBRARIES / "katex.min.js").read_bytes()
    digests["script"].append(f"'sha256-{base64.b64encode(hashlib.sha256(katex).digest()).decode()}'")
    for tag, listed in digests.items():
        assert f"{tag}-src {' '.join(listed)};" in policy
    assert not re.search(r"\son\w+=", text.partition("<script")[0]), "no handlers in attributes"
    text = without_libraries(text)
    assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_libraries_are_the_released_files_with_their_licences() -> None:
    readme = (LIBRARIES / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(.+?)` .*`([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    files = {file.name: file for file in LIBRARIES.glob("*.js")}
    assert listed == {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    for name, file in files.items():
        assert (LIBRARIES / f"{name.partition('.')[0]}.LICENSE").is_file()
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|</script", text)


def test_a_folder_whose_name_is_no_text_is_shown(sokoban_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff<b>")
    try:
        shutil.copytree(sokoban_run, folder)
    except OSError:
        pytest.skip("this file system takes text alone")
    export_page(Run(folder), tmp_path / "page.html")
    assert "<title>run\ufffd&lt;b&gt; · SPEAR</title>" in (tmp_path / "page.html").read_text("utf-8")


def test_a_page_does_not_replace_the_record(sokoban_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sokoban_run, tmp_path / "run")
    record = next(run.glob("**/episodes.jsonl"))
    before = record.read_bytes()
    for path in (run, record):
        result = CliRunner().invoke(view, [str(path), "--export", str(record)])
        assert isinstance(result.exception, SpearError) and "the record" in str(result.exception)
    assert record.read_bytes() == before


def test_a_page_is_served_until_ctrl_c(sokoban_run: Path, root: Path) -> None:
    program = [sys.executable, "-u", "-m", "spear_envs.cli", "view", str(sokoban_run), "--port", "0"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+/)  \(Ctrl-C stops it\)\n", line)
        assert found, line
        with urllib.request.urlopen(found[1], timeout=20) as answer:
            assert b"<!doctype html>" in answer.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(view, [str(tmp_path / "nowhere")])
    assert isinstance(result.exception, SpearError) and "give a folder of" in str(result.exception)
    (tmp_path / "summary.json").write_text("{}")
    result = CliRunner().invoke(view, [str(tmp_path / "summary.json")])
    assert isinstance(result.exception, SpearError) and "is not a file of episodes" in str(result.exception)
    result = CliRunner().invoke(play, ["spear/Sokobn-v0", "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, SpearError) and not (tmp_path / "out").exists()
