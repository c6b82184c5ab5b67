"""Every data set of ``spear data list``, published by a server of the test."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spear_envs.alfworld import data_cli as alfworld
from spear_envs.code.data_cli import PUBLICATIONS
from spear_envs.data import RemoteFile
from spear_envs.search import data_cli as search
from spear_envs.search.data_cli import SOURCES
from spear_envs.search.tasks import BENCHMARKS as QUESTIONS
from spear_envs.search.tasks import SAMPLES
from spear_envs.webshop import data_cli as webshop
from tests.spear_envs.alfworld.game_files import write_trial
from tests.spear_envs.data import hub
from tests.spear_envs.data.server import Site, ranged

FILLING = b" " * 3_000
"""Makes files longer than what a cut leaves of them."""


@dataclass(frozen=True)
class Part:
    """What one command fetches."""

    command: tuple[str, ...]
    """Behind ``spear data get``."""
    kept: str
    """In the data folder: a file that it fetches, or makes of what it fetches."""
    publish: Callable[[Site, pytest.MonkeyPatch, Path], str]
    """Lets the site have its files; returns the path of the last one there, which the faults are tried on."""


def _publish_hub(repository: str, files: Mapping[str, bytes], lfs: bool) -> Callable[..., str]:
    def publish(site: Site, _: pytest.MonkeyPatch, __: Path) -> str:
        hub.publish(site, repository, files, lfs=lfs)
        return f"/datasets/{repository}/resolve/{hub.COMMIT}/{max(files)}"

    return publish


def _move(site: Site, file: RemoteFile, content: bytes) -> RemoteFile:
    size = None if file.size is None else len(content)
    return replace(file, url=site.put(f"/{file.name}", ranged(content)), size=size)


def _publish_games(site: Site, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    write_trial(folder / "train", 1)
    moved = []
    for archive, name in zip(alfworld.ARCHIVES, ("game.tw-pddl", "traj_data.json"), strict=True):
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as zipped:
            for path in folder.rglob(name):
                zipped.write(path, f"json_2.1.1/{path.relative_to(folder)}")
            zipped.writestr("json_2.1.1/filling.txt", FILLING)
        moved.append(_move(site, archive, raw.getvalue()))
    monkeypatch.setattr(alfworld, "ARCHIVES", tuple(moved))
    return f"/{moved[-1].name}"


def _publish_products(size: str) -> Callable[..., str]:
    def publish(site: Site, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
        items, attributes = webshop.FILES[size]
        moved = (_move(site, items, b"[" + FILLING + b"]"), _move(site, attributes, b"{" + FILLING + b"}"))
        monkeypatch.setattr(webshop, "FILES", {**webshop.FILES, size: moved})
        monkeypatch.setattr(webshop, "HUMAN_FILE", _move(site, webshop.HUMAN_FILE, b"{" + FILLING + b"}"))
        nothing = folder / "lock.json"  # what is known of the real files is not true of these
        monkeypatch.setattr("spear_envs.data.fetching.KNOWN", nothing)
        return f"/{webshop.HUMAN_FILE.name}"

    return publish


LINES = json.dumps({"question": "Who?", "golden_answers": ["x"]}).encode() + FILLING + b"\n"
SEARCH: dict[str, tuple[dict[str, bytes], str]] = {
    "questions": ({item.path: LINES for item in QUESTIONS}, f"flashrag/{max(item.path for item in QUESTIONS)}"),
    "train": ({"train.parquet": FILLING, "test.parquet": FILLING}, "search-r1/train.parquet"),
    "wiki-18": ({"wiki-18.jsonl.gz": gzip.compress(LINES, 0)}, "wiki-18/wiki-18.jsonl"),
    "e5-flat": ({"part_aa": FILLING, "part_ab": FILLING}, "wiki-18/e5_Flat.index"),
    "e5-hnsw64": ({"part_aa": FILLING, "part_ab": FILLING}, "wiki-18/e5_HNSW64.index"),
}


def _publish_samples(site: Site, monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    item = SOURCES[SAMPLES]
    assert item.file is not None
    moved = replace(_move(site, item.file, FILLING), sha256=hashlib.sha256(FILLING).hexdigest())
    monkeypatch.setattr(search, "SOURCES", {**SOURCES, SAMPLES: replace(item, file=moved)})
    return f"/{moved.name}"


PARTS = (
    Part(("search", SAMPLES), "search/deepresearcher/test.parquet", _publish_samples),
    *(
        Part(("search", name), f"search/{kept}", _publish_hub(SOURCES[name].repository, files, lfs=name != "questions"))
        for name, (files, kept) in SEARCH.items()
    ),
    *(
        Part(("code", name), f"code/{name}/a.parquet", _publish_hub(item.repository, {"a.parquet": FILLING}, True))
        for name, item in PUBLICATIONS.items()
    ),
    Part(("alfworld",), f"alfworld/archives/{alfworld.ARCHIVES[-1].name}", _publish_games),
    *(
        Part(
            ("webshop", "--size", size, "--human"),
            f"webshop/{size}/raw/{webshop.HUMAN_FILE.name}",
            _publish_products(size),
        )
        for size in webshop.FILES
    ),
)
