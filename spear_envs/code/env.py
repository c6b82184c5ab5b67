"""The environment ``spear/CodeInterpreter-v0``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from spear_envs.code.grading import Grader, find_answer, is_right, read_integer
from spear_envs.code.grammar import (
    CodeParser,
    Prelude,
    ResponseKind,
    make_program,
    read_call,
    strip_fences,
    write_answer,
    write_call,
)
from spear_envs.code.prompts import TOOLS, make_templates
from spear_envs.code.runs import (
    EMPTY_CODE,
    OBSERVATION_CHARS,
    REMINDERS,
    Feedback,
    SandboxChoice,
    open_limits,
    open_runner,
    render_feedback,
    run_program,
    truncate_middle,
)
from spear_envs.code.tasks import EMBEDDED, MINI, SPLITS, ProblemTaskSet, find_splits, open_problems, open_tasks
from spear_envs.core.env import ActionResult, CommonKeywords, SpearEnv
from spear_envs.core.errors import SpearError, choose_member, require_whole
from spear_envs.core.parsing import ResponseFormat
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Criterion
from spear_envs.core.tasks import Task, canonical_json

if TYPE_CHECKING:
    from typing_extensions import Unpack

TIME_LIMIT = 30.0
MEMORY_MB = 1_024
NO_CODE = 256
"""``info["return_code"]`` if no program ended by itself in this turn; not a possible exit code."""
NOT_RUN = "This was the last turn, so the code was not run."


class Preset(str, Enum):
    """Turn limits of the paper. The token limits, 16,384 and 30,000, are the player's."""

    SHORT = "16k"
    """8 turns."""
    LONG = "32k"
    """15 turns."""


_TURNS = {Preset.SHORT: 8, Preset.LONG: 15}


class CodeInterpreterEnv(SpearEnv[str]):
    r"""Mathematics with a Python tool: a response is code to run, or the answer, which ends the episode.

    A call is a JSON object between ``<tool_call>`` tags, as in Qwen's chat templates, code between ``<code>`` tags, or
    a fence of Python; the first valid one of a response is run, in a fresh process. Its output is the next observation.
    A call that cannot be read is answered with the fault. A response without a call is final; its answer is in
    ``\boxed{}``. A call in the last turn is not run and does not count.

    ``tool_calls`` counts programs that were run, including failed ones. ``won``, ``score`` and the native reward say
    whether the answer is right. The first observation is the problem. The anchor digests the task and the outputs so
    far. ``info`` has the keys of ``StepInfo``, ``answer`` (what the grader reads; None until the end), ``grader``,
    ``run`` (how the program of this turn ended: ``Finished``, ``TimeLimitExceeded``, or None) and ``return_code``
    (``NO_CODE`` if there is none).

    Args:
        dataset: ``"mini"`` (embedded), ``"mini-disjoint"`` (its splits share no
            family of problems), ``"mini-small"`` (for word-level models), ``"dapo-math-17k"``, ``"aime-2024"``,
            ``"aime-2025"`` (fetched by ``spear data get code``), ``"dapo-aime"`` (these three as train, valid and
            test), or the path of a file of problems.
        split: ``"train"`` (default), ``"valid"`` or ``"test"`` of the embedded problems; other data have their own
            ``splits``.
        sandbox: None for a sandbox in this process, the address of a service, or an executor.
        grader: ``"integer"``, ``"strict"`` (as the authors grade) or ``"math_verify"``, see
            :class:`~spear_envs.code.grading.Grader`.
        feedback: ``"spear"``, ``"paper"`` or ``"helpful"``, see :class:`~spear_envs.code.runs.Feedback`.
        prelude: ``"retool"`` or ``"none"``, see :class:`~spear_envs.code.grammar.Prelude`.
        preset: ``"16k"`` for 8 turns or ``"32k"`` for 15.
        max_turns: responses after which the episode is truncated; by default 8, or the preset's.
        time_limit: seconds that a run may take; a sandbox in this process allows 30, a service its own limit.
        memory_mb: MiB that a run may use; a sandbox in this process allows 1,024.
        observation_chars: characters of output; longer output is cut in its middle.
        common: keywords of every environment, see :class:`CommonKeywords`. With ``"plain"`` a
            text that is not a call is the bare answer. With ``on_malformed="peer"`` a call that cannot be read ends the
            episode, as in the authors' loop.

    Raises:
        SpearError: a keyword has an invalid value, or data are missing.
    """

    metadata: dict[str, Any]  # type: ignore[misc]
    tools = TOOLS
    peer_parser = CodeParser()  # only the answer to a call that cannot be read differs
    splits: tuple[str, ...] = SPLITS  # type: ignore[misc]
    templates: Mapping[str, PromptTemplate] = make_templates(CodeParser(), TIME_LIMIT)  # type: ignore[misc]

    def __init__(
        self,
        dataset: str | os.PathLike[str] = MINI,
        split: str | None = None,
        sandbox: SandboxChoice = None,
        grader: str = "integer",
        feedback: str = "spear",
        prelude: str = "retool",
        preset: str | None = None,
        max_turns: int | None = None,
        time_limit: float = TIME_LIMIT,
        memory_mb: int = MEMORY_MB,
        observation_chars: int = OBSERVATION_CHARS,
        **common: Unpack[CommonKeywords],
    ) -> None:
        require_whole("observation_chars", observation_chars, 16)
        chosen = Preset.SHORT if preset is None else choose_member(Preset, preset, "preset")
        self.grader = choose_member(Grader, grader, "grader")
        self.feedback = choose_member(Feedback, feedback, "feedback")
        self.prelude = choose_member(Prelude, prelude, "prelude")
        self.limits = open_limits(time_limit, memory_mb, sandbox)
        self.observation_chars = observation_chars
        self.dataset = os.fspath(dataset)
        self.splits = find_splits(self.dataset)
        tasks = open_tasks(self.dataset, split)
        _require_gradable(self.grader, tasks)
        self._runner = open_runner(sandbox)
        super().__init__(
            tasks,
            max_turns=_TURNS[chosen] if max_turns is None else max_turns,
            parser=CodeParser,
            **common,
        )
        self.metadata = {**self.metadata, "blocking": True}
        self.templates = make_templates(self.parser, float(time_limit))
        self._calls: list[tuple[str, str]] = []
        self._answer: str | None = None

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        self._calls, self._answer = [], None

    def _act(self, action: str) -> ActionResult:
        code = read_call(action)
        if code is None:
            return self._finish(action)
        code = strip_fences(code)
        if self.turn >= self.max_turns:
            return ActionResult(False, message=NOT_RUN, details=self._details(), action=write_call(code))
        if not code.strip():
            return ActionResult(False, message=EMPTY_CODE, details=self._details(), action=write_call(code))
        outcome = run_program(self._runner, make_program(code, self.prelude), self.limits)
        text = truncate_middle(render_feedback(outcome, self.feedback, self.limits.wall_s), self.observation_chars)
        self._calls.append((code, text))
        return ActionResult(
            True,
            message=text,
            tool_calls=1,
            details={
                **self._details(),
                "run": outcome.status.value,
                "return_code": NO_CODE if outcome.return_code is None else outcome.return_code,
            },
            action=write_call(code),
        )

    def _finish(self, action: str) -> ActionResult:
        """Grade the response, which ends the episode."""
        plain = self.response_format is ResponseFormat.PLAIN
        self._answer = find_answer(action if plain else self.response, self.grader)
        right = is_right(self._answer, self.task.content["answer"], self.grader)
        return ActionResult(
            self._answer is not None,
            float(right),
            won=right,
            done=True,
            message="Your answer is right." if right else "Your answer is not right.",
            details=self._details(),
            action=action,
        )

    def _malformed(self, problem: str) -> ActionResult:
        if self.parsed.kind == ResponseKind.BAD_CALL.value and not self._peer:
            text = f"Your tool call could not be read: {problem}. {self.parser.hint}"
            return ActionResult(False, message=text, details=self._details())
        ended = self._finish("")
        return ended._replace(message=f"{ended.message} Your response was the final one since {problem}.")

    def _details(self) -> dict[str, Any]:
        return {"answer": self._answer, "grader": self.grader.value, "run": None, "return_code": NO_CODE}

    def criteria(self) -> list[Criterion]:
        """Return the answer, and the right one."""
        return [Criterion("answer", self.episode.won, str(self.task.content["answer"]), self._answer or "no answer")]

    def _observe(self, message: str) -> str:
        # Output may be empty, so the turn says whether there is any.
        return message if self.turn else self.task.instruction

    def _world(self) -> dict[str, Any]:
        return {"calls": [list(call) for call in self._calls], "answer": self._answer}

    def _restore_world(self, state: Mapping[str, Any]) -> None:
        self._calls = [(code, text) for code, text in state["calls"]]
        self._answer = state["answer"]

    def _anchor(self) -> str:
        seen = [self.task.id, [text for _, text in self._calls]]
        return hashlib.sha256(canonical_json(seen).encode()).hexdigest()[:32]

    def _novelty(self) -> str:
        return self._calls[-1][1] if self._calls else ""  # the anchor, a digest of all output, changes with every run

    def expert_plan(self) -> list[str]:
        """Return the next action: the reference code, then what it printed as the answer; empty at the end.

        On the last turn, or without reference code, it is the answer.
        """
        if self.done:
            return []
        content = self.task.content
        reference = content.get("code")
        printed = next((text for code, text in reversed(self._calls) if code == reference), None)
        if printed is not None:
            return [write_answer(printed)]
        if reference is not None and self.turn < self.max_turns - 1:
            return [write_call(reference)]
        return [write_answer(content["answer"])]

    def lexicon(self) -> Iterator[str]:
        """Yield the words of an embedded data set as the template ``compact`` has them; nothing for others."""
        if self.dataset in EMBEDDED:
            compact = self.templates["compact"]
            yield "\n".join(["0123456789", *REMINDERS])
            for problems in open_problems(self.dataset).values():
                for problem in problems:
                    yield problem.text
                    yield compact.respond(write_call(problem.code or ""))


def _require_gradable(grader: Grader, tasks: ProblemTaskSet) -> None:
    """Refuse a grader that is not installed or cannot grade one of the problems."""
    if grader is Grader.MATH_VERIFY:
        from spear_envs.code.verifying import require_math_verify

        require_math_verify()
    if grader is Grader.INTEGER and (index := _find_no_integer(tasks)) is not None:
        raise SpearError(
            f"grader='integer' cannot grade {tasks.id_of(index)}, whose answer is"
            f" {tasks.problems[index].answer[:80]!r}: take grader='math_verify'."
        )


@lru_cache(maxsize=16)
def _find_no_integer(tasks: ProblemTaskSet) -> int | None:
    """Return the index of the first problem whose answer is not an integer, if there is one."""
    answers = enumerate(problem.answer for problem in tasks.problems)
    return next((index for index, answer in answers if read_integer(answer) is None), None)
