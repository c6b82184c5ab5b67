"""The seven 16x16 tiles: our own, drawn here pixel by pixel, or those of an installed gym-sokoban wheel."""

from __future__ import annotations

import importlib.util
import io
from enum import Enum
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError, choose_member

TILE = 16
NAMES = ("wall", "floor", "box_target", "box_on_target", "box", "player", "player_on_target")
"""gym-sokoban's names of the tiles, in the order of the cell codes 0 to 6."""

Image = npt.NDArray[np.uint8]


class Sprites(str, Enum):
    """The tiles of the pictures. The choice never depends on installed packages."""

    DRAWN = "drawn"
    """The tiles of this module."""
    GYM_SOKOBAN = "gym-sokoban"
    """gym-sokoban 0.0.6's PNG files, read from its installed wheel without importing it."""


_PALETTE = {
    ".": (233, 224, 203),  # floor
    ",": (221, 210, 186),  # floor, grain
    "#": (94, 104, 128),  # brick
    "+": (124, 135, 160),  # brick, lit edge
    "=": (54, 60, 78),  # mortar
    "o": (214, 48, 66),  # target ring
    "r": (247, 196, 196),  # target ground
    "R": (240, 134, 142),  # target ground, stood on
    "B": (150, 98, 46),  # crate, frame
    "b": (205, 149, 84),  # crate, planks
    "l": (224, 176, 113),  # crate, lit planks
    "d": (92, 56, 24),  # crate, outline
    "G": (30, 110, 58),  # crate at home, outline
    "g": (72, 176, 96),  # crate at home, planks
    "h": (128, 214, 140),  # crate at home, lit
    "w": (255, 255, 255),  # check mark
    "y": (250, 200, 40),  # cap
    "k": (38, 34, 48),  # visor, pupils, shoes
    "s": (248, 200, 158),  # skin
    "u": (38, 104, 200),  # jacket
    "v": (24, 70, 148),  # jacket, shade
    "t": (58, 62, 92),  # trousers
}

_WALL = """\
++++++=+++++++++
+#####=+########
+#####=+########
+#####=+########
================
++=+++++++++=+++
##=+########=+##
##=+########=+##
##=+########=+##
================
++++++=+++++++++
+#####=+########
+#####=+########
+#####=+########
================
++=+++++++++=+++
"""
_FLOOR = """\
,,,,,,,,,,,,,,,,
,...............
,...............
,...............
,.....,.........
,...............
,...............
,...........,...
,...............
,...,...........
,...............
,...............
,.........,.....
,...............
,...............
,...............
"""
_TARGET = """\
,,,,,,,,,,,,,,,,
,.oooooooooooo..
,oorrrrrrrrrroo.
,orrrrrrrrrrrro.
,orrrrroorrrrro.
,orrrroooorrrro.
,orrroooooorrro.
,orroooooooorro.
,orroooooooorro.
,orrroooooorrro.
,orrrroooorrrro.
,orrrrroorrrrro.
,orrrrrrrrrrrro.
,oorrrrrrrrrroo.
,.oooooooooooo..
,...............
"""
_LIT_TARGET = """\
,,,,,,,,,,,,,,,,
,.oooooooooooo..
,ooRRRRRRRRRRoo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,oRRRRRRRRRRRRo.
,ooRRRRRRRRRRoo.
,.oooooooooooo..
,...............
"""
_BOX = """\
,,,,,,,,,,,,,,,,
,dddddddddddddd.
,dlbbbbbbbbbbBd.
,dbddddddddddBd.
,dbdBbllllbBdBd.
,dbdBBblllBBdBd.
,dbdbBBblBBbdBd.
,dbdlbBBBBbldBd.
,dbdllbBBbbldBd.
,dbdlbBBBBbldBd.
,dbdbBBbbBBbdBd.
,dbdBBbbbbBBdBd.
,dbddddddddddBd.
,dBBBBBBBBBBBBd.
,dddddddddddddd.
,...............
"""
_BOX_ON_TARGET = """\
,,,,,,,,,,,,,,,,
,GGGGGGGGGGGGGG.
,GhhhhhhhhhhhhG.
,GhGGGGGGGGGGhG.
,GhGggggggggGhG.
,GhGgggggggwwhG.
,GhGggggggwwwhG.
,GhGwggggwwwGhG.
,GhGwwggwwwgGhG.
,GhGwwwwwwggGhG.
,GhGgwwwwgggGhG.
,GhGggwwggggGhG.
,GhGGGGGGGGGGhG.
,GhhhhhhhhhhhhG.
,GGGGGGGGGGGGGG.
,...............
"""
_FIGURE = """\
~~~~~~~~~~~~~~~~
~~~~~~~~~~~~~~~~
~~~~~yyyyyy~~~~~
~~~~yyyyyyyy~~~~
~~~~kkkkkkkkk~~~
~~~~sssssssss~~~
~~~~sskssskss~~~
~~~~sssssssss~~~
~~~~~sssssss~~~~
~~~~uuuuuuuu~~~~
~~~uuvuuuuvuu~~~
~~~suvuuuuvus~~~
~~~~~tttttt~~~~~
~~~~~tt~~tt~~~~~
~~~~kkk~~kkk~~~~
~~~~~~~~~~~~~~~~
"""


def _stand_on(ground: str) -> str:
    """Draw the figure over a ground."""
    return "".join(below if mark == "~" else mark for mark, below in zip(_FIGURE, ground, strict=True))


@lru_cache(maxsize=1)
def draw_tiles() -> Image:
    """Draw our own tiles: read-only uint8 of shape (7, 16, 16, 3), in the order of ``NAMES``."""
    drawings = (_WALL, _FLOOR, _TARGET, _BOX_ON_TARGET, _BOX, _stand_on(_FLOOR), _stand_on(_LIT_TARGET))
    tiles = np.array([[[_PALETTE[mark] for mark in row] for row in rows.splitlines()] for rows in drawings], np.uint8)
    tiles.flags.writeable = False
    return tiles


@lru_cache(maxsize=1)
def read_peer_tiles() -> Image:
    """Read gym-sokoban's tiles from its installed wheel: read-only uint8 of shape (7, 16, 16, 3).

    Raises:
        SpearError: the wheel is not installed or lacks a file.
    """
    from PIL import Image as Picture

    mend = "install it with: pip install --no-deps gym-sokoban==0.0.6 (the wheel), or use sprites='drawn'"
    spec = importlib.util.find_spec("gym_sokoban")  # finds the folder without importing
    if spec is None or not spec.submodule_search_locations:
        raise SpearError(f"sprites='gym-sokoban' needs gym-sokoban, which is not installed: {mend}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "envs" / "surface"
    tiles = []
    for name in NAMES:
        try:
            data = (folder / f"{name}.png").read_bytes()
        except OSError as error:
            raise SpearError(f"the installed gym-sokoban lacks {name}.png: {mend}") from error
        tiles.append(np.asarray(Picture.open(io.BytesIO(data)).convert("RGB")))
    stacked = np.stack(tiles)
    stacked.flags.writeable = False
    return stacked


def load_tiles(sprites: Sprites | str) -> Image:
    """Return the tiles of a choice, shape (7, 16, 16, 3).

    Raises:
        SpearError: the choice is unknown, or the wheel is missing.
    """
    choice = choose_member(Sprites, sprites, "sprites")
    return draw_tiles() if choice is Sprites.DRAWN else read_peer_tiles()
