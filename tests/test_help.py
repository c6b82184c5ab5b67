"""Every command shows in its help how it is called, with arguments and options that it has."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import click
import pytest

from spear_envs.cli import COMMAND_GROUP


def list_commands() -> Iterator[tuple[str, click.Command]]:
    """All commands of what is installed, by their names behind ``spear``."""
    for point in sorted(entry_points(group=COMMAND_GROUP)):
        yield from walk(point.name, point.load(), click.Context(click.Group("spear")))


def walk(name: str, command: click.Command, parent: click.Context) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, parent, info_name=name)
    for below in command.list_commands(context):
        found = command.get_command(context, below)
        assert found is not None
        yield from walk(f"{name} {below}", found, context)


COMMANDS = {name: command for name, command in list_commands() if name != "bench"}
MOST = 64
"""Characters that a list of subcommands shows of each on 80 columns."""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.count(" ") == 1])
def test_a_group_shows_the_whole_summary(name: str) -> None:
    summary = COMMANDS[name].get_short_help_str(200)
    assert len(summary) <= MOST, f"the first sentence of spear {name} --help would be cut off: {summary}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name: str) -> None:
    command = COMMANDS[name]
    examples = re.findall(rf"^ *spear {name}\b(.*)$", command.help or "", re.M)
    assert examples, f"spear {name} --help has no example: add one below a line with \\b"
    for example in examples:
        words = shlex.split(example, comments=True)
        parser = command.make_parser(click.Context(command))
        options, rest, _ = parser.parse_args(words)
        names = {param.name for param in command.params if isinstance(param, click.Argument)}
        assert not rest, f"{example!r} has more arguments than {sorted(names)}"
        for param in command.params:
            value = options.get(param.name)
            assert value is not None or not param.required, f"{example!r} lacks {param.name}"
            if isinstance(param.type, click.Choice) and isinstance(value, str):
                param.type.convert(value, param, None)


PATHS = [
    pytest.param(param, id=f"{name}-{param.name}")
    for name, command in COMMANDS.items()
    for param in command.params
    if isinstance(param.type, click.Path)
]


@pytest.mark.parametrize("param", PATHS)
def test_an_empty_text_is_not_the_current_folder(param: click.Parameter) -> None:
    """``--out "$FOLDER"`` where the variable is not set."""
    with pytest.raises(click.BadParameter, match="empty"):
        param.type.convert("", param, None)


MISTAKES = (
    "train nofile.yaml --out runs/x",
    "train preset=demo train.steps=many --out runs/x",
    "train preset=nope --out runs/x",
    "train --optt x",
    "sft --model nope --data nope.jsonl --out runs/x",
    "sft --model nope --data nope.jsonl --out runs/x --nope",
    "eval spear/Sokoban-v1 --engine hf --model nope",
    "eval spear/Sokoban-v1 --engine nope",
    "prove-gpu --nope",
    "compare nope nope",
)


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_before_torch_is_imported(words: str) -> None:
    """Which takes seconds."""
    pytest.importorskip("verl", reason="needs the distribution spear-training")
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    code += "from spear_envs.cli import main; main()"
    call = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2) and done.stderr.startswith(("Error", "Usage")), done.stderr
    assert done.stdout == "False\n"
