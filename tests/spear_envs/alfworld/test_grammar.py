"""Reading how a game speaks off its grammar, and refusing games that do something else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.grammar import KNOWN_PARTS, digest_parts, read_wording, replace_sentence, split_grammar
from spear_envs.alfworld.wording import WORDING_2_1_2, Wording
from tests.spear_envs.alfworld.odd_games import make_release_2_1_1, patch_release_2_1_1
from tests.spear_envs.alfworld.peer import MEND, has_textworld
from tests.spear_envs.alfworld.small import WORDING_2_1_1, make_data

pytestmark = pytest.mark.skipif(not has_textworld(), reason=MEND)


def read(data: dict[str, Any]) -> Wording:
    return read_wording(split_grammar(data["grammar"])[1], data["pddl_domain"])


def test_what_is_built_in_is_alfworlds() -> None:
    data = make_data()
    assert digest_parts(split_grammar(data["grammar"])[1], data["pddl_domain"]) == KNOWN_PARTS


def test_the_releases_speak_as_the_constants_say() -> None:
    data = make_data()
    assert read(data) == WORDING_2_1_2
    assert read(make_release_2_1_1(data)) == WORDING_2_1_1
    assert read(patch_release_2_1_1(data)) == replace(WORDING_2_1_2, sinks=WORDING_2_1_1.sinks)


def test_the_sentence_is_cut_out_and_put_in() -> None:
    grammar = make_data()["grammar"]
    sentence, frame = split_grammar(grammar)
    assert sentence == "put a hot apple in fridge."
    other = replace_sentence(grammar, 'say "é" \\ and go.')
    assert split_grammar(other) == ('say "é" \\ and go.', frame)


@pytest.mark.parametrize(
    ("part", "old", "new", "fault"),
    [
        ("grammar", "You close the {r.name}.", "You shut the {r.name}.", "rule 'CloseObject.feedback' is different"),
        ("grammar", '"list_separator"', '"list_comma"', "rule 'list_separator' is different"),
        ("grammar", "You move the {o.name} to the {r.name}.", "Done.", "unknown way"),
        ("grammar", "move {o} to {r}", "move {r}", "unknown way"),
        ("grammar", "open {r}", "unlock {r}", "action openobject is different"),
        ("grammar", "action help {", "action hilfe {", "no words for the action 'help'"),
        ("grammar", '"intro": [', '"intro": ', "not JSON"),
        ("grammar", '"GotoLocation.feedback": [', '"GotoLocation.feedback": [{"rhs": "x"}, ', "exactly one text"),
        ("pddl_domain", "(not (opened ?r))\n", "\n", "action openobject is different"),
        ("pddl_domain", "(:action SliceObject", "(:action CutObject", "no words for the action 'cutobject'"),
        ("pddl_domain", "(:action inventory", "(:action", "no words for the action"),
        ("pddl_domain", "(define", "((define", "PDDL domain ends within"),
    ],
)
def test_a_game_of_another_kind_is_refused(part: str, old: str, new: str, fault: str) -> None:
    data = make_data()
    assert old in data[part]
    data[part] = data[part].replace(old, new, 1)
    with pytest.raises(GameError, match=fault):
        read(data)


def test_a_missing_action_is_noticed() -> None:
    data = make_data()
    domain = data["pddl_domain"]
    data["pddl_domain"] = domain[: domain.index(";; agent slices")] + domain[domain.index("(:action help") :]
    with pytest.raises(GameError, match="action sliceobject is missing"):
        read(data)


def test_a_grammar_without_a_task() -> None:
    with pytest.raises(GameError, match="Your task is to"):
        split_grammar(re.sub("Your task is to", "Do", make_data()["grammar"]))
    with pytest.raises(GameError, match="Your task is to"):
        replace_sentence("", "x")
