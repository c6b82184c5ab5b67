"""Completion as a shell asks for it, by click's protocol."""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, shell_complete

from spear_envs.cli import spear
from spear_envs.completion import ENV, SPLIT, register_shells
from spear_envs.core.registration import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
IDS = [entry.id for entry in ENVIRONMENTS]
HEAVY = {"torch", "ray", "verl", "transformers", "rich", "spear_agents", "spear_training", "spear_envs.data"}


def ask(line: str) -> list[str]:
    """What is offered at the end of ``line``, asked as click's own scripts ask."""
    words = line.split(" ")
    return run({"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)})


def run(variables: dict[str, str]) -> list[str]:
    out = TextIOWrapper(BytesIO(), "utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        for name, value in variables.items():
            patch.setenv(name, value)
        register_shells()
        shell_complete(spear, {}, "spear", "_SPEAR_COMPLETE", "bash_complete")
    return [line for line in out.buffer.getvalue().decode().splitlines() if line]


def ask_line(line: str, breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """The same as our script for bash asks: with the line, and with the marks at which bash cuts words."""
    found = run({"COMP_LINE": line, "COMP_WORDBREAKS": breaks})
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


def test_where_bash_does_not_cut_at_marks_it_is_given_the_whole_word() -> None:
    assert ask_line("spear eval spear/WebShop-v0 --split=te", breaks=" ") == ["--split=test"]


def test_a_fault_while_completing_stays_out_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[CompletionItem[str]]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(ENV), "shell_complete", fail)
    assert ask("spear check ") == []
