"""From responses to commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.parsing import PEER_TAIL, CommandParser, VerbatimParser, find_peer_command
from spear_envs.core.parsing import MAX_RESPONSE_LENGTH, PeerParser

PIECES = st.sampled_from(
    (
        "<think>",
        "</think>",
        "<action>",
        "</action>",
        "look",
        " ",
        "Go to Bed 1",
        "<ACTION>",
        "</ACTION>",
        "家",
        "\n",
        "é",
    )
)
RESPONSES = st.text(max_size=40) | st.lists(PIECES, max_size=9).map("".join)


@pytest.mark.parametrize(
    ("response", "command", "form"),
    [
        ("<think>a</think><action>look</action>", "look", True),
        (" <think></think>\n<action> Go TO Bed 1\n</action> ", "go to bed 1", True),
        ("<action>look</action>", "look", False),  # no thoughts
        ("<think>a</think><action>look</action><action>help</action>", "look", False),
        ("<action>look</action><think>a</think>", "look", False),
        ("I think: <think>a</think><action>look</action>", "look", False),
        ("<think>a</think>look", None, False),
        ("<think>a</think><action></action>", None, False),
        ("<think>a</think><action>look", None, False),
        ("<ACTION>look</ACTION>", None, False),
        ("", None, False),
    ],
)
def test_what_is_played(response: str, command: str | None, form: bool) -> None:
    parsed = CommandParser().parse(response)
    assert (parsed.action, parsed.format_ok) == (command, form)
    assert bool(parsed.problem) is not form


@pytest.mark.parametrize("parser", [CommandParser(), PeerParser(PEER_TAIL), VerbatimParser()])
def test_what_nobody_reads(parser: CommandParser | PeerParser | VerbatimParser) -> None:
    for response in ("<action>look</action>\0", "<action>look</action>" + "x" * MAX_RESPONSE_LENGTH):
        parsed = parser.parse(response)
        assert parsed.action is None
        assert not parsed.format_ok
        assert parsed.problem


@pytest.mark.parametrize(
    ("response", "command", "valid"),
    [
        ("<think>a</think><action>LOOK</action>", "look", True),
        ("text <think>a</think> more <action>look</action> end", "look", True),
        ("<THINK>a</THINK><action>look</action>", "look", False),
        ("<think>家</think><action>look</action>", "look", False),
        ("<action>look</action>", "look", False),
        ("<think>a</think><ACTION>look</ACTION>", "look", True),
        ("Therefore I will now go to the fridge 1", "fore i will now go to the fridge 1"[-30:], False),
        ("</action>x<action>", "", False),
        ("", "", False),
    ],
)
def test_what_verl_agent_plays(response: str, command: str, valid: bool) -> None:
    parsed = PeerParser(PEER_TAIL).parse(response)
    assert (parsed.action, parsed.format_ok) == (command, valid)


@given(RESPONSES)
def test_nothing_raises_and_peers_always_play(response: str) -> None:
    parsed = CommandParser().parse(response)
    assert parsed.action is None or parsed.action == parsed.action.strip().lower() != ""
    assert parsed.format_ok <= (parsed.action is not None)
    if "\0" not in response:
        assert PeerParser(PEER_TAIL).parse(response).action == find_peer_command(response)
        if "</think>" not in response:  # which ends a native thought
            assert VerbatimParser().parse(response).action == response


@given(st.text("abc 1", min_size=1).filter(str.strip), st.text("abc ."))
def test_an_experts_response_is_read_back(command: str, think: str) -> None:
    for parser in (CommandParser(), PeerParser(PEER_TAIL)):
        parsed = parser.parse(parser.respond(command, think))
        assert (parsed.action, parsed.format_ok) == (command.strip(), True)
    assert VerbatimParser().parse(VerbatimParser().respond(command)).action == command
