"""The page over HTTP, for this machine only, on the bounded server of all services."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import html
import io
import json
import logging
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from spear_agents.evaluation.options import TRUST
from spear_agents.viewer.play import Game, Stage
from spear_agents.viewer.runs import Run
from spear_envs.cli import read_keywords
from spear_envs.completion import ENV, SPLIT
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_text
from spear_sandbox.console import FilePath, echo
from spear_sandbox.web.listening import bind_socket
from spear_sandbox.web.serving import ConnectionLimits, make_server, stop_on_signals

_LIBRARIES = ("tablesort.min.js", "tablesort.number.min.js", "marked.umd.js")
_SCRIPTS = ("curves.js", "runs.js", "search.js", "rich.js", "play.js", "page.js")
_KATEX = "katex.min.js"
_LATEX = re.compile(r"\\[(\[]|\$[^$\\^={}]*[\\^={}][^$]*\$|\$[A-Za-z]\$")
"""Matches whatever the page might take for LaTeX, and more."""
_ESCAPED = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"}


def export_page(run: Run, path: str | Path, on_episode: Callable[[], object] = lambda: None) -> int:
    """Write a run as one HTML file that needs neither a server nor a network; return its bytes.

    Episodes are compressed one by one, and the page unpacks one when it is opened. ``on_episode`` is called after each.
    Raises SpearError if the file cannot be written, or is a record of the run.
    """
    if Path(path).resolve() in map(Path.resolve, run.find_files()):
        raise SpearError(f"{path} is the record itself: name another file")
    summary = run.summarise()

    def read_bodies() -> Iterator[tuple[int, dict[str, Any]]]:
        for row in summary["episodes"]:
            yield row["i"], run.read_episode(row["i"])
            on_episode()

    text = render_page(summary, read_bodies())
    write_text(Path(path), text)
    return len(text.encode("utf-8"))


def render_page(data: dict[str, Any], bodies: Iterable[tuple[int, dict[str, Any]]] = ()) -> str:
    """Return the HTML of a page, with the numbers and contents of episodes in ``bodies``.

    ``data`` has ``title``, ``episodes``, ``sources``, ``trainings`` and ``panels`` (:meth:`Run.summarise`), or
    ``title`` and the ``token`` of a server that is asked for the rest.
    """
    written = []
    has_latex = False
    for number, body in bodies:
        written.append(f'<script type="text/plain" id="e{number}">{_compress(body)}</script>')
        has_latex = has_latex or _has_latex(body)
    katex = f'<script type="text/plain" id="katex">{_compress(_read_library(_KATEX))}</script>' if has_latex else ""
    parts = {
        "policy": html.escape(make_policy()),
        "title": html.escape(f"{data['title']} · SPEAR"),
        "style": _read("page.css"),
        "script": _script(),
        "data": escape_json(data),
        "libraries": _join_libraries(),
        "bodies": "\n".join(written),
        "katex": katex,
    }
    # One pass: a placeholder within the data of an episode must stay.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _read("page.html"))


def escape_json(value: Any) -> str:
    """Write JSON for a script element, ``<``, ``>``, ``&`` and line separators escaped. Raises ValueError for NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


@lru_cache(maxsize=1)
def make_policy() -> str:
    """Write the content security policy: only these scripts and styles run, and only the own server is contacted."""
    libraries, script, katex, style = (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"
        for text in (_join_libraries(), _script(), _read_library(_KATEX), _read("page.css"))
    )
    return (
        f"default-src 'none'; script-src {libraries} {script} {katex}; style-src {style}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _has_latex(body: Mapping[str, Any]) -> bool:
    """Return whether the page might set LaTeX in an episode; a damaged record may have other values than texts."""
    texts = [body["instruction"], body["final_observation"], body["reflection"], *body["memory"]]
    texts += [turn[name] for turn in body["turns"] for name in ("observation", "thought", "said")]
    return any(_LATEX.search(text) for text in texts if isinstance(text, str))


def _compress(body: Any) -> str:
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


@lru_cache(maxsize=1)
def _script() -> str:
    return "\n".join(_read(name) for name in _SCRIPTS) + "\nstart();\n"


@lru_cache(maxsize=1)
def _join_libraries() -> str:
    return "\n".join(map(_read_library, _LIBRARIES))


def _read_library(name: str) -> str:
    return _read(f"vendor/{name}")


@lru_cache(maxsize=16)
def _read(name: str) -> str:
    return (files("spear_agents.viewer") / "page" / name).read_text(encoding="utf-8")


HOST = "127.0.0.1"
PORT = 8700
LONGEST_BODY = 1_000_000
BODY_S = 30.0
CONNECTIONS = 64
"""Connections at a time; one browser opens six."""
DRAIN_S = 2
_log = logging.getLogger(__name__)


class PageServer:
    """Serves a run, and the game of ``spear play --browser`` if there is a stage.

    Requests use numbers and known names, never paths of files. It listens on the loopback interface. A page of another
    site can reach that too, so a request must name this host, and the page's own requests carry a token. Raises
    SpearError if the port is taken.
    """

    def __init__(self, run: Run, stage: Stage | None = None, port: int = PORT) -> None:
        self.run = run
        self.stage = stage
        self.token = secrets.token_urlsafe(24)
        self._listener = bind_socket(HOST, port)
        self.server_address: tuple[str, int] = self._listener.getsockname()[:2]
        self._reading = threading.Lock()
        limits = ConnectionLimits(connections=CONNECTIONS)
        self._server = make_server(
            self._answer, drain_s=DRAIN_S, limits=limits, lifespan="off", ws="none", interface="asgi3"
        )

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    @property
    def server_port(self) -> int:
        """The port that it listens on."""
        return self.server_address[1]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def serve_forever(self) -> None:
        """Answer until :meth:`shutdown`, or a signal in the main thread."""
        if threading.current_thread() is threading.main_thread():
            with stop_on_signals(self._server):
                self._server.run(sockets=[self._listener])
        else:
            self._server.run(sockets=[self._listener])

    def shutdown(self) -> None:
        """Have :meth:`serve_forever` return soon."""
        self._server.should_exit = True

    def answer(self, method: str, path: str, content: Any) -> Any:
        """Answer a request of the page with a JSON value. Raises LookupError for an unknown name, SpearError."""
        if self.stage is not None and method == "POST" and path.startswith("/api/play/") and isinstance(content, dict):
            return self.stage.perform(path.removeprefix("/api/play/"), content)
        with self._reading:
            return self._read(method, path, content)

    def _read(self, method: str, path: str, content: Any) -> Any:
        if (method, path) == ("GET", "/api/run"):
            mark = self.run.mark()  # before the run is read: what is written meanwhile is read again
            self.run.refresh()
            return {**self.run.summarise(), "play": self.stage is not None, "mark": mark}
        if (method, path) == ("GET", "/api/katex"):
            return {"text": _read_library(_KATEX)}
        if (method, path) == ("GET", "/api/mark"):
            return {"mark": self.run.mark(), "progress": self.run.describe_progress()}
        if (
            (method, path) == ("POST", "/api/search")
            and isinstance(content, dict)
            and isinstance(content.get("text"), str)
        ):
            return {"episodes": self.run.search(content["text"])}
        episode = re.fullmatch(r"/api/episode/(\d{1,9})", path, re.ASCII)
        if method == "GET" and episode:
            return self.run.read_episode(int(episode[1]))
        raise LookupError(path)

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request of HTTP, by ASGI."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status, kind, data = await self._decide(scope["method"], scope["raw_path"], headers, receive)
        fields = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": f"{make_policy()}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        head = [(name.encode("ascii"), value.encode("ascii")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status.value, "headers": head})
        await send({"type": "http.response.body", "body": data})

    async def _decide(
        self, method: str, raw_path: bytes, headers: dict[str, str], receive: Any
    ) -> tuple[HTTPStatus, str, bytes]:
        """Return the status, content type and body of the answer."""
        path = raw_path.decode("latin-1")
        if method not in ("GET", "POST"):
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page answers GET and POST")
        # Through a tunnel the port is another one, and browsers do not write port 80.
        if headers.get("host", "").partition(":")[0] not in (HOST, "localhost"):
            return _refuse(HTTPStatus.FORBIDDEN, "this page is for this machine only")
        if method == "GET" and path == "/":
            page = render_page({"title": self.run.title, "token": self.token})
            return HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8")
        if not secrets.compare_digest(headers.get("x-spear-token", "").encode(), self.token.encode()):
            return _refuse(HTTPStatus.FORBIDDEN, "the page is of an earlier server: load it again")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            return _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LONGEST_BODY} bytes")
        try:
            content = await asyncio.wait_for(_read_content(receive), BODY_S) if method == "POST" else None
            return _write(HTTPStatus.OK, await asyncio.to_thread(self.answer, method, path, content))
        except asyncio.TimeoutError:
            return _refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {BODY_S:g} s")
        except LookupError:
            return _refuse(HTTPStatus.NOT_FOUND, "not found")
        except SpearError as error:
            return _refuse(HTTPStatus.CONFLICT, str(error))
        except Exception as error:
            _log.exception("%s %s", method, path)
            return _refuse(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))


async def _read_content(receive: Any) -> Any:
    """Return the JSON of a request; None if it is not JSON, or too long."""
    body = b""
    more = True
    while more and len(body) <= LONGEST_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        return None if more or len(body) > LONGEST_BODY else json.loads(body)
    except (ValueError, RecursionError):
        return None


def _refuse(status: HTTPStatus, why: str) -> tuple[HTTPStatus, str, bytes]:
    return _write(status, {"error": why})


def _write(status: HTTPStatus, value: Any) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


@click.command()
@click.argument("path", metavar="RUN", type=FilePath())
@click.option("--export", type=FilePath(), help="Write one HTML file that needs no server, and stop.")
@click.option("--tokenizer", type=FilePath(), help="Folder of the tokenizer, if the model has moved.")
@TRUST
@click.option("--port", type=int, default=PORT, help="0 takes a free one.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the browser.")
def view(path: Path, export: Path | None, tokenizer: Path | None, trust: bool, port: int, open_browser: bool) -> None:
    """Show RUN: episodes of spear eval and spear play, curves of spear train.

    RUN is a folder, including folders below it, or one JSON-lines file of episodes.

    \b
      spear view runs/first --open
      spear view runs/first --export first.html
    """
    run = Run(path, tokenizer, trust=trust)
    if export is not None:
        count = len(run.rows())
        with click.progressbar(length=count, label="episodes") as bar:
            size = export_page(run, export, lambda: bar.update(1))
        echo(f"{export}: {count:,} episodes, {size / 1e6:.1f} MB")
        return
    with PageServer(run, port=port) as server:
        _serve(server, open_browser)


@click.command()
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--browser", is_flag=True, help="Play in the page of spear view.")
@click.option("--task", help="Id of the first task; by default the first of the split.")
@click.option("--split", type=SPLIT, help="Split of the tasks; by default the last of the environment's, such as test.")
@click.option("--template", default="default", help="Prompt template of the record.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--out", type=FilePath(), help="Folder of the record.  [default: runs/play-<env>]")
@click.option("--port", type=int, default=PORT, help="Port of --browser; 0 takes a free one.")
@click.option("--open", "open_browser", is_flag=True, help="With --browser: open it.")
def play(
    env_id: str,
    browser: bool,
    task: str | None,
    split: str | None,
    template: str,
    env_keywords: tuple[str, ...],
    seed: int,
    out: Path | None,
    port: int,
    open_browser: bool,
) -> None:
    """Play ENV yourself, for instance spear/Sokoban-v1; finished episodes are recorded.

    \b
      spear play spear/ALFWorld-v0
      spear play spear/Sokoban-v1 --browser --open
    """
    keywords = read_keywords(env_keywords)
    name = re.sub(r"[^a-z0-9]+", "-", env_id.rpartition("/")[2].lower()).strip("-")
    folder = out or Path("runs") / f"play-{name}"

    def open_game() -> Game:
        return Game(env_id, folder, env_kwargs=keywords, split=split, template=template, task=task, seed=seed)

    if browser:
        stage = Stage(open_game)
        try:
            with PageServer(Run(folder, trust=True), stage, port) as server:
                _serve(server, open_browser)
        finally:
            stage.close()
        return
    from spear_agents.viewer.play import play_in_terminal, use_readline

    game = open_game()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # one byte that is not UTF-8 would end the game
    try:
        if sys.stdin.isatty():
            use_readline(game)
        with suppress(KeyboardInterrupt):
            play_in_terminal(game, click.echo, input)  # noqa: TID251  (it paints boards)
    finally:
        game.close()
    if game.recorded:
        echo(f"\n{game.recorded} recorded in {folder}: spear view {shlex.quote(str(folder))}")
    else:
        echo("\nNothing was recorded: only episodes that end are.")


def _serve(server: PageServer, open_browser: bool) -> None:
    echo(f"{server.address}  (Ctrl-C stops it)")
    if open_browser:
        click.launch(server.address)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
