"""Prompt templates of Sokoban: ``default`` for language and vision models, ``compact`` for tiny text models."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser, TagParser
from spear_envs.core.prompts import IMAGE, PromptContext, StockTemplate
from spear_envs.sokoban.levels import compact_spaced
from spear_envs.sokoban.sprites import Sprites


class Modality(str, Enum):
    """The form in which the policy sees the board."""

    IMAGE = "image"
    """As a picture; the text has messages only."""
    TEXT = "text"
    """As symbols; observations are plain strings."""
    BOTH = "both"
    """As a picture and as symbols."""


_RULES = """\
You are playing Sokoban. You stand in a room with walls and push boxes; the puzzle is solved as soon as every box \
stands on a target.
- A move takes you one cell up, down, left or right.
- Moving against a box pushes it one cell further, provided that the cell behind it is floor or an empty target. \
You push one box at a time.
- Boxes cannot be pulled. A box that gets stuck in a corner or along a wall away from the targets is lost, so think \
ahead before you push.
- A move against a wall, or against a box that cannot be pushed, changes nothing but still costs a turn."""

_SYMBOLS = """\
The board is written row by row, one symbol for each cell:
# wall
_ floor
O target, empty
X box, not on a target yet
\u221a box on a target
P you
S you, standing on a target"""

_PICTURES = {
    Sprites.DRAWN: """\
The board is shown as a picture made of square tiles:
- wall: grey-blue bricks
- floor: a plain sand-coloured tile
- target, empty: a pink square with a red border and a red diamond in it
- box, not on a target yet: a brown wooden crate
- box on a target: a green crate with a white check mark
- you: a small figure with a yellow cap and a blue jacket
- you, standing on a target: the same figure on a pink square with a red border""",
    Sprites.GYM_SOKOBAN: """\
The board is shown as a picture made of square tiles:
- wall: orange-brown bricks
- floor: plain black
- target, empty: black with a thin red frame and a red dot in the middle
- box, not on a target yet: a yellow crate with an orange frame and an orange cross
- box on a target: the yellow crate with a thick red frame and a red dot
- you: a green creature with two horns
- you, standing on a target: the green creature with a thin red frame behind it""",
}


@dataclass(frozen=True)
class SokobanTemplate(StockTemplate):
    """Rules, legend, the last turns (with text), the board, the words to choose from.

    ``<image>`` marks the picture's place, once a turn. With pictures alone there is no history, since earlier boards
    could not be shown.

    Args:
        sprites: tiles that the legend describes.
        moves_per_turn: most moves of a response.
    """

    modality: Modality = Modality.BOTH
    sprites: Sprites = Sprites.DRAWN
    moves_per_turn: int = 1
    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "default"
    token_pattern: str | None = None

    def render(self, context: PromptContext) -> str:
        """Render rules, legend, task, the last turns and the board."""
        parts = [_RULES]
        if self.modality is not Modality.TEXT:
            parts.append(_PICTURES[self.sprites])
        if self.modality is not Modality.IMAGE:
            parts.append(_SYMBOLS)
        parts.append(f"Your task: {context.instruction} You have {context.max_turns} turns.")
        if context.history and self.modality is not Modality.IMAGE:
            first = context.turn - len(context.history)
            lines = [f"Turn {first + i}\n{seen}\nYou played: {move or '(nothing)'}"
                     for i, (seen, move) in enumerate(context.history)]  # fmt: skip
            parts.append("What happened lately:\n" + "\n".join(lines))
        parts.append(self.follow_up(context))
        return "\n\n".join(parts)

    def follow_up(self, context: PromptContext) -> str:
        """Render the board, the words, and the form of the response."""
        shown = [f"Turn {context.turn} of {context.max_turns}. The board now:"]
        if self.modality is not Modality.TEXT:
            shown.append(IMAGE)
        if context.observation:
            shown.append(context.observation)
        if self.moves_per_turn == 1:
            choice = "Choose your next move: up, down, left or right."
        else:
            choice = f"Choose your next moves, up to {self.moves_per_turn}, joined by commas: up, down, left or right."
        return "\n".join(shown) + f"\n\n{choice}\n{self.parser.hint}"


@dataclass(frozen=True)
class CompactBoardTemplate(StockTemplate):
    """The inner cells of the board alone, for tiny models: 16 symbols for a 6x6 room.

    The game needs no memory and the border is always wall, so both history and border are left out. Responses have no
    thoughts. ``token_pattern`` makes the fixed text on each side of a move one token.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "compact"
    token_pattern: str | None = "<think></think><action>|</action>|up|down|left|right|[#_O\u221aXPS]"

    def render(self, context: PromptContext) -> str:
        """Render the cells inside the border, row by row, without separators.

        Raises:
            SpearError: the observation has no board text.
        """
        board = compact_spaced(context.observation.partition("\n\n")[0])
        inner = "".join([row[1:-1] for row in board.split("\n")[1:-1]])
        if not inner:
            raise SpearError(
                "the compact template writes the board as symbols, and modality='image' shows none: "
                "use modality='text' or 'both'"
            )
        return inner

    def follow_up(self, context: PromptContext) -> str:
        """As :meth:`render`."""
        return self.render(context)

    def respond(self, action: str, think: str = "") -> str:
        """Write the action in the form that the environment reads, with empty thoughts."""
        return self.parser.respond(action)
