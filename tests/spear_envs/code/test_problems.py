from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from spear_envs.code.opening import open_tasks
from spear_envs.code.tasks import EMBEDDED, SPLITS, Problem, normalize_text, open_problems
from spear_envs.core.tasks import check_disjoint
from spear_sandbox.protocol import Outcome

EVERY = [(dataset, split) for dataset in EMBEDDED for split in SPLITS]


@pytest.mark.parametrize("dataset", EMBEDDED)
def test_splits_share_neither_text_nor_parameters(dataset: str) -> None:
    check_disjoint(*(open_tasks(dataset, split) for split in SPLITS))
    texts = [normalize_text(problem.text) for split in SPLITS for problem in open_problems(dataset)[split]]
    assert len(set(texts)) == len(texts)


def choose(dataset: str, each: int) -> list[Problem]:
    """So many problems of each family and level, of all splits."""
    seen: Counter[tuple[str, int | None]] = Counter()
    chosen = []
    for problem in (problem for split in reversed(SPLITS) for problem in open_problems(dataset)[split]):
        seen[problem.subtask, problem.level] += 1
        if seen[problem.subtask, problem.level] <= each:
            chosen.append(problem)
    return chosen


def check_printed(problem: Problem, outcome: Outcome) -> None:
    assert (outcome.stdout.strip(), outcome.stderr, outcome.return_code) == (problem.answer, "", 0), problem
    assert outcome.wall_s < 10 and outcome.cpu_s < 2


@pytest.mark.parametrize("dataset", EMBEDDED)
def test_codes_print_the_answers_in_the_sandbox(dataset: str, isolated: Callable[..., Outcome]) -> None:
    # Answers come by another way than the code's: a formula where the code tries all cases, say.
    for problem in choose(dataset, 1):
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "split"), [each for each in EVERY if each[0] != "mini-disjoint"])
def test_all_codes_print_the_answers(dataset: str, split: str, isolated: Callable[..., Outcome]) -> None:
    for problem in open_problems(dataset)[split]:
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))
