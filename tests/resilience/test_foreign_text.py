"""Text of others in what commands, services and logs show: no control of the terminal, forged line or key."""

import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from spear_agents.evaluation.panels import OFFICIAL, digest_panel, write_panel
from spear_agents.evaluation.records import EPISODES, SETTINGS
from spear_agents.shortcuts import evaluate
from spear_envs.cli import main
from spear_sandbox.console import echo
from spear_sandbox.errors import guard_logs, hide_secret, show_text
from spear_sandbox.terminal import Console
from spear_sandbox.web.listening import read_token
from tests.agents.chat_server import serve_script

KEY = "sk-0123456789"
HOSTILE = f"a\x1b]52;c;eA==\x07b\x1b[2J\x9b31m\u202egnp\u2066\rc\nError: forged [/red] {KEY} \ud800\x00"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def check(shown: str, is_there: str = "52;c") -> None:
    plain = re.sub("\x1b\\[[0-9;?]*[mKAlh]|\r", "", shown) if "\x1b[" in shown else shown
    assert not RAW.search(plain), ascii(plain)
    assert not re.search("^Error: forged", plain, re.MULTILINE), plain
    assert KEY not in shown and is_there in shown, shown


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of one episode."""
    folder = tmp_path_factory.mktemp("foreign") / "run"
    evaluate("spear/Sokoban-v1", engine="random", tasks=1, env_kwargs={"modality": "text"}, out=folder, progress=False)
    return folder


def change_settings(folder: Path, **settings: object) -> None:
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def name_model(folder: Path) -> list[str]:
    change_settings(folder / "run", model=HOSTILE)
    return ["compare", str(folder / "before"), str(folder / "run")]


def name_environment(folder: Path) -> list[str]:
    change_settings(folder / "run", env_id=HOSTILE)
    return ["rescore", str(folder / "run")]


def name_task(folder: Path) -> list[str]:
    path = folder / "run" / EPISODES
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_id": HOSTILE, "reward": 7}) + "\n")
    return ["rescore", str(folder / "run")]


def write_a_panel(folder: Path) -> list[str]:
    written = write_panel(OFFICIAL["sokoban-tiny"]) | {"env_id": HOSTILE}
    (folder / "panel.json").write_text(json.dumps(written | {"digest": digest_panel(written)}))
    return ["panel", "verify", str(folder / "panel.json")]


def name_a_word(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [*words, HOSTILE.replace("\x00", "").replace("\ud800", "\udcff")]


@pytest.mark.parametrize(
    "make",
    [
        name_model,
        name_environment,
        name_task,
        write_a_panel,
        name_a_word("view"),
        name_a_word("envs"),
        name_a_word("check"),
        name_a_word("data", "list"),
        name_a_word("eval"),
        name_a_word("train", "--out", "runs/none"),
        name_a_word("presets"),
        name_a_word("retriever", "serve", "--config"),
        name_a_word("sandbox", "run"),
        name_a_word("serve"),
    ],
)
def test_commands_show_text_of_others_safely(
    tmp_path: Path, played: Path, make: Callable[[Path], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "before"):
        shutil.copytree(played, tmp_path / name)
    with pytest.raises(SystemExit):
        main(make(tmp_path))
    check("".join(capsys.readouterr()))


def test_a_servers_body_is_shown_safely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = f"{HOSTILE.replace(chr(0xD800), '')} {KEY}".encode()
    with serve_script() as script:
        script.answers = [lambda handler: handler.reply(401, body)]
        words = ["eval", "spear/Sokoban-v1", "--env", "modality=text", "--engine", "openai", "--model", "m"]
        with pytest.raises(SystemExit):
            main([*words, "--base-url", script.url, "--tasks", "1"])
    check("".join(capsys.readouterr()))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_makes_all_that_it_prints_safe(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=400)
    table = Table(HOSTILE, title=HOSTILE, caption=Text(HOSTILE))
    table.add_row(Text(HOSTILE))
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), table, [HOSTILE]):
        console.print("line", shown, "end")
    with Progress(console=console) as progress:
        progress.console.print("said", HOSTILE)
        progress.add_task(HOSTILE.replace("[/red]", ""), total=1)
    with console.status(Text(HOSTILE)):
        console.print("waiting", HOSTILE)
    text = console.file.getvalue()
    assert "\x1b]" not in text and "\x1b[2J" not in text and "\x9b" not in text and "\u202e" not in text
    assert KEY not in text and "[/red]" in text


def test_logs_and_errors_are_one_entry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    factory = logging.getLogRecordFactory()
    try:
        guard_logs()
        stream = io.StringIO()
        logger = logging.Logger("service")
        logger.addHandler(logging.StreamHandler(stream))
        logger.warning("refused: %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception(HOSTILE)
        check(stream.getvalue())
    finally:
        logging.setLogRecordFactory(factory)
    echo(HOSTILE.encode("utf-8", "replace"))
    assert "\x1b" in capsys.readouterr().out, "a pipe gets the bytes of a program as they are"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    echo(HOSTILE.encode("utf-8", "replace"), nl=False)
    assert not RAW.search(capsys.readouterr().out)


def test_keys_are_hidden_wherever_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    monkeypatch.setenv("STRANGE_NAME", "from-a-variable")
    monkeypatch.setenv("MY_TOKEN_FILE", str(tmp_path / "token"))
    hide_secret("given-to-it", "NAMED")
    read_token("STRANGE_NAME"), read_token("MY_TOKEN")
    shown = show_text(f"{KEY} from-a-file from-a-variable given-to-it\ttab\nline é 你")
    assert shown == "[OPENAI_API_KEY] [MY_TOKEN] [STRANGE_NAME] [NAMED]\ttab\nline é 你"
