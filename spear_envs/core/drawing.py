"""Texts as pictures, so that wrappers can record videos of every environment."""

from __future__ import annotations

import textwrap
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 640, 480
COLUMNS, ROWS, ROW_HEIGHT, MARGIN = 92, 30, 15, 12
PAPER, INK, FAINT = (250, 250, 247), (25, 25, 30), (130, 130, 135)


@lru_cache(maxsize=1)
def _load_font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(12)


def draw_text(heading: str, text: str) -> np.ndarray:
    """Draw a heading and a wrapped text; what does not fit at the end is left out.

    Returns:
        uint8 [480, 640, 3].
    """
    rows = [row for line in text.splitlines() for row in textwrap.wrap(line, COLUMNS) or [""]]
    if len(rows) > ROWS:
        rows = [*rows[: ROWS - 1], f"… {len(rows) - ROWS + 1} more lines"]
    picture = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen = ImageDraw.Draw(picture)
    for place, row in enumerate([heading[:COLUMNS], *rows]):
        # A policy may have written lone surrogates, which the font lacks.
        shown = row.encode("utf-8", "replace").decode()
        pen.text((MARGIN, MARGIN // 2 + place * ROW_HEIGHT), shown, FAINT if place == 0 else INK, _load_font())
    return np.asarray(picture)
