"""Dry runs of the paper's presets: what they cut down and what policy they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")


from spear_agents.trajectory import Layout
from spear_training.catalogue import survey_presets
from spear_training.launch import compose_config, flatten_config
from spear_training.runs import choose_warm_start
from spear_training.settings import RunSettings
from spear_training.warmstart import WarmStartSettings


def compose(*overrides: str) -> Any:
    return compose_config(overrides, Path("runs/x"), check=False)


def test_the_policy_of_a_dry_run_is_made_for_its_environment() -> None:
    config = compose("preset=math_qwen3_32b_16k", "model=tiny", "spear.warm_start.episodes=9")
    settings = choose_warm_start(RunSettings.from_config(config))
    assert isinstance(settings, WarmStartSettings)
    assert settings.env_id == "spear/CodeInterpreter-v0" and settings.env_kwargs == dict(config.spear.env.kwargs)
    assert (settings.layout, settings.template) == (Layout.CONVERSATION, "compact")
    assert (settings.episodes, settings.panel_tasks) == (9, 0)
    assert settings.learning_rate == 2e-3, "the rest is the environment's recipe"


def test_pictures_have_a_policy_that_sees_them() -> None:
    from spear_training.warmstart.vision import TinyVisionSettings

    config = compose_config(("preset=sokoban_qwen2.5_vl_3b", "model=tiny_vl"), Path("runs/x"))
    assert config.actor_rollout_ref.model.path == str(Path("runs/x/policy").resolve())
    settings = choose_warm_start(RunSettings.from_config(config))
    assert isinstance(settings, TinyVisionSettings)
    assert settings.env_kwargs["modality"] == "image" and (settings.template, settings.steps) == ("default", 70)


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
