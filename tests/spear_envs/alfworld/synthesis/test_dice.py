from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.synthesis.dice import Dice


def test_the_key_decides() -> None:
    def draw(*key: str | int) -> list[int]:
        dice = Dice(*key)
        return [dice.below(10**9) for _ in range(3)]

    assert draw("a", 1) == draw("a", 1) == draw("a/1")
    assert draw("a", 1) != draw("a", 2)


@given(st.integers(), st.integers(-5, 5), st.integers(0, 9), st.lists(st.integers(), min_size=1))
def test_choices_are_in_range(seed: int, least: int, more: int, items: list[int]) -> None:
    dice = Dice(seed)
    for _ in range(20):
        assert least <= dice.between(least, least + more) <= least + more
        assert dice.pick(items) in items
        assert not dice.chance(0.0) and dice.chance(1.0)


def test_all_values_occur_about_equally_often() -> None:
    dice = Dice("fair")
    counts = Counter(dice.between(1, 6) for _ in range(6_000))
    assert set(counts) == set(range(1, 7)) and all(850 < count < 1150 for count in counts.values())
