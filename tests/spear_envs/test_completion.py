"""Completion as a shell asks for it: click's protocol in a process of its own, and a bash at a terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem

from spear_envs.cli import spear
from spear_envs.completion import ENV, SPLIT
from spear_envs.core.registration import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
IDS = [entry.id for entry in ENVIRONMENTS]
PATIENCE_S = 60
HEAVY = {"torch", "ray", "verl", "transformers", "rich", "spear_agents", "spear_training", "spear_envs.data"}
BASH = shutil.which("bash")


def ask(line: str, *, shell: str = "bash", **variables: str) -> list[str]:
    """What is offered at the end of ``line``, asked as click's own scripts ask."""
    words = line.split(" ")
    given = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_SPEAR_COMPLETE": f"{shell}_complete"}
    return run(given | variables)


def run(variables: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "spear_envs.cli"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def ask_line(line: str) -> list[str]:
    """The same as our script for bash asks: with the line, and with the marks at which bash cuts words."""
    found = run({"COMP_LINE": line, "COMP_WORDBREAKS": " \t\n\"'><=;|&(:", "_SPEAR_COMPLETE": "bash_complete"})
    return [word.removeprefix("plain,") for word in found]


def test_the_protocol() -> None:
    assert ask("spear check ") == [f"plain,{id}" for id in IDS]
    assert ask("spear eva") == ["plain,eval"]
    assert ask("spear data g") == ["plain,get"] and ask("spear data get web") == ["plain,webshop"]


@pytest.mark.parametrize("command", ["check", "serve", "eval", "collect", "play", "warmstart"])
def test_every_command_that_takes_an_environment_offers_them(command: str) -> None:
    if command == "warmstart":
        pytest.importorskip("spear_training")
    found = spear.get_command(spear.make_context("spear", [command], resilient_parsing=True), command)
    assert found is not None
    (argument,) = (param for param in found.params if param.name == "env_id")
    assert argument.type is ENV
    splits = [param for param in found.params if param.opts[-1].endswith("split")]
    assert all(param.type is SPLIT for param in splits)
    assert bool(splits) == (command not in ("check", "serve"))


def test_names_of_commands_import_none() -> None:
    program = (
        "import sys\nfrom spear_envs.cli import main\n"
        "try:\n    main([])\nexcept SystemExit:\n"
        f"    print(sorted(sys.modules.keys() & {HEAVY!r}))"
    )
    variables = {"COMP_WORDS": "spear ", "COMP_CWORD": "1", "_SPEAR_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    assert "plain,check\n" in done.stdout and "plain,eval\n" in done.stdout
    assert done.stdout.endswith("[]\n")


def complete(incomplete: str) -> list[str]:
    context = spear.make_context("spear", [], resilient_parsing=True)
    return [item.value for item in ENV.shell_complete(context, spear.params[0], incomplete)]


def test_what_is_offered_for_an_environment() -> None:
    assert complete("") == complete("spear") == complete("spear/") == IDS
    assert complete("spear/w") == complete("webs") == ["spear/WebShop-v0"]
    assert complete("spear_") == [f"spear_envs:{id}" for id in IDS]
    assert complete("spear_envs:spear/Sok") == ["spear_envs:spear/Sokoban-v1"]
    assert complete("mine/") == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spear check spear/Sok", ["spear/Sokoban-v1"]),
        ("spear check spear_envs:spear/Sok", ["spear/Sokoban-v1"]),  # bash keeps what is before the colon
        ("spear eval spear/WebShop-v0 --split=te", ["test"]),
        ("spear eval spear/WebShop-v0 --split=", ["train", "eval", "test"]),
        ("spear check --mod", ["--module"]),
        ("spear data path --js", ["--json"]),
    ],
)
def test_bash_is_given_the_part_that_it_replaces(line: str, offered: list[str]) -> None:
    assert ask_line(line) == offered


def test_a_fault_while_completing_stays_out_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[CompletionItem[str]]:
        raise RuntimeError("a bug")

    from spear_envs.completion import _Bash

    monkeypatch.setattr(type(ENV), "shell_complete", fail)
    assert _Bash(spear, {}, "spear", "_SPEAR_COMPLETE").get_completions(["check"], "") == []


@pytest.fixture(scope="module")
def command_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``spear`` in it, whatever the environment of the tests is called."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "spear"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m spear_envs.cli "$@"\n')
    script.chmod(0o755)
    return folder


class Terminal:
    """A bash that somebody types into."""

    def __init__(self, folder: Path) -> None:
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.environ.update(PS1="$ ", TERM="dumb", INPUTRC="/dev/null", PATH=f"{folder}:{os.environ['PATH']}")
            os.execv(BASH or "", ["bash", "--norc", "--noprofile", "-i"])
        self.type("bind 'set bell-style none'; eval \"$(_SPEAR_COMPLETE=bash_source spear)\"; echo rea''dy\n")
        self.read_until("ready")

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def read_until(self, words: str) -> str:
        """All that comes up to these words."""
        text, end = "", time.monotonic() + PATIENCE_S
        while words not in text:
            assert time.monotonic() < end, f"{words!r} did not come, but {text!r}"
            if select.select([self._file], [], [], 0.1)[0]:
                text += os.read(self._file, 65536).decode()
        return text

    def close(self) -> None:
        self.type("\x15exit\n")
        os.close(self._file)
        os.waitpid(self._pid, 0)


@pytest.fixture(scope="module")
def terminal(command_folder: Path) -> Iterator[Terminal]:
    opened = Terminal(command_folder)
    yield opened
    opened.close()
