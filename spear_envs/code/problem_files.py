"""Reading files of problems: DAPO-Math-17k, AIME, and your own JSON lines or parquet with the same columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spear_envs.code.tasks import normalize_text
from spear_envs.data.rows import MalformedRowError, parse_rows, write_number

# Text around each problem of DAPO and of verl's data, which asks for another form of the answer than the graded box.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
_TAILS = (
    'Remember to put your answer on its own line after "Answer:".',
    'Let\'s think step by step and output the final answer after "####".',  # verl's GSM8K
)


class RawProblem(NamedTuple):
    """A problem as in its file."""

    text: str
    answer: str


def read_problems(path: Path) -> Iterator[RawProblem]:
    """Read the problems of a file in order, with repetitions.

    Columns are ``problem`` and ``answer`` in either case (AIME), or a ``prompt`` of messages or text with
    ``reward_model.ground_truth`` (DAPO, verl), whose instructions around the problem are removed, since they ask for
    another form of the answer; the bare ``extra_info.question`` is taken where there is one. Of an answer in GSM8K's
    form, what follows ``####`` is taken.

    Raises:
        SpearError: the file cannot be read, or a row is not a problem; the message names the row.
    """
    return parse_rows(path, "sandbox", _read_row, noun="problem", example='{"problem": "…", "answer": "42"}')


def _read_row(row: Mapping[str, Any], number: int) -> RawProblem:
    return RawProblem(_find_text(row), _find_answer(row))


class Distinct(NamedTuple):
    """The problems of a file, each once."""

    problems: tuple[RawProblem, ...]
    rows: int
    """In the file."""
    contradicted: int
    """Problems left out because their rows have different answers."""


def keep_distinct(rows: Iterator[RawProblem]) -> Distinct:
    """Keep each problem once, in order of first occurrence; those with several answers are left out.

    Texts are compared without case and white space. The published DAPO-Math-17k has each about 100 times.
    """
    found: dict[str, RawProblem] = {}
    contradicted: set[str] = set()
    count = 0
    for raw in rows:
        count += 1
        key = normalize_text(raw.text)
        if found.setdefault(key, raw).answer != raw.answer:
            contradicted.add(key)
    return Distinct(tuple(raw for key, raw in found.items() if key not in contradicted), count, len(contradicted))


def _find_text(row: Mapping[str, Any]) -> str:
    found = next((row[name] for name in ("problem", "Problem", "question") if row.get(name)), None)
    if found is None:
        extra = row.get("extra_info")
        found = (extra.get("question") if isinstance(extra, Mapping) else None) or row.get("prompt")
        if isinstance(found, Sequence) and not isinstance(found, str):
            found = found[-1].get("content") if found and isinstance(found[-1], Mapping) else None
    if not isinstance(found, str) or not found.strip():
        raise MalformedRowError("it lacks a problem")
    found = found.strip().removeprefix(_DAPO_HEAD)
    for tail in _TAILS:
        found = found.removesuffix(tail)
    return found.strip()


def _find_answer(row: Mapping[str, Any]) -> str:
    found = next((row[name] for name in ("answer", "Answer") if row.get(name) is not None), None)
    if found is None:
        model = row.get("reward_model")
        found = model.get("ground_truth") if isinstance(model, Mapping) else None
    found = write_number(found)
    answer = found.rpartition("####")[2].strip() if isinstance(found, str) else ""
    if not answer:
        raise MalformedRowError("it lacks an answer")
    return answer
