"""A model folder that costs nothing: enough for everything that only looks whether there is one."""

import json
from pathlib import Path

import pytest

TINY_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""``config.json`` of a model that costs nothing."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ``config.json`` of a tiny model, without weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def sokoban_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy after a short warm start: it knows the form of a response and solves some rooms."""
    pytest.importorskip("transformers", reason="needs the extra 'train'")
    from spear_training.warmstart import WarmStartSettings, train_policy

    folder = tmp_path_factory.mktemp("policy") / "warmstart"
    sokoban = {"modality": "text"}
    train_policy(
        WarmStartSettings("spear/Sokoban-v1", env_kwargs=sokoban, episodes=600, epochs=1, panel_tasks=0), folder
    )
    return folder


@pytest.fixture(scope="session")
def tiny_vision_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL of 0.35 M parameters that knows a little of the form of Sokoban's responses."""
    pytest.importorskip("transformers", reason="needs the extra 'train'")
    from spear_training.warmstart.vision import TinyVisionSettings, make_tiny_vision_policy

    folder = tmp_path_factory.mktemp("vision") / "policy"
    make_tiny_vision_policy(TinyVisionSettings(episodes=8, steps=8, batch=4), folder)
    return folder
