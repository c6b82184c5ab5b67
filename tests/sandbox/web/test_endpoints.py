"""Addresses of services, where they listen, and their options."""

import random
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from spear_sandbox.console import Number
from spear_sandbox.errors import SpearError
from spear_sandbox.web.endpoints import Backoff, EndpointRing, Service, read_urls
from spear_sandbox.web.listening import bind_socket, find_foreign_name, read_token

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
    ["", "127.0.0.1:8000", "localhost", "ftp://a", "http://", "http://a:port", "http://a:99999", "http://a?b",
     "http://a b", "http://a b:80", "http://a/b c", [], [""]],
)  # fmt: skip
def test_what_is_no_address_is_told_apart(urls: str | list[str]) -> None:
    with pytest.raises(SpearError, match=r"write, for instance, http://127\.0\.0\.1:8000"):
        read_urls(urls, RETRIEVER)


@pytest.mark.parametrize("place", ["host:80", "host:99999", "[::1", "host:x"])
def test_passwords_in_addresses_are_refused_and_not_repeated(place: str) -> None:
    with pytest.raises(SpearError, match="name or password") as caught:
        read_urls(f"https://user:s3cret@{place}", RETRIEVER)
    assert "s3cret" not in str(caught.value)
    assert place != "host:80" or ("host" in str(caught.value) and "SPEAR_RETRIEVER_TOKEN" in str(caught.value))


@pytest.mark.parametrize(
    ("host", "stranger"),
    [
        ("sandbox:8080", False), ("10.0.0.7:8080", False), ("[fd00::7]:8080", False), ("Sandbox.Example.ORG", False),
        ("sandbox.example.org.:80", False), ("evil.example:8080", True), ("sandbox.example.org.evil.example", True),
        ("127.0.0.1.evil.example", True), ("[", True), ("", True),
    ],
)  # fmt: skip
def test_names_that_a_stranger_may_point_here(host: str, stranger: bool) -> None:
    assert (find_foreign_name({"host": host}, {"sandbox.example.org"}) is not None) is stranger


def test_ports() -> None:
    with bind_socket("localhost", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with pytest.raises(SpearError, match=r"another program listens there.*choose another --port"):
            bind_socket("localhost", port)
    with pytest.raises(SpearError, match="not an address of this machine"):
        bind_socket("no-such-host.invalid", 0)
    with pytest.raises(SpearError, match="choose another --port"):
        bind_socket("192.0.2.1", 8000)


def test_tokens_in_variables_and_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for unset in (
        lambda: monkeypatch.delenv("TOKEN_OF_A_TEST", False),
        lambda: monkeypatch.setenv("TOKEN_OF_A_TEST", ""),
    ):
        unset()
        assert read_token("TOKEN_OF_A_TEST") is None
    secret = tmp_path / "token"
    monkeypatch.setenv("TOKEN_OF_A_TEST_FILE", str(secret))
    with pytest.raises(SpearError, match="cannot be read"):
        read_token("TOKEN_OF_A_TEST")
    secret.write_text("")
    with pytest.raises(SpearError, match="is empty"):
        read_token("TOKEN_OF_A_TEST")  # never a service without one
    secret.write_text("s3cret\n")
    assert read_token("TOKEN_OF_A_TEST") == "s3cret"
    monkeypatch.setenv("TOKEN_OF_A_TEST", "nearer")
    assert read_token("TOKEN_OF_A_TEST") == "nearer"
    for wrong in ("two words", "é", "a\nb"):
        monkeypatch.setenv("TOKEN_OF_A_TEST", wrong)
        with pytest.raises(SpearError, match="TOKEN_OF_A_TEST has characters"):
            read_token("TOKEN_OF_A_TEST")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2.5", "2.5"),
        ("nan", "nan is not a finite number"),
        ("inf", "inf is not a finite number"),
        ("-1", "-1.0 is not in the range x>0"),
        ("many", "'many' is not a valid float"),
    ],
)
def test_a_number_is_finite_and_in_its_range(text: str, shown: str) -> None:
    @click.command()
    @click.option("--share", type=Number(0, min_open=True))
    def show(share: float) -> None:
        click.echo(share)

    assert shown in CliRunner().invoke(show, ["--share", text]).output


@given(st.integers(1, 10_000), st.integers())
def test_jitter_takes_off_and_never_adds(failures: int, seed: int) -> None:
    backoff = Backoff(first=0.1, longest=5.0, jitter=0.5)
    full = min(5.0, 0.1 * 2.0 ** min(failures - 1, 30))
    assert full / 2 <= backoff.choose_wait(failures, random.Random(seed)) <= full
