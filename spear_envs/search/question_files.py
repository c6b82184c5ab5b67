"""Reading files of questions: FlashRAG's JSON lines, and the parquet files of Search-R1, verl and DeepResearcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spear_envs.data.rows import MalformedRowError, parse_rows, write_number

ANSWER_SPLIT = "<|answer_split|>"
"""Separator of the gold answers in DeepResearcher's files."""
_QUESTION_MARK = "Question:"
"""The question is what follows the last of these in a prompt."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can escape a lone one, but tokenizers refuse it."""


class RawQuestion(NamedTuple):
    """A question of a file."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    benchmark: str


def read_questions(path: Path, benchmark: str | None = None) -> Iterator[RawQuestion]:
    """Yield the questions of a file, in order.

    A ``.jsonl`` file (also packed as ``.xz`` or ``.gz``) has rows ``{"id", "question", "golden_answers"}``, as FlashRAG
    writes them; a ``.parquet`` file has ``reward_model.ground_truth``, which is ``{"target": [...]}`` (Search-R1, verl)
    or one string with the golds joined by ``<|answer_split|>`` (DeepResearcher), and the question in a column, in
    ``extra_info`` or at the end of ``prompt``. Golds are stripped; blank and repeated ones are left out.

    Args:
        benchmark: name of the benchmark; by default from each row, else the file's name.

    Raises:
        SpearError: the file cannot be read, or a row is not a question; the message names the row.
    """

    def parse(row: Mapping[str, Any], number: int) -> RawQuestion:
        golds = _clean(_find_golds(row))
        if not golds:
            raise MalformedRowError("it has no gold answer")
        question = _find_question(row)
        if _SURROGATE.search(" ".join((question, *golds))):
            raise MalformedRowError("it contains a lone surrogate")
        return RawQuestion(
            str(_first_present(row.get("id"), _dig(row, "extra_info", "index"), number)),
            question,
            golds,
            benchmark or _find_benchmark(row) or path.name.partition(".")[0],
        )

    example = '{"id": "1", "question": "…", "golden_answers": ["…"]}'
    return parse_rows(path, "search", parse, noun="question", example=example)


def _dig(row: Any, *keys: str) -> Any:
    """Return the value at a path of keys, or None."""
    for key in keys:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def _first_present(*values: Any) -> Any:
    return next((value for value in values if value not in (None, "")), None)


def _find_golds(row: Mapping[str, Any]) -> Any:
    if row.get("golden_answers") is not None:
        return row["golden_answers"]
    truth = _first_present(_dig(row, "reward_model", "ground_truth"), row.get("ground_truth"))
    return truth.get("target") if isinstance(truth, Mapping) else truth


def _clean(golds: Any) -> tuple[str, ...]:
    if isinstance(golds, str):
        golds = golds.split(ANSWER_SPLIT)
    if golds is None:
        return ()
    golds = write_number(golds)
    if isinstance(golds, str):
        golds = [golds]
    if isinstance(golds, Sequence):
        golds = list(map(write_number, golds))
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise MalformedRowError("its gold answers are not a list of strings or numbers")
    return tuple(dict.fromkeys(gold.strip() for gold in golds if gold.strip()))


def _find_question(row: Mapping[str, Any]) -> str:
    found = _first_present(row.get("question"), _dig(row, "extra_info", "question"))
    if found is None:
        found = _find_in_prompt(row.get("prompt"))
    if not isinstance(found, str) or not found.strip():
        raise MalformedRowError("it has no question")
    return found.strip()


def _find_in_prompt(prompt: Any) -> str | None:
    """Return the text after the last mark of a prompt, which is a text or a list of messages."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = _dig(prompt[-1], "content") if prompt else None
    if not isinstance(prompt, str):
        return None
    return prompt.rpartition(_QUESTION_MARK)[2]


def _find_benchmark(row: Mapping[str, Any]) -> str:
    """Return the benchmark that a row names; verl writes ``searchR1_nq``."""
    found = _first_present(_dig(row, "metadata", "benchmark"), row.get("data_source"))
    return found.removeprefix("searchR1_") if isinstance(found, str) else ""
