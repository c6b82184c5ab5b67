from __future__ import annotations

import pytest

from spear_envs.core.parsing import PlainParser, TagParser
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptContext, PromptTemplate


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


def test_default_template_has_all_slots() -> None:
    text = DefaultTemplate("Rules.").render(make_context(4, history=[("P__D", "right"), ("_P_D", "left")]))
    assert text.startswith("Rules.\n\nYour task: Walk to the door.")
    assert "You have taken 3 of at most 12 steps." in text
    assert "[Observation 2: 'P__D', Action 2: 'right']\n[Observation 3: '_P_D', Action 3: 'left']" in text
    assert "This is step 4. You see:\n_P_D" in text
    assert "You may: 'left', 'right', 'help'" in text
    assert text.endswith(TagParser().hint)


def test_follow_up_leaves_out_what_the_conversation_shows() -> None:
    text = DefaultTemplate("Rules.").follow_up(make_context(4, history=[("P__D", "right")]))
    assert "Rules." not in text and "P__D" not in text and "task" not in text


def test_actions_may_be_hidden_or_unlisted() -> None:
    template = DefaultTemplate(hidden_actions=frozenset({"help"}))
    assert "You may: 'left', 'right'\n" in template.render(make_context())
    assert "You may" not in template.render(make_context(admissible_actions=None))
    assert "You may" in template.render(make_context(admissible_actions=[]))


def test_the_form_of_the_response_is_the_parsers() -> None:
    template = DefaultTemplate(parser=PlainParser())
    assert template.render(make_context()).endswith("Give the bare action, nothing else.")
    assert template.respond("left", "hm") == "left"
