"""A retriever as a tool of the Model Context Protocol, by the official package ``mcp``."""

from __future__ import annotations

import asyncio
import threading
from importlib.metadata import version
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import mend_text
from spear_envs.retrieval.retriever import (
    DEFAULT_TOPK,
    MAX_CHARACTERS,
    MAX_TOPK,
    Retriever,
    RetrieverFault,
    find_documents,
)


class Passage(BaseModel):
    """One search result."""

    id: str
    title: str
    text: str


def make_mcp_server(retriever: Retriever) -> MCPServer[Any]:
    """Make a server of one tool, ``search``; any number of clients may call it at once."""
    server: MCPServer[Any] = MCPServer("spear-retriever", version=version("spear-envs"), log_level="WARNING")
    lock = threading.Lock()  # retrievers take one call at a time

    def find(query: str, topk: int) -> list[dict[str, Any]]:
        with lock:
            return find_documents(retriever, query, topk)

    @server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
    async def search(
        query: Annotated[
            str, Field(description="What to look for, in words.", min_length=1, max_length=MAX_CHARACTERS)
        ],
        topk: Annotated[int, Field(description="How many passages to return.", ge=1, le=MAX_TOPK)] = DEFAULT_TOPK,
    ) -> list[Passage]:
        """Search the corpus. Returns passages, best first."""
        if query.isspace():
            raise ToolError("the query is blank: give words to look for.")
        try:
            documents = await asyncio.to_thread(find, query, topk)
        except (SpearError, RetrieverFault) as error:
            raise ToolError(str(error)) from error
        return [_show(document) for document in documents]

    return server


def _show(document: dict[str, Any]) -> Passage:
    """Return a passage as the tool's answer has it: its first line is the title."""
    title, _, text = mend_text(document["contents"]).partition("\n")
    return Passage(id=mend_text(str(document["id"])), title=title.strip().strip('"'), text=text)
