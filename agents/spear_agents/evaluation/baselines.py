"""Reflexion (Shinn et al. 2023): several trials of a task, and notes of the model on why it failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import gymnasium as gym

from spear_agents.engines.base import (
    ByteTokenizer,
    ContextExceededError,
    Engine,
    EngineFault,
    Sampling,
    Served,
    derive_seed,
)
from spear_agents.play.chat import disarm_places
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser, cut_native_thought
from spear_envs.core.prompts import PromptContext, PromptTemplate

DIRECT = "Answer with the action alone, written as the task wants it: no reasoning, no <think> and no <action> tags."
"""Form of a response that I/O asks for."""
STEPWISE = """\
Reason before you act. Answer in this form, without <think> or <action> tags, and stop after the action:
Thought: your reasoning about the situation and the next step
Action: the one action to take now, written as the task wants it"""
"""Form of a response that ReAct asks for."""
_AGAIN = "Go on with Thought: and Action:, one of each."
_ACTION_TAG = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.DOTALL)
_TAG = re.compile(r"</?(?:think|action)>")
_ACTION = re.compile(r"(?:^|\n)[ \t>*#]*Action(?: \d+)?[*]*:[*]*", re.IGNORECASE)
_NEXT = re.compile(r"\n[ \t>*#]*(?:Observation|Thought)(?: \d+)?[*]*:", re.IGNORECASE)
_ANY = "Thought: x\nAction: x"
"""A text that only a parser of bare actions takes."""
_THOUGHT = re.compile(r"\A[\s>*#]*Thought(?: \d+)?[*]*:[*]*", re.IGNORECASE)


class Method(str, Enum):
    """How a model is prompted."""

    PLAIN = "plain"
    """The environment's own template, as policies are trained with it."""
    IO = "io"
    """The action alone, without reasoning (the paper's I/O)."""
    REACT = "react"
    """A thought, then an action; the whole episode is one conversation (Yao et al. 2023), without examples."""
    REFLEXION = "reflexion"
    """ReAct in several trials of a task, with what the model wrote about its failures (Shinn et al. 2023)."""


@dataclass(frozen=True)
class FormTemplate:
    """An environment's template (``base``) with another form of the response.

    ``form``, in later messages ``reminder``, replaces the line with the parser's ``hint``, or follows the text if no
    line has it. ``memory`` is what was learned in earlier trials; it precedes the first message.
    """

    base: PromptTemplate
    hint: str
    form: str
    reminder: str
    memory: tuple[str, ...] = ()
    name: str = "form"
    token_pattern: str | None = None

    def system(self) -> str | None:
        """Return the base's."""
        return self.base.system()

    def render(self, context: PromptContext) -> str:
        """Return the base's text in this form, after the memory."""
        text = _restate(self.base.render(self._forget_hint(context)), self.hint, self.form)
        if not self.memory:
            return text
        learned = "\n".join(f"{number}. {entry}" for number, entry in enumerate(self.memory, 1))
        return f"Earlier trials of this very task failed. What you noted after them:\n{learned}\n\n{text}"

    def follow_up(self, context: PromptContext) -> str:
        """Return what the environment shows, and a reminder of the form."""
        shown = _restate(self.base.follow_up(self._forget_hint(context)), self.hint, self.reminder).strip("\n")
        return f"Observation: {shown}" if self.form is STEPWISE else shown

    def _forget_hint(self, context: PromptContext) -> PromptContext:
        """Return the context without the hint at the end of an answer to a malformed response, whose reason stays."""
        if not self.hint:
            return context
        hint = f" {self.hint}"
        history = [(seen.replace(hint, ""), action) for seen, action in context.history]
        return replace(context, observation=context.observation.replace(hint, ""), history=history)

    def respond(self, action: str, think: str = "") -> str:
        """Return the response that the form asks for."""
        return f"Thought: {think}\nAction: {action}" if self.form is STEPWISE else action

    def remember(self, memory: tuple[str, ...]) -> FormTemplate:
        """Return a copy with another memory, in which image marks are broken up."""
        return replace(self, memory=tuple(map(disarm_places, memory)))


def make_form(method: Method, base: PromptTemplate, parser: ResponseParser) -> FormTemplate:
    """Return the template of a method other than ``plain``."""
    if method is Method.IO:
        return FormTemplate(base, parser.hint, DIRECT, DIRECT, name="io")
    return FormTemplate(base, parser.hint, STEPWISE, _AGAIN, name="react")


def _restate(text: str, hint: str, form: str) -> str:
    """Return ``text`` with the lines of ``hint`` replaced by ``form``."""
    at = text.rfind(hint) if hint else -1
    if at < 0:
        return f"{text.rstrip()}\n\n{form}"
    start = text.rfind("\n", 0, at) + 1
    return text[:start] + form + text[at + len(hint) :]


def read_direct(text: str, parser: ResponseParser) -> str:
    """Turn a bare action into a response; return ``text`` unchanged if it is valid or cannot be read.

    A native thought (:func:`~spear_envs.core.parsing.cut_native_thought`) is kept, and no action is read in it.
    """
    if _has_own_form(text, parser):
        return text
    native, rest = cut_native_thought(text, "")
    tagged = _ACTION_TAG.search(rest)
    if tagged is None and _is_in_thought(rest):
        return text
    action = _cut_action(_TAG.sub("", tagged[1] if tagged else _ACTION.sub("", rest, count=1)))
    return _compose(action, "", native, text, parser)


def read_stepwise(text: str, parser: ResponseParser) -> str:
    """Turn the first thought and action into a response; return ``text`` unchanged if it is valid or cannot be read.

    Text after the action, such as observations that the model invented, is dropped. A native thought is kept, and no
    action is read in it.
    """
    if _has_own_form(text, parser):
        return text
    native, rest = cut_native_thought(text, "")
    found = _ACTION.search(rest)
    if found is None or _is_in_thought(rest):
        return text
    thought = _TAG.sub("", _THOUGHT.sub("", rest[: found.start()])).strip()
    after = rest[found.end() :]
    further = _NEXT.search(after)
    action = _cut_action(_TAG.sub("", after[: further.start()] if further else after))
    return _compose(action, thought, native, text, parser)


def _has_own_form(text: str, parser: ResponseParser) -> bool:
    """Return whether a response has the environment's own form; to a parser that takes any text it must mean more."""
    parsed = parser.parse(text)
    if not (parsed.format_ok and parser.parse(_ANY).format_ok):
        return parsed.format_ok
    return cut_native_thought(text, "")[1].strip() not in (parsed.action or "")


def _is_in_thought(text: str) -> bool:
    """Return whether a text is a thought that was never closed."""
    return text.lstrip().startswith("<think>") and "</think>" not in text


def _compose(action: str, thought: str, native: str | None, text: str, parser: ResponseParser) -> str:
    if not action:
        return text
    written = action if parser.parse(action).format_ok else parser.respond(action, thought)
    if native is None:
        return written
    whole = f"<think>\n{native}\n</think>\n\n{written}"
    with_thought, alone = parser.parse(whole), parser.parse(written)
    is_read = (with_thought.action, with_thought.format_ok) == (alone.action, alone.format_ok)
    return whole if is_read else written


def _cut_action(text: str) -> str:
    """Return the first line, or the full text if it begins with code or a tag."""
    text = text.strip()
    if text.startswith(("```", "<")):
        return text
    line = text.partition("\n")[0].strip()
    quoted = len(line) > 1 and line[0] == line[-1] and line[0] in "'\"`"
    return line[1:-1].strip() if quoted else line


def wrap_reader(method: Method, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return the environment as a policy of this method plays it."""
    if method is Method.PLAIN:
        return env
    core: Any = env.unwrapped
    read = read_direct if method is Method.IO else read_stepwise
    return gym.wrappers.TransformAction(env, partial(read, parser=core.parser), None)


MEMORY = 3
"""Number of latest notes shown in a trial, as in the paper."""
NOTE_TOKENS = 256
_SHOWN_CHARACTERS = 12_000
_SHORTEST = 500
_ASK = """\
You tried to solve a task and failed. Below stand the task and what happened.

Task: {instruction}

{transcript}

The trial ended: {ending}.{notes}

In two to four sentences, write a note to yourself for the next trial of this very task: what went wrong, and what \
you will do instead, step by step. Write the note alone."""
_ENDINGS = {
    StopReason.FAILED: "the task was ended without success",
    StopReason.TURN_LIMIT: "all turns were used up",
    StopReason.CONTEXT_LIMIT: "the conversation grew too long",
}

_Key = tuple[str, int]


@dataclass
class Reflexion:
    """Plays a job in up to ``trials`` trials (:class:`spear_agents.play.rollout.Play`).

    After a failed trial the model sees what happened and writes a note; the next trial's prompt has the last three
    notes. A fault ends the job. The builder's template must be a
    :class:`~spear_agents.evaluation.baselines.FormTemplate`. ``earlier`` has trials already played, by task and seed;
    ``on_trial`` is called with each failed trial but the last.
    """

    trials: int = 3
    earlier: Mapping[_Key, Sequence[Trajectory]] = field(default_factory=dict)
    on_trial: Callable[[Trajectory], None] | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise SpearError(f"trials must be at least 1, got {self.trials}")

    async def __call__(
        self, env: gym.Env[Any, Any], engine: Engine, prompts: PromptBuilder, *, task_id: str, seed: int, **job: Any
    ) -> Trajectory:
        """Play the missing trials and return the last one."""
        template = prompts.template
        if not isinstance(template, FormTemplate):
            raise TypeError(f"reflexion needs a FormTemplate, got {type(template).__name__}")
        done = self.earlier.get((task_id, seed), ())
        notes = tuple(trial.reflection for trial in done if trial.reflection)
        for number in range(len(done) + 1, self.trials + 1):
            memory = notes[-MEMORY:]
            remembering = prompts.with_template(template.remember(memory))
            trial = await play_episode(env, engine, remembering, task_id=task_id, seed=seed, **job)
            trial = replace(trial, trial=number, memory=memory)
            if trial.won or trial.stop is StopReason.FAULT or number == self.trials:
                return trial
            try:
                note, cost = await _write_note(trial, engine, prompts, job["sampling"])
            except EngineFault as fault:
                return replace(trial, stop=StopReason.FAULT, fault=fault.kind.value, detail=fault.message, reward=0.0)
            notes += (note,) if note else ()
            if self.on_trial is not None:
                self.on_trial(replace(trial, reflection=note, reflected=cost))
        raise SpearError(f"task {task_id}: all {self.trials} trials were played before")


async def _write_note(
    trial: Trajectory, engine: Engine, prompts: PromptBuilder, sampling: Sampling
) -> tuple[str, Served | None]:
    """Return the model's note about a failed trial and its counts; empty if even a short account of it is too long."""
    seed = derive_seed(trial.task_id, trial.seed, "note", trial.trial)
    drawn = replace(sampling, seed=seed, max_tokens=min(NOTE_TOKENS, sampling.max_tokens), stop_strings=())
    name = f"{trial.task_id}#{trial.seed:010d}#note{trial.trial:03d}"
    room = _SHOWN_CHARACTERS
    while room >= _SHORTEST:
        ids = prompts.ask(_describe(trial, room))
        if prompts.max_prompt_tokens is None or len(ids) <= prompts.max_prompt_tokens:
            try:
                generation = await engine.generate(ids, drawn, request_id=name)
                own = Served(prompt_tokens=len(ids), completion_tokens=len(generation.token_ids), tries=0)
                is_text = isinstance(prompts.tokenizer, ByteTokenizer)
                _, note = cut_native_thought(prompts.decode(generation.token_ids), "")
                return note.strip(), generation.served or (None if is_text else own)
            except ContextExceededError:
                pass
        room //= 2
    return "", None


def _describe(trial: Trajectory, room: int) -> str:
    """Return the account of a trial that the model sees: its last ``room`` characters."""
    steps = [
        f"Observation {number}: {turn.observation}\nYour response: {turn.response}"
        for number, turn in enumerate(trial.turns, 1)
    ]
    transcript = "\n".join([*steps, f"Observation at the end: {trial.final_observation}"])
    if len(transcript) > room:
        transcript = f"(The beginning is left out.)\n…{transcript[-room:]}"
    notes = "".join(f"\n- {note}" for note in trial.memory)
    return _ASK.format(
        instruction=trial.instruction,
        transcript=transcript,
        ending=_ENDINGS.get(trial.stop, trial.stop.value),
        notes=f"\n\nYour notes from the trials before:{notes}" if notes else "",
    )
