"""The environment ``spear/Sokoban-v1``."""

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.core.env import image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.spaces import INFO_KEYS
from spear_envs.sokoban.env import TEXT_LENGTH, SokobanEnv
from spear_envs.sokoban.levels import format_spaced
from spear_envs.testing import check_spear_env

ID = "spear_envs:spear/Sokoban-v1"
LEVEL = "######\n#P_O_#\n#_X__#\n#____#\n######"
PLAN = ["down", "right", "down", "right", "up"]


def respond(action: str) -> str:
    return f"<think></think><action>{action}</action>"


def make(**keywords: Any) -> SokobanEnv:
    env = gym.make(ID, **keywords).unwrapped
    assert isinstance(env, SokobanEnv)
    return env


TEXT = {"modality": "text", "response_format": "plain", "reward": "native"}
IMAGE = {"modality": "image", "moves_per_turn": 3, "diagnostics": True}
ROOM = {"room": "7x8", "boxes": 2, "shortest": 4, "longest": 14, "text_format": "spaced", "on_malformed": "peer"}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        pytest.param(TEXT, marks=pytest.mark.slow),
        pytest.param(IMAGE, marks=pytest.mark.slow),
        pytest.param(ROOM, marks=pytest.mark.slow),
        pytest.param({"level": LEVEL, "max_turns": 20}, marks=pytest.mark.slow),
    ],
    ids=["plain", "text", "image", "room", "level"],
)
def test_the_contract_holds(keywords: dict[str, Any]) -> None:
    report = check_spear_env(ID, train_tasks=16, resets=200, **keywords)
    assert all(result.passed for result in report.results)


def test_a_won_game() -> None:
    env = make(level=LEVEL)
    observation, info = env.reset(seed=0)
    assert text_of(observation) == LEVEL
    assert image_of(observation).shape == (80, 96, 3)  # type: ignore[union-attr]
    assert info.keys() == INFO_KEYS | {"moved", "pushed", "optimal"}
    assert (info["optimal"], info["admissible_actions"]) == (5, ["up", "down", "left", "right"])
    assert env.expert_plan() == PLAN
    for turn, word in enumerate(PLAN, start=1):
        observation, reward, terminated, truncated, info = env.step(respond(word))
        assert info["turn"] == turn
        assert terminated == (turn == 5)
        assert not truncated
    assert info["won"]
    assert info["tool_calls"] == 5
    assert info["score"] == 1.0
    assert info["reward_terms"] == {
        "outcome": 1.0,
        "tool_call": 0.5,
        "format": 0.1,
        "native_return": pytest.approx(10.5),
    }
    assert reward == 1.0 + 0.1
    assert "√" in text_of(observation)
    assert env.expert_plan() == []


def test_several_moves_a_turn() -> None:
    env = make(level=LEVEL, moves_per_turn=3, reward="native")
    env.reset()
    assert env.expert_plan() == ["down, right, down", "right, up"]
    _, reward, terminated, _, info = env.step(respond("Down || right, down"))
    assert reward == -0.1 + -0.1 + -0.1
    assert (info["action"], info["tool_calls"], info["pushed"]) == ("down, right, down", 3, True)
    _, reward, terminated, _, info = env.step(respond("right up up"))  # the third would come after the win
    assert (reward, terminated, info["tool_calls"]) == (-0.1 + (-0.1 + 1 + 10), True, 5)


def test_diagnostics_tell_lost_positions() -> None:
    env = make(level=LEVEL, diagnostics=True)
    assert env.reset()[1]["solvable"]
    solvable = [env.step(respond(word))[4]["solvable"] for word in ("right", "down", "up")]
    assert solvable == [True, False, False]  # the second move put the box at the lower wall
    assert env.expert_plan() == []


def test_modalities() -> None:
    both, text, image = (make(level=LEVEL, modality=name) for name in ("both", "text", "image"))
    seen, picture = both.reset()[0], image.reset()[0]
    assert text.reset()[0] == LEVEL and text_of(picture) == ""
    assert np.array_equal(image_of(picture), image_of(seen))  # type: ignore[arg-type]
    assert "could not be read" in text_of(image.step("nonsense")[0])
    assert all(env.observation_space.contains(env.step(respond("down"))[0]) for env in (both, text, image))
    spaced = make(level=LEVEL, text_format="spaced")
    assert text_of(spaced.reset()[0]) == format_spaced(LEVEL)


def test_anchors_are_keys_of_the_position() -> None:
    env = make(level=LEVEL)
    start = env.reset()[1]["anchor"]
    assert [env.step(respond(word))[4]["anchor"] == start for word in ("left", "right", "left")] == [True, False, True]


def test_the_papers_preset() -> None:
    own = make(preset="paper", sprites="drawn", longest=10)
    assert (own.modality.value, own.max_turns, own.sprites.value) == ("image", 15, "drawn")
    assert (own.tasks.name, make(preset="paper", sprites="drawn").tasks.name) == (
        "sokoban-v1/6x6-1-1to10",
        "sokoban-v1/6x6-1-1to15",
    )


@pytest.mark.parametrize(
    "response",
    ["", "up", respond("jump"), respond("up") + "!", "<action>up</action>", respond("up\0"), respond("up, up")],
)
def test_what_cannot_be_played_moves_nothing_and_says_why(response: str) -> None:
    env = make(level=LEVEL, reward="native", max_turns=2)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(response)
    board, blank, message = text_of(observation).partition("\n\n")
    assert board == LEVEL
    assert blank
    assert message
    assert reward == -0.1
    assert (info["action"], info["action_ok"], info["moved"], info["pushed"]) == ("", False, False, False)
    assert not (terminated or truncated)
    assert env.step(response)[3]  # the turn counts


def test_a_known_word_that_moves_nothing_is_not_ok_but_needs_no_message() -> None:
    env = make(level=LEVEL, reward="native")
    env.reset()
    for word in ("up", "left", "still"):
        observation, reward, _, _, info = env.step(respond(word))
        assert (text_of(observation), reward) == (LEVEL, -0.1)
        assert (info["action"], info["format_ok"], info["action_ok"]) == (word, True, False)
    assert info["tool_calls"] == 0


def test_the_largest_text_fits_the_space() -> None:
    rows = ["#" * 20] + ["#" + "_" * 18 + "#"] * 18 + ["#" * 20]
    rows[1] = "#P_XO" + "_" * 14 + "#"
    env = make(level="\n".join(rows), text_format="spaced")
    env.reset()
    for response in (respond("\U0001f600" * 50), "\U0001f600" * 5_000, respond("x" * 90_000)):
        observation = env.step(response)[0]
        assert env.observation_space.contains(observation)
        assert len(text_of(observation)) <= TEXT_LENGTH


def test_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    picture = make(level=LEVEL, render_mode="rgb_array", modality="text")
    picture.reset()
    both = make(level=LEVEL)
    assert np.array_equal(picture.render(), image_of(both.reset()[0]))
    ansi = make(level=LEVEL, render_mode="ansi", modality="image")
    ansi.reset()
    assert ansi.render() == LEVEL
    human = make(level=LEVEL, render_mode="human")
    human.reset()
    assert "turn 0 of 15" in capsys.readouterr().out
    human.step(respond("down"))
    printed = capsys.readouterr().out
    assert "turn 1 of 15" in printed
    assert printed.count("\x1b[0m") == 30
    assert human.render() is None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([*PLAN, "left", "jump"]), max_size=8), st.lists(st.sampled_from(PLAN), max_size=6))
def test_a_state_brings_everything_back(before: list[str], after: list[str]) -> None:
    env, other = make(split="test"), make(split="test")
    env.reset(seed=3)
    for word in before:
        if not env.done:
            env.step(respond(word))
    state = pickle.loads(pickle.dumps(env.get_state()))
    other.reset(seed=9)
    observation, _info = other.set_state(state)
    assert np.array_equal(image_of(observation), env.board.frame())  # type: ignore[arg-type]
    assert other.get_state() == env.get_state()
    for word in after:
        if env.done:
            break
        ours, theirs = env.step(respond(word)), other.step(respond(word))
        assert text_of(ours[0]) == text_of(theirs[0])
        assert ours[1:] == theirs[1:]
    assert other.reset()[1]["task_id"] == env.reset()[1]["task_id"]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"room": "4x4"}, "between 5 and 10"),
        ({"room": "big"}, 'room="6x6"'),
        ({"room": f"6x{'6' * 5_000}"}, 'room="6x6"'),
        ({"room": "²x²"}, 'room="6x6"'),
        ({"boxes": 9}, "between 1 and 4"),
        ({"boxes": 1.5}, "whole number"),
        ({"shortest": 5, "longest": 2}, "shortest <= longest"),
        ({"split": "tests"}, "Did you mean 'test'"),
        ({"split_by": "seed"}, "split_by"),
        ({"preset": "papers"}, "choose 'paper' or None"),
        ({"sprites": "png"}, "sprites"),
        ({"modality": "sound"}, "modality"),
        ({"text_format": "html"}, "choose 'plain' or 'spaced'"),
        ({"moves_per_turn": 0}, "at least 1"),
        ({"level": 5}, "rows of the level"),
        ({"max_turns": 0}, "at least 1"),
        ({"moves_per_turn": 2, "on_malformed": "peer"}, "leave moves_per_turn at 1"),
        ({"level": "####\n#P√#\n####"}, "already solved"),
        ({"level": "nonsense"}, "both sides"),
    ],
    ids=str,
)
def test_keywords_without_a_valid_value_are_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(SpearError) as caught:
        SokobanEnv(**keywords)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
