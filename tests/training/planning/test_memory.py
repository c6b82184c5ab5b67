"""Sizes of models: any config.json that transformers knows, and what models.yaml says of some."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from spear_envs.core.errors import SpearError
from spear_training.planning.memory import Architecture, find_architecture, read_known

LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty folders of models, so that shapes come from models.yaml."""
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("name", read_known())
def test_parameters_that_are_written_down_are_those_that_are_built(name: str) -> None:
    assert find_architecture(name).parameters == read_known()[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [
        # As the models' cards have them; a token of the cache in bfloat16.
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 28 * 1024),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 56 * 1024),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352, 256 * 1024),
        ("Qwen/Qwen3-32B", 32_762_123_264, 256 * 1024),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976, 36 * 1024),
        ("smollm2-135m", 134_515_008, 22.5 * 1024),
    ],
)
def test_sizes_of_published_models(name: str, parameters: int, cache: float) -> None:
    model = find_architecture(name)
    assert model.parameters == parameters
    assert 2 * model.cache_values == cache


def test_a_decoder_is_counted_as_by_hand() -> None:
    attention = 2 * 32 * 32 + 2 * 32 * 16
    layer = attention + 3 * 32 * 48 + 2 * 32
    made = Architecture.from_config(LLAMA)
    assert made == Architecture(
        parameters=100 * 32 + 3 * layer + 32,
        largest=layer,
        vocabulary=100,
        hidden=32,
        intermediate=48,
        layers=3,
        cache_values=2 * 3 * 2 * 8,
    )
    assert made.edges == 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    apart = Architecture.from_config({**LLAMA, "tie_word_embeddings": False, "vocab_size": 1000})
    assert apart.parameters == 2 * 1000 * 32 + 3 * layer + 32 and apart.largest == 1000 * 32


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "phi3", "gpt2", "qwen3_moe", "opt"])
def test_any_family_of_transformers_is_counted(kind: str) -> None:
    sizes: dict[str, Any] = {**LLAMA, "model_type": kind, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    made = Architecture.from_config(sizes)
    assert made.layers == 3 and made.hidden == 32 and made.parameters > 3 * 32 * 32
    assert made.vocabulary * 32 < made.parameters < 10**6


def test_what_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"the size of some/Model is unknown: name its folder, or one of Qwen/"):
        find_architecture("some/Model")
    for config, message in (
        ({"model_type": "klingon"}, "the sizes of a klingon model cannot be computed"),
        ({"model_type": "t5"}, "the sizes of a t5 model cannot be computed"),
        ({}, "the sizes of a None model cannot be computed"),
        ({**LLAMA, "hidden_size": "many"}, "the sizes of a llama model cannot be computed"),
    ):
        with pytest.raises(SpearError, match=message) as error:
            Architecture.from_config(config)
        assert "\n" not in str(error.value)
    for text, message in (
        ("{", "fetch or copy the model again"),
        ("[]", "fetch or copy the model again"),
        ('{"architectures": ["BertModel"]}', "holds a BertModel, which does not go on with a text"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpearError, match=message):
            find_architecture(str(tmp_path))
