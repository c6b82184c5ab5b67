from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from spear_training.environments import EnvironmentSettings, inspect_environment, make_environment
from tests.spear_envs.corridor import CorridorEnv


def test_settings_come_from_a_plain_mapping() -> None:
    settings = EnvironmentSettings.from_mapping(
        {"id": "spear/Sokoban-v1", "kwargs": {"modality": "text"}, "layout": "conversation", "history": 0}
    )
    assert settings == EnvironmentSettings(
        "spear/Sokoban-v1", kwargs={"modality": "text"}, layout=Layout.CONVERSATION, history=0
    )
    assert EnvironmentSettings.from_mapping({}) == EnvironmentSettings()


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"templat": "x"}, "spear.env.templat is not a setting; did you mean spear.env.template?"),
        ({"qqq": 1}, "spear.env.qqq is not a setting; there are id, kwargs"),
        ({1: 1}, "spear.env.1 is not a setting"),
        ({"layout": "flat"}, "spear.env.layout cannot be 'flat'; choose per_turn, conversation"),
        ({"layout": None}, "spear.env.layout cannot be None"),
        ({"layout": ["per_turn"]}, "spear.env.layout cannot be ['per_turn']"),
    ],
)
def test_a_wrong_key_or_layout_is_told(mapping: dict[Any, Any], expected: str) -> None:
    with pytest.raises(SpearError) as caught:
        EnvironmentSettings.from_mapping(mapping)
    assert expected in str(caught.value)


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
