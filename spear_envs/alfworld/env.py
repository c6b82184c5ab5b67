"""The environment ``spear/ALFWorld-v0``."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from spear_envs.alfworld.gamefile import WordingChoice
from spear_envs.alfworld.goals import count_goal_conditions, describe_condition
from spear_envs.alfworld.interpreter import CHANGES, Backend, BackendName, Interpreter
from spear_envs.alfworld.oracle import explain, find_shown, plan, search
from spear_envs.alfworld.prompts import CompactHouseholdTemplate, HouseholdTemplate, VerlAgentHouseholdTemplate
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.alfworld.tasks import GAME_SPLITS, SPLITS, EmbeddedTaskSet, GameTaskSet, list_names, make_task_set
from spear_envs.alfworld.tools import (
    TOOLS,
    Aliases,
    CommandParser,
    VerbatimParser,
    find_tools,
    rewrite_command,
)
from spear_envs.core.env import ActionResult, Anchor, CommonKeywords, SpearEnv
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.parsing import PeerParser, ResponseFormat, ResponseParser, TagParser
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Criterion
from spear_envs.core.tasks import Task
from spear_envs.core.tools import Tool

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _make_templates(parser: ResponseParser) -> dict[str, PromptTemplate]:
    found = (
        HouseholdTemplate(parser),
        HouseholdTemplate(parser, "unlisted", lists=False),
        VerlAgentHouseholdTemplate(parser),
        CompactHouseholdTemplate(parser),
    )
    return {template.name: template for template in found}


class Expert(str, Enum):
    """What ``expert_plan`` knows."""

    PLANNER = "planner"
    """The position of everything."""
    SEARCHING = "searching"
    """What the episode has shown, as a policy does; it searches for the rest."""


class ALFWorldEnv(SpearEnv[str]):
    """ALFWorld's text games: walk through a room, open, take, treat and put things until the task is done.

    Observations are what the game says, word for word; one response is one command. ``won`` is the game's own, the
    native reward is 1 at the winning step and 0 otherwise, and each command played counts as a tool call, whether or
    not it did something; ``reward_terms["admissible_commands"]`` counts those that did. ``info`` has the keys of
    ``StepInfo``, ``goal_conditions_met`` and ``goal_conditions`` (ALFRED's, see
    :func:`~spear_envs.alfworld.goals.count_goal_conditions`), and ``goal_condition_success``, their ratio.

    Args:
        dataset: ``"embedded"`` (synthetic games, nothing to download) or ``"official"``.
        split: ``"train"``, ``"valid_seen"`` or ``"valid_unseen"``.
        rooms: size of the embedded rooms, ``"standard"`` or ``"small"``.
        data_dir: folder of official games; by default ``$ALFWORLD_DATA``, else the user's cache.
        game: path of one ``game.tw-pddl``: the task set is exactly this game.
        backend: ``"native"`` or ``"textworld"``.
        wording: ``"file"``, or ``"2.1.2"`` for the newer wording in older files.
        aliases: ``"none"`` or ``"paper"``, see :func:`~spear_envs.alfworld.tools.rewrite_command`.
        task_text: ``"template"``, or ``"human"`` for sentences that people wrote (official games).
        max_turns: responses after which the episode is truncated.
        anchor: ``"state"`` or ``"observation"``, see :class:`~spear_envs.core.env.Anchor`.
        expert: ``"planner"`` or ``"searching"``: what the expert may know.
        common: keywords of every environment, see :class:`CommonKeywords`. With ``"plain"`` the
            response is the command verbatim; between tags it is played in lower case.

    Raises:
        SpearError: a keyword without a valid value, no official games, or a game that cannot be read.
    """

    metadata: dict[str, Any]  # type: ignore[misc]
    splits: tuple[str, ...] = SPLITS  # type: ignore[misc]
    templates: Mapping[str, PromptTemplate] = MappingProxyType(  # type: ignore[misc]
        _make_templates(TagParser())
    )
    tools: tuple[Tool, ...] = TOOLS  # type: ignore[misc]
    peer_parser = PeerParser(tail=30)

    def __init__(
        self,
        dataset: str = "embedded",
        split: str = "train",
        rooms: str = "standard",
        data_dir: str | os.PathLike[str] | None = None,
        game: str | os.PathLike[str] | None = None,
        backend: str = "native",
        wording: str = "file",
        aliases: str = "none",
        task_text: str = "template",
        max_turns: int = 50,
        anchor: str = "state",
        expert: str = "planner",
        **common: Unpack[CommonKeywords],
    ) -> None:
        self.backend = choose_member(BackendName, backend, "backend")
        self.wording = choose_member(WordingChoice, wording, "wording")
        self.aliases = choose_member(Aliases, aliases, "aliases")
        self.rooms = choose_member(RoomSize, rooms, "rooms")
        self.anchor = choose_member(Anchor, anchor, "anchor")
        self.expert = choose_member(Expert, expert, "expert")
        super().__init__(
            make_task_set(
                dataset,
                split,
                rooms=rooms,
                data_dir=None if data_dir is None else os.fspath(data_dir),
                game=None if game is None else os.fspath(game),
                task_text=task_text,
            ),
            max_turns=max_turns,
            parser=lambda form: VerbatimParser() if form is ResponseFormat.PLAIN else CommandParser(),
            **common,
        )
        if game is not None:
            self.splits = GAME_SPLITS
        self.templates = MappingProxyType(_make_templates(self.parser))
        self._game = Backend()
        if self.backend is BackendName.TEXTWORLD:
            from spear_envs.alfworld.textworld import TextWorldBackend  # late: only this needs the extra

            self._game = TextWorldBackend()
            self.metadata = {**self.metadata, "blocking": True}
        self._opening = self._said = ""
        self._shown: set[str] = set()
        """Receptacles whose contents the episode has shown."""
        self._conditions = (0, 0)

    @property
    def play(self) -> Interpreter:
        """Return the current game and its state; with ``backend="textworld"`` the interpreter that plays along."""
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        return self._game.play

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        self._opening = self._said = self._game.start(cast(GameTaskSet, self.tasks).source(task), self.wording)
        self.tools = find_tools(self._game.play.game.wording)
        self.episode.won = self._game.won
        self._shown = set()
        self.episode.extra_terms["admissible_commands"] = 0.0
        self._count_conditions()

    def _act(self, action: str) -> ActionResult:
        backend = self._game
        command = action if self._peer else action.strip()  # verl-agent's history keeps the blanks
        if self.aliases is Aliases.PAPER:
            command = rewrite_command(command, backend.play.game.wording, backend.accepts)
        self._said, accepted, done = backend.step(command.strip())
        if done is not None and (shown := find_shown(backend.play.game, backend.play.state, done)):
            self._shown.add(shown)
        if done is not None and not backend.play.game.goal.reads.isdisjoint(CHANGES[done.verb]):
            self._count_conditions()
        won = backend.won
        return ActionResult(
            accepted,
            1.0 if won else 0.0,
            won,
            message=self._said,
            tool_calls=1,
            details=self._details(),
            terms={"admissible_commands": self.episode.extra_terms["admissible_commands"] + accepted},
            action=command,
        )

    def _count_conditions(self) -> None:
        play = self._game.play
        self._conditions = count_goal_conditions(play.game.conditions, play.state)

    def _details(self) -> dict[str, Any]:
        met, number = self._conditions
        return {
            "goal_conditions_met": met,
            "goal_conditions": number,
            "goal_condition_success": met / number if number else 1.0,
        }

    def criteria(self) -> list[Criterion]:
        """Return ALFRED's goal conditions."""
        play = self.play
        tested = [(one, one.holds(play.state)) for one in play.game.conditions]
        return [
            Criterion(f"condition {place}", met, describe_condition(one), "yes" if met else "no")
            for place, (one, met) in enumerate(tested, start=1)
        ]

    def _observe(self, message: str) -> str:
        return message or self._opening

    def _world(self) -> dict[str, Any]:
        return {"backend": self.backend.value, "said": self._said, "shown": sorted(self._shown), **self._game.save()}

    def _restore_world(self, state: Mapping[str, Any]) -> None:
        if state["backend"] != self.backend.value:
            raise SpearError(
                f"The state was saved with backend={state['backend']!r}, but this environment has"
                f" backend={self.backend.value!r}: restore it with the same backend."
            )
        self._said = state["said"]
        self._shown = set(state["shown"])
        self._game.restore(state)
        self._count_conditions()

    def _anchor(self) -> Hashable:
        if self.anchor is Anchor.OBSERVATION:
            return self._said  # not our answer to a malformed response, which changes nothing
        play = self._game.play
        return f"{self.task.id}:{play.state.digest(play.game.initial)}"

    def _admissible(self) -> list[str]:
        return list(self._game.admissible)

    def expert_plan(self) -> list[str]:
        """Return commands that win from the present state; empty if it is won, or if no plan is found."""
        play = self.play
        if self.expert is Expert.SEARCHING:
            return search(play.game, play.state, self._shown)
        return plan(play.game, play.state)

    def expert_thought(self, plan: Sequence[str]) -> str:
        """See ``SpearEnv``; it knows only what the episode has shown."""
        play = self.play
        return explain(play.game, play.state, self._shown, plan)

    def lexicon(self) -> Iterator[str]:
        """Yield names of embedded things, alone and numbered, for the compact template; empty for official games."""
        if isinstance(self.tasks, EmbeddedTaskSet):
            yield from (f" {name}" for name in list_names(self.rooms))  # as the compact template splits them
