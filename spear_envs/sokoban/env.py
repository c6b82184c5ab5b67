"""The environment ``spear/Sokoban-v1``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from spear_envs.core.criteria import Criterion
from spear_envs.core.env import ActionResult, SpearEnv
from spear_envs.core.errors import SpearError, choose_member, require_whole
from spear_envs.core.parsing import make_parser
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Schedule
from spear_envs.core.spaces import PermissiveText
from spear_envs.core.tasks import Task, TaskSet, check_split
from spear_envs.core.tools import Tool
from spear_envs.sokoban.engine import MOVE_REWARD, Board
from spear_envs.sokoban.generate import Recipe, parse_room
from spear_envs.sokoban.levels import WORDS, Level, SplitBy, format_spaced
from spear_envs.sokoban.moves import Moves, RememberingParser, find_peer_action, find_tools, read_like_peer, read_moves
from spear_envs.sokoban.prompts import CompactBoardTemplate, Modality, SokobanTemplate
from spear_envs.sokoban.search import find_solution
from spear_envs.sokoban.sprites import TILE, Image, Sprites, load_tiles
from spear_envs.sokoban.tasks import make_level_set, make_task_set, read_level
from spear_envs.sokoban.terminal import paint_board

TEXT_LENGTH = 2_048
"""Most characters of an observation's text: the largest board in spaced form and a message."""
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
    the last turn), ``optimal`` (least moves of the level) and, with ``diagnostics``, ``solvable``. The native reward
    is gym-sokoban's; ``tool_calls`` counts the moves that moved something.

    Args:
        room: ``"HxW"`` with the border, 5x5 to 10x10.
        boxes: 1 to 4.
        shortest, longest: bounds on the optimal number of moves, by default 3 and 12.
        split: ``"train"``, ``"valid"`` or ``"test"``.
        split_by: ``"room"`` (held-out walls and targets) or ``"level"``, see :class:`SplitBy`.
        preset: ``"paper"`` or None; keywords that are given win over the preset.
        level: rows joined by newlines: the task set is exactly this level, its split is ``"level"``, and the keywords
            above are unused.
        sprites: ``"drawn"`` (default) or ``"gym-sokoban"``.
        text_format: ``"plain"`` or ``"spaced"`` (each cell as blank, symbol, blank, tab).
        modality: ``"both"`` (default), ``"image"`` or ``"text"``.
        max_turns: responses after which the episode is truncated.
        moves_per_turn: most moves of one response.
        diagnostics: put ``solvable`` into ``info`` (a search at every step).
        response_format, reward, on_malformed, mu, tool_reward, render_mode: as in ``SpearEnv``.

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
        {"default": SokobanTemplate(), "compact": CompactBoardTemplate()}
    )

    splits: tuple[str, ...] = SpearEnv.splits  # type: ignore[misc]
    tools: tuple[Tool, ...] = find_tools(1)  # type: ignore[misc]

    def __init__(
        self,
        room: str = "6x6",
        boxes: int = 1,
        shortest: int | None = None,
        longest: int | None = None,
        split: str = "train",
        split_by: str = "room",
        preset: str | None = None,
        level: str | None = None,
        sprites: str | None = None,
        text_format: str = "plain",
        modality: str | None = None,
        max_turns: int = 15,
        moves_per_turn: int = 1,
        diagnostics: bool = False,
        response_format: str = "tags",
        reward: str = "spear",
        on_malformed: str = "explain",
        mu: str | float | Schedule = "none",
        tool_reward: str = "paper",
        render_mode: str | None = None,
    ) -> None:
        values = _read_preset(preset)
        self.sprites = choose_member(Sprites, sprites or values.get("sprites", "drawn"), "sprites")
        self.modality = choose_member(Modality, modality or values.get("modality", "both"), "modality")
        if text_format not in ("plain", "spaced"):
            raise SpearError(f"text_format={text_format!r} is not valid: choose 'plain' or 'spaced'.")
        self.text_format = text_format
        if level is not None and not isinstance(level, str):
            raise SpearError(f"level={level!r} is not valid: give the rows of the level as one text.")
        self.moves_per_turn = require_whole("moves_per_turn", moves_per_turn, 1)
        self.diagnostics = bool(diagnostics)
        if on_malformed == "peer" and moves_per_turn != 1:
            raise SpearError("on_malformed='peer' plays one move a turn: leave moves_per_turn at 1.")
        if level is not None:
            self.splits = ("level",)
            split = "level" if split in SpearEnv.splits else split
        check_split(split, self.splits)
        if level is None:
            recipe = Recipe(
                *parse_room(room),
                require_whole("boxes", boxes, 1),
                require_whole("shortest", values.get("shortest", 3) if shortest is None else shortest, 1),
                require_whole("longest", values.get("longest", 12) if longest is None else longest, 1),
                choose_member(SplitBy, split_by, "split_by"),
            )
            height, width = recipe.height, recipe.width
            tasks: TaskSet = make_task_set(recipe, split)
        else:
            tasks = make_level_set(level)
            start = read_level(tasks[0].content["level"])
            height, width = start.height, start.width
        parser = make_parser(response_format)
        super().__init__(
            tasks,
            max_turns=max_turns,
            parser=RememberingParser(parser),
            observation_space=make_observation_space(height, width, self.modality),
            response_format=response_format,
            reward=reward,
            on_malformed=on_malformed,
            mu=mu,
            tool_reward=tool_reward,
            render_mode=render_mode,
        )
        self.tools = find_tools(self.moves_per_turn)
        self.templates = MappingProxyType(
            {
                "default": SokobanTemplate(self.modality, self.sprites, self.moves_per_turn, parser),
                "compact": CompactBoardTemplate(parser),
            }
        )
        needs_picture = self.modality is not Modality.TEXT or render_mode == "rgb_array"
        self.tiles = load_tiles(self.sprites) if needs_picture else None
        self._board: Board | None = None
        self._optimal = 0

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        level = read_level(task.content["level"])
        if self._board is None:
            self._board = Board(level, self.tiles)
        else:
            self._board.load(level)
        self._optimal = task.content["optimal"]

    @property
    def board(self) -> Board:
        """Return the board being played."""
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        assert self._board is not None
        return self._board

    def _act(self, action: str) -> ActionResult:
        moves = self.read_moves(action)
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
            message=moves.problem,
            tool_calls=moved,
            details=self._details(moved > 0, pushed > 0),
            action=moves.words,
        )

    def read_moves(self, action: str) -> Moves:
        """Return the moves of an action, by the rule of ``on_malformed``."""
        return read_like_peer(action) if self._peer else read_moves(action, self.moves_per_turn)

    def _malformed(self, problem: str) -> ActionResult:
        return super()._malformed(problem)._replace(native_reward=MOVE_REWARD)

    def peer_action(self, text: str) -> str:
        """Return the action that verl-agent finds in a malformed response."""
        return find_peer_action(text)

    def _details(self, moved: bool = False, pushed: bool = False) -> dict[str, Any]:
        details: dict[str, Any] = {"moved": moved, "pushed": pushed, "optimal": self._optimal}
        if self.diagnostics:
            details["solvable"] = self._solve() is not None
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
        return {"image": board.frame(), "text": text}

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
        """Return the actions of a shortest solution from the present board; empty if it is solved or lost.

        Each action holds up to ``moves_per_turn`` moves.
        """
        words, size = self._solve() or [], self.moves_per_turn
        return [", ".join(words[i : i + size]) for i in range(0, len(words), size)]

    def _solve(self) -> list[str] | None:
        board = self.board
        return find_solution(Level(board.text(), board.height, board.width, tuple(board.codes)))

    # ---------------------------------------------------------------- rendering

    def render(self) -> Image | str | None:
        """Return the native picture (``rgb_array``, as in observations) or the board's text (``ansi``), or print the
        board in colour (``human``, which also prints at every reset and step)."""
        if self.render_mode is None:
            gym.logger.warn("render() without a render mode: pass render_mode='rgb_array' to gym.make().")
            return None
        if self.render_mode == "rgb_array":
            return self.board.frame()
        if self.render_mode == "ansi":
            return self.board.text()
        self._print("")
        return None

    def _print(self, message: str) -> None:
        heading = f"{self.task.id}  turn {self.turn} of {self.max_turns}"
        sys.stdout.write("\n".join([heading, paint_board(self.board.text()), *([message] if message else [])]) + "\n\n")
        sys.stdout.flush()


def make_observation_space(height: int, width: int, modality: Modality) -> spaces.Space[Any]:
    """Make the observation space of one environment."""
    text = PermissiveText(TEXT_LENGTH)
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
