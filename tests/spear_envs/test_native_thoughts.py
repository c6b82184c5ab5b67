"""The thoughts of reasoning models: each environment reads a response around them, and tells that they were native."""

from __future__ import annotations

from typing import Any

import pytest

from spear_envs.core.making import make_env
from spear_envs.core.registration import ENVIRONMENTS

OPENED = "I look.\n</think>\n\n"
BEFORE = "<think>\nFirst I look.\n</think>\n\n"


def play(env_id: str, native: str, asked: str | None, **keywords: Any) -> tuple[str, dict[str, Any], Any]:
    """Play the expert's first action after a native thought and the thought that the prompt asks for."""
    env = make_env(env_id, keywords=keywords)
    env.reset(seed=0)
    action = env.expert_plan()[0]
    written = env.parser.respond(action, "t") if asked else env.parser.respond(action).replace("<think></think>", "")
    *_, info = env.step(native + written)
    return action, info, env


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize(("native", "asked"), [(OPENED, None), (OPENED, "t"), (BEFORE, "t"), ("\n</think>\n\n", None)])
def test_a_response_around_a_native_thought_is_well_formed(env_id: str, native: str, asked: str | None) -> None:
    action, info, _ = play(env_id, native, asked)
    assert (info["action"], info["format_ok"], info["native_thought"]) == (action, True, True)
    assert info["reward_terms"]["format"] > 0


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize("response_format", ["tags", "plain"])
def test_a_response_as_the_prompt_asks_has_none(env_id: str, response_format: str) -> None:
    _, info, _ = play(env_id, "", "t", response_format=response_format)
    assert info["format_ok"]
    assert info["native_thought"] == (env_id == "spear/CodeInterpreter-v0" and response_format == "tags")


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize("native", [OPENED, BEFORE])
def test_a_bare_action_may_follow_a_native_thought(env_id: str, native: str) -> None:
    action, info, _ = play(env_id, native, None, response_format="plain")
    assert (info["action"], info["format_ok"], info["native_thought"]) == (action, True, True)


@pytest.mark.parametrize(
    ("env_id", "on_malformed", "played"),
    [
        ("spear/Sokoban-v1", "explain", "up"),
        ("spear/Sokoban-v1", "peer", "down"),
        ("spear/ALFWorld-v0", "explain", "up"),
        ("spear/ALFWorld-v0", "peer", "down"),
    ],
)
@pytest.mark.parametrize("behind", ["", "."])
def test_an_action_rehearsed_in_a_native_thought_is_played_by_verl_agent_alone(
    env_id: str, on_malformed: str, played: str, behind: str
) -> None:
    env = make_env(env_id, keywords={"on_malformed": on_malformed})
    env.reset(seed=0)
    *_, info = env.step(f"Is <action>down</action> right?\n</think>\n\n<action>up</action>{behind}")
    strict = behind and on_malformed == "explain" and "Sokoban" in env_id
    assert info["action"] == ("" if strict else played)
