"""Whose turn it is among several servers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_sandbox.errors import SpearError
from spear_sandbox.web.endpoints import Backoff, EndpointRing, Service, read_urls

SANDBOX = Service("a sandbox", "/run_code", 8080, "SPEAR_SANDBOX_TOKEN")
RETRIEVER = Service("a retrieval service", "/retrieve", 8000, "SPEAR_RETRIEVER_TOKEN")


def make_ring(*urls: str, **backoff: float) -> EndpointRing:
    return EndpointRing(urls, Backoff(**backoff), random.Random(7))


def test_servers_take_turns() -> None:
    ring = make_ring("a", "b", "c")
    chosen = [ring.choose(0.0).url for _ in range(9)]
    assert chosen[:3] == chosen[3:6] == chosen[6:] and set(chosen) == {"a", "b", "c"}


def test_one_that_failed_is_left_out_and_comes_back() -> None:
    ring = make_ring("a", "b", first=1.0, jitter=0.0)
    bad = next(endpoint for endpoint in (ring.choose(0.0), ring.choose(0.0)) if endpoint.url == "a")
    ring.note_failure(bad, 0.0)
    assert {ring.choose(0.5).url for _ in range(4)} == {"b"}
    assert Counter(ring.choose(1.0).url for _ in range(4)) == {"a": 2, "b": 2}


def test_waits_double_up_to_the_longest_and_success_forgives() -> None:
    ring = make_ring("a", first=1.0, longest=5.0, jitter=0.0)
    endpoint = ring.choose(0.0)
    waits = []
    for _ in range(5):
        now = endpoint.free_from
        ring.note_failure(endpoint, now)
        waits.append(endpoint.free_from - now)
    assert waits == [1, 2, 4, 5, 5]
    ring.note_success(endpoint)
    assert endpoint.free_from == 0.0
    ring.note_failure(endpoint, 100.0)
    assert endpoint.free_from == 101.0


def test_many_requests_that_fail_together_count_once() -> None:
    ring = make_ring("a", first=1.0, jitter=0.0)
    endpoint = ring.choose(0.0)
    for _ in range(64):
        ring.note_failure(endpoint, 0.1)
    assert endpoint.failures == 1 and endpoint.free_from == pytest.approx(1.1)


def test_a_server_may_ask_for_a_longer_wait() -> None:
    ring = make_ring("a", "b", first=1.0, jitter=0.0)
    first, second = ring.choose(0.0), ring.choose(0.0)
    ring.note_failure(first, 0.0, retry_after=20.0)
    ring.note_failure(second, 0.0, retry_after=0.1)
    assert (first.free_from, second.free_from) == (20.0, 1.0)
    assert ring.choose(0.0) is second  # all are left out: the one that comes back first


@given(st.integers(1, 10_000), st.integers())
def test_jitter_takes_off_and_never_adds(failures: int, seed: int) -> None:
    backoff = Backoff(first=0.1, longest=5.0, jitter=0.5)
    full = min(5.0, 0.1 * 2.0 ** min(failures - 1, 30))
    assert full / 2 <= backoff.choose_wait(failures, random.Random(seed)) <= full


@pytest.mark.parametrize(
    ("given_urls", "read"),
    [
        ("http://127.0.0.1:8000/", ("http://127.0.0.1:8000",)),
        ("http://127.0.0.1:8000/retrieve", ("http://127.0.0.1:8000",)),
        (" https://host/search/retrieve/ ", ("https://host/search",)),
        (["http://a:1", "http://b:1", "http://a:1/"], ("http://a:1", "http://b:1")),
        ("http://[::1]:8000", ("http://[::1]:8000",)),
    ],
)
def test_addresses_may_be_written_in_several_ways(given_urls: str | list[str], read: tuple[str, ...]) -> None:
    assert read_urls(given_urls, RETRIEVER) == read


@pytest.mark.parametrize(
    "urls",
    [
        "",
        "127.0.0.1:8000",
        "localhost",
        "ftp://a",
        "http://",
        "http://a:port",
        "http://a:99999",
        "http://a?b",
        "http://a b",
        "http://a b:80",
        "http://a/b c",
        [],
        [""],
    ],
)
def test_what_is_no_address_is_told_apart(urls: str | list[str]) -> None:
    with pytest.raises(SpearError, match=r"write, for instance, http://127\.0\.0\.1:8000"):
        read_urls(urls, RETRIEVER)


def test_passwords_in_addresses_are_refused_and_not_repeated() -> None:
    with pytest.raises(SpearError, match="SPEAR_RETRIEVER_TOKEN") as caught:
        read_urls("https://user:s3cret@host:80", RETRIEVER)
    assert "s3cret" not in str(caught.value) and "host" in str(caught.value)


@pytest.mark.parametrize("url", ["http://u:s3cret@host:99999", "http://u:s3cret@[::1", "http://u:s3cret@host:x"])
def test_a_password_is_not_repeated_where_the_rest_is_wrong(url: str) -> None:
    with pytest.raises(SpearError, match="name or password") as caught:
        read_urls(url, SANDBOX)
    assert "s3cret" not in str(caught.value)
