"""Facts A9 and A10: what things are called."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.names import name_things

IDS = st.sets(
    st.builds(
        "{}{}{}".format,
        st.sampled_from(("apple", "sink", "bathtub", "odd_plus_thing", "x")),
        st.sampled_from(("_bar__plus_01_dot_23", "_bar_4", "")),
        st.text(string.ascii_lowercase + "_", max_size=6) | st.sampled_from(("_bar_sinkbasin", "basin")),
    ),
    max_size=30,
)


def test_numbers_are_dealt_out_from_the_highest_down() -> None:
    names = name_things(["apple_bar_3", "apple_bar_1", "apple_bar_2", "desk_bar_1", "apple_bar_1"])
    assert names == {
        "apple_bar_1": "apple 3",
        "apple_bar_2": "apple 2",
        "apple_bar_3": "apple 1",
        "desk_bar_1": "desk 1",
    }


def test_ids_are_sorted_as_text() -> None:
    names = name_things(["loc_bar_10", "loc_bar_9", "loc_bar__minus_1"])
    assert names == {"loc_bar_10": "loc 3", "loc_bar_9": "loc 2", "loc_bar__minus_1": "loc 1"}


def test_a_basin_is_counted_apart() -> None:
    names = name_things(["sink_bar_1", "sink_bar_1_bar_sinkbasin", "sink_bar_2_bar_sinkbasin"])
    assert names == {
        "sink_bar_1": "sink 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 2",
        "sink_bar_2_bar_sinkbasin": "sinkbasin 1",
    }


def test_a_bare_id_keeps_its_text_and_gets_a_blank() -> None:
    names = name_things(["agent1", "odd_minus_1_dot_5_comma_2_plus_x"])
    assert names == {"agent1": "agent1 ", "odd_minus_1_dot_5_comma_2_plus_x": "odd-1.5,2+x "}


@given(IDS)
def test_numbered_names_are_unique_and_gapless(ids: set[str]) -> None:
    names = name_things(ids)
    assert names.keys() == ids
    numbered = [name for one, name in names.items() if "_bar_" in one]
    assert len(set(numbered)) == len(numbered)
    for base in {name.rpartition(" ")[0] for name in numbered}:
        numbers = sorted(int(name.rpartition(" ")[2]) for name in numbered if name.rpartition(" ")[0] == base)
        assert numbers == list(range(1, len(numbers) + 1))


@given(IDS)
def test_names_do_not_hang_on_the_order_of_ids(ids: set[str]) -> None:
    assert name_things(sorted(ids)) == name_things(sorted(ids, reverse=True))
