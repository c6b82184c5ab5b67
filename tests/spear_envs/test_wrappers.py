"""Wrappers for trainers without text, alone and with those trainers where they are installed."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from spear_envs import SpearError, register_env
from spear_envs.testing.checks import CHECKS, Subject
from spear_envs.wrappers import DiscreteActions, GymnasiumEnv, PictureObservation
from tests.spear_envs.corridor import CorridorEnv

LAKE: dict[str, Any] = {
    "env": "FrozenLake-v1",
    "goal": 1.0,
    "actions": ["left", "down", "right", "up"],
    "env_keywords": {"render_mode": "ansi", "is_slippery": False},
}
WAY = ["down", "down", "right", "right", "down", "right"]


def make_sokoban(**keywords: Any) -> gym.Env[Any, Any]:
    env = gym.make("spear_envs:spear/Sokoban-v1", disable_env_checker=True, **keywords)
    return PictureObservation(DiscreteActions(env, ["up", "down", "left", "right"]))


def test_numbers_play_a_fixed_list() -> None:
    env, plain = DiscreteActions(CorridorEnv(), ["left", "right", "jump"]), CorridorEnv()
    assert env.reset(seed=3)[0] == plain.reset(seed=3)[0]
    for number in (0, np.int64(1), 2):
        observation, reward, *_, info = env.step(number)
        again = plain.step(plain.parser.respond(["left", "right", "jump"][number]))
        assert (observation, reward, info["action"]) == (again[0], again[1], again[4]["action"])
    assert info["action_mask"].tolist() == [action in info["admissible_actions"] for action in ("left", "right")] + [0]


def test_numbers_play_what_is_admissible_now() -> None:
    env = DiscreteActions(gym.make("spear_envs:spear/ALFWorld-v0", disable_env_checker=True), size=60)
    _, info = env.reset(seed=0)
    for _ in range(5):
        offered = info["admissible_actions"]
        assert info["action_mask"].tolist() == [1] * len(offered) + [0] * (60 - len(offered))
        info = env.step(len(offered) - 1)[4]
        assert info["action"] == offered[-1] and info["format_ok"]
    info = env.step(59)[4]
    assert (info["action"], info["format_ok"], info["turn"]) == ("", False, 6)


@pytest.mark.parametrize(
    ("keywords", "word"),
    [({}, "size"), ({"actions": ["a"], "size": 1}, "size"), ({"actions": []}, "different"), ({"size": 0}, "at least 1"),
     ({"actions": ["a", "a"]}, "different"), ({"actions": "up"}, "different")],
)  # fmt: skip
def test_lists_that_mean_nothing_are_refused(keywords: dict[str, Any], word: str) -> None:
    with pytest.raises(SpearError, match=word):
        DiscreteActions(CorridorEnv(), **keywords)


def test_actions_without_a_number_and_environments_without_a_list_are_refused() -> None:
    with pytest.raises(SpearError, match="size=1"):
        DiscreteActions(CorridorEnv(), size=1).reset(seed=0)
    code = gym.make("spear_envs:spear/SearchR1-v0", disable_env_checker=True)
    with pytest.raises(SpearError, match="does not list"):
        DiscreteActions(code, size=4).reset(seed=0)
    with pytest.raises(SpearError, match="not a SpearEnv"):
        DiscreteActions(gym.make("FrozenLake-v1"), size=4)


def test_frozen_lake_in_text() -> None:
    env = GymnasiumEnv(**LAKE, response_format="plain")
    observation, info = env.reset(seed=0)
    assert observation.endswith("(red S)FFF\nFHFH\nFFFH\nHFFG") and env.max_turns == 100
    assert info["admissible_actions"] == LAKE["actions"]
    assert env.step("jump")[4]["action_ok"] is False
    for action in WAY:
        _, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["won"], info["score"]) == (pytest.approx(1.1), True, True, 1.0)
    env.reset(seed=0)
    env.step("right")
    *_, terminated, _, info = env.step("down")  # a hole
    assert terminated and not info["won"]


def test_a_text_says_where_the_player_is() -> None:
    """Gymnasium marks it by colour alone."""
    env = GymnasiumEnv(**LAKE, response_format="plain", tool_reward="distinct")
    assert env.reset(seed=0)[0].endswith("(red S)FFF\nFHFH\nFFFH\nHFFG")
    first, second = env.step("down"), env.step("down")
    assert first[0] != second[0] and first[4]["anchor"] != second[4]["anchor"]
    assert second[4]["reward_terms"]["tool_call"] == pytest.approx(0.2)


class Painted(gym.Env[Any, Any]):
    """A rendering of any colours."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, text: str, render_mode: str | None = None) -> None:
        self.text, self.render_mode = text, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return 0, {}

    def render(self) -> Any:
        return self.text


gym.register("tests/Painted-v0", Painted)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[43m\x1b[34;1mR\x1b[0m\x1b[0m|", "(yellow (blue R))|"),
        ("\x1b[0mplain\x1b[m", "plain"),
        ("\x1b[1mbold\x1b[0m \x1b[32mopen", "(coloured bold) (green open)"),
    ],
)
def test_colours_become_words(text: str, shown: str) -> None:
    env = GymnasiumEnv("tests/Painted-v0", 1, env_keywords={"text": text, "render_mode": "ansi"})
    assert env.reset(seed=0)[0] == shown


def test_other_rules_are_other_tasks() -> None:
    def fingerprint(**keywords: Any) -> str:
        return GymnasiumEnv("FrozenLake-v1", 1, env_keywords=keywords).tasks.fingerprint

    rows = [np.array(list(row)) for row in ("SF", "FG")]
    found = [fingerprint(map_name="4x4"), fingerprint(map_name="8x8"), fingerprint(desc=rows), fingerprint()]
    assert len(set(found)) == 4 and fingerprint(desc=rows) == found[2]
    assert fingerprint(map_name="4x4", render_mode="ansi") == fingerprint(map_name="4x4")


def test_numbers_follow_a_restored_state() -> None:
    env = DiscreteActions(gym.make("spear_envs:spear/ALFWorld-v0", rooms="small", disable_env_checker=True), size=60)
    _, info = env.reset(seed=0)
    core: Any = env.unwrapped
    state, wanted = core.get_state(), info["admissible_actions"][2]
    env.step(2)
    core.set_state(state)
    assert env.step(2)[4]["action"] == wanted


def test_the_limit_of_turns_truncates() -> None:
    env = GymnasiumEnv(**LAKE, response_format="plain")
    env.reset(seed=0)
    for _ in range(100):
        _, _, terminated, truncated, _ = env.step("left")
    assert (terminated, truncated) == (False, True)


class Parts(gym.Env[Any, Any]):
    """Observations of several parts, as MiniGrid's."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(direction=gym.spaces.Discrete(4), mission=gym.spaces.Text(9))


gym.register("tests/Parts-v0", Parts)


def test_cart_pole_in_text() -> None:
    env = GymnasiumEnv("CartPole-v1", 5, actions=["left", "right"], labels=["x", "v", "angle", "turn"], max_turns=9)
    observation, info = env.reset(seed=1)
    assert [line.split(": ")[0] for line in observation.split("\n")] == ["x", "v", "angle", "turn"]
    for action in ("left", "right", "left", "right", "left"):
        assert not info["won"]
        *_, info = env.step(env.parser.respond(action))
    assert info["won"] and info["reward_terms"]["native_return"] == 5.0


@pytest.mark.parametrize(
    "keywords",
    [{**LAKE, "env_keywords": {"render_mode": "ansi"}}, {"env": "CartPole-v1", "goal": 30.0}],
    ids=["lake", "pole"],
)
def test_what_holds_of_ours_holds_of_them(keywords: dict[str, Any]) -> None:
    register_env("tests/Inner-v0", GymnasiumEnv, kwargs=keywords)
    subject = Subject("tests/Inner-v0", {"max_turns": 12}, train_tasks=8, resets=40)
    for name, check in CHECKS.items():
        if name not in ("oracle", "determinism", "portable"):  # no expert; a class and nested keywords are not JSON
            assert check(subject)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"env": "NoLake-v1"}, "cannot be made"),
        ({"env": "Pendulum-v1", "env_keywords": {}}, "Discrete"),
        ({"actions": ["left"]}, "4 actions"),
        ({"actions": ["a"] * 4}, "different"),
        ({"goal": 0}, "above 0"),
        ({"goal": float("nan")}, "above 0"),
        ({"goal": "1"}, "above 0"),
        ({"max_turns": 0}, "max_turns"),
        ({"env": "no_such:Lake-v0"}, "cannot be made"),
        ({"env_keywords": {"map_name": "9x9"}}, "9x9"),
        ({"env_keywords": {"depth": 3}}, "cannot be made"),
        ({"split": "dev"}, "split"),
        ({"env": "CartPole-v1", "actions": ["a", "b"], "env_keywords": {}, "labels": ["x"]}, "4 numbers"),
        ({"env": "tests/Parts-v0", "actions": ["a", "b"], "env_keywords": {}}, "not numbers"),
    ],
)
def test_what_cannot_be_in_text_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(SpearError, match=word):
        GymnasiumEnv(**{**LAKE, **changes})


def test_stable_baselines_learns_from_it() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_checker import check_env as check

    env = make_sokoban(split="train")
    check(env)
    model = sb3.PPO("CnnPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0).learn(64)
    assert model.num_timesteps == 64


def test_rllib_samples_from_it() -> None:
    pytest.importorskip("tree", reason="RLlib is not installed")
    rllib = pytest.importorskip("ray.rllib.algorithms.ppo", exc_type=ImportError)
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune import register_env as register_for_ray

    register_for_ray("sokoban", lambda _: make_sokoban())
    config = rllib.PPOConfig().environment("sokoban").env_runners(num_env_runners=0, rollout_fragment_length=20)
    runner = SingleAgentEnvRunner(config=config)
    episodes = runner.sample(num_timesteps=20, random_actions=True)
    assert sum(map(len, episodes)) == 20
    assert episodes[0].get_observations(0).shape == (96, 96, 3)
    runner.stop()
