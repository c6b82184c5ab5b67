"""The console through which all commands print with Rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from spear_sandbox.errors import show_text


class Console(rich.console.Console):  # noqa: TID251
    """Rich's console, safe for text of others: no markup or emoji unless a call asks for it, and no raw controls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text safe before it is measured."""
        return super().render_str(show_text(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make safe what was not a string; Rich's own controls stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(show_text(segment.text), segment.style)
