"""Prompt templates of Sokoban: ``default`` and ``verl_agent`` for large models, ``compact`` for tiny text models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser, TagParser
from spear_envs.core.prompts import IMAGE, PromptContext, StockTemplate, VerlAgentTemplate
from spear_envs.sokoban.levels import compact_spaced, format_spaced
from spear_envs.sokoban.sprites import Sprites


class Modality(str, Enum):
    """The form in which the policy sees the board."""

    IMAGE = "image"
    """A picture; the text has messages only."""
    TEXT = "text"
    """Symbols; observations are plain strings."""
    BOTH = "both"
    """A picture and symbols."""


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


# The texts of VerlAgentBoardTemplate are verl-agent's to the letter: https://github.com/langfengQ/verl-agent,
# agent_system/environments/prompts/sokoban.py. Licensed under the Apache License, Version 2.0;
# Copyright 2025 Nanyang Technological University (NTU), Singapore and the verl-agent (GiGPO) team.
_VERL_AGENT_HEAD = """\

You are an expert agent operating in the Sokoban environment.

# Symbols and Their Meaning
- Walls (`#`): These block movement. You can't move through or push anything into walls.
- Floor (`_`): Open spaces where you can walk and move boxes.
- Targets (`O`): The spots where boxes need to go.
- Boxes (`X`): These are what you need to push onto the targets.
- Player (`P`): That's you! You'll move around the grid to push boxes.
- Box on Target (`\u221a`): A box successfully placed on a target.
- Player on Target (`S`): You standing on a target.

# Your Goal
Your goal is to push all the boxes (`X`) onto the target spots (`O`). Once all boxes are on the targets, you win!

# Rules
You can only push boxes. You can't pull them, so plan ahead to avoid getting stuck.
You can't walk through or push boxes into walls (`#`).
To avoid traps, do not push boxes into corners or against walls where they can't be moved again.

# Current Step
"""
_VERL_AGENT_TAIL = """\
Your admissible actions are ["up", "down", "left", "right"].

Now it's your turn to make a move (choose ONE action only for the current step).
You should first reason step-by-step about the current situation \u2014 observe the positions of boxes and targets, \
plan a path to push a box toward a target, and avoid traps like corners or walls. This reasoning process MUST be \
enclosed within <think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
"""
_VERL_AGENT_PICTURE = """\

You are an expert agent operating in the Sokoban environment. Your goal is to push all the boxes onto the target \
spots. Once all boxes are on the targets, you win!

# Rules
You can only push boxes. You can't pull them, so plan ahead to avoid getting stuck.
You can't walk through or push boxes into walls.
To avoid traps, do not push boxes into corners or against walls where they can't be moved again.

# Visual Elements in the Image:
Character: A small, green alien-like figure with two antennae and black eyes. It represents you.
Box: A yellow crate marked with an orange "X" across its front. It is the box you need to push.
Target: A black tile outlined in red, with a small red diamond shape in the center. It marks the destination where a \
box should be pushed.

# Current Step
Your current observation is shown in the image: <image>
"""


@dataclass(frozen=True)
class VerlAgentBoardTemplate(VerlAgentTemplate):
    """verl-agent's prompt: the spaced board and the last turns, or one text with the picture and without either."""

    modality: Modality = Modality.BOTH

    texts = (
        _VERL_AGENT_HEAD
        + """\
Your current observation is:
{current_observation}
"""
        + _VERL_AGENT_TAIL,
        _VERL_AGENT_HEAD
        + """\
Prior to this step, you have already taken {step_count} step(s). Below are the most recent {history_length} \
observations and the corresponding actions you took: {action_history}
You are now at step {current_step} and your current observation is:
{current_observation}
"""
        + _VERL_AGENT_TAIL,
    )

    def render(self, context: PromptContext) -> str:
        """Write the prompt of a turn; where the board is shown as a picture, that of every turn is the same."""
        if self.modality is not Modality.TEXT:
            return _VERL_AGENT_PICTURE + _VERL_AGENT_TAIL
        return super().render(context)

    def _show(self, context: PromptContext) -> PromptContext:
        context = super()._show(context)
        played = [(_space(seen), (moves or "still").capitalize()) for seen, moves in context.history]
        return replace(context, observation=_space(context.observation), history=played)


def _space(observation: str) -> str:
    """Return the board in its spaced form, as verl-agent shows it; a message below it stays."""
    board, gap, message = observation.partition("\n\n")
    return format_spaced(compact_spaced(board)) + gap + message


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
        """Render as :meth:`render` does."""
        return self.render(context)

    def respond(self, action: str, think: str = "") -> str:
        """Write the action in the form that the environment reads, with empty thoughts."""
        return self.parser.respond(action)
