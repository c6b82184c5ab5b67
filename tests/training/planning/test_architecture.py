from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from spear_envs.core.errors import SpearError
from spear_training.choices import list_choices
from spear_training.planning.architecture import Architecture, find_architecture

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

KNOWN: dict[str, dict[str, Any]] = yaml.safe_load(
    (resources.files("spear_training.planning") / "models.yaml").read_text(encoding="utf-8")
)
CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3"}


def count_parameters(config: dict[str, Any]) -> int:
    """Of the model that transformers builds of ``config``, without memory for its weights."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        if config["model_type"] == "qwen2_5_vl":
            from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

            vision = values.pop("vision_config")
            shape = Qwen2_5_VLConfig(text_config=values, vision_config=vision)
            shape.tie_word_embeddings = values["tie_word_embeddings"]
            model = Qwen2_5_VLForConditionalGeneration(shape)
        else:
            family = CLASSES[config["model_type"]]
            model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values))
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    assert find_architecture(name).parameters == count_parameters(KNOWN[name])


@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [
        # As the models' cards have them; a token of the cache in bfloat16.
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 28 * 1024),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 56 * 1024),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352, 256 * 1024),
        ("Qwen/Qwen3-32B", 32_762_123_264, 256 * 1024),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976, 36 * 1024),
    ],
)
def test_sizes_of_the_papers_models(name: str, parameters: int, cache: int) -> None:
    model = find_architecture(name)
    assert model.parameters == parameters
    assert model.cache_bytes(2) == cache


def test_every_model_of_the_configuration_is_known() -> None:
    folder = resources.files("spear_training") / "config" / "model"
    for name in list_choices("model"):
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        path = yaml.safe_load(text).get("actor_rollout_ref", {}).get("model", {}).get("path")
        assert path is None or path in KNOWN


def test_a_folder_is_read(tmp_path: Path) -> None:
    config = {**KNOWN["Qwen/Qwen3-32B"], "hidden_size": 96, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 250}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_architecture(str(tmp_path))
    assert (model.hidden, model.layers, model.head_size) == (96, 4, 32)
    assert model.parameters == count_parameters(config)


def test_what_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"the size of some/Model is not known here: name its folder, or one of Qwen/"):
        find_architecture("some/Model")
    with pytest.raises(SpearError, match="sizes of a llama model are not known here"):
        Architecture.from_config({"model_type": "llama"})
    with pytest.raises(SpearError, match=r"config\.json has no hidden_size"):
        Architecture.from_config({"model_type": "qwen2", "vocab_size": 3})
