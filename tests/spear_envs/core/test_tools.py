"""Actions as calls of tools."""

from __future__ import annotations

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import CodeParser, read_call
from spear_envs.code.prompts import TOOLS as CODE_TOOLS
from spear_envs.core.parsing import PlainParser
from spear_envs.core.registration import ENVIRONMENTS
from spear_envs.core.tools import ACT, CallParser, Tool


@pytest.mark.parametrize("entry", ENVIRONMENTS, ids=lambda entry: entry.id)
def test_every_environment_has_tools_that_its_grammar_reads(entry: object) -> None:
    env = gym.make(entry.id, response_format="plain").unwrapped  # type: ignore[attr-defined]
    for tool in env.tools:
        assert tool.name.isidentifier() and tool.parameter.isidentifier()
        assert env.parser.parse(tool.write("42")).format_ok
    env.close()


def test_the_schema() -> None:
    tool = Tool("look", "Looks.", "where", "A place.", "<look>", "</look>")
    assert tool.write("here") == "<look>here</look>"
    function = tool.schema()["function"]
    assert function["name"] == "look" and function["parameters"]["required"] == ["where"]


@given(st.text(min_size=1).filter(str.strip))
def test_code_of_any_kind_survives_a_call(code: str) -> None:
    """Also code with fences, tags and quotes in it."""
    parsed = CodeParser().parse(CODE_TOOLS[0].write(code))
    assert parsed.action is not None and read_call(parsed.action) == code


def test_prompts_ask_for_a_call() -> None:
    parser = CallParser((ACT,), PlainParser())
    assert "Call act" in parser.hint
    assert parser.parse(" up ") == PlainParser().parse(" up ") and parser.respond("up") == "up"
