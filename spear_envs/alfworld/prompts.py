"""Prompt templates: ``default``, ``unlisted`` and ``verl_agent`` for language models, ``compact`` for tiny ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from spear_envs.alfworld.interpreter import NOTHING_HAPPENS
from spear_envs.core.parsing import ResponseParser, TagParser
from spear_envs.core.prompts import DefaultTemplate, PromptContext, StockTemplate, VerlAgentTemplate

_HIDDEN = frozenset({"help", "help()"})
UNREAD = "Your response could not be read"
"""First words of the answer to a malformed response."""
_WELCOME = "-= Welcome to TextWorld, ALFRED! =-\n\n"
_TASK = "\n\nYour task is to: "

_RULES = """\
You live in a text world: one room of a household, with furniture and appliances (receptacles) and things that lie in \
or on them. You are given one task; it is done as soon as the room is as the task wants it.
- You can carry one thing at a time, and only what lies in a receptacle before you can be taken.
- A closed receptacle shows what is in it once you open it. Walk from place to place until you find what you need.
- Heating takes a microwave, cooling a fridge and cleaning a sink basin: carry the thing there. Nothing has to be \
opened or put inside for that. A lamp is switched on by using it.
- What cannot be done now is answered by "Nothing happens." and still costs a step."""

_SHORT_RULES = """\
You act in one room of a household, in text. Look for what the task needs, place by place; a closed place shows what \
is in it once you open it. You can carry one thing. Clean it at a sink basin, heat it with a microwave, cool it with a \
fridge. Commands: go to PLACE, open PLACE, take THING from PLACE, move THING to PLACE (older games: put THING in/on \
PLACE), clean/heat/cool THING with PLACE, use LAMP, inventory, look. Use the names and numbers that you see."""


def strip_opening(observation: str) -> str:
    """Remove greeting and task from the first observation, since prompts show them elsewhere; keep others."""
    if not observation.startswith(_WELCOME):
        return observation
    return observation.removeprefix(_WELCOME).partition(_TASK)[0]


@dataclass(frozen=True)
class HouseholdTemplate(StockTemplate):
    """All slots of the paper: task, step count, the last turns, observation, admissible commands without ``help``.

    The lists of commands are two thirds of a conversation. Without them short rules give their forms once, and later
    messages are the observation alone.

    Args:
        lists: whether prompts list the admissible commands.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "default"
    token_pattern: str | None = None
    lists: bool = True

    def render(self, context: PromptContext) -> str:
        """Write the complete prompt."""
        return self._template.render(self._strip(context))

    def follow_up(self, context: PromptContext) -> str:
        """Return the observation, commands and the form of the response; without lists the observation alone."""
        stripped = self._strip(context)
        return self._template.follow_up(stripped) if self.lists else stripped.observation

    @property
    def _template(self) -> DefaultTemplate:
        return DefaultTemplate(_RULES if self.lists else _SHORT_RULES, self.parser, hidden_actions=_HIDDEN)

    def _strip(self, context: PromptContext) -> PromptContext:
        return replace(
            context,
            observation=strip_opening(context.observation),
            admissible_actions=context.admissible_actions if self.lists else None,
            history=[(strip_opening(seen), command) for seen, command in context.history],
        )


# The texts of VerlAgentHouseholdTemplate are verl-agent's to the letter: https://github.com/langfengQ/verl-agent,
# agent_system/environments/prompts/alfworld.py. Licensed under the Apache License, Version 2.0;
# Copyright 2025 Nanyang Technological University (NTU), Singapore and the verl-agent (GiGPO) team.
@dataclass(frozen=True)
class VerlAgentHouseholdTemplate(VerlAgentTemplate):
    """verl-agent's prompt: greeting and task stay in the first observation, the commands but ``help`` are quoted."""

    texts = (
        """\

You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {current_observation}
Your admissible actions of the current situation are: [{admissible_actions}].

Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within \
<think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
""",
        """\

You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {task_description}
Prior to this step, you have already taken {step_count} step(s). Below are the most recent {history_length} \
observations and the corresponding actions you took: {action_history}
You are now at step {current_step} and your current observation is: {current_observation}
Your admissible actions of the current situation are: [{admissible_actions}].

Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within \
<think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
""",
    )

    def _list(self, actions: Sequence[str]) -> dict[str, str]:
        return {"admissible_actions": "\n ".join([f"'{command}'" for command in actions if command != "help"])}


# A piece is a word with the preceding blank, so that blanks are not tokens. A numbered thing is one piece, so that tiny
# models copy complete names.
_PIECES = (
    "<think></think><action>",
    "</action>",
    "go to",
    r" [a-z]+ \d+",
    r" ?[a-z]+",
    r"\n[>!:@#]?",
    r" ?[^\sa-z]+",
    r"\s",
)
_WORD = re.compile(r"[a-z]+(?: \d+)?")
_FILLERS = "a an and are at in is it of on see some the them to up you your"
_DROPPED = frozenset(_FILLERS.split())
_ARRIVAL = re.compile(r"You (?:arrive at|open the) [^.]+\. ")
_SILENT = frozenset({"help", "inventory", "look"})


@dataclass(frozen=True)
class CompactHouseholdTemplate(StockTemplate):
    """Task, last commands, what is here and seen, commands by verb, an end mark: some 50 tokens in small rooms.

    One line for the task; one for each command of the history after ``>``, or ``!`` if nothing happened; one with what
    was said (``:``), one with what can be examined (``@``: the receptacles here and what is held); then the commands,
    one line for each verb. ``help``, ``inventory``, ``look`` and ``examine`` are understood, but not listed. ``#`` ends
    the prompt: without it a tiny model continues the list.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "compact"
    token_pattern: str | None = "|".join(_PIECES)

    def render(self, context: PromptContext) -> str:
        """Write the complete prompt."""
        seen = [text for text, _ in context.history] + [context.observation]
        past = [
            "\n!" if answer.startswith((NOTHING_HAPPENS, UNREAD)) else f"\n>{command}"
            for (_, command), answer in zip(context.history, seen[1:], strict=True)
        ]
        return _shorten(context.instruction).lstrip() + "".join(past) + self.follow_up(context)

    def follow_up(self, context: PromptContext) -> str:
        """Write everything but task and history."""
        lines = [f"\n:{_describe(context.observation)}", *_list_commands(context.admissible_actions or ()), "\n#"]
        return "".join(lines)

    def respond(self, action: str, think: str = "") -> str:
        """Return the command in the environment's form; the thoughts are left out."""
        return self.parser.respond(action)


def _shorten(text: str) -> str:
    """Return the significant words, a blank before each."""
    return "".join([f" {word}" for word in _WORD.findall(text.lower()) if word not in _DROPPED])


def _describe(observation: str) -> str:
    if observation.startswith(_WELCOME):
        return ""  # the commands list the receptacles
    if observation.startswith("Available commands:"):
        return " help"
    if observation.startswith(UNREAD):
        return " unread"
    return _shorten(_ARRIVAL.sub("", observation, count=1))


def _list_commands(commands: Sequence[str]) -> Iterator[str]:
    """Yield lines ``@ fridge 1 mug 1``, ``go to bed 1 desk 1``, ``take mug 1 pen 2 from desk 1``; others verbatim."""
    here = "".join([command.removeprefix("examine") for command in commands if command.startswith("examine ")])
    yield f"\n@{here}"
    moves = [command.removeprefix("go to") for command in commands if command.startswith("go to ")]
    taken: dict[str, list[str]] = {}
    for command in commands:
        verb, _, rest = command.partition(" ")
        if verb == "take":
            thing, _, receptacle = rest.rpartition(" from ")
            taken.setdefault(receptacle, []).append(f" {thing}")
        elif verb not in _SILENT and verb not in ("examine", "go"):
            yield f"\n{command}"
    for receptacle, things in taken.items():
        yield f"\ntake{''.join(things)} from {receptacle}"
    if moves:
        yield f"\ngo to{''.join(moves)}"
