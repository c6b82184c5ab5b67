"""A text space of any strings, for responses and observations."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import create_shared_memory

from spear_envs.core.parsing import mend_text
from spear_envs.core.rewards import RewardTerms

if TYPE_CHECKING:
    from PIL import ImageFont

ACTION_LENGTH = 2**24
"""Most characters of a response: far more than models write, since a long response must not be an error."""

OBSERVATION_LENGTH = 2**20
"""Most characters of an observation, unless an environment sets a lower bound."""

# sample() draws from these: blanks, line breaks, mark-up, other scripts and an emoji, as models write. contains() does
# not use them.
_SAMPLED = "\n\t" + "".join(map(chr, range(32, 127))) + "äéßñЖяλπ漢字かな한글ابहि√→😀"
_SAMPLED_LENGTH = 64


class PermissiveText(spaces.Text):
    """All strings of ``min_length`` to ``max_length`` characters, whatever the characters.

    ``gymnasium.spaces.Text`` has an alphabet, by default 62 letters and digits, without blanks, line breaks and other
    scripts. ``sample()`` gives short strings (at most 64 characters above ``min_length``), the same for the same seed
    on every machine.
    """

    def __init__(
        self,
        max_length: int = OBSERVATION_LENGTH,
        *,
        min_length: int = 0,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(max_length, min_length=min_length, charset=_SAMPLED, seed=seed)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string of a permitted length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random string; ``mask`` and ``probability`` as in ``gymnasium.spaces.Text``."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        longest = min(self.max_length, self.min_length + _SAMPLED_LENGTH)
        length = int(self.np_random.integers(self.min_length, longest + 1))
        letters = self.character_list
        return "".join(letters[i] for i in self.np_random.integers(len(letters), size=length))

    @property
    def is_np_flattenable(self) -> bool:
        """Return False: an unbounded alphabet does not fit into fixed-size arrays."""
        return False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PermissiveText)
            and self.min_length == other.min_length
            and self.max_length == other.max_length
        )

    __hash__ = None  # type: ignore[assignment]  # like every gymnasium space

    def __repr__(self) -> str:
        return f"PermissiveText({self.min_length}, {self.max_length})"


_NONE = -1
"""Code point that stands for a character beyond the end of a flattened text."""


@flatdim.register(PermissiveText)
def _count_places(space: PermissiveText) -> int:
    return space.max_length


@flatten_space.register(PermissiveText)
def _flatten_space(space: PermissiveText) -> spaces.Box:
    return spaces.Box(_NONE, sys.maxunicode, (space.max_length,), np.int32)


@flatten.register(PermissiveText)
def _flatten(space: PermissiveText, x: str) -> np.ndarray:  # type: ignore[misc]
    """Return code points; gymnasium's form for texts has places for the alphabet alone."""
    places = np.full(space.max_length, _NONE, np.int32)
    places[: len(x)] = np.frombuffer(x.encode("utf-32-le", "surrogatepass"), "<i4")
    return places


@unflatten.register(PermissiveText)
def _unflatten(space: PermissiveText, x: np.ndarray) -> str:  # type: ignore[misc]
    return x[x != _NONE].astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")


@create_shared_memory.register(PermissiveText)
def _refuse_shared_memory(space: PermissiveText, n: int = 1, ctx: Any = None) -> Any:
    """Refuse: gymnasium's form for texts would replace every character outside the alphabet."""
    raise CustomSpaceError(f"{space} cannot be in shared memory: pass shared_memory=False to the vector environment.")


class StepInfo(TypedDict):
    """Keys of ``info``; environments may add others."""

    task_id: str
    """Stable id of the task, such as ``sokoban-v1/6x6-1/train/00000017``."""
    task_fingerprint: str
    """SHA-256 (hex) of the task set: equal fingerprints, same tasks."""
    subtask: str
    """Kind of task, for reports of success."""
    instruction: str
    """The task in words."""
    turn: int
    """Responses taken so far: 0 after ``reset``."""
    admissible_actions: list[str] | None
    """Actions that the environment would accept now, in plain form; None if they cannot be listed."""
    anchor: Hashable
    """Key of the state: steps of a group with equal keys start from the same state (GiGPO)."""
    action: str
    """The action that was played, in the environment's canonical form; empty if nothing was."""
    format_ok: bool
    """The last response was well formed."""
    native_thought: bool
    """The last response had a thought that a reasoning model writes by itself, see ``cut_native_thought``."""
    action_ok: bool
    """The last action did something."""
    tool_calls: int
    """Tool calls so far."""
    won: bool
    """The task is solved."""
    score: float
    """The benchmark's own score so far, in [0, 1]."""
    reward_terms: RewardTerms
    """Raw reward terms so far."""
    fault: str | None
    """Kind of the fault that ended the episode, which is not the policy's; None without a fault."""


INFO_KEYS: frozenset[str] = frozenset(StepInfo.__annotations__)
"""Keys of every ``info``."""

WIDTH, HEIGHT = 640, 480
COLUMNS, ROWS, ROW_HEIGHT, MARGIN = 92, 30, 15, 12
PAPER, INK, FAINT = (250, 250, 247), (25, 25, 30), (130, 130, 135)


@lru_cache(maxsize=1)
def _load_font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(12)


def draw_text(heading: str, text: str) -> np.ndarray:
    """Draw a heading and a wrapped text; what does not fit at the end is left out.

    Returns:
        uint8 [480, 640, 3].
    """
    rows = [row for line in text.splitlines() for row in textwrap.wrap(line, COLUMNS) or [""]]
    if len(rows) > ROWS:
        rows = [*rows[: ROWS - 1], f"… {len(rows) - ROWS + 1} more lines"]
    from PIL import Image, ImageDraw  # 5 MB, which only pictures need

    picture = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen = ImageDraw.Draw(picture)
    for place, row in enumerate([heading[:COLUMNS], *rows]):
        # A policy may have written lone surrogates, which the font lacks.
        pen.text((MARGIN, MARGIN // 2 + place * ROW_HEIGHT), mend_text(row), FAINT if place == 0 else INK, _load_font())
    return np.asarray(picture)
