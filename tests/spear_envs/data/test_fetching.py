from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, fetch, transfer
from spear_envs.data.files import format_bytes
from spear_envs.data.transfer import Patience
from tests.spear_envs.data.server import Site, cut, page, ranged, status, whole

BODY = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()
OTHER = BODY[::-1]
QUICK = Patience(attempts=3, first_wait=0.01, longest_wait=0.05, connect_timeout=5, read_timeout=5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "Patience", lambda: QUICK)


def describe(url: str = "", **known: Any) -> RemoteFile:
    known.setdefault("manual", "Open the page in a browser.")
    return RemoteFile("items.json", url, **known)


def pinned(url: str = "") -> RemoteFile:
    return describe(url, size=len(BODY), sha256=SHA256)


def get(file: RemoteFile, folder: Path, **more: Any) -> bytes:
    digest = fetch(file, folder, **more)
    content = (folder / file.name).read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    assert [item.name for item in folder.iterdir()] == [file.name]
    return content


def fail(file: RemoteFile, folder: Path, **more: Any) -> str:
    with pytest.raises(SpearError) as caught:
        fetch(file, folder, **more)
    message = str(caught.value)
    assert "\n" not in message
    assert not (folder / file.name).exists()
    return message


class TestGood:
    def test_a_pinned_file(self, site: Site, tmp_path: Path) -> None:
        url = site.put("/f", whole(BODY))
        assert get(pinned(url), tmp_path / "new" / "folder") == BODY
        assert get(pinned(url), tmp_path / "new" / "folder") == BODY
        assert len(site.requests) == 1  # the second time it was there

    def test_redirects(self, site: Site, tmp_path: Path) -> None:
        site.put("/there", whole(BODY))
        assert get(pinned(site.put("/here", status(302, Location="/there"))), tmp_path) == BODY

    def test_no_length_announced(self, site: Site, tmp_path: Path) -> None:
        def stream(handler: Any) -> None:
            handler.close_connection = True
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(BODY)

        assert get(pinned(site.put("/f", stream)), tmp_path) == BODY

    def test_progress_is_shown(self, site: Site, tmp_path: Path) -> None:
        for terminal in (True, False):
            out = io.StringIO()
            console = Console(file=out, force_terminal=terminal, width=120)
            url = site.put("/f", whole(BODY))
            get(pinned(url), tmp_path / str(terminal), console=console)
            assert "items.json from 127.0.0.1" in out.getvalue()


def send_another_range(handler: Any) -> None:
    handler.say(206, BODY[5:], Content_Range=f"bytes 5-{len(BODY) - 1}/{len(BODY)}")


class TestTrouble:
    @pytest.mark.parametrize(
        ("answers", "begins"),
        [
            ([ranged(BODY, stop=100_000), ranged(BODY, stop=200_000), ranged(BODY)], [None, 100_000, 200_000]),
            ([ranged(OTHER, '"v1"', stop=100_000), ranged(BODY, '"v2"')], [None, 100_000]),
            ([ranged(OTHER, None, stop=100_000), ranged(BODY, None)], [None, None]),
            ([cut(BODY, 100_000, ETag='"v1"'), whole(BODY)], [None, 100_000]),
            ([ranged(BODY, stop=100_000), send_another_range, ranged(BODY)], [None, 100_000, None]),
        ],
        ids=["broken off twice", "changed", "without a mark", "ignores ranges", "another range"],
    )
    def test_a_broken_transfer_goes_on_if_it_can(
        self, site: Site, tmp_path: Path, answers: list[Any], begins: list[int | None]
    ) -> None:
        assert get(describe(site.put("/f", *answers)), tmp_path) == BODY
        assert site.ranges() == [None if begin is None else f"bytes={begin}-" for begin in begins]

    def test_also_when_called_again(self, site: Site, tmp_path: Path) -> None:
        url = site.put("/f", ranged(BODY, stop=100_000), status(503))
        message = fail(describe(url), tmp_path)
        assert "503" in message and "The same command resumes the download." in message
        site.put("/f", ranged(BODY))
        assert get(describe(url), tmp_path) == BODY
        assert site.ranges()[-1] == "bytes=100000-"

    def test_a_date_serves_as_well_as_an_etag(self, site: Site, tmp_path: Path) -> None:
        day = "Mon, 01 Jan 2024 00:00:00 GMT"
        url = site.put("/f", ranged(BODY, 'W/"v"', stop=9, Last_Modified=day), ranged(BODY, None, Last_Modified=day))
        assert get(describe(url), tmp_path) == BODY
        assert site.requests[1][1]["if-range"] == day

    def test_and_never_gets_far_enough(self, site: Site, tmp_path: Path) -> None:
        answers = [cut(BODY, size, ETag='"v1"') for size in (50_000, 100_000, 40_000, 100_000)]
        message = fail(describe(site.put("/f", *answers)), tmp_path)
        assert "100,000" in message or "incomplete" in message or "complete" in message
        assert len(site.requests) == 1 + 3

    @pytest.mark.parametrize(
        ("part", "begins"),
        [
            (BODY, [len(BODY)]),
            (BODY + b"more", [None]),
            (OTHER[:1000], [1000, None]),
            (OTHER, [len(BODY), None]),
        ],
        ids=["whole", "too long", "of other bytes", "whole, of other bytes"],
    )
    def test_a_part_that_was_there(self, site: Site, tmp_path: Path, part: bytes, begins: list[int | None]) -> None:
        (tmp_path / "items.json.part").write_bytes(part)
        assert get(pinned(site.put("/f", ranged(BODY))), tmp_path) == BODY
        assert site.ranges()[-len(begins) :] == [None if begin is None else f"bytes={begin}-" for begin in begins]

    def test_a_server_in_trouble_is_asked_again(self, site: Site, tmp_path: Path) -> None:
        url = site.put("/f", status(503, Retry_After="0"), status(429), whole(BODY))
        assert get(pinned(url), tmp_path) == BODY

    def test_waiting_is_bounded(self, site: Site, tmp_path: Path) -> None:
        start = time.monotonic()
        fail(pinned(site.put("/f", status(503, Retry_After="100000"))), tmp_path)
        assert time.monotonic() - start < 5
        assert len(site.requests) == 3

    def test_a_transfer_that_stalls_is_resumed(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stall(handler: Any) -> None:
            handler.say(200, BODY[:100_000], length=len(BODY), ETag='"v1"')
            came.wait(20)

        came = threading.Event()
        start = time.monotonic()
        monkeypatch.setattr(transfer, "Patience", lambda: replace(QUICK, read_timeout=0.3))
        assert get(describe(site.put("/f", stall, ranged(BODY))), tmp_path) == BODY
        came.set()
        assert site.ranges() == [None, "bytes=100000-"] and time.monotonic() - start < 15

    def test_nobody_listens(self, site: Site, tmp_path: Path) -> None:
        message = fail(pinned("http://127.0.0.1:9/f"), tmp_path)
        assert "127.0.0.1:9: " in message and "Connection refused" in message

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.integers(1, len(BODY) - 1), max_size=6), st.booleans())
    def test_any_breaks_end_in_the_same_file(
        self, site: Site, tmp_path_factory: pytest.TempPathFactory, stops: list[int], known: bool
    ) -> None:
        answers = [ranged(BODY, stop=stop) for stop in sorted(set(stops))]
        url = site.put("/f", *answers, ranged(BODY))
        file = pinned(url) if known else describe(url)
        assert get(file, tmp_path_factory.mktemp("breaks")) == BODY


def claim(reach: str) -> Any:
    """The rest of the file, from the middle, under another range."""
    return lambda handler: handler.say(206, BODY[128_000:], Content_Range=f"bytes {reach}")


def flood(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(BODY)


class TestRefusals:
    def test_the_reason_is_named_with_the_manual_step(self, site: Site, tmp_path: Path) -> None:
        message = fail(pinned(site.put("/b", whole(OTHER))), tmp_path)
        assert "items.json could not be downloaded (127.0.0.1" in message and f"instead of {SHA256[:12]}…" in message
        assert message.endswith("By hand: Open the page in a browser. Then name its folder: --from FOLDER.")

    def test_a_part_goes_on_at_another_address_if_the_checksum_is_known(self, site: Site, tmp_path: Path) -> None:
        fail(pinned(site.put("/first", ranged(BODY, stop=100_000), status(403))), tmp_path)
        assert get(pinned(site.put("/second", ranged(BODY, '"other"'))), tmp_path) == BODY
        assert site.ranges() == [None, "bytes=100000-", "bytes=100000-"]

    @pytest.mark.parametrize(
        ("answer", "known", "word"),
        [
            (status(404), {"size": len(BODY)}, "404 Not Found"),
            (page("Google Drive -\n Virus scan warning"), {}, "a web page instead of the file"),
            (page("Sign in", kind="application/octet-stream"), {}, "a web page instead of the file"),
            (
                lambda handler: handler.say(200, BODY, length=len(BODY) - 1),
                {"size": len(BODY)},
                "255,999 bytes instead",
            ),
            (
                lambda handler: handler.say(200, BODY, length=len(BODY) + 1),
                {"size": len(BODY)},
                "256,001 bytes instead",
            ),
            (flood, {"size": len(BODY)}, "more than the 256,000 bytes"),
            (whole(BODY, Content_Encoding="gzip"), {}, "compresses"),
            (whole(b""), {}, "it is empty"),
            (status(302, Location="/f"), {}, "redirects"),
            (status(302, Location="ftp://nowhere/f"), {}, "ftp"),
            (status(302, Location="http://xn--?/f"), {}, "A-label"),
        ],
    )
    def test_what_is_not_the_file(self, site: Site, tmp_path: Path, answer: Any, known: Any, word: str) -> None:
        assert word in fail(describe(site.put("/f", answer), **known), tmp_path)
        assert not list(tmp_path.glob("*"))
        assert site.requests[0][1]["accept-encoding"] == "identity"

    @pytest.mark.parametrize("digits", [400, 5000])
    @pytest.mark.parametrize("reach", ["128000-{0}/{0}", "{0}-{0}/*"])
    def test_a_range_of_hundreds_of_digits(self, site: Site, tmp_path: Path, reach: str, digits: int) -> None:
        (tmp_path / "items.json.part").write_bytes(BODY[:128_000])
        answers = claim(reach.format("9" * digits)), whole(BODY)
        assert get(pinned(site.put("/f", *answers)), tmp_path) == BODY

    def test_a_mark_that_no_header_can_have(self, site: Site, tmp_path: Path) -> None:
        assert get(describe(site.put("/f", cut(BODY, 9, ETag='"é"'), ranged(BODY))), tmp_path) == BODY
        assert site.ranges() == [None, None]

    def test_an_address_that_is_none(self, tmp_path: Path) -> None:
        assert "could not be downloaded" in fail(pinned("http://["), tmp_path)

    def test_an_address_with_a_password(self, tmp_path: Path) -> None:
        message = fail(pinned("http://user:secret@127.0.0.1:9/f"), tmp_path)
        assert "127.0.0.1:9: " in message and "secret" not in message

    def test_no_address_at_all(self, tmp_path: Path) -> None:
        assert "has no address. By hand: Open the page" in fail(describe(), tmp_path)


class TestAtHand:
    def test_from_a_folder_or_a_file(self, tmp_path: Path) -> None:
        source = tmp_path / "Downloads"
        source.mkdir()
        (source / "items.json").write_bytes(BODY)
        assert get(pinned(), tmp_path / "a", source=source) == BODY
        assert get(pinned(), tmp_path / "b", source=source / "items.json") == BODY
        assert get(describe(), tmp_path / "c", source=source) == BODY
        assert (source / "items.json").read_bytes() == BODY

    def test_the_wrong_file(self, tmp_path: Path) -> None:
        (tmp_path / "items.json").write_bytes(OTHER)
        message = fail(pinned(), tmp_path / "a", source=tmp_path)
        assert "is not the expected file (its SHA-256 is" in message and "Open the page" in message
        assert not list((tmp_path / "a").iterdir())

    def test_an_interrupted_download_is_left_alone(self, tmp_path: Path) -> None:
        part, record = tmp_path / "items.json.part", tmp_path / "items.json.part.json"
        part.write_bytes(b"[1, 2")
        record.write_text('{"url": "http://localhost:1/f", "validator": "v"}')
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "items.json").write_bytes(b"")
        assert "it is empty" in fail(describe(), tmp_path, source=tmp_path / "bad")
        assert part.read_bytes() == b"[1, 2" and record.is_file()
        fetch(describe(), tmp_path, source=part)
        assert (tmp_path / "items.json").read_bytes() == b"[1, 2" and not part.exists() and not record.exists()

    def test_no_such_file(self, tmp_path: Path) -> None:
        assert "does not exist" in fail(pinned(), tmp_path / "a", source=tmp_path)

    def test_offline(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = pinned(site.put("/f", whole(BODY)))
        monkeypatch.setenv("SPEAR_OFFLINE", "1")
        message = fail(file, tmp_path)
        assert "downloads are forbidden" in message and "--from FOLDER" in message
        assert not site.requests


class TestDisk:
    def test_too_small_is_said_before_the_download(self, site: Site, tmp_path: Path) -> None:
        url = site.put("/f", lambda handler: handler.say(200, b"x", length=10**18))
        assert "items.json needs 1000000.0 TB" in fail(describe(url), tmp_path)

    def test_full_on_the_way(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "items.json.part").symlink_to("/dev/full")  # the kernel's own full disk
        assert "is full before items.json is complete" in fail(
            describe(site.put("/f", whole(BODY, ETag="x"))), tmp_path
        )

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SpearError, match=r"cannot be made \(.*\): name another folder"):
            fetch(pinned(), tmp_path / "file" / "folder")

    def test_units(self) -> None:
        assert [format_bytes(n) for n in (0, 999, 4_467_013, 10**9, 10**13)] == [
            "0 bytes",
            "999 bytes",
            "4.5 MB",
            "1.0 GB",
            "10.0 TB",
        ]


PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from spear_envs.data import RemoteFile, fetch, transfer
fetch(RemoteFile("items.json", sys.argv[1]), Path(sys.argv[2]), console=Console())
"""


def test_two_processes_fetch_a_file_once(site: Site, tmp_path: Path, root: Path) -> None:
    def slow(handler: Any) -> None:
        time.sleep(1.5)
        handler.say(200, BODY)

    url = site.put("/f", slow)
    command = [sys.executable, "-c", PROGRAM, url, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert len(site.requests) == 1
    assert (tmp_path / "items.json").read_bytes() == BODY
    assert "waiting for another process" in "".join(outputs)


def test_a_killed_download_goes_on(site: Site, tmp_path: Path, root: Path) -> None:
    def stall(handler: Any) -> None:
        handler.say(200, BODY[:100_000], length=len(BODY), ETag='"v1"')
        time.sleep(30)

    url = site.put("/f", stall, ranged(BODY))
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, url, str(tmp_path)], cwd=root)
    part = tmp_path / "items.json.part"
    for _ in range(300):
        if part.exists() and part.stat().st_size > 90_000:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    size = part.stat().st_size  # the end of what came may still have been on its way to the file
    assert get(describe(url), tmp_path) == BODY
    assert size > 90_000 and site.ranges()[-1] == f"bytes={size}-"


def test_without_httpx(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "spear_envs.data.transfer")
    message = fail(pinned(site.put("/f", whole(BODY))), tmp_path)
    assert "pip install 'spear-envs[data]'" in message


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:1/", "nonsense://a"])
def test_a_proxy_that_cannot_be_used_is_one_sentence(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    message = fail(describe("http://example.org/f"), tmp_path)
    assert "proxy" in message and "Open the page" in message
