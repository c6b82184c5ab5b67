"""Files of tasks: an instruction and a rule for the reward."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import ListTaskSet, Task

_CALL = {
    "type": "object",
    "properties": {"tool": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["tool"],
    "additionalProperties": False,
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
ROW = {
    "type": "object",
    "properties": {
        "instruction": {"type": "string", "minLength": 1},
        "split": {"enum": ["train", "valid", "test"]},
        "subtask": {"type": "string"},
        "reward": {
            "type": "object",
            "properties": {
                "answer": _TEXTS,
                "calls": {"type": "array", "items": _CALL, "minItems": 1},
                "function": {"type": "string", "pattern": "^[^:]+:[^:]+$"},
            },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        },
        "plan": {"type": "array", "items": _CALL},
        "more": {},
    },
    "required": ["instruction", "reward"],
    "additionalProperties": False,
}
"""JSON schema of a line."""
Rule = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]], "str | None"], float]


def read_tasks(path: str | Path, split: str) -> ListTaskSet:
    """Read the tasks of a split from a file of JSON lines.

    Raises:
        SpearError: the file cannot be read, a line is not a task, or the split is empty.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise SpearError(f"the tasks in {path} cannot be read: {error}.") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _read_row(line, f"{path}:{number}")
            if row.get("split", "train") == split:
                content: dict[str, Any] = {key: row[key] for key in ("reward", "plan", "more") if key in row}
                name = f"{path.stem}/{split}/{len(tasks):05d}"
                tasks.append(Task(name, split, row.get("subtask", "task"), row["instruction"], content))
    if not tasks:
        raise SpearError(f"{path} has no tasks of the split {split!r}: set 'split' in its lines.")
    return ListTaskSet(tasks)


def _read_row(line: str, place: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        jsonschema.Draft202012Validator(ROW).validate(row)
        if "function" in row["reward"]:
            load_rule(row["reward"]["function"])
    except (ValueError, RecursionError) as error:
        raise SpearError(f"{place} is not JSON ({error}).") from error
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "the line"
        raise SpearError(f"{place} is not a task: {where}: {error.message[:200]}.") from error
    except SpearError as error:
        raise SpearError(f"{place}: {error}") from error
    return row


def load_rule(name: str) -> Rule:
    """Load the function ``MODULE:FUNCTION`` of a task's reward.

    Raises:
        SpearError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        rule: Rule | None = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # the user's module may raise anything
        raise SpearError(f"the rule {name}: {module} cannot be imported ({type(error).__name__}: {error}).") from error
    if not callable(rule):
        raise SpearError(f"the rule {name}: {module} lacks the function {attribute!r}.")
    return rule


def judge(task: Task, calls: Sequence[Mapping[str, Any]], answer: str | None) -> float:
    """Compute the score of an episode, from 0 to 1; it is won at 1.

    Args:
        task: has the rule.
        calls: of the episode, each with ``tool``, ``arguments``, ``text`` and ``is_error``.
        answer: that ended the episode; None while it runs.

    Raises:
        SpearError: the user's function raises, or does not return a score.
    """
    rule = task.content["reward"]
    if "answer" in rule:
        wanted = [rule["answer"]] if isinstance(rule["answer"], str) else rule["answer"]
        return float(answer is not None and _plain(answer) in map(_plain, wanted))
    if "calls" in rule:
        return sum(any(_fits(call, wanted) for call in calls) for wanted in rule["calls"]) / len(rule["calls"])
    try:
        score = float(load_rule(rule["function"])(task.definition(), calls, answer))
    except SpearError:
        raise
    except Exception as error:
        raise SpearError(
            f"the rule {rule['function']} failed on {task.id}: {type(error).__name__}: {error}."
        ) from error
    if not 0 <= score <= 1:
        raise SpearError(f"the rule {rule['function']} gave {score} for {task.id}: a score is from 0 to 1.")
    return score


def _fits(call: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    given = call["arguments"]
    asked = wanted.get("arguments", {})
    return (
        call["tool"] == wanted["tool"]
        and not call["is_error"]
        and all(key in given and given[key] == value for key, value in asked.items())
    )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")
