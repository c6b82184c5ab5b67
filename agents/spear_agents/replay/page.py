"""The page as self-contained HTML: style and script are inline, and data is escaped JSON."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from spear_agents.files import write_text
from spear_agents.replay.runs import Run

_SCRIPTS = ("curves.js", "overview.js", "search.js", "play.js", "page.js")
_ESCAPED = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"}


def export_page(run: Run, path: str | Path, on_episode: Callable[[], object] = lambda: None) -> int:
    """Write a run as one HTML file that needs neither a server nor a network; return its bytes.

    Episodes are compressed one by one, and the page unpacks one when it is opened. ``on_episode`` is called after each.
    Raises SpearError if the file cannot be written.
    """
    summary = run.summarise()

    def read_bodies() -> Iterator[tuple[int, dict[str, Any]]]:
        for row in summary["episodes"]:
            yield row["i"], run.read_episode(row["i"])
            on_episode()

    text = render_page(summary, read_bodies())
    write_text(Path(path), text)
    return len(text.encode("utf-8"))


def render_page(data: dict[str, Any], bodies: Iterable[tuple[int, dict[str, Any]]] = ()) -> str:
    """The HTML of a page, with the numbers and contents of episodes in ``bodies``.

    ``data`` has ``title``, ``episodes``, ``sources``, ``trainings`` and ``panels`` (:meth:`Run.summarise`), or
    ``title`` and the ``token`` of a server that is asked for the rest.
    """
    parts = {
        "policy": html.escape(make_policy()),
        "title": html.escape(f"{data['title']} · SPEAR"),
        "style": _read("page.css"),
        "script": _script(),
        "data": escape_json(data),
        "bodies": "\n".join(
            f'<script type="text/plain" id="e{number}">{_compress(body)}</script>' for number, body in bodies
        ),
    }
    # One pass: a placeholder within the data of an episode must stay.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _read("page.html"))


def escape_json(value: Any) -> str:
    """JSON for a script element; ``<``, ``>``, ``&`` and line separators are escaped. Raises ValueError for NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


@lru_cache(maxsize=1)
def make_policy() -> str:
    """The content security policy: only this script and style run, and only the page's own server may be contacted."""
    script, style = (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"
        for text in (_script(), _read("page.css"))
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )


def _compress(body: dict[str, Any]) -> str:
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


@lru_cache(maxsize=1)
def _script() -> str:
    return "\n".join(_read(name) for name in _SCRIPTS) + "\nstart();\n"


@lru_cache(maxsize=8)
def _read(name: str) -> str:
    return (files("spear_agents.replay") / "page" / name).read_text(encoding="utf-8")
