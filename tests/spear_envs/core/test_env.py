import copy
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.core import (
    ActionResult,
    EnvFault,
    SpearError,
    TagParser,
    Task,
    UnknownTaskError,
    set_training_step,
)
from spear_envs.testing.trace import MALFORMED, choose_response, describe_step, freeze
from tests.spear_envs.corridor import CORRIDOR, CorridorEnv

LEFT, RIGHT = TagParser().respond("left"), TagParser().respond("right")


class ShakyCorridorEnv(CorridorEnv):
    """A corridor with a service that may be down, and with a few extras of its own."""

    def _act(self, action: str) -> ActionResult:
        if action == "knock":
            raise EnvFault("door_down", "nobody answers")
        if action == "grade":
            return ActionResult(True, 0.25, done=True, outcome=0.8, terms={"f1": 0.5}, details={"knocks": 2})
        result = super()._act(action.lower())
        return result._replace(details={"knocks": 1}, action=action.lower())

    def _details(self) -> Mapping[str, Any]:
        return {"knocks": 0}


class BrokenStartEnv(CorridorEnv):
    def _start(self, task: Task) -> None:
        raise EnvFault("no_corridor", "it is closed today")


def play(env: CorridorEnv, actions: list[str]) -> list[Any]:
    return [env.step(env.parser.respond(action)) for action in actions]


def test_an_episode_won_pays_the_paper_reward_at_its_end() -> None:
    env = CorridorEnv(mu="constant")
    env.reset(seed=3)
    plan = env.expert_plan()
    *before, last = play(env, plan)
    assert all(reward == 0.0 and not terminated for _, reward, terminated, _, _ in before)
    _, reward, terminated, truncated, info = last
    assert terminated and not truncated
    terms = info["reward_terms"]
    assert terms["outcome"] == 1.0 and terms["format"] == 0.1
    assert terms["tool_call"] == pytest.approx(0.1 * len(plan)) and info["tool_calls"] == len(plan)
    assert terms["native_return"] == pytest.approx(0.9 - 0.1 * (len(plan) - 1))
    assert reward == terms["outcome"] + terms["tool_call"] + terms["format"]
    assert info["won"] and info["score"] == 1.0 and info["turn"] == len(plan)


def test_the_turn_limit_truncates_and_pays_a_loss() -> None:
    env = CorridorEnv(max_turns=3)
    env.reset(seed=3)
    assert [step[3] for step in play(env, ["x", "x"])] == [False, False]
    _, reward, terminated, truncated, info = env.step("<action>x</action>")
    assert truncated and not terminated
    assert reward == -1.0 and info["reward_terms"]["format"] == 0.0
    assert not info["won"] and info["score"] == 0.0


def test_winning_on_the_last_turn_terminates() -> None:
    env = CorridorEnv()
    env.reset(seed=3)
    env.max_turns = len(env.expert_plan())
    *_, last = play(env, env.expert_plan())
    assert last[2:4] == (True, False)


def test_one_malformed_turn_costs_the_format_term_for_good() -> None:
    env = CorridorEnv()
    _, info = env.reset(seed=3)
    assert info["reward_terms"] == {"outcome": -1.0, "tool_call": 0.0, "format": 0.0, "native_return": 0.0}
    assert play(env, ["x"])[0][4]["reward_terms"]["format"] == 0.1
    observation, _, _, _, info = env.step("left")
    assert info["reward_terms"]["format"] == 0.0 and not info["format_ok"] and info["action"] == ""
    assert "there is no <action>…</action>" in observation and env.parser.hint in observation
    assert play(env, ["x"])[0][4]["reward_terms"]["format"] == 0.0


def test_native_reward_is_paid_each_turn() -> None:
    env = CorridorEnv(reward="native")
    env.reset(seed=3)
    rewards = [step[1] for step in play(env, ["x", *env.expert_plan()])]
    assert rewards == [-0.1] * (len(rewards) - 1) + [0.9]


@pytest.mark.parametrize(("mu", "step", "weight"), [("none", 1, 0.0), (0.5, 1, 0.5), ("cosine:10", 5, 0.5)])
def test_mu_follows_its_schedule(mu: Any, step: int, weight: float) -> None:
    env = gym.make("tests/Corridor-v0", mu=mu)
    set_training_step(env, step)
    env.reset(seed=3)
    *_, (_, reward, _, _, info) = play(env.unwrapped, env.unwrapped.expert_plan())  # type: ignore[arg-type,attr-defined]
    assert reward == pytest.approx(1.1 + weight * info["reward_terms"]["tool_call"])
    with pytest.raises(SpearError, match="no training step"):
        set_training_step(gym.make("CartPole-v1"), step)


@pytest.mark.parametrize("reward", ["spear", "native"])
def test_a_fault_truncates_without_reward(reward: str) -> None:
    env = ShakyCorridorEnv(reward=reward)
    env.reset(seed=3)
    observation, paid, terminated, truncated, info = play(env, ["knock"])[0]
    assert (paid, terminated, truncated) == (0.0, False, True)
    assert info["fault"] == "door_down" and info["knocks"] == 0 and info["turn"] == 1
    assert "nobody answers" in observation
    with pytest.raises(ResetNeeded):
        env.step(LEFT)
    _, info = env.reset(seed=3)
    assert info["fault"] is None


def test_extras_of_an_environment() -> None:
    env = ShakyCorridorEnv()
    _, first = env.reset(seed=3)
    *_, info = play(env, ["LEFT"])[0]
    assert (first["knocks"], info["knocks"], info["action"]) == (0, 1, "left")
    _, reward, terminated, truncated, info = play(env, ["grade"])[0]
    assert terminated and not truncated and not info["won"]
    assert (info["reward_terms"]["outcome"], info["reward_terms"]["f1"]) == (0.8, 0.5)
    assert reward == pytest.approx(0.8 + 0.1)


@pytest.mark.parametrize("action", [None, 3, b"left", ["left"]])
def test_a_response_must_be_text(action: Any) -> None:
    env = CorridorEnv()
    env.reset(seed=1)
    with pytest.raises(TypeError, match="not " + type(action).__name__):
        env.step(action)
    assert env.turn == 0


def test_a_fault_at_the_start_is_raised_and_leaves_no_episode() -> None:
    env = BrokenStartEnv()
    with pytest.raises(EnvFault, match="it is closed today"):
        env.reset(seed=1)
    with pytest.raises(ResetNeeded):
        env.step(LEFT)
    with pytest.raises(ResetNeeded):
        _ = env.task


def test_nothing_happens_before_the_beginning_and_after_the_end() -> None:
    env = CorridorEnv(max_turns=1, render_mode="ansi")
    assert env.done
    for call in (lambda: env.step(LEFT), env.render, env.get_state):
        with pytest.raises(ResetNeeded):
            call()
    env.reset(seed=1)
    assert not env.done
    env.step("")
    assert env.done
    with pytest.raises(ResetNeeded, match="has ended"):
        env.step(LEFT)


def test_reset_options() -> None:
    env = CorridorEnv()
    _, info = env.reset(options={"task": "corridor/train/00007"})
    assert info["task_id"] == env.task.id == "corridor/train/00007"
    with pytest.raises(UnknownTaskError, match="corridor/train/00000"):
        env.reset(options={"task": "corridor/test/00001"})
    with pytest.raises(SpearError, match="'task'"):
        env.reset(options={"tasks": ["corridor/train/00007"]})
    for options in (["task"], "task", 5, 0, ("task", "corridor/train/00007")):
        with pytest.raises(SpearError, match="give a dictionary"):
            env.reset(options=options)  # type: ignore[arg-type]
    assert env.task.id == "corridor/train/00007" and not env.done  # a refused reset changes nothing


def test_the_seed_draws_the_task() -> None:
    env, other = CorridorEnv(), CorridorEnv()
    first = [env.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert first == [other.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert len(set(first)) > 10
    env.reset(seed=5)
    other.reset(seed=5)
    assert [env.reset()[1]["task_id"] for _ in range(9)] == [other.reset()[1]["task_id"] for _ in range(9)]


@pytest.mark.parametrize(
    ("keywords", "mend"),
    [
        ({"max_turns": 0}, "at least 1"),
        ({"max_turns": True}, "at least 1"),
        ({"response_format": "xml"}, "'tags', 'plain'"),
        ({"reward": "big"}, "'spear', 'native'"),
        ({"on_malformed": "cry"}, "'explain', 'peer'"),
        ({"mu": "linear"}, "mu: .*'cosine:200'"),
        ({"mu": float("nan")}, "mu: a weight must be a finite number"),
        ({"mu": 10**400}, "mu: a weight must be a finite number"),
        ({"mu": "constant:inf"}, "finite"),
        ({"tool_reward": "new"}, "'paper', 'distinct'"),
        ({"spilt": "test"}, "no keyword 'spilt'. Did you mean 'split'"),
        ({"render_mode": "3d"}, "ansi"),
        ({"split": "dev"}, "'train', 'valid', 'test'"),
    ],
)
def test_bad_keywords_name_the_mend(keywords: dict[str, Any], mend: str) -> None:
    with pytest.raises(SpearError, match=mend):
        CorridorEnv(**keywords)


@given(st.text() | st.sampled_from(MALFORMED))
def test_no_response_raises(response: str) -> None:
    for response_format in ("tags", "plain"):
        env = CorridorEnv(response_format=response_format)
        env.reset(seed=1)
        observation, _, _, _, info = env.step(response)
        assert observation in env.observation_space and info["turn"] == 1


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(0, 12))
def test_a_state_is_all_there_is(seed: int, turns: int) -> None:
    rng = random.Random(seed)
    env = CorridorEnv()
    seen = describe_step(*_spread(env.reset(seed=seed)))
    for _ in range(turns):
        if not env.done:
            seen = describe_step(*env.step(choose_response(env, rng)))
    state = env.get_state()
    kept = freeze(state)
    other = CorridorEnv()
    for target in (env, other):
        observation, info = target.set_state(pickle.loads(pickle.dumps(state)))
        assert freeze(observation) == seen["observation"] and freeze(info) == seen["info"]
        assert freeze(target.get_state()) == kept
    choices = random.Random(seed + 1)
    while not env.done:
        response = choose_response(env, choices)
        assert describe_step(*env.step(response)) == describe_step(*other.step(response))
    assert other.done and freeze(state) == kept
    assert env.reset()[1]["task_id"] == other.reset()[1]["task_id"]  # the generator went along


def _spread(first: tuple[Any, dict[str, Any]]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    return first[0], 0.0, False, False, first[1]


def test_a_state_of_another_split_is_refused() -> None:
    env, other = CorridorEnv(), CorridorEnv(split="test")
    env.reset(seed=1)
    other.reset(seed=1)
    with pytest.raises(UnknownTaskError):
        other.set_state(env.get_state())


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["episode"].update(turn=-1),
        lambda state: state["episode"].update(won="yes"),
        lambda state: state["episode"].pop("fault"),
        lambda state: state.update(episode=None),
        lambda state: state.pop("world"),
        lambda state: state.update(world={"no": "place"}),
        lambda state: state.update(np_random="x"),
        lambda state: state["result"].update(strange=1),
        lambda state: state.update(task_id=["a"]),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_lost(damage: Any) -> None:
    env = CorridorEnv()
    env.reset(seed=1)
    state = env.get_state()
    env.reset(seed=2)
    env.step("nonsense")
    kept = freeze(env.get_state())
    damage(state)
    with pytest.raises(SpearError) as refused:
        env.set_state(state)
    assert "\n" not in str(refused.value) and freeze(env.get_state()) == kept
    env.step(LEFT)  # the episode goes on
    fresh = CorridorEnv()
    with pytest.raises(SpearError):
        fresh.set_state(state)
    with pytest.raises(ResetNeeded):
        fresh.step(LEFT)


def test_distinct_tool_calls_pay_for_what_is_new() -> None:
    rewards = {}
    for kind in ("paper", "distinct"):
        env = CorridorEnv(mu="constant", tool_reward=kind, max_turns=8)
        env.reset(seed=3)
        state = None
        for turn in range(8):
            step = env.step(LEFT if turn % 2 else RIGHT)
            state = env.get_state()
            if env.done:
                break
        assert state is not None and not step[4]["won"]
        copied = CorridorEnv(mu="constant", tool_reward=kind, max_turns=8)
        assert copied.set_state(state)[1]["reward_terms"] == step[4]["reward_terms"]
        rewards[kind] = step[1]
    assert rewards["distinct"] == pytest.approx(-1 + 0.1 + 0.1), (
        "one step led to a new place, the others back and forth"
    )
    assert rewards["paper"] == pytest.approx(-1 + 0.8 + 0.1)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("limit", [3, 99])
def test_a_time_limit_of_gymnasium_ends_an_episode_as_the_turn_limit_does(wrap: bool, limit: int) -> None:
    def end(env: gym.Env[Any, Any]) -> tuple[int, float, bool, bool]:
        env.reset(seed=0)
        for turn in range(1, 100):
            _, reward, terminated, truncated, _ = env.step("left")
            if terminated or truncated:
                return turn, float(reward), terminated, truncated
        raise AssertionError

    own = {"response_format": "plain", "length": 40}
    if wrap:
        env: Any = TimeLimit(gym.wrappers.RecordEpisodeStatistics(CorridorEnv(**own, max_turns=20)), limit)
    else:
        env = gym.make(CORRIDOR, max_episode_steps=limit, **own, max_turns=20)
    assert end(env) == end(CorridorEnv(**own, max_turns=min(limit, 20)))
    assert env.unwrapped.get_state()["episode"]["done"]
    assert env.unwrapped.max_turns == copy.deepcopy(env).unwrapped.max_turns == min(limit, 20)
    env.unwrapped.reset(seed=0)  # without the wrapper around it
    assert not env.unwrapped.done and env.unwrapped.max_turns == 20


class LuckyCorridorEnv(CorridorEnv):
    """Draws at the start, and in every step."""

    def _start(self, task: Task) -> None:
        super()._start(task)
        self._place = int(self.np_random.integers(self._length))

    def _observe(self, message: str) -> str:
        return super()._observe(message) + f" {self.np_random.integers(1_000)}"


def test_a_state_restores_the_luck_of_an_environment_that_draws_at_the_start() -> None:
    env, other = LuckyCorridorEnv(length=40), LuckyCorridorEnv(length=40)
    env.reset(seed=1)
    env.step(LEFT)
    state = env.get_state()
    other.reset(seed=2)
    other.set_state(state)
    assert other.get_state() == state
    later = [env.step(LEFT)[0], env.step(RIGHT)[0]]
    assert [other.step(LEFT)[0], other.step(RIGHT)[0]] == later
    other.set_state(state)
    assert [other.step(LEFT)[0], other.step(RIGHT)[0]] == later


def copy_by_pickle(env: Any) -> Any:
    return pickle.loads(pickle.dumps(env))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy_by_pickle])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_copy_has_what_is_in_no_state(make_copy: Callable[[Any], Any], is_reset: bool) -> None:
    env = CorridorEnv()
    env.reset(seed=7)
    if not is_reset:
        env = CorridorEnv()
        env.np_random = np.random.default_rng(3)
    env.set_text_measure(len)
    env.set_training_step(9)
    env.max_turns = 5
    env.action_space.seed(5)
    env.observation_space.seed(6)
    copied = make_copy(env)
    assert (copied.text_measure, copied.training_step, copied.max_turns) == (len, 9, 5)
    assert copied.np_random_seed == env.np_random_seed
    assert copied.np_random.integers(10**9) == env.np_random.integers(10**9)
    for space in ("action_space", "observation_space"):
        assert getattr(copied, space).sample() == getattr(env, space).sample()
