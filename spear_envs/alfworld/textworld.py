"""Plays games in the real TextWorld, through the packages alfworld and textworld (extra ``alfworld``)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from spear_envs.alfworld.gamefile import GameSource, GameText, WordingChoice
from spear_envs.alfworld.interpreter import Backend
from spear_envs.alfworld.state import Action
from spear_envs.alfworld.synthesis.games import read_game_logic
from spear_envs.core.errors import SpearError

LOCK = threading.RLock()
"""Held around every call into TextWorld, which is not thread-safe: loading a game swaps ``sys.stdout`` and
``sys.argv`` and fills module globals of its translator."""

_VARIABLE = "ALFWORLD_DATA"


class TextWorldReply(NamedTuple):
    """TextWorld's reply to a command."""

    observation: str
    admissible: tuple[str, ...]
    """Admissible commands in TextWorld's order."""
    won: bool


class TextWorldPlay:
    """Plays games in TextWorld, one after another.

    ``PddlEnv`` under alfworld's ``AlfredDemangler(shuffle=False)`` and ``AlfredInfos``, as alfworld makes it for
    evaluation. About 0.8 s to load or reset and 50 to 80 ms a step.

    Raises:
        SpearError: the extra is not installed.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None
        self.commands: list[str] = []
        """Commands played since the last reset."""
        with _enter_textworld() as make:
            self._env = make()

    def reset(self, data: Mapping[str, Any]) -> TextWorldReply:
        """Begin a game.

        Args:
            data: ``pddl_domain``, ``grammar`` and ``pddl_problem``, as in a game file.

        Raises:
            SpearError: TextWorld cannot load the game.
        """
        with _enter_textworld():
            try:
                if data != self._loaded:
                    self._loaded = None
                    self._env.load(dict(data))
                    self._loaded = dict(data)
                return self.restart()
            # Its parsers may raise anything, even SystemExit.
            except (Exception, SystemExit) as error:
                raise SpearError(f"TextWorld cannot load the game: {type(error).__name__}: {error}") from error

    def restart(self) -> TextWorldReply:
        """Begin the current game again."""
        with _enter_textworld():
            state = self._env.reset()
        self.commands = []
        return _read_state(state)

    def step(self, command: str) -> TextWorldReply:
        """Play one command."""
        with _enter_textworld():
            state, _, _ = self._env.step(command)
        self.commands.append(command)
        return _read_state(state)


class TextWorldBackend(Backend):
    """TextWorld gives observations, admissible commands and ``won``.

    The interpreter plays along for the expert, the goal conditions and the anchor.

    Raises:
        SpearError: the extra is not installed.
    """

    _reply: TextWorldReply

    def __init__(self) -> None:
        self._peer = TextWorldPlay()

    @property
    def admissible(self) -> Sequence[str]:
        """Return the admissible commands, in TextWorld's order."""
        return self._reply.admissible

    @property
    def won(self) -> bool:
        """Return whether the game is won, as TextWorld says."""
        return self._reply.won

    def start(self, source: GameSource, wording: WordingChoice) -> str:
        """Begin a game, which takes most of a second."""
        super().start(source, wording)
        self._reply = self._peer.reset(make_data(source.read(), wording))
        return self._reply.observation

    def accepts(self, command: str) -> bool:
        """Return whether TextWorld lists a command."""
        return command in self._reply.admissible

    def step(self, command: str) -> tuple[str, bool, Action | None]:
        """Play a command in both."""
        accepted = self.accepts(command)
        self._reply = self._peer.step(command)
        return self._reply.observation, accepted, self.play.step(command)[1]

    def save(self) -> dict[str, Any]:
        """Return the commands since the start, because TextWorld's state cannot be copied."""
        return {"commands": list(self._peer.commands)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Play the saved commands, from the start unless they only continue from here."""
        wanted, done = saved["commands"], self._peer.commands
        if wanted[: len(done)] != done:
            self._reply = self._peer.restart()
            self.play.go_to(self.play.game.new_state())
        for command in wanted[len(self._peer.commands) :]:
            self.step(command)


def make_data(text: GameText, wording: WordingChoice) -> dict[str, str]:
    """Make what TextWorld loads: the file's own logic, or that of the installed alfworld, release 2.1.2.

    Raises:
        SpearError: alfworld's logic is needed and not installed.
    """
    domain, grammar = text.domain, text.grammar
    if domain is None or grammar is None or wording is WordingChoice.RELEASE_2_1_2:
        domain, grammar = read_game_logic(text.sentence)
    return {"pddl_domain": domain, "grammar": grammar, "pddl_problem": text.problem}


def _read_state(state: Any) -> TextWorldReply:
    return TextWorldReply(state.feedback, tuple(state["admissible_commands"]), bool(state["won"]))


@contextmanager
def _enter_textworld() -> Iterator[Any]:
    """Hold the lock and restore ``sys.argv`` afterwards; yield the function that makes an environment."""
    with LOCK:
        arguments = sys.argv
        try:
            yield _import_textworld()
        finally:
            sys.argv = arguments


@lru_cache(maxsize=1)
def _import_textworld() -> Any:
    """Import the function that makes an environment, with no side effects outside ``sys.modules``."""
    with _keep_surroundings():
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise SpearError(
                f"backend='textworld' needs a package ({error}): pip install 'spear-envs[alfworld]'"
            ) from error

    def make() -> Any:
        wanted = textworld.EnvInfos(won=True, admissible_commands=True)
        return AlfredInfos(AlfredDemangler(PddlEnv(wanted), shuffle=False))

    return make


@contextmanager
def _keep_surroundings() -> Iterator[None]:
    """Undo what importing alfworld does: it sets ``$ALFWORLD_DATA`` and makes the folder of that name."""
    before = os.environ.get(_VARIABLE)
    folder = Path(os.path.expanduser(before or "~/.cache/alfworld"))
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
        for place in made:
            try:
                place.rmdir()  # only succeeds if it is empty
            except OSError:
                break
