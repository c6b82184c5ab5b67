"""Actions as calls of tools."""

import inspect
import json
import pickle
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import CodeParser, read_call
from spear_envs.code.prompts import TOOLS as CODE_TOOLS
from spear_envs.core.env import SpearEnv
from spear_envs.core.making import make_env
from spear_envs.core.tools import ACT, CallError, make_tool, show_call, write_call
from tests.spear_envs.corridor import CORRIDOR

ALL: dict[str, dict[str, Any]] = {
    "spear/ALFWorld-v0": {},
    "spear/WebShop-v0": {},
    "spear/Sokoban-v1": {"modality": "text"},
    "spear/SearchR1-v0": {},
    "spear/CodeInterpreter-v0": {},
    CORRIDOR: {},
}
ALPHABET = st.text(min_size=1, max_size=8) | st.integers() | st.none() | st.booleans() | st.lists(st.text(max_size=3))


def find_call(env: SpearEnv[Any], action: str) -> tuple[str, dict[str, Any]]:
    """The one call that writes an action."""
    found = [(tool, arguments) for tool in env.tools if (arguments := tool.read(action)) is not None]
    assert len(found) == 1, action
    ((tool, arguments),) = found
    written = tool.write(arguments)
    assert env.parser.parse(written).action == env.parser.parse(action).action
    return tool.name, arguments


@pytest.mark.parametrize("env_id", ALL)
def test_an_expert_plays_the_same_by_calls(env_id: str) -> None:
    """Each admissible action on the way is written by one call, and calls pay what the bare actions pay."""
    env, twin = (make_env(env_id, keywords={"response_format": "plain", **ALL[env_id]}) for _ in range(2))
    seen = set()
    for seed in range(3):
        env.reset(seed=seed), twin.reset(seed=seed)
        while not env.done:
            for action in env._admissible() or ():
                seen.add(find_call(env, action)[0])
            action = env.expert_plan()[0]
            name, arguments = find_call(env, action)
            seen.add(name)
            called, plain = env.step(write_call(env.tools, name, arguments)), twin.step(action)
            assert called == plain
        assert env.episode.won
    # Treatments, lamps and knives are not in every game.
    assert {"go_to", "open", "take", "move", "look", "help"} <= seen or seen == {tool.name for tool in env.tools}
    assert pickle.loads(pickle.dumps(env)).tools == env.tools
    env.close(), twin.close()


def test_several_moves_in_a_turn_are_a_list() -> None:
    env = make_env("spear/Sokoban-v1", keywords={"modality": "text", "moves_per_turn": 3, "response_format": "plain"})
    env.reset(seed=1)
    while not env.done:
        name, arguments = find_call(env, env.expert_plan()[0])
        assert name == "move" and isinstance(arguments["directions"], list)
        env.step(write_call(env.tools, name, arguments))
    assert env.episode.won
    (tool,) = env.tools
    items = {"type": "string", "enum": ["up", "down", "left", "right"]}
    assert tool.parameters["properties"]["directions"]["items"] == items
    with pytest.raises(CallError, match="'directions' of move is a list, each item one of up, down, left, right, not"):
        tool.write({"directions": ["up", "still"]})


Colour = Literal["red", "green"]


@make_tool(r"(?P<colour>red|green) x(?P<count>-?\d+) (?P<loud>True|False)")
def paint(
    colour: Annotated[Colour, "Of the paint."], count: Annotated[int, "How often."], loud: Annotated[bool, "Whether."]
) -> str:
    """Paints."""
    return f"{colour} x{count} {loud}"


def test_the_schema_and_the_function_are_those_of_the_hints() -> None:
    assert paint.schema()["function"] == {
        "name": "paint",
        "description": "Paints.",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": ["red", "green"], "description": "Of the paint."},
                "count": {"type": "integer", "description": "How often."},
                "loud": {"type": "boolean", "description": "Whether."},
            },
            "required": ["colour", "count", "loud"],
        },
    }

    def play(self: Any, **arguments: Any) -> str:
        return paint.write(arguments)

    dressed = paint.dress(play, "self")
    assert list(inspect.signature(dressed).parameters) == ["self", "colour", "count", "loud"]
    assert inspect.get_annotations(dressed)["colour"] == Colour and "count: How often." in (dressed.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"color": "red"}, "paint takes no argument 'color': it takes colour, count, loud. Did you mean 'colour'?"),
        ({"colour": "red"}, "paint needs the argument 'count': a whole number."),
        ({"colour": "blue", "count": 1, "loud": True}, "'colour' of paint is one of red, green, not \"blue\"."),
        ({"colour": "red", "count": True, "loud": True}, "'count' of paint is a whole number, not true."),
        ({"colour": "red", "count": "1", "loud": 1}, "'count' of paint is a whole number, not \"1\"."),
        ({"colour": ["red"], "count": 1, "loud": 1}, "'colour' of paint is one of red, green, not [\"red\"]."),
    ],
)
def test_what_is_wrong_with_a_call_is_told_in_a_sentence(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(CallError) as caught:
        paint.write(arguments)
    assert str(caught.value) == text


@given(st.integers(), st.booleans())
def test_what_is_shown_can_be_called(count: int, loud: bool) -> None:
    wanted = {"colour": "red", "count": count, "loud": loud}
    written = paint.write(wanted)
    assert paint.read(written) == wanted
    assert show_call([paint], written) == f'paint(colour="red", count={count}, loud={json.dumps(loud)})'


@given(st.dictionaries(st.sampled_from(["colour", "count", "loud", "x"]), ALPHABET | st.sampled_from(["red"])))
def test_a_call_is_played_or_refused(arguments: dict[str, Any]) -> None:
    try:
        written = paint.write(arguments)
    except CallError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?"))
    else:
        assert paint.form.fullmatch(written) and set(arguments) == {"colour", "count", "loud"}


def test_tools_that_cannot_be_made() -> None:
    def unexplained(name: str) -> str:
        return name

    def untyped(name: Annotated[dict[str, str], "A name."]) -> str:
        return ""

    for function in (unexplained, untyped):
        with pytest.raises(TypeError, match="annotate each parameter"):
            make_tool("(?P<name>.+)")(function)
    with pytest.raises(TypeError, match="a group for each of action"):
        make_tool("(?P<name>.+)")(ACT.function)
    with pytest.raises(CallError, match=r"no tool 'ac'. Did you mean 'act'\? There is: act\."):
        write_call((ACT,), "ac", {})


@given(st.text(min_size=1).filter(str.strip))
def test_code_of_any_kind_survives_a_call(code: str) -> None:
    """Also code with fences, tags and quotes in it."""
    parsed = CodeParser().parse(CODE_TOOLS[0].write({"code": code}))
    assert parsed.action is not None and read_call(parsed.action) == code
    assert CODE_TOOLS[0].read(parsed.action) == {"code": code}
