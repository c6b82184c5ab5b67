"""``spear presets`` and ``spear models list``: what they say is what a training would compose and find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the distribution spear-training")

from spear_agents.model_files import models
from spear_agents.models import KNOWN, Place, find_cache, models_folder
from spear_envs.cli import ABSENT, SUMMARIES
from spear_training import catalogue as inventory
from spear_training.catalogue import Need, PresetListing, list_presets, presets, survey_models, survey_presets
from spear_training.choices import list_choices
from spear_training.launch import compose_config
from spear_training.settings import RunSettings
from tests.spear_envs.test_catalogue import write_shop

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "verl", "ray", "hydra", "omegaconf", "transformers", "huggingface_hub", "tensordict")
PRESETS_OF_OURS = ("demo", "alfworld_tiny", "code_tiny", "search_tiny", "webshop_tiny")
SMALL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders for data and models."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def find(name: str) -> PresetListing:
    return next(preset for preset in survey_presets() if preset.name == name)


def compose(*overrides: str) -> Any:
    return compose_config(overrides, Path("x"), check=False)


def test_all_presets_are_listed() -> None:
    found = survey_presets()
    assert {preset.name: preset.title for preset in found} == list_choices("preset")
    assert [preset.name for preset in found if preset.of_paper] == list_presets()


@pytest.mark.parametrize(
    "name",
    [*PRESETS_OF_OURS, "alfworld_qwen2.5_1.5b", "math_qwen3_32b_32k", "search", "sokoban_qwen2.5_vl_3b"],
)
def test_a_preset_is_what_a_training_composes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    look = inventory._list_data_needs
    monkeypatch.setattr(
        inventory, "_list_data_needs", lambda id, kwargs: asked.update({id + str(kwargs): kwargs}) or look(id, kwargs)
    )
    listed = find(name)
    config = compose(f"preset={name}")
    assert listed.env_id == config.spear.env.id
    hub_ids = {model.name: model.hub_id for model in survey_models()}
    assert (None if listed.model is None else hub_ids[listed.model]) == config.actor_rollout_ref.model.path
    assert config.spear.env.kwargs in [kwargs for key, kwargs in asked.items() if key.startswith(listed.env_id)]


def test_the_algorithm_is_the_default() -> None:
    chosen = RunSettings.from_config(compose("preset=demo")).algorithm
    assert chosen == RunSettings.from_config(compose("preset=demo", f"algorithm={find('demo').algorithm}")).algorithm
    assert chosen != RunSettings.from_config(compose("preset=demo", "algorithm=grpo")).algorithm


def test_what_a_preset_needs() -> None:
    def kinds(name: str) -> list[tuple[str, bool | None]]:
        return [(need.kind, need.here) for need in find(name).needs]

    assert kinds("webshop") == [("data", False), ("model", None)]
    assert kinds("webshop_qwen2.5_1.5b") == [("data", False), ("model", False)]
    assert kinds("math_qwen3_32b_16k") == [("data", False), ("package", True), ("model", False)]
    assert kinds("search_qwen2.5_7b") == [("data", False), ("package", True), ("server", None), ("model", False)]
    assert kinds("sokoban_qwen2.5_vl_3b") == [("model", False)]
    assert kinds("demo") == [("warm start", None)]
    (needed,) = find("alfworld_tiny").needs
    assert needed.mend.startswith("spear warmstart spear/ALFWorld-v0 --out")


def test_data_that_is_here_is_not_missing(nothing_here: Path) -> None:
    write_shop(nothing_here / "data")
    assert find("webshop").needs[0] == Need(
        "data", "spear/WebShop-v0 small", True, "spear data get webshop --size small"
    )
    assert [need.kind for need in find("webshop").missing] == ["model"]


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "list_unreadable", lambda collection: list(collection.packages))
    package = next(need for need in find("math").missing if need.kind == "package")
    assert (package.name, package.mend) == ("pyarrow", "pip install 'spear-envs[sandbox]'")


def put_model(hub: Path, files: dict[str, str], hub_id: str = SMALL) -> None:
    snapshot = hub / f"models--{hub_id.replace('/', '--')}" / "snapshots" / "0123"
    snapshot.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)


def look_up() -> Place:
    return next(model.place for model in survey_models() if model.hub_id == SMALL)


def test_models() -> None:
    found = {model.name: model for model in survey_models()}
    assert list(found) == list(list_choices("model"))
    assert (found["tiny"].place, found["tiny"].hub_id, found["tiny_vl"].place) == (Place.MADE, None, Place.MADE)
    small = found["qwen2.5_1.5b"]
    assert small.hub_id == SMALL and small.place is Place.DOWNLOAD
    assert small.parameters == 1_543_714_304 and small.download_bytes == 2 * small.parameters


def test_a_model_out_of_a_wheel() -> None:
    def find_packaged() -> Place:
        return next(model.place for model in survey_models() if model.name == "smollm2-135m")

    assert find_packaged() is Place.DOWNLOAD
    assert compose("model=smollm2-135m").actor_rollout_ref.model.path in KNOWN
    (models_folder() / "smollm2-135m").mkdir(parents=True)
    assert find_packaged() is Place.DOWNLOAD, "an empty folder is not a model"
    (models_folder() / "smollm2-135m" / "config.json").write_text("{}")
    assert find_packaged() is Place.CACHED


def test_a_model_is_in_the_cache_when_all_its_files_are(nothing_here: Path) -> None:
    hub = nothing_here / "hub"
    assert look_up() is Place.DOWNLOAD
    put_model(hub, {"config.json": "{}"})
    assert look_up() is Place.PARTIAL
    put_model(hub, {"model.safetensors": ""})
    assert look_up() is Place.CACHED
    assert [need.here for need in find("webshop_qwen2.5_1.5b").needs if need.kind == "model"] == [True]
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    put_model(hub, {"model.safetensors.index.json": json.dumps(weights), "model-1.safetensors": ""})
    assert look_up() is Place.PARTIAL
    put_model(hub, {"model-2.safetensors": ""})
    assert look_up() is Place.CACHED
    for broken in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'):
        put_model(hub, {"model.safetensors.index.json": broken})
        assert look_up() is Place.PARTIAL


def test_a_download_that_only_began(nothing_here: Path) -> None:
    blobs = nothing_here / "hub" / f"models--{SMALL.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_text("")
    assert look_up() is Place.PARTIAL


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/x/hf"},
        {"HF_HUB_CACHE": "/x/hub", "HF_HOME": "/x/hf"},
        {"XDG_CACHE_HOME": "/x/cache"},
        {"HUGGINGFACE_HUB_CACHE": "/x/old"},
    ],
)
def test_the_cache_is_the_one_of_the_library(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(find_cache()) == done.stdout.strip()


@pytest.mark.parametrize("columns", [80, 170])
def test_the_tables_fit(columns: int) -> None:
    for command, args, names in ((presets, [], list_choices("preset")), (models, ["list"], list_choices("model"))):
        result = CliRunner().invoke(command, args, env={"COLUMNS": str(columns)})
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert max(map(len, lines[:-2])) <= columns  # the last two name folders
        listed = [line.split()[0] for line in lines if line and not line.startswith(" ")]
        assert [name for name in listed if name in names] == list(names)
        assert any(title in result.output for title in names.values())


def test_the_footer_says_how_to_mend() -> None:
    output = CliRunner().invoke(presets, [], env={"COLUMNS": "200"}).output
    for need in (need for preset in survey_presets() for need in preset.missing if need.kind == "data"):
        assert need.mend in output
    assert "spear warmstart ENV" in output and "pip install" not in output


@pytest.mark.parametrize(("command", "args", "key"), [(presets, [], "presets"), (models, ["list"], "models")])
def test_json(command: Any, args: list[str], key: str) -> None:
    result = CliRunner().invoke(command, [*args, "--json"])
    found = json.loads(result.output)[key]
    assert [item["name"] for item in found] == sorted(list_choices(key.rstrip("s")))
    assert all(item["title"] for item in found)


@pytest.mark.parametrize("command", ["presets", "models list", "algorithms"])
def test_they_start_without_anything_heavy(command: str) -> None:
    program = (
        "import sys, time\nfrom spear_envs.cli import main\n"
        f"try:\n    main({command.split()!r})\nexcept SystemExit:\n"
        f"    print(sorted(set({HEAVY!r}) & sys.modules.keys()), time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy, _, seconds = done.stdout.splitlines()[-1].rpartition(" ")
    assert heavy == "[]" and float(seconds) < 1.5, "0.6 s of CPU on a quiet machine"
    assert command.split()[0] in SUMMARIES and command.split()[0] in ABSENT
