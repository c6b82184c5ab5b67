"""An MCP server to play with: a library that lends books. ``--http PORT`` serves over HTTP, else over stdio."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

BOOKS = {"Emma": "shelf 3", "Ulysses": "shelf 9"}
server: MCPServer = MCPServer("library", log_level="ERROR")
lent: dict[str, int] = {}


@server.tool()
def find(title: Annotated[str, Field(description="The book's title.")]) -> str:
    """Says where a book is."""
    if title not in BOOKS:
        raise ToolError(f"no book {title!r}")
    return f"{title} is lent out" if title in lent else f"{title} is on {BOOKS[title]}"


@server.tool()
def borrow(title: str, days: int = 7) -> str:
    """Lends a book."""
    lent[title] = days
    return f"{title}: {days} days, of {len(lent)} lent"


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("the roof fell in", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def wait(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "x" * 20_000


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("no card, no entry")
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run("stdio")
