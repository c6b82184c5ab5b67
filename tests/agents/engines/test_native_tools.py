"""The environment's actions as tools of a server's model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spear_agents.cli import evaluate
from spear_agents.evaluation.records import EPISODES
from spear_agents.play.trajectory import Trajectory, read_trajectories
from spear_envs.core.errors import SpearError
from tests.agents.chat_server import Answer, Handler, Script, complete, say

pytest.importorskip("openai")
SOKOBAN = ["spear/Sokoban-v1", "--engine", "openai", "--env", "modality=text", "--tasks", "1"]


def call(name: str, arguments: Any, text: str | None = None, times: int = 1) -> dict[str, Any]:
    """An answer that calls a tool, as OpenAI's servers write it."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    made = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": written}}
    message = {"role": "assistant", "content": text, "tool_calls": [made] * times}
    return complete(choice={"message": message, "finish_reason": "tool_calls"})


def check_tools(handler: Handler) -> None:
    """Checks tools as OpenAI does: a list of functions with names and schemas of objects."""
    body = handler.server.script.requests[-1]
    for tool in body["tools"]:
        function = tool["function"]
        if tool["type"] != "function" or not function["name"].isidentifier():
            return say({"error": {"message": "Invalid type for 'tools'", "param": "tools"}}, 400)(handler)
        if function["parameters"]["type"] != "object":
            return say({"error": {"message": "Invalid schema for function"}}, 400)(handler)
    tool = body["tools"][0]["function"]
    properties = tool["parameters"]["properties"]
    return say(call(tool["name"], {name: kind["enum"][0] for name, kind in properties.items()}, "I look."))(handler)


def play(script: Script, tmp_path: Path, *answers: Answer) -> list[Trajectory]:
    script.answers = [*answers]
    done = run(script, "--native-tools", "--out", str(tmp_path))
    assert done.exit_code == 0, (done.output, done.exception)
    return list(read_trajectories(tmp_path / EPISODES))


def run(script: Script, *options: str) -> Result:
    return CliRunner().invoke(evaluate, [*SOKOBAN, "--base-url", script.url, "--model", "m", *options])


def test_a_call_is_the_action_and_the_text_its_thoughts(script: Script, tmp_path: Path) -> None:
    (episode,) = play(script, tmp_path, check_tools)
    turn = episode.turns[0]
    assert turn.format_ok and turn.response.startswith("<think>I look.</think><action>")
    assert turn.served is not None and turn.served.ending is None and turn.served.note.startswith("call ")
    prompt = script.requests[0]["messages"][-1]["content"]
    assert "<action>" not in prompt and "Call " in prompt
    assert json.loads((tmp_path / "settings.json").read_text("utf-8"))["native_tools"] is True


def test_one_of_several_calls_is_played_and_marks_in_the_text_do_no_harm(script: Script, tmp_path: Path) -> None:
    def answer(handler: Handler) -> None:
        function = handler.server.script.requests[-1]["tools"][0]["function"]
        arguments = {name: kind["enum"][1] for name, kind in function["parameters"]["properties"].items()}
        say(call(function["name"], arguments, "I write <action>up</action>.", times=3))(handler)

    (episode,) = play(script, tmp_path, answer)
    turn = episode.turns[0]
    assert turn.format_ok and turn.action == "down"
    assert turn.served is not None and "2 more, not played" in turn.served.note


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (call("fly", {}), "no tool 'fly'"),
        (call("act", "[1]"), "not a JSON object"),
        (call("act", "{"), "not a JSON object"),
    ],
)
def test_a_call_that_cannot_be_played_is_a_malformed_response(
    script: Script, tmp_path: Path, answer: dict[str, Any], note: str
) -> None:
    (episode,) = play(script, tmp_path, say(answer))
    turn = episode.turns[0]
    assert not turn.format_ok and turn.served is not None and note in turn.served.note


def test_a_call_that_comes_in_pieces_is_joined(script: Script, tmp_path: Path) -> None:
    def answer(handler: Handler) -> None:
        function = handler.server.script.requests[-1]["tools"][0]["function"]
        arguments = json.dumps({n: kind["enum"][1] for n, kind in function["parameters"]["properties"].items()})
        named = {"id": "1", "type": "function", "function": {"name": function["name"], "arguments": ""}}
        parts: list[dict[str, Any]] = [
            {"index": 0, **named},
            {"index": 1, **named},
            {"index": 0, "function": {"arguments": arguments[:3]}},
            {"index": 1, "function": {"arguments": "{"}},
            {"index": 0, "function": {"arguments": arguments[3:]}},
        ]
        pieces = [{"choices": [{"delta": {"tool_calls": [part]}}]} for part in parts]
        pieces.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
        say("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces).encode())(handler)

    (episode,) = play(script, tmp_path, answer)
    turn = episode.turns[0]
    assert turn.format_ok and turn.action == "down"
    assert turn.served is not None and "1 more, not played" in turn.served.note


def test_text_without_a_call_is_read_as_ever_and_a_refused_field_left_out(script: Script, tmp_path: Path) -> None:
    text = say(complete("<think>x</think><action>up</action>"))
    refusal = say({"error": {"message": "Unsupported parameter", "param": "parallel_tool_calls"}}, 400)
    (episode,) = play(script, tmp_path, refusal, text)
    assert episode.turns[0].format_ok and episode.turns[0].action == "up"
    assert "parallel_tool_calls" in script.requests[0] and "parallel_tool_calls" not in script.requests[1]


def test_tools_are_off_by_default_and_have_prompts_of_their_own(script: Script) -> None:
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    assert run(script).exit_code == 0 and "tools" not in script.requests[0]
    done = run(script, "--native-tools", "--method", "react")
    assert isinstance(done.exception, SpearError) and "--method" in str(done.exception)
    done = CliRunner().invoke(evaluate, ["spear/Sokoban-v1", "--engine", "random", "--tasks", "1", "--native-tools"])
    assert isinstance(done.exception, SpearError) and "--native-tools" in str(done.exception)
