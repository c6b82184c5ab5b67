"""Prompt templates: how an observation becomes the message that a policy reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

from spear_envs.core.parsing import ResponseParser, TagParser

NO_ACTION = "(nothing)"
"""Stands in the history for the action of a turn that played none."""
IMAGE = "<image>"
"""Place of the turn's picture, at most once a message; the contents of slots never have it."""


@dataclass(frozen=True)
class PromptContext:
    """The slots of a prompt before a response."""

    instruction: str
    """The task."""
    observation: str
    """What the environment shows now, as text."""
    admissible_actions: Sequence[str] | None
    """Actions that may be taken now; None if they cannot be listed."""
    history: Sequence[tuple[str, str]]
    """Pairs of observation and action (or :data:`NO_ACTION`), oldest first, already cut to the window."""
    turn: int
    """Number of the next response, from 1."""
    max_turns: int
    """Turns after which the episode ends."""
    picture: bool = False
    """Whether the environment shows a picture now."""


@runtime_checkable
class PromptTemplate(Protocol):
    """Words around the slots. Environments offer some by name in ``SpearEnv.templates``."""

    @property
    def name(self) -> str:
        """Name in ``SpearEnv.templates``."""

    @property
    def token_pattern(self) -> str | None:
        """Return the regular expression of the words of a tiny model's tokenizer; None if not for tiny models."""

    def system(self) -> str | None:
        """Return the system message, or None."""

    def render(self, context: PromptContext) -> str:
        """Return the user message of a prompt made for each turn, and the first user message of a conversation."""

    def follow_up(self, context: PromptContext) -> str:
        """Return later user messages of a conversation, which already has the earlier turns."""

    def respond(self, action: str, think: str = "") -> str:
        """Return the response an expert would write to play ``action``."""


@runtime_checkable
class RunningTemplate(PromptTemplate, Protocol):
    """A template whose conversation is one message of the assistant.

    A response ends with a stop string, directly followed by the follow-up.
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return texts that end a response."""


class StockTemplate:
    """Base of our templates: without a system message, and with responses in the form of ``parser``."""

    parser: ResponseParser

    def system(self) -> str | None:
        """Return None: the rules are in the user message, since some chat templates lack a system role."""
        return None

    def respond(self, action: str, think: str = "") -> str:
        """Return thoughts and action in the environment's form."""
        return self.parser.respond(action, think)


def write_history(context: PromptContext) -> str:
    """Return the turns of the history as in the paper, in lines ``[Observation 3: '…', Action 3: '…']``."""
    first = context.turn - len(context.history)
    return "\n".join(
        [
            f"[Observation {i}: '{seen}', Action {i}: '{action}']"
            for i, (seen, action) in enumerate(context.history, first)
        ]
    )


@dataclass(frozen=True)
class DefaultTemplate(StockTemplate):
    """A prompt with all slots of the paper: task, step count, history, observation, actions, form of the response.

    The turn's picture stands before the text of the observation.

    Args:
        rules: of the world; precedes everything.
        hidden_actions: admissible actions that the prompt leaves out.
    """

    rules: str = ""
    parser: ResponseParser = field(default_factory=TagParser)
    hidden_actions: frozenset[str] = frozenset()
    name: str = "default"
    token_pattern: str | None = None

    def render(self, context: PromptContext) -> str:
        """Write the complete prompt."""
        parts = [self.rules] if self.rules else []
        parts.append(f"Your task: {context.instruction}")
        if context.turn > 1:
            taken = context.turn - 1
            parts.append(f"You have taken {taken} of at most {context.max_turns} steps.")
        if context.history:
            parts.append("The latest observations and what you did:\n" + write_history(context))
        parts.append(self.follow_up(context))
        return "\n\n".join(parts)

    def follow_up(self, context: PromptContext) -> str:
        """Return the observation, actions and the form of the response."""
        seen = "\n".join(filter(None, (IMAGE if context.picture else "", context.observation)))
        parts = [f"This is step {context.turn}. You see:\n{seen}"]
        if context.admissible_actions is not None:
            offered = [action for action in context.admissible_actions if action not in self.hidden_actions]
            parts.append("You may: " + ", ".join(f"'{action}'" for action in offered))
        parts.append(f"Think about what to do next. {self.parser.hint}")
        return "\n\n".join(parts)


@dataclass(frozen=True)
class VerlAgentTemplate(StockTemplate):
    """The prompt of verl-agent: one text without history, another with the last turns.

    Subclasses quote both and write the slots as its environment manager does. verl-agent makes a prompt for each turn;
    a conversation repeats the one without history.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "verl_agent"
    token_pattern: str | None = None
    texts: ClassVar[tuple[str, str]]
    """Formats without and with history, with slots in braces."""

    def render(self, context: PromptContext) -> str:
        """Write the prompt of a turn, with history if there is any."""
        context = self._show(context)
        slots = {
            "task_description": context.instruction,
            "current_observation": context.observation,
            "step_count": context.turn - 1,
            "current_step": context.turn,
            "history_length": len(context.history),
            "action_history": write_history(context),
            **self._list(context.admissible_actions or ()),
        }
        return self.texts[bool(context.history)].format_map(slots)

    def follow_up(self, context: PromptContext) -> str:
        """Write the prompt without history."""
        return self.render(replace(context, history=()))

    def _show(self, context: PromptContext) -> PromptContext:
        """Return the context with each part as it is written in the slots."""
        played = [(seen, "" if action == NO_ACTION else action) for seen, action in context.history]
        return replace(context, history=played)

    def _list(self, actions: Sequence[str]) -> dict[str, str]:
        """Return the slot of the admissible actions."""
        return {}


@dataclass(frozen=True)
class CompactTemplate(StockTemplate):
    """The observation alone: short sequences for tiny models with a word-level tokenizer."""

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "compact"
    token_pattern: str | None = r"</?\w+>|\w+|\n|[^\w\s]"

    def render(self, context: PromptContext) -> str:
        """Return the instruction in the first turn, then the observation."""
        return f"{context.instruction}\n{context.observation}" if context.turn == 1 else context.observation

    def follow_up(self, context: PromptContext) -> str:
        """Return the observation."""
        return context.observation
