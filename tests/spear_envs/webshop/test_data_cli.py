"""``spear data get|build|verify webshop``, against files and a server of our own."""

import json
from pathlib import Path
from typing import Any

import pytest

from spear_envs.data import RemoteFile
from spear_envs.webshop import data_cli
from spear_envs.webshop.catalogue import open_catalogue
from tests.spear_envs.data.hub import run, use_data_folder
from tests.spear_envs.data.server import Site, page, whole
from tests.spear_envs.webshop import catalogues
from tests.spear_envs.webshop.catalogues import make_entry, make_record

RECORDS = [make_record(f"B{i:03d}") for i in range(12)]
ENTRIES = {record["asin"]: make_entry("soft") for record in RECORDS}
ROW = {"instruction": "I need x.", "instruction_attributes": ["soft"], "instruction_options": []}
HUMAN = {"B003": [ROW], "B005": [ROW, ROW]}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data", monkeypatch) / "webshop"


def text_of(name: str) -> bytes:
    content = {"items_shuffle": RECORDS, "items_ins_v2": ENTRIES, "items_human_ins": HUMAN}
    return json.dumps(content[name.removesuffix(".json").removesuffix("_1000")]).encode()


def publish(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the same files come from our server; the sizes are those of ours."""

    def move(file: RemoteFile) -> RemoteFile:
        url = site.put(f"/{file.name}", whole(text_of(file.name)))
        size = None if file.size is None else len(text_of(file.name))
        return RemoteFile(file.name, url, size, file.sha256, file.manual)

    monkeypatch.setattr(data_cli, "FILES", {size: tuple(map(move, files)) for size, files in data_cli.FILES.items()})
    monkeypatch.setattr(data_cli, "HUMAN_FILE", move(data_cli.HUMAN_FILE))
    monkeypatch.setattr("spear_envs.data.fetching.KNOWN", Path("nothing is known of ours"))


@pytest.mark.parametrize("size", ["small", "full"])
def test_get_build_verify_and_play(
    size: str, data: Path, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(site, monkeypatch)
    code, out, err = run(capsys, "get", "webshop", "--size", size, "--human")
    assert code == 0, err
    suffix = "_1000" if size == "small" else ""
    names = [f"items_shuffle{suffix}.json", f"items_ins_v2{suffix}.json", "items_human_ins.json"]
    assert [(data / size / "raw" / name).read_bytes() for name in names] == [text_of(name) for name in names]
    assert f"spear data build webshop --size {size}" in out
    code, out, err = run(capsys, "build", "webshop", "--size", size, "--processes", 1, "--price-seed", 7)
    assert code == 0, err
    assert "12 products; goals: 12 synthetic, 3 human" in out and "prices keyed from seed 7" in out
    assert "nouns by rule" in out
    catalogue = open_catalogue(size)
    assert f"fingerprint {catalogue.fingerprint}" in out and len(catalogue.goals("human")) == 3
    code, out, _ = run(capsys, "verify", "webshop", "--size", size)
    assert code == 0 and out.count("is as it should be") == 3 + 1, "three files and the store"
    store = data / size / "store"
    records = store / "records.bin"
    records.write_bytes(records.read_bytes()[::-1])
    for where in (["--store", store], ["--size", size], []):
        code, out, err = run(capsys, "verify", "webshop", *where)
        assert code == 1 and "records.bin is damaged" in out and "webshop: not all" in err


def test_get_from_a_folder(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    for name in ("items_shuffle.json", "items_ins_v2.json"):
        (source / name).write_bytes(text_of(name))
    code, _, err = run(capsys, "get", "webshop", "--size", "full", "--from", source)
    assert code == 0, err
    assert (data / "full" / "raw" / "items_shuffle.json").read_bytes() == text_of("items_shuffle.json")
    # The sizes of the small files are known.
    (source / "items_shuffle_1000.json").write_bytes(text_of("items_shuffle.json"))
    code, _, err = run(capsys, "get", "webshop", "--from", source)
    assert code == 1 and "instead of 4,467,013" in err and "https://drive.google.com/file/d/1EgHdx" in err


def test_build_from_files_at_hand(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = catalogues.write(tmp_path / "files", RECORDS, ENTRIES, HUMAN, packed=True)
    common = ["--items", files.items, "--attributes", files.attributes, "--processes", 1]
    code, out, err = run(capsys, "build", "webshop", *common)
    assert code == 0 and "goals: 12 synthetic" in out and "human" not in out, err
    assert len(open_catalogue(tmp_path / "files")) == 12
    more = ["--human-goals", files.human, "--out", tmp_path / "out", "--limit", 4, "--draws", "sequential"]
    code, out, err = run(capsys, "build", "webshop", *common, *more)
    assert code == 0 and "4 products; goals: 4 synthetic, 1 human" in out, err
    assert "prices sequential from seed 42" in out and len(open_catalogue(tmp_path / "out")) == 4
    for words, status, message in (
        ([], 2, "Give either --size"),
        (["--items", files.items], 2, "Give either --size"),
        (["--size", "small", *common[:4]], 2, "Give either --size"),
        (["--size", "small", "--human-goals", files.human], 2, "--human-goals goes with --items"),
        (["--size", "small"], 1, "'spear data get webshop --size small' fetches it"),
        ([*common, "--nouns", "spacy"], 1, "title_nouns='spacy' is not valid"),
    ):
        code, _, err = run(capsys, "build", "webshop", *words)
        assert code == status and message in err


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/octet-stream"])
def test_a_page_is_no_file(
    kind: str, data: Path, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(site, monkeypatch)
    site.put("/items_shuffle.json", page("Google Drive - Quota exceeded", kind=kind))
    code, _, err = run(capsys, "get", "webshop", "--size", "full")
    assert code == 1 and "By hand: Open https://drive.google.com/file/d/1A2whVg" in err and "--from FOLDER" in err
    assert not list((data / "full" / "raw").glob("items_shuffle.json*"))


def test_a_transfer_that_breaks_off_is_no_file(
    data: Path, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_off(handler: Any) -> None:  # without a length, which would show it
        handler.close_connection = True
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'[{"asin": "B1", "na')

    publish(site, monkeypatch)
    site.put("/items_shuffle.json", break_off)
    code, _, err = run(capsys, "get", "webshop", "--size", "full")
    assert code == 1 and "a part" in err
    assert not list((data / "full" / "raw").glob("items_shuffle.json*"))
