from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

from spear_envs import cli
from spear_envs.data.cli import DATASETS, VERBS, source_option


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["data", *args])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset.name)
def test_every_named_command_exists(dataset: object) -> None:
    for verb, value in dataset.commands.items():  # type: ignore[attr-defined]
        assert verb in VERBS
        module, _, name = value.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), click.Command)


def test_path(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(capsys, "path") == (0, f"{folder}\n", "")
    assert run(capsys, "path", "webshop") == (0, f"{folder / 'webshop'}\n", "")
    code, _, err = run(capsys, "path", "webshp")
    assert code == 1 and "there is no data set 'webshp'. Did you mean 'webshop'?" in err


def test_list(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "webshop" / "small").mkdir(parents=True)
    (folder / "webshop" / "small" / "items.json").write_bytes(bytes(4_467_013))
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["webshop"].rstrip().endswith("4.5 MB") and lines["alfworld"].rstrip().endswith("–")
    assert f"in {folder} (downloads are forbidden: SPEAR_OFFLINE)" in out


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
