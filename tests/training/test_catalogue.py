"""Algorithms: each row of the paper's tables is a file, and what it changes is what the paper says it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.algorithms import Aggregation, SpearSettings, VoidFilter
from spear_training.catalogue import ADDITIONS, FOLDER, ORDER, check_algorithm, list_algorithms
from spear_training.catalogue_cli import algorithms
from spear_training.launch import compose_config, read_settings

NAMES = [f"{base}{addition}" for base in ORDER for addition in ADDITIONS]


def compose(name: str, *overrides: str) -> Any:
    return compose_config((f"algorithm={name}", *overrides), Path("x"), check=False)


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    """The composed configuration of every algorithm."""
    return {name: compose(name) for name in NAMES}


@pytest.fixture(scope="module")
def settings(configs: dict[str, Any]) -> dict[str, SpearSettings]:
    """Their settings."""
    return {name: read_settings(config.spear) for name, config in configs.items()}


def test_every_file_is_an_algorithm_with_a_title_of_its_own() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(NAMES)
    listed = list_algorithms()
    assert [algorithm.name for algorithm in listed] == NAMES
    assert len({algorithm.title for algorithm in listed}) == len(NAMES)
    assert all(algorithm.meaning for algorithm in listed)


def test_what_the_trainer_does_unasked_is_drbot_with_spear(settings: dict[str, SpearSettings]) -> None:
    assert settings["drbot_spear"] == SpearSettings() == read_settings(compose_config((), Path("x"), check=False).spear)


@pytest.mark.parametrize("base", ORDER)
def test_additions_change_nothing_else(settings: dict[str, SpearSettings], base: str) -> None:
    plain, imitating, whole = (settings[f"{base}{addition}"] for addition in ADDITIONS)
    assert not plain.sil.enabled and plain.sil.weight(9) == 0 and plain.reward.weight(1) == 0
    assert imitating.sil.enabled and imitating.reward.weight(1) == 0 and imitating.cov.ratio == 0.02
    assert whole.sil.enabled and whole.reward.mu == "cosine" and whole.reward.weight(1) > 0.9
    assert replace(imitating, sil=plain.sil) == plain and replace(whole, reward=plain.reward) == imitating


def test_plain_baselines_have_none_of_the_tricks(settings: dict[str, SpearSettings]) -> None:
    estimators = {
        "grpo": ("grpo", True),
        "rloo": ("rloo", False),
        "ppo": ("gae", False),
        "gigpo": ("gigpo", True),
        "gigpo_nostd": ("gigpo", False),
    }
    for name, (estimator, normalized) in estimators.items():
        one = settings[name]
        assert (one.advantage.estimator, one.advantage.normalize_std) == (estimator, normalized)
        assert (one.clip.low, one.clip.high) == (0.2, 0.2)
        assert one.loss.aggregation is Aggregation.TOKEN_MEAN
        assert (one.filter.groups, one.filter.void) == (1.0, VoidFilter.OFF)
        assert not (one.filter.overlong or one.filter.repetition or one.cov.on_policy)
        assert replace(one, advantage=settings["grpo"].advantage) == settings["grpo"]


def test_drbot_has_all_of_them(settings: dict[str, SpearSettings]) -> None:
    one = settings["drbot"]
    assert (one.kl.coefficient, one.clip.high, one.clip.dual) == (0.0, 0.28, 10.0)
    assert not one.advantage.normalize_std and one.loss.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    assert (one.filter.groups, one.filter.void) == (0.75, VoidFilter.TRAJECTORY)
    assert one.filter.overlong and one.filter.repetition
    other = settings["drbot_gigpo"]
    assert other.advantage.estimator == "gigpo" and not other.advantage.normalize_std
    assert replace(other, advantage=one.advantage) == one


def test_ppo_alone_has_a_critic_which_is_the_actors_network(configs: dict[str, Any]) -> None:
    for name, config in configs.items():
        assert config.critic.enable == name.startswith("ppo")
        assert not config.actor_rollout_ref.actor.use_kl_loss
    config = compose("ppo_spear", "actor_rollout_ref.model.path=/some/model", "trainer.max_actor_ckpt_to_keep=7")
    assert config.critic.model.path == "/some/model" and config.critic.optim.lr == 1e-5
    assert config.critic.strategy == config.actor_rollout_ref.actor.strategy
    assert config.trainer.max_critic_ckpt_to_keep == 7


def test_a_kl_term_brings_the_reference_policy() -> None:
    assert compose("grpo", "spear.kl.coefficient=0.01").actor_rollout_ref.actor.use_kl_loss


def test_each_trick_of_drbot_has_a_switch_of_its_own() -> None:
    switches = {
        "kl": {"coefficient": 0.01},
        "clip": {"high": 0.2, "dual": None},
        "advantage": {"normalize_std": True},
        "loss": {"aggregation": "token-mean"},
        "filter": {"overlong": False, "void": "off", "repetition": False, "groups": 1.0},
    }
    given = [
        f"spear.{node}.{key}={json.dumps(value)}" for node, keys in switches.items() for key, value in keys.items()
    ]
    # Each is a field of its own, so that all at once show that none needs another.
    found = read_settings(compose("drbot_spear", *given).spear).to_mapping()
    plain = SpearSettings().to_mapping()
    assert found == {node: {**values, **switches.get(node, {})} for node, values in plain.items()}


def test_a_user_has_the_last_word() -> None:
    assert read_settings(compose("grpo", "spear.clip.high=0.3").spear).clip.high == 0.3


@pytest.mark.parametrize(("name", "near"), [("gigpo-spear", "gigpo_spear"), ("grppo", "grpo")])
def test_a_wrong_name_is_told_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpearError, match=f"did you mean {near}"):
        check_algorithm(name)
    assert check_algorithm(near) == near


def test_the_command_lists_them_all() -> None:
    result = CliRunner().invoke(algorithms, [], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert all(f"\n{name} " in result.output for name in NAMES)


def test_the_command_gives_them_as_json() -> None:
    result = CliRunner().invoke(algorithms, ["--json"])
    assert json.loads(result.output) == {"algorithms": [asdict(algorithm) for algorithm in list_algorithms()]}
