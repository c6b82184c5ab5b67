from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from spear_envs.data.cli import DATASETS, VERBS, source_option
from tests.spear_envs.data.hub import run


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset.name)
def test_every_named_command_exists(dataset: object) -> None:
    for verb in dataset.verbs:  # type: ignore[attr-defined]
        assert verb in VERBS
        assert isinstance(dataset.load(verb), click.Command)  # type: ignore[attr-defined]


def test_path(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(capsys, "path") == (0, f"{folder}\n", "")
    assert run(capsys, "path", "webshop") == (0, f"{folder / 'webshop'}\n", "")
    code, _, err = run(capsys, "path", "webshp")
    assert code == 1 and "there is no data set 'webshp'. Did you mean 'webshop'?" in err


def test_list(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "webshop" / "small").mkdir(parents=True)
    (folder / "webshop" / "small" / "items.json").write_bytes(bytes(4_467_013))
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["webshop"].rstrip().endswith("4.5 MB") and lines["alfworld"].rstrip().endswith("–")
    assert f"in {folder} (downloads are forbidden: SPEAR_OFFLINE)" in out


def test_path_and_list_for_scripts(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert json.loads(run(capsys, "path", "webshop", "--json")[1]) == {"path": f"{folder / 'webshop'}", "exists": False}
    raw = folder / "webshop" / "small" / "raw"
    raw.mkdir(parents=True)
    (raw / "items_shuffle_1000.json").write_bytes(b"x" * 9)
    (raw / "items_ins_v2_1000.json.part").write_bytes(b"x")
    (folder / "code" / "aime-2024").mkdir(parents=True)
    (folder / "code" / "aime-2024" / "a.parquet").write_bytes(b"y")
    lock = {"revisions": {}, "files": {"code/aime-2024/a.parquet": "0" * 64}}
    (folder / "lock.json").write_text(json.dumps(lock))
    assert json.loads(run(capsys, "path", "webshop", "--json")[1])["exists"]
    code, out, err = run(capsys, "list", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["folder"] == str(folder) and facts["offline"] is False
    assert [one["name"] for one in facts["datasets"]] == [dataset.name for dataset in DATASETS]
    files = {entry["path"]: entry for one in facts["datasets"] for entry in one["files"]}
    assert {path: files[f"webshop/small/raw/{path}"]["state"] for path in ("items_shuffle_1000.json",)} == {
        "items_shuffle_1000.json": "present"
    }
    assert files["webshop/small/raw/items_shuffle_1000.json"]["size"] == 9
    cut_off = files["webshop/small/raw/items_ins_v2_1000.json"]
    assert (cut_off["state"], cut_off["size"]) == ("partial", 147_099)
    assert files["webshop/full/raw/items_shuffle.json"]["state"] == "absent"
    assert files["alfworld/archives/json_2.1.1_json.zip"]["source"].startswith("https://github.com/alfworld")
    problems = files["code/aime-2024/a.parquet"]
    assert (problems["sha256"], problems["state"]) == ("0" * 64, "present")
    assert problems["source"].endswith("/datasets/Maxwell-Jia/AIME_2024")
    assert files["code/aime-2025/"]["state"] == "absent"


def test_list_of_one(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run(capsys, "list", "webshop")
    assert code == 0 and out.count("absent") == 6 and "4,467,013" in out and "alfworld" not in out
    assert run(capsys, "list", "webshp")[0] == 1


class TestVerifyAll:
    def test_nothing_is_here(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        code, out, err = run(capsys, "verify")
        assert code == 3 and "'spear data get' fetches it" in err
        assert out.count("nothing is here") == len(DATASETS)

    def test_each_data_set_has_its_verdict(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        given = folder / "given"
        given.mkdir()
        rows = "".join(json.dumps({"Problem": f"Problem {i}?", "Answer": i}) + "\n" for i in range(30))
        (given / "aime.jsonl").write_text(rows)
        assert run(capsys, "get", "code", "aime-2024", "--from", str(given))[0] == 0
        code, out, err = run(capsys, "verify", "--json")
        assert code == 0, err
        verdicts = {one["dataset"]: one for one in json.loads(out)}
        states = {name: one["state"] for name, one in verdicts.items()}
        assert states == {"alfworld": "absent", "code": "whole", "search": "absent", "webshop": "absent"}
        code, out, _ = run(capsys, "verify", "code", "aime-2024", "aime-2025")
        assert code == 1 and "aime-2025 is missing" in out
        path = folder / "code" / "aime-2024" / "aime.jsonl"
        assert [one["subject"] for one in verdicts["code"]["findings"]] == [str(path), "aime-2024/test"]
        path.write_text(rows[:-3] + "7}\n")
        code, out, err = run(capsys, "verify", "--json")
        assert code == 1 and err.strip().splitlines()[-1].startswith("Error: code: not all of it")
        (finding,) = next(one for one in json.loads(out) if one["dataset"] == "code")["findings"]
        assert finding["subject"] == str(path) and "is not the expected file" in finding["fault"]
        code, out, _ = run(capsys, "verify", "code", "--json")
        assert code == 1 and [one["state"] for one in json.loads(out)] == ["damaged"]

    def test_json_stands_behind_the_name(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        code, _, err = run(capsys, "verify", "--json", "code")
        assert code == 2 and "put --json after the name" in err


def test_verbs_list_their_data_sets_and_import_none() -> None:
    program = (
        "import sys\nfrom spear_envs.cli import main\n"
        "try:\n    main(['data', 'get', '--help'])\nexcept SystemExit:\n"
        "    print(sorted(sys.modules.keys() & {'httpx', 'rich', 'spear_envs.webshop', 'spear_envs.alfworld'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Data sets:" in done.stdout and "webshop   WebShop: " in done.stdout
    assert done.stdout.endswith("[]\n")


def test_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "get", "webshp")
    assert code == 2 and "Did you mean 'webshop'?" in err
    code, _, err = run(capsys, "gt")
    assert code == 2 and "get" in err


def test_the_option_from(tmp_path: Path) -> None:
    seen: list[Path | None] = []

    @click.command()
    @source_option
    def get(source: Path | None) -> None:
        seen.append(source)

    get.main(["--from", str(tmp_path)], standalone_mode=False)
    get.main([], standalone_mode=False)
    assert seen == [tmp_path, None]
    with pytest.raises(click.BadParameter, match="does not exist"):
        get.main(["--from", str(tmp_path / "nowhere")], standalone_mode=False)
