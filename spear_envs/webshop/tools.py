"""Searches and clicks as calls of tools."""

from __future__ import annotations

from typing import Annotated

from spear_envs.core.tools import make_tool


@make_tool(r"search\[(?P<query>.*)\]")
def search(query: Annotated[str, "Words to look for."]) -> str:
    """Finds products and returns the first page of them."""
    return f"search[{query}]"


@make_tool(r"click\[(?P<target>.*)\]")
def click(
    target: Annotated[str, "Name of what the page offers: a product's code, the value of an option, a button."],
) -> str:
    """Clicks on something that the page offers and returns the page that follows."""
    return f"click[{target}]"


TOOLS = (search, click)
"""The two kinds of actions as functions."""
