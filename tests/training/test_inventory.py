"""``spear presets`` and ``spear models list``: what they say is what a training would compose and find."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the distribution spear-training")

import json
import subprocess
import sys

from click.testing import CliRunner

from spear_agents.model_files import models
from spear_training.catalogue import Need, PresetListing, list_presets, presets, survey_models, survey_presets
from spear_training.run.compose import compose, list_choices
from tests.spear_envs.test_listing import write_shop

PRESETS_OF_OURS = ("demo", "alfworld_tiny", "code_tiny", "search_tiny", "webshop_tiny")


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders for data and models."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def find(name: str) -> PresetListing:
    return next(preset for preset in survey_presets() if preset.name == name)


def test_all_presets_are_listed() -> None:
    found = survey_presets()
    assert {preset.name: preset.title for preset in found} == list_choices("preset")
    assert [preset.name for preset in found if preset.of_paper] == list_presets()


@pytest.mark.parametrize(
    "name",
    [*PRESETS_OF_OURS, "alfworld_qwen2.5_1.5b", "math_qwen3_32b_32k", "search", "sokoban_qwen2.5_vl_3b"],
)
def test_a_preset_is_what_a_training_composes(name: str) -> None:
    listed = find(name)
    config = compose([f"preset={name}"]).config
    assert listed.env_id == config.env.id
    hub_ids = {model.name: model.hub_id for model in survey_models()}
    assert (None if listed.model is None else hub_ids[listed.model]) == config.model.path


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [("demo", "warm start", "spear warmstart"), ("alfworld_smollm2", "cold start", "spear sft"),
     ("code_smollm2", "cold start", "spear sft")],
)  # fmt: skip
def test_our_presets_need_the_policy_that_they_train(name: str, kind: str, command: str) -> None:
    (need,) = find(name).missing
    assert need.kind == kind and need.mend.startswith(command)
    assert f"{kind}  {command} " in CliRunner().invoke(presets).output


def test_data_that_is_here_is_not_missing(nothing_here: Path) -> None:
    write_shop(nothing_here / "data")
    assert find("webshop").needs[0] == Need(
        "data", "spear/WebShop-v0 small", True, "spear data get webshop --size small"
    )
    assert [need.kind for need in find("webshop").missing] == ["model"]


@pytest.mark.parametrize(("command", "args", "key"), [(presets, [], "presets"), (models, ["list"], "models")])
def test_json(command: Any, args: list[str], key: str) -> None:
    result = CliRunner().invoke(command, [*args, "--json"])
    found = json.loads(result.output)[key]
    assert [item["name"] for item in found] == sorted(list_choices(key.rstrip("s")))
    assert all(item["title"] for item in found)


HEAVY = ("torch", "verl", "ray", "hydra", "omegaconf", "transformers", "huggingface_hub", "tensordict")
MOST_MODULES = 800


@pytest.mark.parametrize("command", ["presets", "models list", "algorithms"])
def test_they_start_without_anything_heavy(command: str) -> None:
    program = (
        "import sys\nfrom spear_envs.cli import main\n"
        f"try:\n    main({command.split()!r})\nexcept SystemExit:\n"
        f"    print(sorted(set({HEAVY!r}) & sys.modules.keys()), len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy, _, modules = done.stdout.splitlines()[-1].rpartition(" ")
    assert heavy == "[]" and int(modules) < MOST_MODULES
