"""Run click commands; an error that a user can fix becomes one line instead of a traceback."""

from __future__ import annotations

import errno
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import click

from spear_sandbox.errors import SpearError, guard_logs, show_entry, show_text
from spear_sandbox.options import OPTION, list_fields, name_flag, name_parameter, strip_none
from spear_sandbox.web.listening import is_loopback

DEBUG = "SPEAR_DEBUG"
"""Environment variable; if set, an error shows its traceback."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk."""


def echo(message: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print safely, as all commands do; bytes go unchanged to files and pipes, for programs that read them."""
    stream = sys.stderr if err else sys.stdout
    if isinstance(message, bytes) and not stream.isatty():
        click.echo(message, nl=nl, err=err)  # noqa: TID251
        return
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
    click.echo(show_text(text), nl=nl, err=err)  # noqa: TID251


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
    guard_logs()
    sys.excepthook = lambda *error: echo("".join(traceback.format_exception(*error)), nl=False, err=True)
    try:
        code = command.main(args=None if args is None else list(args), prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        message = show_entry(error.format_message())
        error.format_message = lambda: message  # type: ignore[method-assign]
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        text = error.__cause__ if isinstance(error.__cause__, KeyboardInterrupt) else error  # click wraps it
        _fail(str(text) or "Interrupted.", 130)
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
    """Write the line for a missing package, which ``requirement`` brings, such as ``"spear-envs[data]"``."""
    return f"a package is missing ({error}): pip install '{requirement}' brings it."


def _fail(line: str, code: int = 1) -> NoReturn:
    if os.environ.get(DEBUG):
        echo(traceback.format_exc(), nl=False, err=True)
    echo(show_entry(line), err=True)
    sys.exit(code)


F = TypeVar("F", bound=Callable[..., object])


class Number(click.FloatRange):
    """A finite number in a range; click's own takes NaN, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class FilePath(click.Path):
    """A path, with click's options. An empty text, of a variable that is not set, is not the current folder.

    Shells leave the tilde of ``--out=~/runs``, which would be a folder of that name here.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty text is not a path: is a variable of the shell not set?", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


def take_address(port: int) -> Callable[[F], F]:
    """Give a command ``--host`` and ``--port``, which is ``port`` by default."""

    def take(command: F) -> F:
        take_port = click.option("--port", type=click.IntRange(0, 65535), default=port, help="Port; 0 for a free one.")
        return click.option("--host", default="127.0.0.1", help="Address to listen on.")(take_port(command))

    return take


def warn_of_open_address(url: str, host: str, token: str | None, *, allows: str, variable: str) -> None:
    """Warn of a service that other machines can reach and that does not ask for a token.

    ``allows`` says what anyone who reaches it may do, and ``variable`` names the environment variable of the token.
    """
    if not is_loopback(host) and token is None:
        echo(f"Warning: anyone who reaches {url} may {allows}; set {variable} to ask for a token.", err=True)


def take_options(*kinds: type, leave: Collection[str] = (), **defaults: Any) -> Callable[[F], F]:
    """Give a command the options of dataclasses, except for those of the fields ``leave``.

    ``defaults`` replace those of their fields in this command.
    """

    def take(command: F) -> F:
        for kind in reversed(kinds):
            hints = get_type_hints(kind)
            for item in reversed(list_fields(kind)):
                if item.name in leave:
                    continue
                default = defaults.get(item.name, item.default)
                command = _declare(item, hints[item.name], default)(command)
                command.__click_params__[-1].section = item.metadata[OPTION]["section"]  # type: ignore[attr-defined]
        return command

    return take


def _declare(item: Field[Any], hint: Any, default: Any) -> Callable[[F], F]:
    about, kind = item.metadata[OPTION], strip_none(hint)
    known: dict[str, Any] = {"help": about["meaning"], "metavar": about["metavar"]}
    if kind is bool:
        return click.option(name_flag(item), name_parameter(item), is_flag=True, default=default, **known)
    value = default.value if isinstance(default, Enum) else default
    if value is not None:
        known |= {"default": str(value) if about["choices"] else _divide(value, about["unit"]), "show_default": True}
    bounds = {"min": about["at_least"] if about["above"] is None else about["above"], "max": about["at_most"]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        known["type"] = click.Choice([member.value for member in kind])
    elif about["choices"]:
        known["type"] = click.Choice([str(choice) for choice in about["choices"]])
    elif kind is int and not set(bounds.values()) - {None}:
        known["type"] = int
    elif kind is int:
        known["type"] = click.IntRange(**bounds)
    elif kind is float:
        known["type"] = Number(**bounds, min_open=about["above"] is not None)
    return click.option(name_flag(item), name_parameter(item), **known)


def _divide(value: Any, unit: int) -> Any:
    return value if unit == 1 else value // unit


def format_seconds(seconds: float) -> str:
    """Format a time for people: seconds, minutes, hours or days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
