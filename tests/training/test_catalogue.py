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
from spear_training.algorithms import SpearSettings
from spear_training.catalogue import algorithms
from spear_training.choices import ORDER, check_choice, find_files, list_algorithms
from spear_training.launch import compose_config
from spear_training.settings import RunSettings

ADDITIONS = ("", "_sil", "_spear")
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
    return {name: RunSettings.from_config(config).algorithm for name, config in configs.items()}


def test_every_file_is_an_algorithm_with_a_title_of_its_own() -> None:
    assert list(find_files("algorithm")) == sorted(NAMES)
    listed = list_algorithms()
    assert [algorithm.name for algorithm in listed] == NAMES
    assert len({algorithm.title for algorithm in listed}) == len(NAMES)
    assert all(algorithm.meaning for algorithm in listed)


def test_what_the_trainer_does_unasked_is_drbot_with_spear(settings: dict[str, SpearSettings]) -> None:
    assert (
        settings["drbot_spear"]
        == SpearSettings()
        == RunSettings.from_config(compose_config((), Path("x"), check=False)).algorithm
    )


@pytest.mark.parametrize("base", ORDER)
def test_additions_change_nothing_else(settings: dict[str, SpearSettings], base: str) -> None:
    plain, imitating, whole = (settings[f"{base}{addition}"] for addition in ADDITIONS)
    assert not plain.sil.enabled and plain.sil.weight(9) == 0 and plain.reward.weight(1) == 0
    assert imitating.sil.enabled and imitating.reward.weight(1) == 0 and imitating.cov.ratio == 0.02
    assert whole.sil.enabled and whole.reward.mu == "cosine" and whole.reward.weight(1) > 0.9
    assert replace(imitating, sil=plain.sil) == plain and replace(whole, reward=plain.reward) == imitating


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
    found = RunSettings.from_config(compose("drbot_spear", *given)).algorithm.to_mapping()
    plain = SpearSettings().to_mapping()
    assert found == {node: {**values, **switches.get(node, {})} for node, values in plain.items()}


@pytest.mark.parametrize(("name", "near"), [("gigpo-spear", "gigpo_spear"), ("grppo", "grpo")])
def test_a_wrong_name_is_told_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpearError, match=f"did you mean {near}"):
        check_choice("algorithm", name)
    check_choice("algorithm", near)


def test_the_command_gives_them_as_json() -> None:
    result = CliRunner().invoke(algorithms, ["--json"])
    assert json.loads(result.output) == {"algorithms": [asdict(algorithm) for algorithm in list_algorithms()]}


# ---- a user's own ----------------------------------------------------------------------------------------------------
MINE = """# @package _global_
# Mine: GRPO with a wide clip.
defaults:
  - grpo

spear:
  clip: {high: 0.5}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with an algorithm, a model and a preset that no package has."""
    files = {
        "algorithm/mine": MINE,
        "model/small": "# @package _global_\n# A small one.\nactor_rollout_ref:\n  model: {path: me/small}\n",
        "preset/small_sokoban": "# @package _global_\n# Small.\ndefaults:\n  - demo\n  - /model/small\n  - _self_\n\n"
        "data:\n  train_batch_size: 3\n",
    }
    for name, text in files.items():
        path = tmp_path / "my own, configurations" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "my own, configurations"


def test_a_file_of_ones_own_is_an_algorithm(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [algorithm.name for algorithm in list_algorithms(own)] == [*NAMES, "mine"]
    given = ("preset=small_sokoban", "algorithm=mine", "spear.seed=4")
    config = compose_config(given, Path("x"), check=False, config_dir=own)
    clip = RunSettings.from_config(config).algorithm.clip
    assert (clip.low, clip.high, config.spear.seed, config.data.train_batch_size) == (0.2, 0.5, 4, 3)
    assert (config.actor_rollout_ref.model.path, config.trainer.experiment_name) == ("me/small", "demo")
    monkeypatch.setenv("SPEAR_CONFIG_DIR", str(own))
    assert compose_config(given, Path("x"), check=False) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# @package _global_\nspear: {clip: [\n", "mine.yaml is not YAML: while parsing"),
        ("# @package _global_\n- spear\n", "mine.yaml is not a mapping"),
        (MINE.partition("\n")[2], "mine.yaml must start with the line '# @package _global_'"),
        (MINE.replace("- grpo", "- grppo"), "Could not load 'algorithm/grppo'"),
        (MINE.replace("high", "hihg"), "hihg"),
    ],
)
def test_a_file_that_cannot_be_is_told_in_one_line(own: Path, text: str, expected: str) -> None:
    (own / "algorithm" / "mine.yaml").write_text(text)
    with pytest.raises(SpearError) as caught:
        compose_config(("algorithm=mine",), Path("x"), check=False, config_dir=own)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_names_are_not_taken_twice_and_a_missing_folder_is_told(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpearError, match="did you mean mine"):
        check_choice("algorithm", "mne", own)
    (own / "algorithm" / "grpo.yaml").write_text(MINE)
    with pytest.raises(SpearError, match=r"grpo\.yaml has the name of an existing choice"):
        list_algorithms(own)
    monkeypatch.setenv("SPEAR_CONFIG_DIR", str(own / "none"))
    with pytest.raises(SpearError, match=r"folder of configurations .*none .*does not exist"):
        list_algorithms()
