from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import CodeParser, read_call, write_answer, write_call
from spear_envs.code.prompts import CompactCodeTemplate, RetoolTemplate, ToolCallTemplate, make_templates
from spear_envs.core.prompts import PromptContext, PromptTemplate, RunningTemplate
from tests.spear_envs.code.conftest import make

FIRST = PromptContext("What is $\\frac{1}{2}$ of {4}?", "What is $\\frac{1}{2}$ of {4}?", None, (), 1, 8)
LATER = replace(FIRST, observation="42", turn=2)


def test_all_templates() -> None:
    templates = make_templates(CodeParser(), 30.0)
    assert set(templates) == {"default", "budget", "retool", "compact", "tools"}
    for name, template in templates.items():
        assert isinstance(template, PromptTemplate) and template.name == name and template.system() is None
        assert isinstance(template, RunningTemplate) == (name == "retool")
        assert FIRST.instruction in template.render(FIRST), "braces stay as they are"


def test_the_slots() -> None:
    for template in (ToolCallTemplate(time_limit=2.5), RetoolTemplate(time_limit=2.5)):
        text = template.render(replace(FIRST, max_turns=19))
        assert "at most 19 t" in text and "2.5 seconds" in text and "\\boxed{" in text and "print" in text
        assert text.endswith(f"Problem: {FIRST.instruction}") and "{{" not in text
    assert '"name": "code_interpreter"' in ToolCallTemplate().render(FIRST)


# What the chat template of Qwen2.5-Instruct writes for a message of the role `tool`, and for one of the role `user`.
QWEN_TOOL = "<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
QWEN_USER = "<|im_start|>user\n{content}<|im_end|>\n"


def test_output_comes_back_as_qwen_s_chat_template_writes_a_tool_message() -> None:
    said = ToolCallTemplate().follow_up(LATER)
    assert QWEN_USER.format(content=said) == QWEN_TOOL.format(content="42")


def test_turns_that_are_left() -> None:
    template = make_templates(CodeParser(), 30.0)["budget"]
    assert template.follow_up(LATER) == "<tool_response>\n42\n[7 turns left]\n</tool_response>"
    assert "[1 turn left]" in template.follow_up(replace(LATER, turn=8))


def test_retool_s_form() -> None:
    template = RetoolTemplate()
    assert template.respond(write_call("print(1)"), "Hm.") == "Hm.\n<code>\n```python\nprint(1)\n```\n</code>"
    assert template.respond(write_answer("42")) == "<answer>\\boxed{42}</answer>"
    assert template.follow_up(LATER) == "\n<interpreter>\n42\n</interpreter>\n"
    assert template.stop_strings == ("</code>", "</answer>")


def test_a_prompt_for_each_turn_shows_the_turns_before() -> None:
    history = [(FIRST.instruction, write_call("print(1)")), ("1", "(nothing)")]
    text = RetoolTemplate().render(replace(FIRST, observation="oops", history=history, turn=3))
    assert text.endswith(
        f"Problem: {FIRST.instruction}\n\n<code>\n```python\nprint(1)\n```\n</code>\n\n"
        "<interpreter>\n1\n</interpreter>\n\n(nothing)\n\n<interpreter>\noops\n</interpreter>"
    )
    cut = ToolCallTemplate().render(replace(FIRST, observation="oops", history=history[1:], turn=3))
    assert "(1 earlier turns are not shown.)" in cut and "print(1)" not in cut
    assert cut.endswith("<tool_response>\n1\n</tool_response>\n\n(nothing)\n\n<tool_response>\noops\n</tool_response>")


def test_the_compact_form() -> None:
    template = CompactCodeTemplate()
    assert template.render(FIRST) == f"{FIRST.instruction}\n#"
    assert template.follow_up(LATER) == "\n>42\n#"
    history = [(FIRST.instruction, write_call("print(1)"))]
    expected = f"{FIRST.instruction}\n#<code>print(1)</code>\n>42\n#"
    assert template.render(replace(LATER, history=history)) == expected


@pytest.mark.parametrize("name", ["default", "budget", "retool", "compact"])
@given(code=st.text(st.characters(exclude_characters="`<>\r\n\0")).filter(str.strip), answer=st.integers())
def test_responses_are_read_as_they_were_meant(name: str, code: str, answer: int) -> None:
    template, parser = make_templates(CodeParser(), 30.0)[name], CodeParser()
    parsed = parser.parse(template.respond(write_call(code), "So"))
    fenced = f"```python\n{code}\n```" if name == "retool" else code
    assert parsed.format_ok and parsed.action is not None and read_call(parsed.action) == fenced
    parsed = parser.parse(template.respond(write_answer(str(answer)), "So"))
    assert (parsed.action, parsed.format_ok) == (write_answer(str(answer)), True)


def test_the_compact_words_are_few_and_give_back_the_text() -> None:
    env = make(dataset="mini-small")
    template = env.templates["compact"]
    assert template.token_pattern is not None
    words = set()
    for text in env.lexicon():
        pieces = re.findall(template.token_pattern, text)
        assert "".join(pieces) == text
        words.update(pieces)
    assert len(words) < 150
    for split in env.splits:
        for task in make(dataset="mini-small", split=split).tasks:
            shown = template.render(replace(FIRST, instruction=task.instruction))
            assert set(re.findall(template.token_pattern, shown)) <= words | {"#", "\n"}
            assert set(str(task.content["answer"])) <= words
