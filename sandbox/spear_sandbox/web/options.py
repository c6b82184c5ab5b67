"""Options that the commands of all services have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from spear_sandbox.web.listening import is_loopback

F = TypeVar("F", bound=Callable[..., object])


def take_address(port: int) -> Callable[[F], F]:
    """Give a command ``--host`` and ``--port``, which is ``port`` by default."""

    def take(command: F) -> F:
        asked = click.option("--port", type=click.IntRange(0, 65535), default=port, help="Port; 0 takes a free one.")(
            command
        )
        return click.option("--host", default="127.0.0.1", help="Address to listen on.")(asked)

    return take


def warn_of_open_address(url: str, host: str, token: str | None, *, allows: str, variable: str) -> None:
    """Say that others may use a service that other machines reach and that asks for no token.

    Args:
        url: of the service.
        host: it listens on.
        token: it asks for.
        allows: what whoever reaches it may do.
        variable: of the environment, which holds the token.
    """
    if not is_loopback(host) and token is None:
        click.echo(f"Warning: whoever reaches {url} may {allows}; set {variable} to ask for a token.", err=True)
