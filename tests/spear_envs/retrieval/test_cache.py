"""The cache of hits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spear_envs.retrieval.cache import ENTRY_BYTES, HitCache

HITS = st.lists(st.tuples(st.integers(0, 2**40), st.floats(allow_nan=False)), max_size=10)


@given(HITS)
def test_hits_come_back_as_they_went_in(hits: list[tuple[int, float]]) -> None:
    cache = HitCache(1 << 20)
    cache.put("q", 10, hits)
    assert cache.get("q", 10) == hits
    assert cache.get("q", 100) is None and cache.get("Q", 10) is None


def test_the_least_recently_used_goes_first() -> None:
    cache = HitCache(3 * (ENTRY_BYTES + 60))
    for name in "abc":
        cache.put(name, 10, [])
    assert cache.get("a", 10) == []
    cache.put("d", 10, [])
    assert [cache.get(name, 10) is None for name in "abcd"] == [False, True, False, False]


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=3), HITS), max_size=60), st.integers(0, 4000))
def test_room_is_never_exceeded(entries: list[tuple[str, list[tuple[int, float]]]], room: int) -> None:
    cache = HitCache(room)
    for query, hits in entries:
        cache.put(query, 10, hits)
        assert cache.used_bytes <= room
        assert cache.get(query, 10) in (hits, None)
    if not len(cache):
        assert cache.used_bytes == 0


def test_no_room_keeps_nothing_and_long_queries_count() -> None:
    nothing = HitCache(0)
    nothing.put("a", 10, [])
    assert nothing.get("a", 10) is None
    small = HitCache(1000)
    small.put("a", 10, [])
    small.put("x" * 2000, 10, [])
    assert small.get("a", 10) == [] and len(small) == 1
