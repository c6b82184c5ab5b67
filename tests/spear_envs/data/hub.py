"""``spear data`` against a data set hub of our own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_main
from tests.spear_envs.data.server import Site, ranged, serve, whole

COMMIT = "c0ffee" + "0" * 34


def use_data_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let ``folder`` be where data sets lie, and nothing of the surroundings lead elsewhere."""
    for name in (
        "ALFWORLD_DATA",
        "SPEAR_MIRROR",
        "SPEAR_OFFLINE",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(folder))
    return folder


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A hub without a data set; skips where what downloads is not installed."""
    pytest.importorskip("huggingface_hub", reason="needs the extra 'data'")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    site = Site()
    server = serve(site)
    monkeypatch.setenv("HF_ENDPOINT", f"{site.address}/")
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


def publish(
    site: Site,
    repository: str,
    files: Mapping[str, bytes],
    others: Sequence[Mapping[str, Any]] = (),
    *,
    lfs: bool = True,
    commit: str = COMMIT,
) -> None:
    """Let a repository have these files at its newest commit, and list ``others`` and a README."""
    siblings: list[Mapping[str, Any]] = [*others, {"rfilename": "README.md", "size": 5}]
    for path, content in files.items():
        entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "0"}
        if lfs:
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        siblings.append(entry)
        site.put(f"/datasets/{repository}/resolve/{commit}/{path}", ranged(content))
    facts = json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
    for revision in ("main", commit):
        site.put(locate_listing(repository, revision), whole(facts, Content_Type="application/json"))


def locate_listing(repository: str, revision: str = "main") -> str:
    """Path on the site of a repository's listing."""
    return f"/api/datasets/{repository}/revision/{revision}?blobs=true"


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """``spear data ARGS``: exit code, stdout, stderr."""
    return run_main(capsys, "data", *args)
