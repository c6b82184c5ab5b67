from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.draws import NO_CEILING, KeyedDraws, ceilings_above, make_draws

AMOUNTS = st.floats(0, 2_000)


@given(AMOUNTS | st.integers(0, 200).map(lambda i: i * 10.0))
def test_ceilings_are_the_next_four_tens(price: float) -> None:
    assert ceilings_above(price) == tuple(step for step in (10.0 * i for i in range(1, 100)) if step > price)[:4]


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
@given(AMOUNTS, AMOUNTS, st.integers(0, 2**40))
def test_prices_lie_in_their_range_and_ceilings_above(mode: str, a: float, b: float, seed: int) -> None:
    draws = make_draws(mode, seed)
    assert draws.draw_price("B1", (a,)) == a
    price = draws.draw_price("B1", (a, b))
    assert min(a, b) <= price <= max(a, b)
    ceiling = draws.draw_ceiling("B1", 0, price)
    # The larger of two is never the lowest.
    assert ceiling in (ceilings_above(price)[1:] or (NO_CEILING,))


def test_keyed_draws_hang_on_nothing_but_their_key() -> None:
    first, second = KeyedDraws(7), KeyedDraws(7)
    second.draw_price("B2", (1.0, 2.0))
    second.draw_ceiling("B2", 3, 5.0)
    assert first.draw_price("B1", (1.0, 9.0)) == second.draw_price("B1", (1.0, 9.0))
    assert first.draw_ceiling("B1", 0, 50.0) == second.draw_ceiling("B1", 0, 50.0)
    assert KeyedDraws(8).draw_price("B1", (1.0, 9.0)) != first.draw_price("B1", (1.0, 9.0))


def test_keyed_draws_stay_what_they_are() -> None:
    draws = KeyedDraws(42)
    assert draws.draw_price("B06Y3VLDFB", (10.0, 20.0)) == 17.95671668564851
    assert [draws.draw_ceiling("B06Y3VLDFB", number, 15.0) for number in range(8)] == [
        30.0,
        50.0,
        50.0,
        50.0,
        50.0,
        50.0,
        40.0,
        40.0,
    ]


def test_the_larger_of_two_of_four_is_distributed_as_it_should() -> None:
    draws = KeyedDraws(0)
    counts = Counter(draws.draw_ceiling(f"B{i}", 0, 5.0) for i in range(6_000))
    assert set(counts) == {20.0, 30.0, 40.0}
    for step, share in ((20.0, 1 / 6), (30.0, 2 / 6), (40.0, 3 / 6)):
        assert counts[step] / 6_000 == pytest.approx(share, abs=0.03)


def test_few_steps_above() -> None:
    draws = KeyedDraws(0)
    assert draws.draw_ceiling("B1", 0, 975.0) == 990.0
    assert draws.draw_ceiling("B1", 0, 985.0) == NO_CEILING
    assert draws.draw_ceiling("B1", 0, 5_000.0) == NO_CEILING


def test_unknown_mode() -> None:
    with pytest.raises(SpearError, match="draws='random' is not valid: choose one of 'keyed', 'sequential'"):
        make_draws("random", 1)
