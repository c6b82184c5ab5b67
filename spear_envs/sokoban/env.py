"""The environment ``spear/Sokoban-v1``."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from spear_envs.core.env import ActionResult, CommonKeywords, SpearEnv
from spear_envs.core.errors import SpearError, choose_member, require_whole
from spear_envs.core.parsing import PeerParser, make_parser
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Criterion
from spear_envs.core.spaces import PermissiveText
from spear_envs.core.tasks import Task, TaskSet, check_split
from spear_envs.core.tools import Tool
from spear_envs.sokoban.engine import (
    MOVE_REWARD,
    Board,
    RememberingParser,
    find_tools,
    paint_board,
    read_moves,
)
from spear_envs.sokoban.generate import STATE_BUDGET, Recipe, find_solution, parse_room
from spear_envs.sokoban.levels import WALL, WORDS, Level, LevelError, SplitBy, format_spaced
from spear_envs.sokoban.prompts import CompactBoardTemplate, Modality, SokobanTemplate, VerlAgentBoardTemplate
from spear_envs.sokoban.sprites import TILE, Image, Sprites, load_tiles
from spear_envs.sokoban.tasks import (
    ALL,
    FILE_SPLITS,
    OPTIMUM_BUDGET,
    make_file_set,
    make_level_set,
    make_task_set,
    read_level,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

TEXT_LENGTH = 2_048
"""Most characters of an observation's text, unless a larger board in spaced form and a message need more."""
MESSAGE_LENGTH = 512
PAPER_TURNS = 15
UNKNOWN_MOVES = 1_000
"""Moves for a level that the solver cannot finish."""
Observation = str | dict[str, Any]

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"paper": {"shortest": 1, "longest": 15, "sprites": "gym-sokoban", "modality": "image"}}
)
"""Defaults of keywords by preset. ``paper``: levels close to those of the paper's Sokoban table, with its tiles and
pictures alone."""


class SokobanEnv(SpearEnv[Observation]):
    """Sokoban for language and vision models; one response is one move (or ``moves_per_turn``).

    Observations are ``{"image": uint8 (16*height, 16*width, 3), "text": board}``. With ``modality="image"`` the text
    has messages only; with ``modality="text"`` the observation is the text alone. The problem of a malformed response
    follows a blank line below the board. ``info`` has the keys of ``StepInfo`` and ``moved`` and ``pushed`` (in
    the last turn), ``optimal`` (least moves of the level, 0 if unknown) and, with ``diagnostics``, ``solvable`` (False
    once the position is known to be lost). The native reward
    is gym-sokoban's; ``tool_calls`` counts the moves that moved something.

    Args:
        room: ``"HxW"`` with the border, 5x5 to 10x10.
        boxes: 1 to 4.
        shortest, longest: bounds on the optimal number of moves, by default 3 and 12.
        split: ``"train"`` (default), ``"valid"`` or ``"test"``.
        split_by: ``"room"`` (held-out walls and targets) or ``"level"``, see :class:`SplitBy`.
        preset: ``"paper"`` or None; keywords that are given win over the preset.
        level: rows joined by newlines, in our symbols or XSB: the task set is exactly this level, its split is
            ``"level"``, and the keywords above are unused.
        levels: a level file or a folder with levels (Boxoban's ``.txt``, XSB, SOK) instead of generated ones. The split
            is ``"all"`` by default; folders of that name make the others, else the content of each level.
        number: of one level in that file: as in its ``; 12``, else counted from 1.
        sprites: ``"drawn"`` (default) or ``"gym-sokoban"``.
        text_format: ``"plain"`` or ``"spaced"`` (each cell as blank, symbol, blank, tab).
        modality: ``"both"`` (default), ``"image"`` or ``"text"``.
        max_turns: responses after which the episode is truncated; by default 15 where a shortest solution fits, else
            twice what it takes (1,000 moves if it is unknown).
        moves_per_turn: most moves of one response.
        diagnostics: put ``solvable`` into ``info`` (a search at every step).
        common: keywords of every environment, see :class:`CommonKeywords`.

    Raises:
        SpearError: a keyword has an invalid value, or the sprites are not installed.
        LevelError: the level cannot be played, or the bounds allow none.
    """

    draws = True
    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["rgb_array", "ansi", "human"],
        "render_fps": 4,
    }
    templates: Mapping[str, PromptTemplate] = MappingProxyType(  # type: ignore[misc]
        {"default": SokobanTemplate(), "verl_agent": VerlAgentBoardTemplate(), "compact": CompactBoardTemplate()}
    )

    splits: tuple[str, ...] = SpearEnv.splits  # type: ignore[misc]
    tools: tuple[Tool, ...] = find_tools(1)  # type: ignore[misc]
    peer_parser = PeerParser(words=(*WORDS, "still"))

    def __init__(
        self,
        room: str = "6x6",
        boxes: int = 1,
        shortest: int | None = None,
        longest: int | None = None,
        split: str | None = None,
        split_by: str = "room",
        preset: str | None = None,
        level: str | None = None,
        levels: str | os.PathLike[str] | None = None,
        number: int | None = None,
        sprites: str | None = None,
        text_format: str = "plain",
        modality: str | None = None,
        max_turns: int | None = None,
        moves_per_turn: int = 1,
        diagnostics: bool = False,
        **common: Unpack[CommonKeywords],
    ) -> None:
        values = _read_preset(preset)
        self.sprites = choose_member(Sprites, sprites or values.get("sprites", "drawn"), "sprites")
        self.modality = choose_member(Modality, modality or values.get("modality", "both"), "modality")
        if text_format not in ("plain", "spaced"):
            raise SpearError(f"text_format={text_format!r} is not valid: choose 'plain' or 'spaced'.")
        self.text_format = text_format
        self.moves_per_turn = require_whole("moves_per_turn", moves_per_turn, 1)
        self.diagnostics = bool(diagnostics)
        by = choose_member(SplitBy, split_by, "split_by")
        if level is not None or levels is not None or number is not None:
            opened = _open_levels(level, levels, number, split, by)
            self.splits = opened.splits
        else:
            recipe = Recipe(
                *parse_room(room),
                require_whole("boxes", boxes, 1),
                require_whole("shortest", values.get("shortest", 3) if shortest is None else shortest, 1),
                require_whole("longest", values.get("longest", 12) if longest is None else longest, 1),
                by,
            )
            tasks = make_task_set(recipe, check_split("train" if split is None else split, self.splits))
            opened = _Opened(tasks, recipe.height, recipe.width, self.splits, recipe.longest)
        self._is_limited = max_turns is not None
        if max_turns is None:
            max_turns = self._choose_turns(opened.longest)
        super().__init__(
            opened.tasks,
            max_turns=max_turns,
            parser=lambda form: RememberingParser(make_parser(form)),
            observation_space=make_observation_space(opened.height, opened.width, self.modality),
            **common,
        )
        if self._peer and self.moves_per_turn != 1:
            raise SpearError("on_malformed='peer' plays one move a turn: leave moves_per_turn at 1.")
        self._size = opened.height, opened.width
        self._is_measured = opened.longest is not None
        self._warn_if_short(opened.longest, "some levels")
        self.tools = find_tools(self.moves_per_turn)
        parser = make_parser(self.response_format)
        self.templates = MappingProxyType(
            {
                "default": SokobanTemplate(self.modality, self.sprites, self.moves_per_turn, parser),
                "verl_agent": VerlAgentBoardTemplate(parser, modality=self.modality),
                "compact": CompactBoardTemplate(parser),
            }
        )
        needs_picture = self.modality is not Modality.TEXT or self.render_mode == "rgb_array"
        self.tiles = load_tiles(self.sprites) if needs_picture else None
        self._board: Board | None = None
        self._optimal: int | None = None

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        level = read_level(task.content["level"])
        if self._board is None:
            self._board = Board(level, self.tiles)
        else:
            self._board.load(level)
        self._optimal = task.content["optimal"]
        if not self._is_limited:
            self.max_turns = self._choose_turns(self._optimal)
        elif not self._is_measured:
            self._warn_if_short(self._optimal, task.id)

    def _warn_if_short(self, optimal: int | None, what: str) -> None:
        needed = -(-(optimal or 1) // self.moves_per_turn)
        if needed > self.max_turns:
            gym.logger.warn(f"max_turns={self.max_turns}: {what} cannot be won, which may take {needed} turns")

    def _choose_turns(self, optimal: int | None) -> int:
        if optimal is None:
            return -(-UNKNOWN_MOVES // self.moves_per_turn)
        needed = -(-optimal // self.moves_per_turn)
        return PAPER_TURNS if needed <= PAPER_TURNS else 2 * needed

    @property
    def board(self) -> Board:
        """Return the board being played."""
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        assert self._board is not None
        return self._board

    def _act(self, action: str) -> ActionResult:
        moves = read_moves(action, self.moves_per_turn)
        board = self._board
        assert board is not None
        reward = 0.0
        moved = pushed = 0
        for code in moves.codes:
            reward += board.step(code)
            moved += board.moved
            pushed += board.pushed
            if board.won:
                break
        if not moves.codes:
            reward = MOVE_REWARD
        return ActionResult(
            moved > 0,
            reward,
            board.won,
            message="" if self._peer else moves.problem,
            tool_calls=moved,
            details=self._details(moved > 0, pushed > 0),
            action=moves.words,
        )

    def _malformed(self, problem: str) -> ActionResult:
        return super()._malformed(problem)._replace(native_reward=MOVE_REWARD)

    def _details(self, moved: bool = False, pushed: bool = False) -> dict[str, Any]:
        details: dict[str, Any] = {"moved": moved, "pushed": pushed, "optimal": self._optimal or 0}
        if self.diagnostics:
            details["solvable"] = self._may_be_won()
        return details

    def criteria(self) -> list[Criterion]:
        """Return the number of boxes on targets, and how many are needed."""
        board = self.board
        return [Criterion("boxes on targets", board.won, str(board.boxes), str(board.on_target))]

    def _observe(self, message: str) -> Observation:
        board = self._board
        assert board is not None
        text = "" if self.modality is Modality.IMAGE else board.text()
        if self.text_format == "spaced":
            text = format_spaced(text)
        if message:
            text = f"{text}\n\n{message}" if text else message
        if self.render_mode == "human":
            self._print(message)
        if self.modality is Modality.TEXT:
            return text
        return {"image": self._frame(), "text": text}

    def _frame(self) -> Image:
        """Return the picture in the size of the set's largest level, with walls around a smaller one."""
        frame = self.board.frame()
        height, width = (side * TILE for side in self._size)
        if frame.shape[:2] == (height, width):
            return frame
        assert self.tiles is not None
        full = np.tile(self.tiles[WALL], (*self._size, 1))
        full[: frame.shape[0], : frame.shape[1]] = frame
        return full

    def _world(self) -> dict[str, Any]:
        return {"board": self.board.text()}

    def _restore_world(self, state: Mapping[str, Any]) -> None:
        self.board.load(read_level(state["board"]))

    def _anchor(self) -> str:
        assert self._board is not None
        # The board's text gives level, boxes and player.
        return hashlib.blake2b(self._board.text().encode(), digest_size=16).hexdigest()

    def _admissible(self) -> list[str]:
        return list(WORDS)

    def expert_plan(self) -> list[str]:
        """Return the actions of a shortest solution from the present board; empty if it is solved or lost, or if the
        search takes too many states.

        Each action holds up to ``moves_per_turn`` moves.
        """
        try:
            words, size = self._solve() or [], self.moves_per_turn
        except LevelError:  # a collection has levels that no solver finishes; the others are to be played
            return []
        return [", ".join(words[i : i + size]) for i in range(0, len(words), size)]

    def _solve(self, budget: int = STATE_BUDGET) -> list[str] | None:
        board = self.board
        return find_solution(Level(board.text(), board.height, board.width, tuple(board.codes)), budget)

    def _may_be_won(self) -> bool:
        try:
            return self._solve(OPTIMUM_BUDGET) is not None
        except LevelError:
            return True

    # ---------------------------------------------------------------- rendering

    def render(self) -> Image | str | None:
        """Return the native picture (``rgb_array``, as in observations) or the board's text (``ansi``), or print the
        board in colour (``human``, which also prints at every reset and step)."""
        if self.render_mode is None:
            gym.logger.warn("render() without a render mode: pass render_mode='rgb_array' to gym.make().")
            return None
        if self.render_mode == "rgb_array":
            return self._frame()
        if self.render_mode == "ansi":
            return self.board.text()
        self._print("")
        return None

    def _print(self, message: str) -> None:
        heading = f"{self.task.id}  turn {self.turn} of {self.max_turns}"
        sys.stdout.write("\n".join([heading, paint_board(self.board.text()), *([message] if message else [])]) + "\n\n")
        sys.stdout.flush()


class _Opened(NamedTuple):
    """A task set, and facts about it."""

    tasks: TaskSet
    height: int
    width: int
    splits: tuple[str, ...]
    longest: int | None
    """Most moves that a shortest solution takes, if that is known."""


def _open_levels(
    level: str | None, levels: str | os.PathLike[str] | None, number: int | None, split: str | None, by: SplitBy
) -> _Opened:
    """Open what ``level``, or ``levels`` and ``number``, name."""
    if number is not None and levels is None:
        raise SpearError(f"number={number!r} needs levels, the file with this level.")
    if levels is not None:
        if level is not None:
            raise SpearError("level and levels exclude each other: give one of them.")
        place = None if number is None else require_whole("number", number, 0)
        files = make_file_set(Path(os.path.expanduser(levels)), place, ALL if split is None else split, by)
        longest = None if place is None else files[0].content["optimal"]
        return _Opened(files, files.height, files.width, FILE_SPLITS, longest)
    if not isinstance(level, str):
        raise SpearError(f"level={level!r} is not valid: give the rows of the level as one text.")
    check_split("level" if split is None or split in SpearEnv.splits else split, ("level",))
    tasks = make_level_set(level)
    start = read_level(tasks[0].content["level"])
    return _Opened(tasks, start.height, start.width, ("level",), tasks[0].content["optimal"])


def make_observation_space(height: int, width: int, modality: Modality) -> spaces.Space[Any]:
    """Make the observation space of one environment."""
    text = PermissiveText(max(TEXT_LENGTH, 4 * height * (width + 1) + MESSAGE_LENGTH))
    if modality is Modality.TEXT:
        return text
    image = spaces.Box(0, 255, (height * TILE, width * TILE, 3), np.uint8)
    return spaces.Dict({"image": image, "text": text})


def _read_preset(preset: str | None) -> Mapping[str, Any]:
    if preset is None:
        return {}
    if preset not in PRESETS:
        known = ", ".join(map(repr, PRESETS))
        raise SpearError(f"preset={preset!r} is not valid: choose {known} or None.")
    return PRESETS[preset]
