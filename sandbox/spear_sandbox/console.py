"""Run click commands; an error that a user can fix becomes one line instead of a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from spear_sandbox.errors import SpearError

DEBUG = "SPEAR_DEBUG"
"""Environment variable; if set, an error shows its traceback."""

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""What moves the cursor, clears the screen, sets the title or clipboard, or turns the direction of writing."""
_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST_SECRET = 8
_secrets: dict[str, str] = {}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk."""


def show_text(text: str) -> str:
    """Make text of others safe for a terminal or a log: controls become escapes, and keys the names of their variables.

    Line ends and tabs stay. A key is what :func:`hide_secret` has had, or a variable of the environment whose name says
    so.
    """
    named = {value: name for name, value in os.environ.items() if _SECRET.search(name)}
    for value, name in {**named, **_secrets}.items():
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"[{name}]")
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def hide_secret(value: str, name: str) -> None:
    """Have :func:`show_text` write ``[name]`` instead of this value."""
    _secrets[value] = name


def run_command(
    command: click.Command,
    name: str,
    args: Sequence[str] | None = None,
    *,
    explain: Callable[[ModuleNotFoundError], str | None],
) -> NoReturn:
    """Run a command and exit: with its own code, 1 for an error, 2 for wrong usage, 130 for Ctrl-C.

    ``name`` is what it is called in its help, ``args`` are those of this process by default, and ``explain`` gives the
    line for a missing package, or None for a bug, which is raised.
    """
    try:
        code = command.main(args=None if args is None else list(args), prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        told = error.__cause__ if isinstance(error.__cause__, KeyboardInterrupt) else error  # click wraps it
        _fail(str(told) or "Interrupted.", 130)
    except SpearError as error:
        _fail(f"Error: {error}")
    except ModuleNotFoundError as error:  # commands import heavy packages only when they need them
        if (line := explain(error)) is None:
            raise
        _fail(f"Error: {line}")
    except OSError as error:
        if error.errno in FULL:  # a write, which does not know the name of its file
            _fail(f"Error: {error.strerror}: free some space or use another disk, then run the command again.")
        if error.filename is None:  # no file: a bug or a pipe, not a folder that the user could fix
            raise
        _fail(f"Error: {error.strerror}: {error.filename}. Check the path, its permissions and the space left.")
    sys.exit(code if isinstance(code, int) else 0)


def explain_missing(error: ImportError, requirement: str) -> str:
    """The line for a package that is not installed; ``requirement`` brings it, such as ``"spear-envs[data]"``."""
    return f"a package is missing ({error}): pip install '{requirement}' brings it."


def _fail(line: str, code: int = 1) -> NoReturn:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    click.echo(show_text(line), err=True)
    sys.exit(code)
