"""Reflexion (Shinn et al. 2023): several trials of a task, and notes of the model on why it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym

from spear_agents.baselines.forms import FormTemplate
from spear_agents.engines.base import ContextExceededError, Engine, EngineFault, Sampling, Served, derive_seed
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError

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
    """Plays a job in up to ``trials`` trials (:class:`spear_agents.rollout.Play`).

    After a failed trial the model sees what happened and writes a note; the next trial's prompt has the last three
    notes. A fault ends the job. The builder's template must be a :class:`~spear_agents.baselines.forms.FormTemplate`.
    ``earlier`` has trials already played, by task and seed; ``on_trial`` is called with each failed trial but the last.
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
    """The model's note about a failed trial and its counts; empty if even a short account of it is too long."""
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
                return prompts.decode(generation.token_ids).strip(), generation.served or (None if is_text else own)
            except ContextExceededError:
                pass
        room //= 2
    return "", None


def _describe(trial: Trajectory, room: int) -> str:
    """The account of a trial that the model sees: its last ``room`` characters."""
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
