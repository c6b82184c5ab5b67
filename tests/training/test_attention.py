"""The choice of an attention, and what is refused before Ray starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("hydra", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training import attention
from spear_training.attention import AUTO, FLASH, SDPA, check_sequence_parallel, choose_attention
from spear_training.launch import check_config, compose_config, compose_training
from tests.training.conftest import TINY_CONFIG

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
SHARED = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-attention that can be imported."""
    module = ModuleType("flash_attn")
    module.__spec__ = attention.find_spec("json")
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def compose(folder: Path, out: Path, *overrides: str) -> Any:
    chosen = ("preset=demo", f"actor_rollout_ref.model.path={folder}", "cluster=8gpu")
    return compose_training((*chosen, *overrides), out).config


def test_a_gpu_has_flash_attention_where_it_is_installed(flash: None, model_folder: Path, tmp_path: Path) -> None:
    config = compose(model_folder, tmp_path)
    assert config.actor_rollout_ref.model.override_config.attn_implementation == FLASH
    assert config.critic.model.override_config.attn_implementation == FLASH
    assert choose_attention(AUTO, "cpu") == SDPA
    with pytest.raises(SpearError, match="it needs a GPU; take auto"):
        choose_attention(FLASH, "cpu")


def test_and_torch_s_own_where_it_is_not(model_folder: Path, tmp_path: Path) -> None:
    config = compose(model_folder, tmp_path)
    assert config.actor_rollout_ref.model.override_config.attn_implementation == SDPA
    assert compose(model_folder, tmp_path, f"{KEY}=eager").critic.model.override_config.attn_implementation == "eager"
    with pytest.raises(SpearError, match=r"flash-attn is not installed; take auto"):
        compose(model_folder, tmp_path, f"{KEY}={FLASH}")


def test_one_built_for_another_torch_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_attention(AUTO, "cuda") == SDPA
    with pytest.raises(SpearError, match=r"cannot be imported .undefined symbol"):
        choose_attention(FLASH, "cuda")


@pytest.mark.parametrize("place", [SHARED, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"])
def test_an_attention_that_stays_within_a_rank_is_refused(place: str, model_folder: Path, tmp_path: Path) -> None:
    config = compose(model_folder, tmp_path, f"{place}=2")  # torch's own exchanges
    config.actor_rollout_ref.model.override_config.attn_implementation = "eager"
    with pytest.raises(SpearError, match=r"size=2 with .*=eager: each rank .* take flash_attention_2 or sdpa"):
        check_config(config)
    config[place.partition(".")[0]].model.override_config.attn_implementation = SDPA
    with pytest.raises(SpearError, match=r"and pictures: each rank .* take flash_attention_2, or a size of 1"):
        check_sequence_parallel(config, str(model_folder), vision=True)
    config.actor_rollout_ref.model.use_remove_padding = False
    with pytest.raises(SpearError, match="use_remove_padding=true"):
        check_config(config)


def test_heads_must_divide(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 2}))
    with pytest.raises(SpearError, match=r"size=4 does not divide the model's 6 heads and 2 key heads"):
        compose(folder, tmp_path, f"{SHARED}=4")
    compose(folder, tmp_path, f"{SHARED}=2")


def test_a_critic_counts_where_there_is_one(model_folder: Path, tmp_path: Path) -> None:
    config = compose_config(("preset=demo", "cluster=8gpu", "algorithm=ppo"), tmp_path, check=False)
    config.critic.fsdp.ulysses_sequence_parallel_size = 2
    config.critic.model.override_config = {"attn_implementation": "flex_attention"}
    with pytest.raises(SpearError, match="flex_attention"):
        check_sequence_parallel(config, str(model_folder), vision=False)
    config.critic.enable = False
    check_sequence_parallel(config, str(model_folder), vision=False)
