from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from spear_envs.code.opening import open_tasks
from spear_envs.code.problems import SIZES, SPLITS, build
from spear_envs.code.problems.generate import list_parameters
from spear_envs.code.tasks import Problem, normalize_text
from spear_envs.core.tasks import check_disjoint
from spear_sandbox.protocol import Outcome

FINGERPRINTS = {
    ("mini", "train"): "3370c0dd3fd734b6",
    ("mini", "valid"): "8d9b92c8481ce507",
    ("mini", "test"): "0dd5c3411ce2893b",
    ("mini-disjoint", "train"): "16271091ed06b37b",
    ("mini-disjoint", "valid"): "981d700adc702c17",
    ("mini-disjoint", "test"): "baaf783c5b095b14",
    ("mini-small", "train"): "daa514cdb5ca2326",
    ("mini-small", "valid"): "e5ae0c7d8f5c5a9e",
    ("mini-small", "test"): "867e9cc4306058a8",
}
EVERY = [(dataset, split) for dataset in SIZES for split in SPLITS]


@pytest.mark.parametrize(("dataset", "split"), EVERY)
def test_the_problems_are_the_published_ones(dataset: str, split: str) -> None:
    assert open_tasks(dataset, split).fingerprint[:16] == FINGERPRINTS[dataset, split]


def test_they_are_the_same_in_any_process() -> None:
    code = "from spear_envs.code.opening import open_tasks; print(open_tasks('mini', 'test').fingerprint)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == open_tasks("mini", "test").fingerprint


def test_how_many_there_are() -> None:
    counts = {split: len(problems) for split, problems in build("mini").items()}
    assert counts == {"train": 640, "valid": 320, "test": 380}
    families = {split: {problem.subtask for problem in build("mini")[split]} for split in SPLITS}
    assert len(families["test"]) == 19 and len(families["train"]) == 16 and families["train"] == families["valid"]
    assert families["test"] - families["train"] == {"triangles", "walks", "last_in_circle"}
    assert {problem.level for problem in build("mini")["test"]} == {1, 2, 3}


@pytest.mark.parametrize("dataset", SIZES)
def test_splits_share_neither_text_nor_parameters(dataset: str) -> None:
    check_disjoint(*(open_tasks(dataset, split) for split in SPLITS))
    drawn = list_parameters(dataset)
    keys = [
        (family, parameters) for split in SPLITS for family, found in drawn[split].items() for _, parameters in found
    ]
    texts = [normalize_text(problem.text) for split in SPLITS for problem in build(dataset)[split]]
    assert len(set(keys)) == len(keys) == len(set(texts)) == len(texts)


@pytest.mark.parametrize(("dataset", "split"), EVERY)
def test_no_answer_is_worth_guessing(dataset: str, split: str) -> None:
    problems = build(dataset)[split]
    assert all(problem.answer.isdigit() and int(problem.answer) >= 2 for problem in problems)
    most = Counter(problem.answer for problem in problems).most_common(1)[0][1]
    assert most <= 0.05 * len(problems)
    if dataset == "mini":
        for family in {problem.subtask for problem in problems}:
            answers = [problem.answer for problem in problems if problem.subtask == family]
            assert len(set(answers)) == len(answers) >= 20 and min(map(int, answers)) >= 10


def test_wordings_are_shared_between_splits_as_the_page_says() -> None:
    def mask(dataset: str) -> dict[str, list[str]]:
        return {split: [re.sub(r"\d+", "N", each.text) for each in build(dataset)[split]] for split in SPLITS}

    mini, apart = mask("mini"), mask("mini-disjoint")
    assert sum(text in set(mini["test"]) for text in mini["train"]) == 626
    sets = [set(apart[split]) for split in SPLITS]
    assert sum(map(len, sets)) == len(set().union(*sets))
    assert [len(apart[split]) for split in SPLITS] == [720, 120, 80]


@pytest.mark.parametrize("dataset", SIZES)
def test_any_beginning_has_all_families(dataset: str) -> None:
    for split in SPLITS:
        problems = build(dataset)[split]
        families = {problem.subtask for problem in problems}
        assert {problem.subtask for problem in problems[: len(families)]} == families


def choose(dataset: str, each: int) -> list[Problem]:
    """So many problems of each family and level, of all splits."""
    seen: Counter[tuple[str, int | None]] = Counter()
    chosen = []
    for problem in (problem for split in reversed(SPLITS) for problem in build(dataset)[split]):
        seen[problem.subtask, problem.level] += 1
        if seen[problem.subtask, problem.level] <= each:
            chosen.append(problem)
    return chosen


def check_printed(problem: Problem, outcome: Outcome) -> None:
    assert (outcome.stdout.strip(), outcome.stderr, outcome.return_code) == (problem.answer, "", 0), problem
    assert outcome.wall_s < 10 and outcome.cpu_s < 2


@pytest.mark.parametrize("dataset", SIZES)
def test_codes_print_the_answers_in_the_sandbox(dataset: str, isolated: Callable[..., Outcome]) -> None:
    # Answers come by another way than the code's: a formula where the code tries all cases, say.
    for problem in choose(dataset, 1):
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "split"), [each for each in EVERY if each[0] != "mini-disjoint"])
def test_all_codes_print_the_answers(dataset: str, split: str, isolated: Callable[..., Outcome]) -> None:
    for problem in build(dataset)[split]:
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))


def test_codes_print_the_answers_without_a_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    for problem in choose("mini", 2) + choose("mini-small", 3):
        exec(compile(problem.code or "", problem.subtask, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip() == problem.answer, problem


def test_codes_are_short_and_need_the_standard_library_alone() -> None:
    allowed = {"math", "itertools", "functools"}
    for dataset, split in EVERY:
        for problem in build(dataset)[split]:
            code = problem.code or ""
            assert len(code.splitlines()) <= 16
            words = [line.split()[1] for line in code.splitlines() if line.startswith(("import ", "from "))]
            assert set(words) <= allowed


def count_necklaces(beads: int, colours: int, mirrored: int, proper: int) -> int:
    """By the smallest of the forms that are the same."""
    found = set()
    for row in product(range(colours), repeat=beads):
        if proper and any(row[i] == row[i - 1] for i in range(beads)):
            continue
        forms = [row[i:] + row[:i] for i in range(beads)]
        if mirrored:
            forms += [form[::-1] for form in forms]
        found.add(min(forms))
    return len(found)


@pytest.mark.parametrize("beads", [3, 4, 5, 6])
def test_burnside_by_trying(beads: int) -> None:
    from spear_envs.code.problems.counting import answer_necklaces

    for colours, mirrored, proper in product((2, 3), (0, 1), (0, 1)):
        expected = count_necklaces(beads, colours, mirrored, proper)
        assert answer_necklaces(beads, colours, mirrored, proper) == expected
