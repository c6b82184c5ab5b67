"""The environment ``spear/ALFWorld-v0``."""

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import REWARD_TERM_KEYS
from spear_envs.core.spaces import INFO_KEYS
from spear_envs.testing import check_spear_env
from tests.spear_envs.alfworld.peer import MEND, has_textworld
from tests.spear_envs.alfworld.small import make_data

OWN_KEYS = {"goal_conditions_met", "goal_conditions", "goal_condition_success"}
HEAT = "alfworld/embedded/train/00003"
needs_logic = pytest.mark.skipif(not has_textworld(), reason=MEND)


def make(**kwargs: Any) -> ALFWorldEnv:
    return ALFWorldEnv(**{"response_format": "plain", **kwargs})


def write_small(folder: Path, data: dict[str, Any] | None = None) -> Path:
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(data or make_data()), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"rooms": "small", "max_turns": 20, "reward": "native", "anchor": "observation", "aliases": "paper"},
        {"response_format": "plain", "split": "valid_unseen"},
        {"on_malformed": "peer", "split": "valid_seen"},
    ],
    ids=["default", "small", "plain", "peer"],
)
def test_contract(kwargs: dict[str, Any]) -> None:
    check_spear_env("spear/ALFWorld-v0", **kwargs).raise_on_failure()


def test_an_episode_of_the_expert() -> None:
    env = make(reward="native")
    observation, info = env.reset(options={"task": HEAT})
    assert set(info) == INFO_KEYS | OWN_KEYS
    assert info["subtask"] == "heat"
    assert observation.endswith(f"Your task is to: {info['instruction']}")
    assert info["reward_terms"].keys() == REWARD_TERM_KEYS | {"admissible_commands"}
    assert (info["goal_conditions_met"], info["goal_conditions"]) == (0, 3)
    plan = env.expert_plan()
    shares = []
    for number, command in enumerate(plan, 1):
        assert command in info["admissible_actions"]
        observation, reward, terminated, truncated, info = env.step(command)
        shares.append(info["goal_condition_success"])
        assert (info["action"], info["action_ok"], info["tool_calls"]) == (command, True, number)
        assert info["reward_terms"]["admissible_commands"] == number
        assert reward == float(number == len(plan))
        assert terminated == (number == len(plan)) and not truncated
    assert shares == sorted(shares) and shares[-1] == 1.0 and 1 / 3 in shares
    assert (info["won"], info["score"], info["reward_terms"]["outcome"]) == (True, 1.0, 1.0)
    assert observation.startswith("You move the ")
    with pytest.raises(ResetNeeded):
        env.step("look")


def test_what_does_nothing_counts_as_a_call() -> None:
    env = make()
    env.reset(options={"task": HEAT})
    for number, command in enumerate(("look", "help", "inventory", "eat", "LOOK", ""), 1):
        observation, _, _, _, info = env.step(command)
        assert (info["tool_calls"], info["turn"]) == (number, number)
        assert info["action_ok"] == (number <= 3)
        assert (observation == "Nothing happens.") == (number > 3)
    assert info["reward_terms"]["admissible_commands"] == 3.0
    assert info["reward_terms"]["tool_call"] == pytest.approx(0.6)


def test_aliases_are_rewritten_before_they_are_played() -> None:
    for aliases, accepted in (("none", False), ("paper", True)):
        env = make(aliases=aliases)
        _, info = env.reset(options={"task": HEAT})
        command = next(text for text in info["admissible_actions"] if text.startswith("go to"))
        _, _, _, _, info = env.step(command.replace("go to", "GOTO "))
        assert info["action_ok"] is accepted
        assert (info["action"] == command) is accepted


def test_a_long_command_is_read_in_no_time() -> None:
    env = make(aliases="paper")
    env.reset(options={"task": HEAT})
    start = time.process_time()
    for verb in ("toggle", "put", "move"):
        *_, info = env.step(f"{verb} " + "a in " * 18_000)
        assert not info["action_ok"]
    assert time.process_time() - start < 2


def test_the_anchor_tells_states_apart_or_texts() -> None:
    by_state, by_text = make(), make(anchor="observation")
    anchors: list[list[Any]] = [[], []]
    for command in (None, "eat", "look", "go to fridge 1", "eat", "go to microwave 1", "go to fridge 1"):
        for env, list_ in zip((by_state, by_text), anchors, strict=True):
            if command is None:
                observation, info = env.reset(options={"task": HEAT})
            else:
                observation, _, _, _, info = env.step(command)
            list_.append(info["anchor"])
            if env is by_text:
                assert info["anchor"] == observation
    states, texts = anchors
    assert states[0] == states[1] == states[2] != states[3]
    assert states[3] == states[4] == states[6] != states[5]
    assert texts[1] == texts[4] == "Nothing happens."
    assert len(set(texts)) == 5
    other = make()
    assert other.reset(options={"task": "alfworld/embedded/train/00009"})[1]["anchor"] != states[0]


def test_a_state_goes_over_to_another_environment() -> None:
    env, other = make(), make()
    env.reset(options={"task": HEAT})
    plan = env.expert_plan()
    for command in plan[:3]:
        env.step(command)
    state = pickle.loads(pickle.dumps(env.get_state()))
    assert json.loads(json.dumps(state["world"])) == state["world"]
    rest = [env.step(command) for command in plan[3:]]
    _, info = other.set_state(state)
    assert info["turn"] == 3
    assert other.expert_plan() == plan[3:]
    assert [other.step(command) for command in plan[3:]] == rest
    env.set_state(state)
    assert [env.step(command) for command in plan[3:]] == rest


@needs_logic
def test_one_game_is_a_task_set(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    env = make(game=path)
    assert (len(env.tasks), env.splits) == (1, ("game",))
    observation, info = env.reset(seed=1)
    assert "a sinkbasin 1." in observation
    assert info["instruction"] == "put a hot apple in fridge."
    for command in env.expert_plan():
        *_, info = env.step(command)
    assert info["won"]
    assert make(game=str(path)).reset(seed=2)[1]["task_id"] == info["task_id"]


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        ({"backend": "jericho"}, "backend='jericho'"),
        ({"wording": "3"}, "wording='3'"),
        ({"aliases": "all"}, "aliases='all'"),
        ({"anchor": "text"}, "anchor='text'"),
        ({"dataset": "unofficial"}, "dataset='unofficial'"),
        ({"split": "test"}, "split='test'"),
        ({"rooms": "huge"}, "rooms='huge'"),
        ({"histroy": 2}, "has no keyword 'histroy'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"task_text": "human"}, "task_text='human'"),
        ({"response_format": "xml"}, "response_format='xml'"),
        ({"on_malformed": "ignore"}, "on_malformed='ignore'"),
        ({"dataset": "official"}, "no official games"),
    ],
)
def test_keywords_without_a_valid_value(kwargs: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpearError, match=fault):
        ALFWorldEnv(**kwargs)
