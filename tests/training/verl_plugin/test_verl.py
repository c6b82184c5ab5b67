"""What the plugin uses of verl without a public promise: each name still exists and means what the plugin thinks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import verl

import spear_training.verl_plugin  # registers everything  # noqa: F401
from tests.rooms import ROOMS
from tests.training.verl_plugin.promises import METHODS, NAMES, TEXTS, find_fault


def test_the_version_is_the_one_the_plugin_was_written_for() -> None:
    assert verl.__version__ == "0.9.1", "run all tests here, the slow ones too, before allowing another version"


@pytest.mark.parametrize("path", sorted({*METHODS, *NAMES, *TEXTS}))
def test_what_the_plugin_relies_on_is_there(path: str) -> None:
    assert find_fault(path) is None


def test_vllm_servers_of_verl_call_truncated_responses_completed() -> None:
    # If this fails, ServerEngine may trust the stop reason again.
    spec = find_spec("verl.workers.rollout.vllm_rollout")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "vllm_async_server.py").read_text(encoding="utf-8")
    assert re.search(r'finish_reason in \("stop", "length"\):\s*stop_reason = "completed"', source)


# ---- the plugin's side -----------------------------------------------------------------------------------------------
def test_everything_is_registered_under_its_name() -> None:
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from spear_training.verl_plugin import platform, rollout_hf, rollout_vllm, trainer, workers

    assert PlatformRegistry._platforms["cpu"] is platform.PlatformCPU
    assert get_trainer_cls("spear") is trainer.SpearTrainer
    assert get_rollout_class("spear_hf") is rollout_hf.HFWeightSender
    assert RolloutReplicaRegistry.get("spear_hf") is rollout_hf.HFReplica
    assert get_rollout_class("vllm_cpu") is rollout_vllm.VLLMWeightSender
    assert RolloutReplicaRegistry.get("vllm_cpu") is rollout_vllm.VLLMReplica
    for backend in ("fsdp", "fsdp2"):
        for kind, engine in (
            ("language_model", workers.CpuLanguageModelEngine),
            ("value_model", workers.CpuValueModelEngine),
        ):
            assert engine in EngineRegistry._engines[kind][backend].values()


def test_the_configuration_names_classes_that_exist() -> None:
    from spear_training.launch import compose_config

    config = compose_config((), Path("x"), check=False)
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute).__name__ == "RolloutManager"
    asked = config.data.custom_cls
    assert asked.path.startswith("pkg://") and hasattr(import_module(asked.path.removeprefix("pkg://")), asked.name)
    texts = [path.read_text("utf-8") for path in ROOMS["spear_training"].rglob("*.yaml")]
    modules = {module for text in texts for module in re.findall(r"pkg://([\w.]+)", text)}
    assert len(modules) >= 2 and all(map(find_spec, modules)), modules


@pytest.mark.slow
def test_verl_loads_the_plugin_by_its_variable_in_a_fresh_process(tmp_path: Path) -> None:
    # As a Ray actor does: it unpickles a class of ours, which enters a submodule of the plugin before verl is imported.
    # The last call is the one that verl's own worker makes.
    code = (
        "import spear_training.verl_plugin.workers as w; from verl.plugin.platform import get_platform; "
        "from verl.workers import engine_workers; engine_workers.initialize_global_process_group_ray(); "
        "from torch import distributed; "
        "print(get_platform().communication_backend_name(), w.SpearTrainingWorker.__name__, distributed.get_backend())"
    )
    variables = {"VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin", "VERL_PLATFORM": "cpu"}
    environment = {**os.environ, **variables, "DIST_INIT_METHOD": f"file://{tmp_path / 'group'}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["gloo", "SpearTrainingWorker", "gloo"]
