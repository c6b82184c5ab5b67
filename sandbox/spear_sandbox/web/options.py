"""Options of all commands that serve, and numbers of all commands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from spear_sandbox.console import echo
from spear_sandbox.web.listening import is_loopback

F = TypeVar("F", bound=Callable[..., object])


class Number(click.FloatRange):
    """A finite number in a range; click's own takes NaN, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


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
