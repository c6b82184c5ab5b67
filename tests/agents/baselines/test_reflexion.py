from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from spear_agents.baselines.forms import Method, make_form, wrap_reader
from spear_agents.baselines.reflexion import Reflexion
from spear_agents.engines.base import ContextExceededError, EngineFault, EngineFaultKind, Sampling
from spear_agents.engines.bytes import ChatByteTokenizer
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Layout, StopReason, Trajectory
from spear_envs.core.prompts import DefaultTemplate
from tests.agents.corridor import CorridorEnv

TASK = "corridor/test/000"
ASKED = "You tried to solve a task and failed."


class Learner:
    """Walks the wrong way until its notes tell it where to go."""

    def __init__(self, notes: Sequence[str] = ("look around first", "walk on with go")) -> None:
        self.notes = list(notes)
        self.prompts: list[str] = []
        self.asked: list[str] = []

    def __call__(self, prompt: str, dice: random.Random) -> str:
        if ASKED in prompt:
            self.asked.append(prompt)
            return self.notes[len(self.asked) - 1]
        self.prompts.append(prompt)
        return "Thought: so\nAction: " + ("go" if "walk on with go" in prompt else "fail")


def play(
    policy: Any,
    trials: int = 3,
    earlier: Mapping[tuple[str, int], Sequence[Trajectory]] | None = None,
    failed: list[Trajectory] | None = None,
    **options: Any,
) -> Trajectory:
    env = CorridorEnv()
    codec = ChatByteTokenizer()
    words = make_form(Method.REFLEXION, DefaultTemplate(), env.parser)
    kept = [] if failed is None else failed
    return asyncio.run(
        Reflexion(trials, earlier=earlier or {}, on_trial=kept.append)(
            wrap_reader(Method.REFLEXION, env),
            ScriptedEngine(policy, codec),
            PromptBuilder(codec, words, Layout.CONVERSATION, **options),
            task_id=TASK,
            sampling=Sampling(),
            seed=4,
            env_id="corridor",
        )
    )


def test_notes_of_failed_trials_stand_in_the_next_ones() -> None:
    learner, failed = Learner(), []  # type: ignore[var-annotated]
    last = play(learner, failed=failed)
    assert last.won and last.trial == 3
    assert last.memory == ("look around first", "walk on with go") and last.reflection is None
    assert [(t.trial, t.memory, t.reflection) for t in failed] == [
        (1, (), "look around first"),
        (2, ("look around first",), "walk on with go"),
    ]
    assert "1. look around first\n2. walk on with go" in learner.prompts[2]
    assert "Earlier trials" not in learner.prompts[0]
    assert "Action: fail" in learner.asked[0] and "ended without success" in learner.asked[0]
    assert "look around first" in learner.asked[1]
    assert all(Trajectory.from_json(t.to_json()) == t for t in (*failed, last))


def test_a_won_trial_ends_it_and_the_last_one_is_not_reflected_on() -> None:
    first = play(Learner(notes=()), trials=1)
    assert not first.won and first.trial == 1
    learner = Learner(["walk on with go"])
    assert play(learner).trial == 2
    assert len(learner.asked) == 1


def test_an_interrupted_job_goes_on_behind_its_trials() -> None:
    whole: list[Trajectory] = []
    last = play(Learner(), failed=whole)
    resumed = Learner()
    resumed.asked = ["already asked"]
    again: list[Trajectory] = []
    found = play(resumed, earlier={(TASK, 4): whole[:1]}, failed=again)
    assert found == last and again == whole[1:]


def test_only_the_latest_notes_are_remembered() -> None:
    failed: list[Trajectory] = []
    play(Learner([f"note {i}" for i in range(6)]), trials=6, failed=failed)
    assert failed[-1].memory == ("note 1", "note 2", "note 3")


def test_a_note_marks_no_place_of_a_picture() -> None:
    learner, failed = Learner(["it showed <image>", "walk on with go"]), []  # type: ignore[var-annotated]
    last = play(learner, failed=failed)
    assert last.won and last.memory[0] == "it showed <image>", "the record has what was written"
    assert "1. it showed < image>" in learner.prompts[1]
    assert "<image>" not in "".join((*learner.prompts, *learner.asked))


def test_a_fault_while_reflecting_is_a_fault_of_the_episode() -> None:
    class Broken(Learner):
        def __call__(self, prompt: str, dice: random.Random) -> str:
            if ASKED in prompt:
                raise EngineFault(EngineFaultKind.TIMEOUT, "gone")
            return super().__call__(prompt, dice)

    failed: list[Trajectory] = []
    found = play(Broken(), failed=failed)
    assert (found.stop, found.fault, failed) == (StopReason.FAULT, "engine_timeout", [])


def test_an_account_that_is_too_long_is_cut_down_to_its_end() -> None:
    lengths: list[int] = []

    class Narrow(Learner):
        def __call__(self, prompt: str, dice: random.Random) -> str:
            if ASKED in prompt:
                lengths.append(len(prompt))
                if len(lengths) < 3:
                    raise ContextExceededError("too long")
            return super().__call__(prompt, dice)

    assert play(Narrow(["walk on with go"])).won
    assert lengths == sorted(lengths, reverse=True)
    short = play(Learner(), max_prompt_tokens=300)  # no account fits: the trials go on without notes
    assert short.memory == () and not short.won
