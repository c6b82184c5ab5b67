from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import CodeParser, read_call, write_answer, write_call
from spear_envs.code.prompts import make_templates
from spear_envs.core.prompts import PromptContext, PromptTemplate, RunningTemplate
from tests.spear_envs.code.conftest import make

FIRST = PromptContext("What is $\\frac{1}{2}$ of {4}?", "What is $\\frac{1}{2}$ of {4}?", None, (), 1, 8)


def test_all_templates() -> None:
    templates = make_templates(CodeParser(), 30.0)
    assert set(templates) == {"default", "budget", "retool", "compact", "tools"}
    for name, template in templates.items():
        assert isinstance(template, PromptTemplate) and template.name == name and template.system() is None
        assert isinstance(template, RunningTemplate) == (name == "retool")
        assert FIRST.instruction in template.render(FIRST), "braces stay as they are"


# What the chat template of Qwen2.5-Instruct writes for a message of the role `tool`, and for one of the role `user`.


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
