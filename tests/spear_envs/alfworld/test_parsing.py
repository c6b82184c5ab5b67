"""From responses to commands: names, aliases, task types, and task sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.gamefile import SUBTASKS, TaskType, find_task_type, name_subtask
from spear_envs.alfworld.grammar import WORDING_2_1_2, Wording
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.pddl import name_things
from spear_envs.alfworld.tools import CommandParser, VerbatimParser, rewrite_command
from spear_envs.core.parsing import MAX_RESPONSE_LENGTH, PeerParser
from tests.spear_envs.alfworld.small import WORDING_2_1_1, play, start

PIECES = st.sampled_from(
    (
        "<think>",
        "</think>",
        "<action>",
        "</action>",
        "look",
        " ",
        "Go to Bed 1",
        "<ACTION>",
        "</ACTION>",
        "家",
        "\n",
        "é",
    )
)
RESPONSES = st.text(max_size=40) | st.lists(PIECES, max_size=9).map("".join)


@pytest.mark.parametrize(
    ("response", "command", "form"),
    [
        ("<think>a</think><action>look</action>", "look", True),
        (" <think></think>\n<action> Go TO Bed 1\n</action> ", "go to bed 1", True),
        ("<action>look</action>", "look", False),  # no thoughts
        ("<think>a</think><action>look</action><action>help</action>", "look", False),
        ("<action>look</action><think>a</think>", "look", False),
        ("I think: <think>a</think><action>look</action>", "look", False),
        ("<think>a</think>look", None, False),
        ("<think>a</think><action></action>", None, False),
        ("<think>a</think><action>look", None, False),
        ("<ACTION>look</ACTION>", None, False),
        ("", None, False),
    ],
)
def test_what_is_played(response: str, command: str | None, form: bool) -> None:
    parsed = CommandParser().parse(response)
    assert (parsed.action, parsed.format_ok) == (command, form)
    assert bool(parsed.problem) is not form


@pytest.mark.parametrize("parser", [CommandParser(), VerbatimParser()])
def test_what_nobody_reads(parser: CommandParser | VerbatimParser) -> None:
    for response in ("<action>look</action>\0", "<action>look</action>" + "x" * MAX_RESPONSE_LENGTH):
        parsed = parser.parse(response)
        assert parsed.action is None
        assert not parsed.format_ok
        assert parsed.problem


@given(RESPONSES)
def test_nothing_raises(response: str) -> None:
    parsed = CommandParser().parse(response)
    assert parsed.action is None or parsed.action == parsed.action.strip().lower() != ""
    assert parsed.format_ok <= (parsed.action is not None)
    if "\0" not in response and "</think>" not in response:  # which ends a native thought
        assert VerbatimParser().parse(response).action == response


@given(st.text("abc 1", min_size=1).filter(str.strip), st.text("abc ."))
def test_an_experts_response_is_read_back(command: str, think: str) -> None:
    for parser in (CommandParser(), PeerParser(tail=30)):
        parsed = parser.parse(parser.respond(command, think))
        assert (parsed.action, parsed.format_ok) == (command.strip(), True)
    assert VerbatimParser().parse(VerbatimParser().respond(command)).action == command


def test_a_basin_is_counted_apart() -> None:
    names = name_things(["sink_bar_1", "sink_bar_1_bar_sinkbasin", "sink_bar_2_bar_sinkbasin"])
    assert names == {
        "sink_bar_1": "sink 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 2",
        "sink_bar_2_bar_sinkbasin": "sinkbasin 1",
    }


def test_a_bare_id_keeps_its_text_and_gets_a_blank() -> None:
    names = name_things(["agent1", "odd_minus_1_dot_5_comma_2_plus_x"])
    assert names == {"agent1": "agent1 ", "odd_minus_1_dot_5_comma_2_plus_x": "odd-1.5,2+x "}


def test_names() -> None:
    assert SUBTASKS == ("pick", "look", "clean", "heat", "cool", "pick2")
    for kind in TaskType:
        assert find_task_type(kind.value) is find_task_type(kind.subtask) is kind
        assert name_subtask(kind.value) == kind.subtask
    assert name_subtask("pick_and_place_with_movable_recep") == "pick_and_place_with_movable_recep"


def rewrite(game: Interpreter, command: str) -> str:
    return rewrite_command(command, game.game.wording, lambda text: game.find_action(text) is not None)


def hold_apple(wording: Wording) -> Interpreter:
    game = start(wording=wording)
    play(game, "go to countertop 1", "take apple 2 from countertop 1", "go to fridge 1", "open fridge 1")
    return game


PUTS = (
    "put apple 2 in/on fridge 1",
    "put apple 2 in fridge 1",
    "put apple 2 on fridge 1",
    "put apple 2 into fridge 1",
    "move apple 2 to fridge 1",
    "PUT  apple 2   in fridge 1",
)


@pytest.mark.parametrize("command", PUTS)
def test_putting_in_all_words_of_both_releases(command: str) -> None:
    assert rewrite(hold_apple(WORDING_2_1_2), command) == "move apple 2 to fridge 1"
    assert rewrite(hold_apple(WORDING_2_1_1), command) == "put apple 2 in/on fridge 1"


@pytest.mark.parametrize(
    ("command", "meaning"),
    [
        ("toggle desklamp 1", "use desklamp 1"),
        ("toggle desklamp 1 desk 1", "use desklamp 1"),
        ("turn on desklamp 1", "use desklamp 1"),
        ("goto fridge 1", "go to fridge 1"),
        ("Go To FRIDGE 1", "go to fridge 1"),
        ("take   pencil 1 from desk  1", "take pencil 1 from desk 1"),
        ("LOOK", "look"),
    ],
)
def test_the_papers_words(command: str, meaning: str) -> None:
    game = start()
    play(game, "go to desk 1")
    assert rewrite(game, command) == meaning


@pytest.mark.parametrize(
    "command",
    ["put mug 1 in fridge 1", "toggle desklamp 1 fridge 1", "toggle fridge 1", "turn off desklamp 1", "goto desk 1",
     "put", "put in", "move to", "toggle", "", "   ", "open the fridge 1", "put apple 2 to fridge 1"],
)  # fmt: skip
def test_what_would_not_be_admissible_stays_as_it_is(command: str) -> None:
    game = start()
    play(game, "go to desk 1")
    assert rewrite(game, command) == command


@given(st.text(max_size=40) | st.sampled_from(PUTS).flatmap(lambda text: st.permutations(text.split()).map(" ".join)))
def test_a_rewritten_command_is_admissible(command: str) -> None:
    game = hold_apple(WORDING_2_1_2)
    rewritten = rewrite(game, command)
    assert rewritten == command or game.find_action(rewritten) is not None
