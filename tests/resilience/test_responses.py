"""Whatever a model writes, an environment answers in its contract; and a service that dies takes one session along."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_envs.core.making import make_env
from spear_envs.core.spaces import INFO_KEYS
from tests.resilience.damage import EXAMPLES

TAGS = ("think", "action", "search", "answer", "code", "tool_call", "information", "image")
PIECES = (
    *(f"<{tag}>" for tag in TAGS),
    *(f"</{tag}>" for tag in TAGS),
    '{"name": "code_interpreter", "arguments": {"code": "print(1)"}}',
    '{"name":',
    "{" * 3000,
    "```python\n",
    "```",
    "print(2)\n",
    "\\boxed{",
    "}",
    *("<|im_end|>", "\ud800", "\x00", "\u202e", "\r\n", " " * 5000, "é" * 300, "١٢", "1e999"),
    *("up", "look", "search[shoe]", "click[buy now]", "go to desk 1", "river"),
)
responses = st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=8).map("".join)
KEYWORDS: dict[str, dict[str, Any]] = {
    "spear/Sokoban-v1": {"modality": "text"},
    "spear/ALFWorld-v0": {},
    "spear/WebShop-v0": {},
    "spear/SearchR1-v0": {},
    "spear/CodeInterpreter-v0": {"time_limit": 5},
}


@pytest.fixture(scope="module", params=KEYWORDS)
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    if "Code" in request.param:
        from tests.sandbox.service import need_isolation

        need_isolation()
    made = make_env(request.param, keywords=KEYWORDS[request.param])
    yield made
    made.close()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(said=st.lists(responses, min_size=1, max_size=3), number=st.integers(0, 5))
def test_any_response_is_answered(env: Any, said: list[str], number: int) -> None:
    env.reset(options={"task": env.tasks[number].id})
    for response in said:
        observation, reward, terminated, truncated, info = env.step(response)
        assert env.observation_space.contains(observation) and isinstance(observation, str)
        assert set(info) >= set(INFO_KEYS) and info["fault"] is None
        assert math.isfinite(reward) and (reward == 0 or terminated or truncated)
        if terminated or truncated:
            assert 0 <= info["score"] <= 1
            break
    again = env.set_state(env.get_state())
    assert again[1]["task_id"] == env.task.id


@pytest.mark.slow
def test_a_server_of_environments_that_dies_takes_no_task_along() -> None:
    """The episode is lost with its session; played again on another server it is the same."""
    pytest.importorskip("websockets", reason="needs the extra 'env-server'")
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    from tests.commands import run_command
    from tests.spear_envs.adapters.service import Player

    def play(url: str, kill: Any = None) -> list[Any]:
        seen: list[Any] = []
        with connect(url.replace("http", "ws") + "/ws") as socket:
            player = Player(socket)
            seen.append(player.ask("reset", seed=5))
            for response in ("<think>a</think><action>up</action>", "nonsense", "<think></think><action>left</action>"):
                if kill is not None and len(seen) == 2:
                    kill()
                seen.append(player.ask("step", response=response))
        return seen

    arguments = ("spear/Sokoban-v1", "--env", "modality=text")
    with run_command("serve", *arguments) as first:
        whole = play(first.url)
        with pytest.raises((WebSocketException, ConnectionError, TimeoutError)):
            play(first.url, first.process.kill)
    with run_command("serve", *arguments) as second:
        assert play(second.url) == whole
