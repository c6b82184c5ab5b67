"""Dry runs of the paper's presets: what they cut down and what policy they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from rich.console import Console

from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_training.catalogue import survey_presets
from spear_training.launch import compose_config, flatten_config
from spear_training.runs import choose_warm_start, list_cuts, show_cuts
from spear_training.settings import RunSettings
from spear_training.warmstart import WarmStartSettings


def compose(*overrides: str) -> Any:
    return compose_config(overrides, Path("runs/x"), check=False)


def read(*overrides: str) -> RunSettings:
    return RunSettings.from_config(compose(*overrides))


def test_the_policy_of_a_dry_run_is_made_for_its_environment() -> None:
    config = compose("preset=math_qwen3_32b_16k", "model=tiny", "spear.warm_start.episodes=9")
    settings = choose_warm_start(RunSettings.from_config(config))
    assert isinstance(settings, WarmStartSettings)
    assert settings.env_id == "spear/CodeInterpreter-v0" and settings.env_kwargs == dict(config.spear.env.kwargs)
    assert (settings.layout, settings.template) == (Layout.CONVERSATION, "compact")
    assert (settings.episodes, settings.panel_tasks) == (9, 0)
    assert settings.learning_rate == 2e-3, "the rest is the environment's recipe"


def test_the_form_is_learnt_in_one_pass() -> None:
    settings = choose_warm_start(read("preset=webshop_qwen2.5_7b", "model=tiny"))
    assert isinstance(settings, WarmStartSettings) and settings.env_id == "spear/WebShop-v0"
    assert (settings.short_epochs, settings.long_epochs, settings.panel_tasks) == (0, 0, 0)


def test_pictures_have_a_policy_that_sees_them() -> None:
    from spear_training.warmstart.vision import TinyVisionSettings

    config = compose_config(("preset=sokoban_qwen2.5_vl_3b", "model=tiny_vl"), Path("runs/x"))
    assert config.actor_rollout_ref.model.path == str(Path("runs/x/policy").resolve())
    settings = choose_warm_start(RunSettings.from_config(config))
    assert isinstance(settings, TinyVisionSettings)
    assert settings.env_kwargs["modality"] == "image" and (settings.template, settings.steps) == ("default", 70)


def test_a_wrong_setting_of_the_policy_is_told() -> None:
    with pytest.raises(SpearError, match=r"spear\.warm_start\.episode is not a setting; did you mean .*episodes\?"):
        choose_warm_start(read("model=tiny", "+spear.warm_start.episode=9"))
    with pytest.raises(SpearError, match=r"spear\.warm_start\.noise: .*less than 1"):
        choose_warm_start(read("model=tiny", "+spear.warm_start.noise=1"))


def test_what_is_cut_down_is_said(tmp_path: Path) -> None:
    overrides = ("preset=webshop_qwen2.5_7b", "model=tiny", "algorithm=grpo_sil")
    cuts = {key: (before, after) for key, before, after in list_cuts(overrides)}
    assert cuts["data.train_batch_size"] == (32, 6) and cuts["spear.replay.capacity"] == (2048, 8)
    assert cuts["spear.env.kwargs.catalog"] == ("small", "mini")
    assert not any(key.startswith(("spear.sil", "spear.clip", "spear.advantage", "spear.filter")) for key in cuts)
    path = tmp_path / "console.txt"
    with path.open("w") as file:
        show_cuts(overrides, Console(file=file, width=160))
    text = path.read_text()
    assert "all others are the preset's" in text and "data.train_batch_size" in text


@pytest.mark.slow
def test_rows_of_one_experiment_have_the_same_dry_run() -> None:
    """So that one run speaks for all of them: they differ in the model alone, and in lengths that are cut anyway."""
    runs: dict[str, dict[str, Any]] = {}
    for preset in survey_presets():
        if preset.of_paper and preset.model:
            name = preset.name
            flat = flatten_config(compose(f"preset={name}", "model=tiny"))
            assert runs.setdefault(name.partition("_")[0], flat) == flat, name
    assert set(runs) == {"alfworld", "webshop", "sokoban", "math", "search"}
