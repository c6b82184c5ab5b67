"""Addresses, tokens and ports of services."""

from __future__ import annotations

from pathlib import Path

import pytest

from spear_sandbox.errors import SpearError
from spear_sandbox.web.listening import bind_socket, find_foreign_name, is_loopback, read_token, write_url


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "stranger"),
    [
        ("sandbox:8080", False),
        ("10.0.0.7:8080", False),
        ("[fd00::7]:8080", False),
        ("Sandbox.Example.ORG", False),
        ("sandbox.example.org.:80", False),
        ("evil.example:8080", True),
        ("sandbox.example.org.evil.example", True),
        ("127.0.0.1.evil.example", True),
        ("[", True),
        ("", True),
    ],
)
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


def test_urls() -> None:
    assert write_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert write_url("::1", 80) == "http://[::1]:80"


def test_tokens_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOKEN_OF_A_TEST", raising=False)
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


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKEN_OF_A_TEST", raising=False)
    assert read_token("TOKEN_OF_A_TEST") is None
    monkeypatch.setenv("TOKEN_OF_A_TEST", "")
    assert read_token("TOKEN_OF_A_TEST") is None
    monkeypatch.setenv("TOKEN_OF_A_TEST", "s3cret")
    assert read_token("TOKEN_OF_A_TEST") == "s3cret"
    for wrong in ("two words", "é", "a\nb"):
        monkeypatch.setenv("TOKEN_OF_A_TEST", wrong)
        with pytest.raises(SpearError, match="TOKEN_OF_A_TEST has characters"):
            read_token("TOKEN_OF_A_TEST")
