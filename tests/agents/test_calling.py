from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.calling import CallForm, ToolCall, find_form, read_calls, spell_out

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, st.text("abc_", min_size=1), st.dictionaries(st.text("xyz", min_size=1), json_values))
words = st.text("ab <>{}\n", max_size=12).map(str.strip)


@given(st.lists(calls, min_size=1, max_size=3), words)
def test_hermes_calls_come_back(made: list[ToolCall], before: str) -> None:
    # A closing tag within an argument ends the call for every reader of this form.
    if any("</tool_call>" in call.write()[len("<tool_call>") : -len("</tool_call>")] for call in made):
        return
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


def test_reading_takes_linear_time() -> None:
    def measure(size: int) -> float:
        start = time.perf_counter()
        for piece in ("<tool_call>", "<tool_call>{", "{};", "</tool_call>"):
            for form in CallForm:
                read_calls(piece * size, form)
        return time.perf_counter() - start

    measure(100)
    assert measure(40_000) < 30 * max(measure(4_000), 1e-3)


def test_the_form_is_read_off_the_chat_template() -> None:
    assert find_form("{% if tools %}<tool_call>{{ '\"parameters\"' }}") is CallForm.HERMES
    assert find_form('{"name": function name, "parameters": dictionary}') is CallForm.LLAMA
    assert find_form("") is CallForm.HERMES


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
