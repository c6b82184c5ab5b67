"""Names and texts of verl that the plugin uses without a public promise: those who allow another version look here."""

import inspect
from importlib import import_module
from typing import Any

METHODS: dict[str, tuple[str, ...]] = {
    # overridden by SpearTrainer
    "verl.trainer.ppo.v1:PPOTrainerSync.__init__": ("config",),
    "verl.trainer.ppo.v1:PPOTrainerSync._build_replay_buffer": (),
    "verl.trainer.ppo.v1:PPOTrainerSync._init_dataloader": (),
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
    "verl.workers.engine_workers:TrainingWorker.train_batch": ("data",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs": (
        "output",
        "output_args",
        "micro_batch",
        "logits_processor_func",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs": ("micro_batch",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._merged_lora_per_tensor_param": (),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.save_checkpoint": ("local_path",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": (),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": ("module",),
    # checkpoints of another number of ranks
    "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint": (
        "local_path",
        "hdfs_path",
        "del_local_after_load",
    ),
    "verl.utils.fsdp_utils:fsdp_version": ("model",),
    # called by the CPU engine
    "verl.utils.fsdp_utils:merged_lora_context": ("actor", "backup_adapters"),
    "verl.utils.fsdp_utils:normalize_peft_param_name": ("params",),
    # called instead of a worker's own call
    "verl.utils.distributed:initialize_global_process_group_ray": ("timeout_second", "backend"),
    # the critic and the reference policy
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_ref_log_prob": ("data",),
    "verl.workers.engine_workers:TrainingWorker.reset": (),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("data",),
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("data",),
    # rollouts
    "verl.workers.rollout.llm_server:LLMServerClient._acquire_server": ("request_id",),
    "verl.workers.rollout.llm_server:LLMServerClient._release_server": ("server_id", "request_id"),
    "verl.workers.rollout.llm_server:LLMServerClient.__init__": ("config", "load_balancer_handle"),
    "verl.trainer.ppo.v1:PPOTrainerSync.get_llm_client": (),
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
    "verl.trainer.constants_ppo:get_ppo_ray_runtime_env": ("config",),
    "verl.trainer.ppo.utils:need_critic": ("config",),
    "verl.trainer.ppo.utils:need_reference_policy": ("config",),
    "verl.utils.config:validate_config": ("config", "use_reference_policy", "use_critic"),
}
"""Methods that the plugin overrides or calls, and parameters that it counts on."""
NAMES = (
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
    "verl.workers.engine.base:EngineRegistry.register",
    "verl.plugin.platform:PlatformRegistry.register",
    "verl.trainer.ppo.v1:register_trainer",
    "verl.trainer.ppo.utils:Role.Critic",
    "verl.workers.engine_workers:ActorRolloutRefWorker.actor_worker_cls",
    "verl.workers.engine_workers:ActorRolloutRefWorker.ref_worker_cls",
    "verl.models.transformers.monkey_patch:is_trl_available",
    "verl.utils.tensordict_utils:assign_non_tensor",
    "verl.utils.tensordict_utils:get",
    "verl.utils.metric:reduce_metrics",
    "verl.utils.debug:marked_timer",
    "transfer_queue:kv_batch_get",
    "transfer_queue:kv_batch_put",
    "transfer_queue:async_kv_batch_put",
    "transfer_queue:KVBatchMeta",
)
"""Other names that it uses."""
TEXTS: dict[str, tuple[str, ...]] = {
    "verl.workers.engine_workers:TrainingWorker.__init__": (
        "initialize_global_process_group_ray(timeout_second=None)",
    ),
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
        '"temperature_is_one"',
        'key="use_remove_padding", default=True',
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": (
        'self.model_config.model_type == "language_model"',
        "get_hf_auto_model_class(hf_config=self.model_config.hf_config)",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": ("self.engine_config.forward_only",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.initialize": (
        "self.checkpoint_manager = FSDPCheckpointManager(",
    ),
    "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint": (
        'f"model_world_size_{self.world_size}_rank_{self.rank}.pt"',
        'f"optim_world_size_{self.world_size}_rank_{self.rank}.pt"',
        'f"extra_state_world_size_{self.world_size}_rank_{self.rank}.pt"',
    ),
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
    "verl.trainer.ppo.v1:PPOTrainerSync._init_dataloader": ("self.train_dataset = ",),
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
"""Functions, and what their source must say for the plugin to work."""


def find_name(path: str) -> Any:
    """The object at ``package.module:name.attribute``.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    module, _, names = path.partition(":")
    thing = import_module(module)
    for name in names.split(".") if names else ():
        thing = getattr(thing, name)
    return thing


def find_fault(path: str) -> str | None:
    """What is wrong with one of the names; None if nothing is."""
    try:
        thing = find_name(path)
    except (ImportError, AttributeError) as error:
        return f"{path} is gone ({error})"
    if path in METHODS:
        parameters = inspect.signature(thing).parameters
        lost = [name for name in METHODS[path] if name not in parameters]
        if lost:
            return f"{path} takes {', '.join(parameters) or 'nothing'}, not {', '.join(lost)}"
    if path in TEXTS:
        source = inspect.getsource(thing)
        lost = [text for text in TEXTS[path] if text not in source]
        if lost:
            return f"{path} no longer says {', '.join(lost)}"
    return None
