"""Responses of the plain form, and what verl-agent plays of malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.parsing import MAX_RESPONSE_LENGTH
from spear_envs.webshop.parsing import VerbatimParser, find_peer_action


@given(st.text().filter(lambda text: "\0" not in text))
def test_plain_responses_are_taken_as_they_are(text: str) -> None:
    parsed = VerbatimParser().parse(text)
    assert (parsed.action, parsed.format_ok) == (text, True)
    assert VerbatimParser().respond(text, "thoughts") == text


@pytest.mark.parametrize("text", ["a\0b", "x" * (MAX_RESPONSE_LENGTH + 1)])
def test_unreadable_responses_are_malformed(text: str) -> None:
    parsed = VerbatimParser().parse(text)
    assert parsed.action is None and parsed.problem and not parsed.format_ok


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<action> Click[Buy Now] </action>", "click[buy now]"),
        ("<ACTION>search[a]</Action> <action>b</action>", "search[a]"),
        ("I would say: search[red lamp]", "ay: search[red lamp]"),
        ("search[red lamp]", "search[red lamp]"),
        ("<action>search[red lamp]", "tion>search[red lamp]"[-20:]),
        ("</action><action>x", ""),
        ("", ""),
    ],
)
def test_peer_action(response: str, action: str) -> None:
    assert find_peer_action(response) == action
