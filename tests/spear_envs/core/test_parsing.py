"""Responses, spaces of text, and prompt templates."""

import time

import gymnasium as gym
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import create_shared_memory
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.parsing import (
    MAX_RESPONSE_LENGTH,
    PlainParser,
    ResponseParser,
    TagParser,
)
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptContext, PromptTemplate
from spear_envs.core.spaces import PermissiveText

TAGS = [
    "<think>",
    "</think>",
    "<action>",
    "</action>",
    "<",
    ">",
    "/",
    "think",
    "action",
    " ",
    "\n",
    "up",
    "é",
    "漢",
    "\0",
]
anything = st.text() | st.lists(st.sampled_from(TAGS), max_size=30).map("".join)
plain_text = st.text(st.characters(exclude_characters="<\0")).filter(lambda text: text.strip())


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("", "it is empty"),
        (" \n\t ", "it is empty"),
        ("up", "there is no <action>…</action>"),
        ("<Think>a</Think><Action>up</Action>", "lower case"),
        ("<think>a</think>", "there is no <action>…</action>"),
        ("<action>up</action>", "there is no <think>…</think>"),
        ("<think>a</think><action>up", "<action> is never closed"),
        ("<think>a</think>up</action>", "</action> was never opened"),
        ("<think>a<action>up</action>", "<think> is never closed"),
        ("a</think><action>", "never closed"),
        ("a</think>up</action>", "never opened"),
        ("a</think>so <action>up</action>", "outside the tags"),
        ("a</think>b</think><action>up</action>", "2 times"),
        ("</think>\n\n<action> </action>", "is empty"),
        ("<think>\na\n</think>\n\n<think>b</think>\n\n<think>c</think><action>up</action>", "2 times"),
        ("<think>\na\n</think>\n\n<think>b</think>", "there is no <action>…</action>"),
        ("<think>\na\n</think>\n\n<think>b<action>up</action></think><action>up</action>", "2 times"),
        ("a</think>", "there is no <action>…</action>"),
        ("<think>a</think><action>up</action><action>down</action>", "2 times"),
        ("<think>a</think><think>b</think><action>up</action>", "2 times"),
        ("<think>a</think><action><action>up</action></action>", "2 times"),
        ("<think>a<action>up</action></think>", "overlap"),
        ("<think>a<action>b</think>up</action>", "overlap"),
        ("<action><think>a</think>up</action>", "overlap"),
        ("<action>a<think>b</action>c</think>", "overlap"),
        ("<action>up</action><think>a</think>", "the reasoning comes first"),
        ("</think>a<think><action>up</action>", "<think> is never closed"),
        ("<think>a</think></action>up<action>", "comes before <action>"),
        ("<think>a</think><action> \n </action>", "is empty"),
        ("so: <think>a</think><action>up</action>", "outside the tags"),
        ("<think>a</think> and <action>up</action>", "outside the tags"),
        ("<think>a</think><action>up</action>.", "outside the tags"),
        ("<think>a\0</think><action>up</action>", "NUL"),
    ],
)
def test_each_malformation_has_its_reason(response: str, problem: str) -> None:
    parsed = TagParser().parse(response)
    assert parsed.action is None
    assert not parsed.format_ok
    assert problem in parsed.problem


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<think>a</think><action>up</action>", "up"),
        ("  <think></think>\n\n<action>\n up \n</action>\n", "up"),
        ("<think>2 < 3 and </b></think><action>a < b</action>", "a < b"),
        ("<think><act</think><action>ion></action>", "ion>"),
        ("<think>思考</think><action>上</action>", "上"),
    ],
)
def test_well_formed_responses(response: str, action: str) -> None:
    parsed = TagParser().parse(response)
    assert parsed.action == action
    assert parsed.format_ok
    assert parsed.problem == ""


@given(anything)
def test_parsing_never_raises_and_always_explains(response: str) -> None:
    for parser in (TagParser(), PlainParser(), TagParser("answer")):
        parsed = parser.parse(response)
        assert parsed.format_ok == (parsed.action is not None) == (parsed.problem == "")
        if parsed.action is not None:
            assert parsed.action and parsed.action == parsed.action.strip()


@given(plain_text, st.text(st.characters(exclude_characters="<\0")))
def test_respond_is_the_inverse_of_parse(action: str, think: str) -> None:
    for parser in (TagParser(), TagParser("search", "reason"), PlainParser()):
        assert isinstance(parser, ResponseParser)
        parsed = parser.parse(parser.respond(action, think))
        assert parsed.action == action.strip()
        assert parsed.format_ok


@pytest.mark.parametrize(
    ("response", "action", "think", "native"),
    [
        ("I look.\n</think>\n\n<action>up</action>", "up", "I look.", "I look."),
        ("</think>\n\n<action>up</action>", "up", "", ""),
        ("n\n</think>\n\n<think>t</think>\n<action>up</action>", "up", "t", "n"),
        ("<think>\nn\n</think>\n\n<think>t</think><action>up</action>", "up", "t", "n"),
        ("<think>n</think>\n\n<think>t</think><action>up</action>", "up", "t", "n"),
        (
            "Is <action>down</action> right? No.\n</think>\n\n<action>up</action>",
            "up",
            *["Is <action>down</action> right? No."] * 2,
        ),
        ("<think>t</think><action>up</action>", "up", "t", None),
    ],
)
def test_native_thoughts_of_reasoning_models_are_well_formed(
    response: str, action: str, think: str, native: str | None
) -> None:
    assert TagParser().parse(response) == (action, True, "", think, "action", native)


@pytest.mark.parametrize("native", ["<think>n</think>", "n</think>"])
def test_other_tags_for_thoughts_leave_think_to_the_model(native: str) -> None:
    parser = TagParser("search", "reason")
    assert parser.parse(f"{native}<reason>t</reason><search>q</search>") == ("q", True, "", "t", "action", "n")
    assert parser.parse(f"{native}<search>q</search>") == ("q", True, "", "n", "action", "n")


@pytest.mark.parametrize("response", ["<think>\nn\n</think>\n\nup", "n\n</think>\n\nup"])
def test_a_native_thought_is_no_part_of_a_bare_action(response: str) -> None:
    assert PlainParser().parse(response) == ("up", True, "", "n", "action", "n")


def test_length_limit() -> None:
    fits = TagParser().respond("up", "x" * (MAX_RESPONSE_LENGTH - 36))
    assert len(fits) <= MAX_RESPONSE_LENGTH
    assert TagParser().parse(fits).format_ok
    assert "1,048,576 characters" in TagParser().parse("x" * 1_048_576).problem
    assert "100,001 characters" in PlainParser().parse("x" * (MAX_RESPONSE_LENGTH + 1)).problem


@pytest.mark.parametrize("piece", ["<think>", "<action>", "<", "</think><action>", " "])
def test_time_is_linear(piece: str) -> None:
    longest = piece * (MAX_RESPONSE_LENGTH // len(piece))
    start = time.process_time()
    for response in (longest, "<think>" + longest[: MAX_RESPONSE_LENGTH - 20] + "</action>"):
        TagParser().parse(response)
    assert time.process_time() - start < 0.5


PINNED = "iZ=B\"&\t2}j\u304bYe\u093fth^`\uae00>~m\nL\u0416_!xt\xdf2(\u0416 ]'AVOM!\n,\nm\\j<fxKT\U0001f600|\u221a"


@given(st.text())
def test_any_text_is_in_the_space(text: str) -> None:
    assert text in PermissiveText(10_000)


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a"], "x" * 101])
def test_what_is_no_text_or_too_long_is_not(value: object) -> None:
    assert value not in PermissiveText(100)


def test_samples_depend_on_the_seed_alone() -> None:
    first, second = PermissiveText(1000), PermissiveText(1000)
    first.seed(5)
    second.seed(5)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(sample in first for sample in samples)
    assert max(map(len, samples)) <= 64 and len(set(samples)) > 40
    assert PermissiveText(1000, seed=5).sample() == samples[0]
    # pinned: the same text on every machine
    first.seed(0)
    assert first.sample() == PINNED


@pytest.mark.parametrize("space", [PermissiveText(9), gym.spaces.Dict(text=PermissiveText(9))])
def test_shared_memory_would_garble_texts_and_is_refused(space: gym.Space) -> None:
    with pytest.raises(CustomSpaceError, match="shared_memory=False"):
        create_shared_memory(space, n=2)


@pytest.mark.parametrize("text", ["", "漢字 ∑ 😀", "\0\ud800", "x" * 90])
def test_any_text_can_be_flattened(text: str) -> None:
    space = PermissiveText(90)
    flat = flatten(space, text)
    assert flat in flatten_space(space) and len(flat) == flatdim(space)
    assert unflatten(space, flat) == text


def make_context(turn: int = 1, **more: object) -> PromptContext:
    slots: dict = {
        "instruction": "Walk to the door.",
        "observation": "_P_D",
        "admissible_actions": ["left", "right", "help"],
        "history": [],
        "turn": turn,
        "max_turns": 12,
    }
    return PromptContext(**{**slots, **more})


@pytest.mark.parametrize("template", [DefaultTemplate("Rules."), CompactTemplate()])
def test_templates_keep_the_protocol(template: PromptTemplate) -> None:
    assert isinstance(template, PromptTemplate)
    assert template.system() is None
    assert "_P_D" in template.render(make_context())
    assert "_P_D" in template.follow_up(make_context(2))
    assert TagParser().parse(template.respond("left", "hm")).action == "left"


def test_actions_may_be_hidden_or_unlisted() -> None:
    template = DefaultTemplate(hidden_actions=frozenset({"help"}))
    assert "You may: 'left', 'right'\n" in template.render(make_context())
    assert "You may" not in template.render(make_context(admissible_actions=None))
    assert "You may" in template.render(make_context(admissible_actions=[]))
