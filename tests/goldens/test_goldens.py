"""Nothing that the project prints, sends or writes has changed; ``python -m tests.goldens make`` accepts a change."""

from __future__ import annotations

import pytest

from tests.goldens.__main__ import find_differences, make_plain, read_golden
from tests.goldens.subjects import SUBJECTS

SLOW = {"transcripts": pytest.mark.slow, "configurations": pytest.mark.nightly}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SUBJECTS])
def test_it_is_as_before(name: str) -> None:
    assert list(find_differences(read_golden(name), make_plain(SUBJECTS[name]()))) == []


def test_a_difference_is_found_wherever_it_is() -> None:
    golden = {"a": {"b": [1, {"c": 2}], "d": 3}}
    assert list(find_differences(golden, {"a": {"b": [1, {"c": 4}], "e": 3}})) == [
        "a / b / 1 / c: 2 -> 4",
        "a / d: gone, was 3",
        "a / e: new, 3",
    ]
