"""What the plugin uses of verl without a public promise: each name still exists and means what the plugin thinks."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import verl

import training.verl_plugin  # registers everything  # noqa: F401


def find(path: str) -> Any:
    """The object at ``package.module:name.attribute``."""
    module, _, names = path.partition(":")
    thing = import_module(module)
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


def test_the_version_is_the_one_the_plugin_was_written_for() -> None:
    assert verl.__version__ == "0.9.1", "run all tests here, the slow ones too, before allowing another version"


METHODS: dict[str, tuple[str, ...]] = {
    # overridden by SpearTrainer
    "verl.trainer.ppo.v1:PPOTrainerSync.__init__": ("config",),
    "verl.trainer.ppo.v1:PPOTrainerSync._build_replay_buffer": (),
    "verl.trainer.ppo.v1:PPOTrainerSync._init_resource_pool_mgr": (),
    "verl.trainer.ppo.v1:PPOTrainerSync._step_once": ("metrics", "timing_raw", "sample_batch_size"),
    "verl.trainer.ppo.v1:PPOTrainerSync._compute_metrics": ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
    "verl.trainer.ppo.v1:PPOTrainerSync._validate": (),
    "verl.trainer.ppo.v1:PPOTrainerSync._save_checkpoint": (),
    "verl.trainer.ppo.v1:PPOTrainerSync._load_checkpoint": (),
    "verl.trainer.ppo.v1:PPOTrainerSync.prepare_step": (),
    "verl.trainer.ppo.v1:PPOTrainerSync.on_init_end": (),
    "verl.trainer.ppo.v1:PPOTrainerSync.on_sample_end": (),
    "verl.trainer.ppo.v1:PPOTrainerSync.on_step_end": (),
    # called on the actor's worker group
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": ("loss_fn",),
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob": ("data",),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor": ("data",),
    "verl.single_controller.base.worker:Worker._query_dispatch_info": ("mesh_name",),
    # overridden by SpearTrainingWorker and the CPU engine
    "verl.workers.engine_workers:TrainingWorker.__init__": ("config",),
    "verl.workers.engine_workers:TrainingWorker.train_batch": ("data",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs": (
        "output",
        "output_args",
        "micro_batch",
        "logits_processor_func",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": (),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": ("module",),
    # the critic and the reference policy
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_ref_log_prob": ("data",),
    "verl.workers.engine_workers:TrainingWorker.reset": (),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("data",),
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("data",),
    # rollouts
    "verl.workers.rollout.llm_server:LLMServerClient._acquire_server": ("request_id",),
    "verl.workers.rollout.llm_server:LLMServerClient._release_server": ("server_id", "request_id"),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": (
        "request_id",
        "prompt_ids",
        "sampling_params",
        "image_data",
    ),
    "verl.experimental.agent_loop:AgentLoopWorker.__init__": ("config", "llm_client"),
    "verl.workers.rollout.base:BaseRollout.__init__": ("config", "model_config", "device_mesh"),
    "verl.workers.rollout.base:BaseRollout.resume": ("tags",),
    "verl.workers.rollout.base:BaseRollout.release": (),
    "verl.workers.rollout.base:BaseRollout.update_weights": ("weights",),
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": (),
    # started by training.process
    "verl.trainer.main_ppo:run_ppo": ("config", "task_runner_class"),
    "verl.trainer.main_ppo:TaskRunnerV1": (),
    "verl.trainer.ppo.utils:need_critic": ("config",),
    "verl.trainer.ppo.utils:need_reference_policy": ("config",),
    "verl.utils.config:validate_config": ("config", "use_reference_policy", "use_critic"),
}


@pytest.mark.parametrize("path", METHODS)
def test_a_method_the_plugin_overrides_or_calls_is_there(path: str) -> None:
    parameters = inspect.signature(find(path)).parameters
    for name in METHODS[path]:
        assert name in parameters, f"{path}({', '.join(parameters)})"


NAMES = (
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
    "verl.workers.engine.base:EngineRegistry.register",
    "verl.plugin.platform:PlatformRegistry.register",
    "verl.trainer.ppo.v1:register_trainer",
    "verl.trainer.ppo.utils:Role.Critic",
    "verl.workers.engine_workers:ActorRolloutRefWorker.actor_worker_cls",
    "verl.workers.engine_workers:ActorRolloutRefWorker.ref_worker_cls",
    "verl.utils.tensordict_utils:assign_non_tensor",
    "verl.utils.tensordict_utils:get",
    "verl.utils.metric:reduce_metrics",
    "verl.utils.debug:marked_timer",
    "transfer_queue:kv_batch_get",
    "transfer_queue:kv_batch_put",
    "transfer_queue:async_kv_batch_put",
    "transfer_queue:KVBatchMeta",
)


@pytest.mark.parametrize("path", NAMES)
def test_a_name_the_plugin_uses_is_there(path: str) -> None:
    assert find(path) is not None


READ: dict[str, tuple[str, ...]] = {
    # path of a function: what its source must say for the plugin to work
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": (
        'key="mini_batch_size"',
        'key="epochs"',
        'key="seed"',
        'key="dataloader_kwargs"',
        "update_lr_scheduler=batch_idx == total_num_iterations - 1",
    ),
    "verl.workers.engine_workers:TrainingWorker.train_batch": (
        'key="update_lr_scheduler"',
        "if key not in data.keys()",  # our cut into micro-batches stays
        "micro_batch_size_per_gpu=",
        "use_dynamic_bsz=",
        'output["metrics"]["lr"]',
    ),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ('key="compute_loss"', "if key not in data.keys()"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs": (
        'output_args["input_ids_rmpad_rolled"]',
        'output_args["temperature"]',
        '"temperature_is_one"',
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": (
        'self.model_config.model_type == "language_model"',
        "get_hf_auto_model_class(hf_config=self.model_config.hf_config)",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": ("self.engine_config.forward_only",),
    "verl.utils.model:get_hf_auto_model_class": ("_architecture_to_auto_class", "hf_config.architectures[0]"),
    "verl.trainer.ppo.v1:PPOTrainerSync._setup": (
        "self.critic_wg.reset()",
        "self.critic_wg.set_loss_fn(",
        "self.ref_in_actor = ",
        "self.ref_policy_wg = all_wg[str(actor_role)]",
    ),
    "verl.trainer.ppo.v1:PPOTrainerSync._compute_values": (
        "self.critic_wg.infer_batch(batch)",
        "ray.get(output.futures)",
    ),
    "verl.trainer.ppo.v1:PPOTrainerSync._compute_ref_log_prob": ('"no_lora_adapter"',),
    "verl.trainer.ppo.v1:PPOTrainerSync._update_critic": ("output.get()", 'output["metrics"]'),
    "verl.single_controller.base.worker_group:WorkerGroup.__init__": ("self._dispatch_info = {}",),
    "verl.single_controller.base.decorator": ("_query_dispatch_info(mesh_name)",),
    "verl.trainer.ppo.v1:PPOTrainerSync._init_resource_pool_mgr": ("self.role_worker_mapping[",),
    "verl.trainer.ppo.v1:PPOTrainerSync._save_checkpoint": (
        '"latest_checkpointed_iteration.txt"',
        'f"global_step_{self.global_steps}"',
        '"data.pt"',
        '"actor"',
    ),
    "verl.trainer.ppo.v1:PPOTrainerSync._load_checkpoint": ('self.config.trainer.resume_mode == "resume_path"',),
    "verl.trainer.ppo.v1:PPOTrainerSync.fit": (
        "self.agent_loop_manager = agent_loop_manager",
        "tq.kv_clear(keys=batch.keys",
        "assert val_metrics",
    ),
    "verl.trainer.ppo.v1:PPOTrainerSync.step": ("self.prepare_step()", "self._step_once("),
    "verl.experimental.agent_loop:AgentLoopManager": (
        'hasattr(self, "agent_loop_workers_class")',
        "self.agent_loop_workers = []",
    ),
    "verl.experimental.agent_loop:AgentLoopWorker.__init__": (
        "self.llm_client = llm_client",
        "self.tokenizer =",
        "self.rollout_config",
        "self.model_config",
    ),
    "verl.utils.tracking:FileLogger": ("VERL_FILE_LOGGER_PATH", '"step": step, "data": data'),
    "verl.utils.tracking:_TensorboardAdapter": ("TENSORBOARD_DIR",),
}


@pytest.mark.parametrize("path", READ)
def test_the_source_still_says_what_the_plugin_relies_on(path: str) -> None:
    thing = find(path) if ":" in path else import_module(path)
    source = inspect.getsource(thing)
    for text in READ[path]:
        assert text in source, f"{path} no longer says {text}"


def test_the_plugins_environment_variables_are_read() -> None:
    assert "VERL_USE_EXTERNAL_MODULES" in inspect.getsource(verl)
    assert "VERL_PLATFORM" in inspect.getsource(import_module("verl.plugin.platform.platform_manager"))


def test_the_tracker_file_is_where_launches_look_for_it() -> None:
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    assert os.path.basename(get_checkpoint_tracker_filename("x")) == "latest_checkpointed_iteration.txt"


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

    from training.verl_plugin import platform, rollout_hf, rollout_vllm, trainer, workers

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
    from training.launch import compose_config

    config = compose_config((), Path("x"), check=False)
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute).__name__ == "RolloutManager"
    assert config.data.custom_cls.path == "pkg://training.verl_plugin.dataset"
    assert import_module("training.verl_plugin.dataset").TaskDataset.__name__ == config.data.custom_cls.name


def test_verl_loads_the_plugin_by_its_variable_in_a_fresh_process() -> None:
    # As a Ray actor does: it unpickles a class of ours, which enters a submodule of the plugin before verl is imported.
    code = (
        "import training.verl_plugin.workers as w; from verl.plugin.platform import get_platform; "
        "print(get_platform().communication_backend_name(), w.SpearTrainingWorker.__name__)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "training.verl_plugin", "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["gloo", "SpearTrainingWorker"]
