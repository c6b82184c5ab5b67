import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import (
    CodeParser,
    ResponseKind,
    parse_response,
    read_call,
    remove_thoughts,
    write_call,
)
from spear_envs.core.parsing import ResponseFormat, ResponseParser

PARSER = CodeParser()


def tool_call(call: Any) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


def named(arguments: Any, name: Any = "code_interpreter") -> str:
    return tool_call({"name": name, "arguments": arguments})


ONCE = json.dumps({"code": "print(1)"})


@pytest.mark.parametrize(
    "response",
    [
        named({"code": "print(1)"}),
        named(ONCE),
        named(json.dumps(ONCE)),
        named({"code": "print(1)", "language": "python"}),
        "Let me try.\n" + named({"code": "print(1)"}) + "\n",
        "<think>\nI reason.\n</think>\n\n" + named({"code": "print(1)"}),
        "I reason.\n</think>\n" + named({"code": "print(1)"}),
        "<code>print(1)</code>",
        "Try:\n<code>\nprint(1)\n</code>",
        "```python\nprint(1)\n```",
        "Try:\n```py\nprint(1)\n```\n",
        "Try:\r\n```python\r\nprint(1)\r\n```",
        "<think>t</think><action>```python\nprint(1)\n```</action>",
        "<think>t</think><action>\n```python\nprint(1)\n```\n</action>",
        "<think>```python\nprint(2)\n```</think>\n<code>print(1)</code>",
    ],
)
def test_calls(response: str) -> None:
    parsed = parse_response(response)
    assert (parsed.kind, parsed.content, parsed.format_ok) == (ResponseKind.CALL, "print(1)", True)


@pytest.mark.parametrize(
    "response",
    [
        named({"code": "print(1)"}) + named({"code": "print(2)"}),
        named({"code": "print(1)"}) + " and so on",
        tool_call("{") + named({"code": "print(1)"}),
        named({"code": "x"}, "search") + "<code>print(1)</code>",
        "<code>print(1)</code>\\boxed{1}",
        "<tool_call> never closed\n<code>print(1)</code>",
    ],
)
def test_the_first_valid_call_counts_and_the_format_is_not_right(response: str) -> None:
    parsed = parse_response(response)
    assert (parsed.kind, parsed.content, parsed.format_ok) == (ResponseKind.CALL, "print(1)", False)


@pytest.mark.parametrize("arguments", [{}, {"code": ""}, {"code": None}, "", None, "{}", '"{}"'])
def test_a_call_without_code_is_a_call(arguments: Any) -> None:
    parsed = parse_response(named(arguments))
    assert (parsed.kind, parsed.content) == (ResponseKind.CALL, "")


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (tool_call("{bad}"), "not valid JSON"),
        (tool_call(""), "not valid JSON"),
        (tool_call('{"name": "code_interpreter", "arguments": {"code": "a\nb"}}'), "not valid JSON"),
        (tool_call("[" * 100_000), "not valid JSON"),
        (tool_call("1" * 10_000), "not valid JSON"),
        (tool_call([1]), "not a JSON object"),
        (tool_call(3), "not a JSON object"),
        (named({"code": "x"}, "python"), "no tool 'python'; the only one is 'code_interpreter'"),
        (named({"code": "x"}, None), "without a name"),
        (tool_call({"arguments": {"code": "x"}}), "without a name"),
        (named("{"), "'arguments' is not valid JSON"),
        (named(json.dumps(json.dumps(ONCE))), "'arguments' is not a JSON object"),
        (named([1]), "'arguments' is not a JSON object"),
        (named({"code": 3}), "'code' is not a string"),
        (named({"code": ["print(1)"]}), "'code' is not a string"),
        ("<tool_call>{}", "never closed by </tool_call>"),
        ("<code>print(1)", "never closed by </code>"),
        ("```python\nprint(1)", "never closed by ```"),
        (tool_call("{") + "\\boxed{4}", "not valid JSON"),
    ],
)
def test_bad_calls(response: str, words: str) -> None:
    parsed = parse_response(response)
    assert parsed.kind is ResponseKind.BAD_CALL and not parsed.format_ok
    assert words in parsed.problem and "\n" not in parsed.problem and len(parsed.problem) < 250


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So it is \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{ 42 }", "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<think>\\boxed{1}</think>\\boxed{42}", "42"),
        ("\\boxed{1}</think>\\boxed{42}", "42"),
        ("\\boxed{42} and \\boxed{43", "42"),
        ("In `x` we print(1). ```inline``` \\boxed{42}", "42"),
        ("<answer>\\boxed{42}</answer>", "42"),
    ],
)
def test_answers(response: str, answer: str) -> None:
    parsed = parse_response(response)
    assert (parsed.kind, parsed.content, parsed.format_ok) == (ResponseKind.ANSWER, answer, True)


@pytest.mark.parametrize("response", ["", " \n", "42", "boxed{42}", "\\boxed{}", "<think>\\boxed{42}", "\\boxed{42"])
def test_neither_call_nor_answer(response: str) -> None:
    parsed = parse_response(response)
    assert parsed.kind is ResponseKind.NO_ANSWER and not parsed.format_ok and parsed.problem


def test_thoughts() -> None:
    assert remove_thoughts("a<think>b</think>c<think>d</think>e") == ("ace", ["b", "d"], True)
    assert remove_thoughts("a</think>b<think>c") == ("b", ["a", "c"], False)
    assert remove_thoughts("plain") == ("plain", [], True)
    assert PARSER.parse("<think> t </think>\\boxed{1}").think == "t"


@pytest.mark.parametrize(
    "piece",
    [
        *("<tool_call>", "<code>", "```python\n", "<think>", "</think>", "\\boxed{", "{", "`", "<", "\n", "}"),
        *("<tool_call></tool_call>", "<code>```python\n", "<tool_call>{</code>", "<think></think>", "```py\n```\n"),
        "<action>```python\n",
    ],
)
def test_time_is_linear(piece: str) -> None:
    text = piece * (600_000 // len(piece))
    start = time.process_time()
    parse_response(text)
    assert time.process_time() - start < 2, "600 kB"


@given(st.text(alphabet=st.sampled_from(list("<>/`{}\\\n ab\"':,")) | st.characters(), max_size=200))
def test_any_text_is_read(text: str) -> None:
    for parser in (PARSER, CodeParser(ResponseFormat.PLAIN)):
        parsed = parser.parse(text)
        assert (parsed.action is None) == bool(parsed.problem)
        assert not (parsed.action is None and parsed.format_ok)


@given(st.text(), st.text(alphabet="abc ,."))
def test_what_is_written_is_read(code: str, think: str) -> None:
    if "</tool_call>" in json.dumps(code, ensure_ascii=False):
        return
    parsed = PARSER.parse(PARSER.respond(write_call(code), think))
    assert parsed.action is not None and read_call(parsed.action) == code
    assert parsed.format_ok and parsed.think == think.strip()


def test_plain_responses() -> None:
    plain = CodeParser(ResponseFormat.PLAIN)
    assert isinstance(plain, ResponseParser)
    assert plain.parse("42").action == "\\boxed{42}" and plain.parse("42").format_ok
    assert plain.parse("```python\nprint(1)\n```").action == "```python\nprint(1)\n```"
    assert plain.parse(" ").action is None
    assert plain.respond("```python\nprint(1)\n```", "t") == "```python\nprint(1)\n```"
