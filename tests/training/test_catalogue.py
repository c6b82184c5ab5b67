"""Algorithms as files, dry runs of presets, reward functions of users, and the environments of a training."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.play.trajectory import Layout, StopReason, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from spear_envs.core.tasks import ListTaskSet, Task
from spear_training.algorithms import SpearSettings
from spear_training.run.compose import ORDER, compose, find_files, list_algorithms
from spear_training.run.config import EnvironmentSettings, RunConfig
from spear_training.run.custom_reward import CUSTOM, CustomReward, load_custom_reward
from spear_training.run.environments import inspect_environment, make_environment
from spear_training.run.launch import prepare_training
from spear_training.run.to_verl import to_verl
from spear_training.run.training import choose_warm_start
from spear_training.warmstart import WarmStartSettings
from tests.spear_envs.corridor import CorridorEnv
from tests.training.test_review import make_episode

ADDITIONS = ("", "_sil", "_spear")
NAMES = [f"{base}{addition}" for base in ORDER for addition in ADDITIONS]


@pytest.fixture(scope="module")
def settings() -> dict[str, SpearSettings]:
    """The settings of every algorithm."""
    return {name: compose([f"algorithm={name}"]).config.algorithm for name in NAMES}


def test_every_file_is_an_algorithm_with_a_title_of_its_own() -> None:
    assert list(find_files("algorithm")) == sorted(NAMES)
    listed = list_algorithms()
    assert [algorithm.name for algorithm in listed] == NAMES
    assert len({algorithm.title for algorithm in listed}) == len(NAMES)
    assert all(algorithm.meaning for algorithm in listed)


def test_what_the_trainer_does_unasked_is_drbot_with_spear(settings: dict[str, SpearSettings]) -> None:
    assert settings["drbot_spear"] == SpearSettings() == compose([]).config.algorithm


@pytest.mark.parametrize("base", ORDER)
def test_additions_change_nothing_else(settings: dict[str, SpearSettings], base: str) -> None:
    plain, imitating, whole = (settings[f"{base}{addition}"] for addition in ADDITIONS)
    assert not plain.sil.enabled and plain.sil.weight(9) == 0 and plain.reward.weight(1) == 0
    assert imitating.sil.enabled and imitating.reward.weight(1) == 0 and imitating.cov.ratio == 0.02
    assert whole.sil.enabled and whole.reward.mu == "cosine" and whole.reward.weight(1) > 0.9
    assert replace(imitating, sil=plain.sil) == plain and replace(whole, reward=plain.reward) == imitating


def test_ppo_alone_has_a_critic_which_is_the_actors_network(settings: dict[str, SpearSettings]) -> None:
    assert all(one.advantage.needs_critic == name.startswith("ppo") for name, one in settings.items())
    assert not any(one.kl.coefficient for one in settings.values())
    config = compose(["algorithm=ppo_spear", "model.path=/some/model", "checkpoint.keep=7"]).config
    verl = to_verl(config, Path("x"))
    assert verl.critic.enable and verl.critic.model.path == "/some/model" and verl.critic.optim.lr == 1e-5
    assert verl.critic.strategy == verl.actor_rollout_ref.actor.strategy
    assert verl.trainer.max_critic_ckpt_to_keep == 7


# ---- policies of dry runs --------------------------------------------------------------------------------------------
def test_the_policy_of_a_dry_run_is_made_for_its_environment() -> None:
    config = compose(["preset=math_qwen3_32b_16k", "model=tiny", "model.warm_start.episodes=9"]).config
    settings = choose_warm_start(config)
    assert isinstance(settings, WarmStartSettings)
    assert settings.env_id == "spear/CodeInterpreter-v0" and settings.env_kwargs == config.env.kwargs
    assert (settings.layout, settings.template) == (Layout.CONVERSATION, "compact")
    assert (settings.episodes, settings.panel_tasks) == (9, 0)
    assert settings.learning_rate == 2e-3, "the rest is the environment's recipe"


def test_pictures_have_a_policy_that_sees_them() -> None:
    from spear_training.warmstart.vision import TinyVisionSettings

    config = prepare_training(compose(["preset=sokoban_qwen2.5_vl_3b", "model=tiny_vl"]), Path("runs/x")).config
    assert config.model.path == str(Path("runs/x/policy").resolve())
    settings = choose_warm_start(config)
    assert isinstance(settings, TinyVisionSettings)
    assert settings.env_kwargs["modality"] == "image" and (settings.template, settings.steps) == ("verl_agent", 70)


# ---- reward functions ------------------------------------------------------------------------------------------------
TASKS = ListTaskSet(
    [
        Task("t/train/0", "train", "easy", "add", {"answer": "42"}),
        Task("t/train/1", "train", "easy", "ask", {"golden_answers": ["a", "b"]}),
        Task("t/train/2", "train", "easy", "walk", {"board": 1}),
    ],
)


def configure(function: Any = None, **options: Any) -> RunConfig:
    return RunConfig().change("reward", function=function and str(function), function_options=options)


def load(tmp_path: Path, text: str, **options: Any) -> CustomReward:
    path = tmp_path / "reward.py"
    path.write_text(text)
    reward = load_custom_reward(configure(path, **options).reward)
    assert reward is not None
    return reward


def play(number: int) -> Trajectory:
    episode = replace(make_episode(number), task_id=f"t/train/{number}", reward_terms={"outcome": -1.0})
    return replace(episode, turns=(*episode.turns, replace(episode.turns[0], response="stop")))


def score(reward: CustomReward, *episodes: Trajectory) -> list[Trajectory]:
    return asyncio.run(reward.score_all(episodes, TASKS, "train"))


SEEN = """
seen = []
{0}def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
    return {1}
"""


@pytest.mark.parametrize("kind", ["", "async "])
@pytest.mark.parametrize("answer", ["0.5", "{'score': 0.5, 'acc': 1}", "__import__('numpy').float32(0.5)"])
def test_the_function_is_called_as_verl_calls_it(tmp_path: Path, kind: str, answer: str) -> None:
    reward = load(tmp_path, SEEN.format(kind, answer), bonus=2)
    scored = score(reward, play(0), play(1), play(2))
    assert [episode.reward_terms for episode in scored] == [{"outcome": -1.0, CUSTOM: 0.5}] * 3
    assert scored[0] == replace(play(0), reward_terms=scored[0].reward_terms), "nothing else of an episode changes"
    calls = sorted(reward.function.__globals__["seen"], key=lambda call: call[3]["task_id"])
    assert [call[2] for call in calls] == ["42", ["a", "b"], None]
    source, solution, _, extra, keywords = calls[0]
    assert (source, solution, keywords) == ("env", "go\nstop", {"bonus": 2})
    assert extra == {
        "task_id": "t/train/0",
        "split": "train",
        "reward_terms": {"outcome": -1.0},
        "won": True,
        "num_turns": 2,
        "turns": [{"observation": "_P_", "response": word, "action": "go"} for word in ("go", "stop")],
    }


def test_the_function_cannot_change_what_it_is_given(tmp_path: Path) -> None:
    head = "def compute_score(ground_truth, seen, **_):\n"
    body = "    ground_truth.clear()\n    seen.append(1)\n    return len(seen)"
    scored = score(load(tmp_path, head + body, seen=[]), play(1), play(1))
    assert [episode.reward_terms[CUSTOM] for episode in scored] == [1, 1]
    assert TASKS.get("t/train/1").content["golden_answers"] == ["a", "b"]


def test_an_episode_that_a_fault_cut_short_is_not_scored(tmp_path: Path) -> None:
    broken = replace(play(0), fault="backend", stop=StopReason.FAULT)
    assert score(load(tmp_path, SEEN.format("", "1")), broken, play(1))[0] is broken


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def helper(t):\n    return int(t)\ndef compute_score(solution_str, **_): return helper(solution_str)",
            "reward.py, line 2, in helper: ValueError: invalid literal for int() with base 10: 'go\\nstop' (task t/tr",
        ),
        ("def compute_score(text):\n    return 1", "reward.py, compute_score: TypeError: compute_score() got an unexp"),
        ("async def compute_score(**_):\n\n    raise KeyError('a\\nb')", "reward.py, line 3, in compute_score: KeyErr"),
        ("def compute_score(**_):\n    return next(iter([]))", "line 2, in compute_score: RuntimeError: Stop"),
        ("def compute_score(**_): return None", "compute_score returned None for task t/train/0, which is neither"),
        ("def compute_score(**_): return {'acc': 1}", "nor a dict with one under 'score'"),
        ("def compute_score(**_): return float('nan')", "returned nan for task t/train/0"),
        ("def compute_score(**_): return 1e300", "returned 1e+300 for task t/train/0"),
        ("def compute_score(**_): return 10**400", "returned 1000"),
        ("def compute_score(**_):\n    raise SystemExit(0)", "line 2, in compute_score: SystemExit: 0"),
    ],
)
def test_an_error_of_the_function_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpearError) as caught:
        score(load(tmp_path, text), play(0))
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["def compute_score(**_):\n    {}", "async def compute_score(**_):\n    await asyncio.{}"]
)
def test_a_function_that_takes_long_is_named_in_the_log(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spear_training.run.custom_reward.SLOW", 0.5)
    head, tail = "import asyncio\nfrom time import sleep\n", "\n    return 1"
    score(load(tmp_path, head + text.format("sleep(1)") + tail), play(0))
    assert "compute_score has not returned" in caplog.text and "t/train/0" in caplog.text
    caplog.clear()
    score(load(tmp_path, head + text.format("sleep(0)") + tail), play(0))
    assert not caplog.text


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n1 / 0", "", "reward.py, line 2 cannot be loaded: ZeroDivisionError: division by zero"),
        ("def compute_score(:", "", "reward.py cannot be loaded: SyntaxError: invalid syntax (reward.py, line 1)"),
        ("x = 1\nraise SystemExit(0)", "", "reward.py, line 2 cannot be loaded: ImportError: it ends the program"),
        ("x = 1", "", "reward.py has no function 'compute_score': name it as reward.function=FILE.py:FUNCTION"),
        ("x = 1", ":x", "has no function 'x'"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_before_anything_starts(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(SpearError) as caught:
        load_custom_reward(configure(f"{path}{name}").reward)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_composed_training_knows_the_function(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text("def mine(bonus, **_): return bonus\ncompute_score = mine")
    monkeypatch.chdir(tmp_path)
    base = ("preset=demo", f"model.path={model_folder}")
    for given, name in (("reward.py:mine", "mine"), ("reward.py", "compute_score"), ("file://reward.py:mine", "mine")):
        request = compose([*base, f"reward.function={given}", "reward.function_options.bonus=3"])
        config = prepare_training(request, tmp_path / "run").config
        assert config.reward.function == f"{tmp_path}/reward.py:{name}", "workers run in another folder"
        reward = load_custom_reward(config.reward)
        assert reward is not None and (reward.name, reward.kwargs) == (name, {"bonus": 3})
    assert load_custom_reward(compose(base).config.reward) is None
    for wrong, message in (
        ("function=missing.py", "is not a file"),
        ("function_options.a=1", "needs reward.function="),
    ):
        with pytest.raises(SpearError, match=message):
            prepare_training(compose([*base, f"reward.{wrong}"]), tmp_path / "run")


# ---- environments ----------------------------------------------------------------------------------------------------


def test_an_environment_of_a_split_is_made_without_the_checker() -> None:
    settings = EnvironmentSettings("spear/Sokoban-v1", kwargs={"modality": "text"})
    env = make_environment(settings, split="valid")
    core: Any = env.unwrapped
    assert core.tasks.split == "valid"
    assert "PassiveEnvChecker" not in str(env)
    _, info = env.reset(options={"task": core.tasks[0].id})
    assert info["task_id"] == core.tasks[0].id
    env.close()


def test_an_environment_whose_states_cannot_be_kept_says_why() -> None:
    corridor = EnvironmentSettings("tests.spear_envs.corridor:tests/Corridor-v0", template="compact")
    assert inspect_environment(corridor, branches=True).obstacle is None
    for name, expected in (("Far", "requests to other processes"), ("Odd", "holds numpy.*snapshot keeps plain values")):
        obstacle = inspect_environment(replace(corridor, id=f"{__name__}:tests/{name}-v0"), branches=True).obstacle
        assert obstacle is not None and re.search(expected, obstacle) and not obstacle.endswith(".")


class Far(CorridorEnv):
    restores = False


class Odd(CorridorEnv):
    def _world(self) -> Any:
        return np.asarray(super()._world())


for made in (Far, Odd):
    register_env(f"tests/{made.__name__}-v0", f"{__name__}:{made.__name__}")
