from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="needs the extra 'train'")
torch = pytest.importorskip("torch")

from spear_envs.core.errors import SpearError  # noqa: E402
from spear_training import computing as precision  # noqa: E402
from spear_training.computing import TINY, choose_dtype, keep_dtype, measure_weights, prefers_bfloat16  # noqa: E402
from spear_training.launch import compose_config  # noqa: E402
from tests.training.conftest import TINY_CONFIG  # noqa: E402

DTYPE = "actor_rollout_ref.rollout.dtype"


def make_folder(folder: Path, size: int) -> Path:
    """A model with a file of weights of so many bytes, which holds nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    spare = 8 + 96  # the header's length, and the header
    header = json.dumps({"zeros": {"dtype": "U8", "shape": [size - spare], "data_offsets": [0, size - spare]}})
    with (folder / "model.safetensors").open("wb") as file:
        file.write((96).to_bytes(8, "little") + header.ljust(96).encode("ascii"))
        file.truncate(size)
    return folder


@pytest.mark.parametrize(
    ("size", "faster", "expected"),
    [(TINY, True, "bfloat16"), (TINY - 1, True, "float32"), (TINY, False, "float32"), (None, True, "float32")],
)
def test_bfloat16_is_for_large_models_on_a_cpu_where_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, faster: bool, expected: str
) -> None:
    monkeypatch.setattr(precision, "prefers_bfloat16", lambda: faster)
    folder = tmp_path / "model"
    if size is not None:
        make_folder(folder, size)
    assert choose_dtype("auto", measure_weights(folder)) == expected
    assert choose_dtype("float32", 0) == "float32" and choose_dtype("bfloat16", 0) == "bfloat16"
    with pytest.raises(SpearError, match="no dtype 'float16' on a CPU: take auto, float32 or bfloat16"):
        choose_dtype("float16", 0)


@pytest.mark.parametrize(("slow", "expected"), [(torch.float32, True), (torch.bfloat16, False), (None, False)])
def test_the_faster_type_is_found_by_a_trial(
    monkeypatch: pytest.MonkeyPatch, slow: torch.dtype | None, expected: bool
) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        assert left.dtype == right.dtype and left.shape[1] == right.shape[0]
        time.sleep(0.01 if left.dtype == slow else 0.002)

    monkeypatch.setattr(torch, "mm", multiply)
    prefers_bfloat16.cache_clear()
    assert prefers_bfloat16() == expected
    prefers_bfloat16.cache_clear()


def test_a_resumed_run_keeps_its_type(tmp_path: Path) -> None:
    earlier = tmp_path / "config.yaml"
    assert keep_dtype("auto", "a.dtype", earlier) == keep_dtype("auto", "a.dtype", None) == "auto"
    earlier.write_text("a: {dtype: bfloat16}\n")
    assert keep_dtype("auto", "a.dtype", earlier) == "bfloat16"
    assert keep_dtype("float32", "a.dtype", earlier) == "float32", "the user has the last word"
    assert keep_dtype("auto", "b.dtype", earlier) == "auto", "a run from before this key"


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_one_key_sets_rollouts_actor_reference_and_critic(tmp_path: Path, chosen: str) -> None:
    model = make_folder(tmp_path / "model", 4096)
    overrides = ("preset=demo", f"actor_rollout_ref.model.path={model}", f"{DTYPE}={chosen}")
    config = compose_config(overrides, tmp_path / "run")
    node = config.actor_rollout_ref
    parts = (node.actor.fsdp_config, node.ref.fsdp_config, config.critic.fsdp)
    assert {part.mixed_precision.param_dtype for part in parts} == {node.rollout.dtype} == {chosen}
    assert {part.mixed_precision.reduce_dtype for part in parts} == {"fp32"}


def test_a_tiny_policy_stays_float32_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "prefers_bfloat16", lambda: True)
    model = make_folder(tmp_path / "model", TINY - 1)
    for overrides in (("preset=demo", f"actor_rollout_ref.model.path={model}"), ("preset=demo", "model=tiny")):
        assert compose_config(overrides, tmp_path / "run").actor_rollout_ref.rollout.dtype == "float32"


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "actor_rollout_ref.ref.fsdp_config.mixed_precision={param_dtype: bf16}",
    ],
)
def test_rollouts_and_trainer_that_compute_otherwise_are_refused(tmp_path: Path, override: str) -> None:
    model = make_folder(tmp_path / "model", 4096)
    overrides = ("preset=demo", f"actor_rollout_ref.model.path={model}", "spear.kl.coefficient=0.1", override)
    with pytest.raises(SpearError, match=f"computes in bf16, the rollouts in float32: set {DTYPE}"):
        compose_config(overrides, tmp_path / "run")


def test_a_gpu_keeps_verls_own(tmp_path: Path) -> None:
    config = compose_config(("preset=alfworld_qwen2.5_7b", "cluster=8gpu"), tmp_path / "run", check=False)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
