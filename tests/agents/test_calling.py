from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.transcript import CallForm, ToolCall, find_form, read_calls, spell_out

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, st.text("abc_", min_size=1), st.dictionaries(st.text("xyz", min_size=1), json_values))
words = st.text("ab <>{}\n", max_size=12).map(str.strip)


@given(st.lists(calls, min_size=1, max_size=3), words)
def test_hermes_calls_come_back(made: list[ToolCall], before: str) -> None:
    text = "\n".join([before, *(call.write() for call in made)])
    assert read_calls(text, CallForm.HERMES) == (before, made)


@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(["", "<|python_tag|>"]))
def test_llama_calls_come_back(made: list[ToolCall], tag: str) -> None:
    text = tag + "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in made)
    assert read_calls(text, CallForm.LLAMA) == ("", made)


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "{", '"name"', ":", "}", "1;"])


@given(st.text() | st.lists(PIECES).map("".join))
def test_whatever_is_written_is_read_without_an_error_and_stays_text(text: str) -> None:
    for form in CallForm:
        kept, found = read_calls(text, form)
        assert found or kept == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "go"</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "go", "arguments": [1]}</tool_call>',
        '<tool_call>["go"]</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '{"name": "go", "parameters": 1}',
        '{"name": "go", "parameters": {}} and more',
    ],
)
def test_broken_calls_stay_text(text: str) -> None:
    assert read_calls(text, CallForm.HERMES) == (text, [])
    assert read_calls(text, CallForm.LLAMA) == (text, [])


def test_what_models_write_beside_the_form_is_read() -> None:
    unclosed = read_calls('I go.\n<tool_call>{"name": "go", "arguments": "{\\"to\\": 1}"}', CallForm.HERMES)
    assert unclosed == ("I go.", [ToolCall("go", {"to": 1})])
    assert read_calls('<tool_call>{"name": "look"}</tool_call>', CallForm.HERMES) == ("", [ToolCall("look", {})])


GET = ToolCall("get", {"city": "Paris"})
ARGUMENTS = '{"city": "Paris"}'
PLAIN = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
SCHEMA = {
    "city": {"type": "string"},
    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "raw": {"type": "string"},
}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": SCHEMA}}}]


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", [GET]),
        ("<function=get>\n<parameter=days>\n3\n</parameter>\n<parameter=raw>\n3\n</parameter>\n</function>",
         [ToolCall("get", {"days": 3, "raw": "3"})]),
        ("<tool_call>\n<function=get>\n<parameter=raw>\na </parameter> b\n\nc\n</parameter>\n</function>\n</tool_call>",
         [ToolCall("get", {"raw": "a </parameter> b\n\nc"})]),
        ("<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", [GET]),
        ("<tool_call>get<arg_key>days</arg_key><arg_value>null</arg_value></tool_call>",
         [ToolCall("get", {"days": None})]),
        ("<tool_call>get</tool_call>", [ToolCall("get", {})]),
        (f'[TOOL_CALLS] [{{"name": "get", "arguments": {ARGUMENTS}, "id": "VvvODy9mT"}}, {PLAIN}]', [GET, GET]),
        (f"[TOOL_CALLS]get[CALL_ID]VvvODy9mT[ARGS]{ARGUMENTS}[TOOL_CALLS]get{ARGUMENTS}", [GET, GET]),
        (f"<|tool_call|>[{PLAIN}]<|/tool_call|>", [GET]),
        (f"<|tool_call|>[{PLAIN}, {PLAIN}]", [GET, GET]),
        (f"functools[{PLAIN}]", [GET]),
        (f"<TOOLCALL>[{PLAIN}]</TOOLCALL>", [GET]),
        (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         [GET]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
         f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [GET]),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
         f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>", [GET]),
        (f"<tool_call>\n{PLAIN}\n{PLAIN}\n</tool_call>", [GET, GET]),
        ('<tool_call>{"name": "get", "arguments": {"raw": "a\nb"}}</tool_call>', [ToolCall("get", {"raw": "a\nb"})]),
        (f"```json\n{PLAIN}\n```", [GET]),
        (f"<think>\nOr <tool_call>{PLAIN}</tool_call>?\n</think>\n\n<tool_call>{PLAIN}</tool_call>", [GET]),
        (f"Or <tool_call>{PLAIN}</tool_call>?</think>\n<tool_call>{PLAIN}</tool_call>", [GET]),
        ('<tool_call>{"name": "get", "arguments": {"raw": "</think> <think>"}}</tool_call>',
         [ToolCall("get", {"raw": "</think> <think>"})]),
    ],
)  # fmt: skip
def test_calls_of_each_family_are_read(written: str, made: list[ToolCall]) -> None:
    assert read_calls(written, CallForm.HERMES, TOOLS)[1] == made
    kept, found = read_calls(f"I look.\n{written}", CallForm.HERMES, TOOLS)
    assert (found == made and kept.startswith("I look.")) or written.startswith("```")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>I could write <tool_call>{PLAIN}</tool_call> but no.</think>\n\nThe answer is 3.",
        f"I could write <tool_call>{PLAIN}</tool_call> but no.</think>\n\nThe answer is 3.",
        f"[THINK]<tool_call>{PLAIN}</tool_call>[/THINK]3",
        f"<think>I could write <tool_call>{PLAIN}</tool_call>",
        f"<think>{PLAIN.replace('arguments', 'parameters')}</think>",
        '{"name": "Ada Lovelace", "born": 1815}',
        '{"name": "get"}',
        '{"name": "other", "arguments": {}}',
        f"<tool_call>{PLAIN} and more",
        "<tool_call><function=get><parameter=city>Par",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for form in CallForm:
        assert read_calls(text, form, TOOLS) == (text, [])


@pytest.mark.parametrize("schema", [None, [], {"properties": []}, {"properties": {"city": {"anyOf": 3, "type": {}}}}])
def test_a_schema_that_makes_no_sense_does_not_matter(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    assert read_calls(f"<tool_call>{PLAIN}</tool_call>", CallForm.HERMES, tools) == ("", [GET])


def test_a_thought_that_the_prompt_opened_holds_no_call() -> None:
    call = f"<tool_call>{PLAIN}</tool_call>"
    assert read_calls(f"Or {call}", CallForm.HERMES, TOOLS, thinking=True) == (f"Or {call}", [])
    assert read_calls(f"{call}</think>{call}", CallForm.HERMES, TOOLS, thinking=True)[1] == [GET]


def test_llamas_call_may_come_with_other_keys_and_after_prose() -> None:
    for written in (PLAIN, PLAIN.replace("arguments", "parameters"), f'{{"type": "function", {PLAIN[1:]}'):
        assert read_calls(f"Let me look. {written}", CallForm.LLAMA, TOOLS) == ("Let me look.", [GET])


def test_reading_takes_linear_time() -> None:
    def measure(size: int) -> float:
        start = time.perf_counter()
        for piece in ("<tool_call>", "<tool_call>{", "{};", "</tool_call>", "<function=a><parameter=b>", "<think>"):
            for form in CallForm:
                read_calls(piece * size, form)
        return time.perf_counter() - start

    measure(100)
    assert measure(40_000) < 30 * max(measure(4_000), 1e-3)


def test_the_form_is_read_off_the_chat_template() -> None:
    assert find_form("{% if tools %}<tool_call>{{ '\"parameters\"' }}") is CallForm.HERMES
    assert find_form('{"name": function name, "parameters": dictionary}') is CallForm.LLAMA
    assert find_form("") is CallForm.HERMES
    assert find_form("{% if tools %}[TOOL_CALLS]{% endif %}") is CallForm.HERMES
    assert find_form("{% for tool in tools %}<|call|>{% endfor %}") is CallForm.UNKNOWN


def test_tools_are_spelled_out_for_templates_that_know_none() -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": {}}}
    call = {"type": "function", "id": "1", "function": {"name": "go", "arguments": {"to": "x"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "gone", "tool_call_id": "1"},
        {"role": "tool", "content": "again", "tool_call_id": "2"},
    ]
    plain = spell_out(messages, [tool])
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert '"name": "go"' in plain[0]["content"] and plain[0]["content"].endswith("\n\nBe brief.")
    assert read_calls(plain[2]["content"], CallForm.HERMES) == ("Well.", [ToolCall("go", {"to": "x"})])
    assert plain[3]["content"].count("<tool_response>") == 2
    assert spell_out(messages[1:2], []) == messages[1:2]
    folded = spell_out(messages, [tool], system="user")
    assert [message["role"] for message in folded] == ["user", "assistant", "user"]
    assert folded[0]["content"].endswith("\n\nBe brief.\n\nGo.")
