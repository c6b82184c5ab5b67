"""Keys of verl's configuration with an effect here; changes of other keys are refused by name.

SPEAR's trainer replaces verl's losses, advantages, rewards, samplers and agent loops. A key of theirs with an exact
equivalent of ours sets that (:mod:`spear_training.verl_aliases`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spear_envs.core.errors import SpearError
from spear_training.computing import HF, VLLM, VLLM_CPU
from spear_training.verl_aliases import KL_TYPE, explain_alias, find_pattern

Flat = Mapping[str, Any]
"""Values of a configuration by dotted key."""

_AR = "actor_rollout_ref"
_ROLLOUT_NAME = f"{_AR}.rollout.name"
_STRATEGY = f"{_AR}.actor.strategy"
UNREAD = "nothing reads it under this trainer"

_ENGINE = (
    "wrap_policy.* param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size model_dtype seed "
    "full_determinism ulysses_sequence_parallel_size use_torch_compile use_no_sync_for_gradient_accumulation "
    "pad_to_length pad_to_length_bucket qat.* mixed_precision.*"
)
_ENTROPY = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing"
_FSDP1 = "forward_prefetch use_orig_params"
_OPTIMISER = (
    "optimizer optimizer_impl lr lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type min_lr_ratio num_cycles "
    "zero_indexed_step warmup_style weight_decay betas clip_grad override_optimizer_config.*"
)
_MODEL = (
    "path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib override_config.* "
    "enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank lora_alpha lora_adapter_path "
    "target_modules target_parameters exclude_modules use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.*"
)
_CHECKPOINT = "save_contents load_contents save_lora_only"


@dataclass(frozen=True)
class Readers:
    """Keys that are read in every training, or in those of one kind.

    Attributes:
        keys: names below each node; ``name.*`` is a node passed on entirely.
        needs: condition of that kind, as text; None for every training.
        holds: whether a configuration is of that kind.
    """

    keys: Mapping[str, str]
    needs: str | None = None
    holds: Callable[[Flat], bool] = lambda flat: True

    def list_patterns(self) -> list[str]:
        """Full keys; entire nodes end in ``.*``."""
        return [f"{node}.{name}" for node, names in self.keys.items() for name in names.split()]


def _where(key: str, *values: str) -> tuple[str, Callable[[Flat], bool]]:
    return f"{key}={' or '.join(values)}", lambda flat: flat.get(key) in values


READERS = (
    Readers(
        {
            f"{_AR}.actor": "strategy ppo_mini_batch_size ppo_max_token_len_per_gpu ppo_epochs use_kl_loss "
            f"ulysses_sequence_parallel_size pad_to_length profiler.* {_ENTROPY}",
            f"{_AR}.actor.optim": _OPTIMISER,
            f"{_AR}.actor.fsdp_config": f"{_ENGINE} {_ENTROPY}",
            f"{_AR}.actor.checkpoint": _CHECKPOINT,
            f"{_AR}.model": f"{_MODEL} lora.merge",
            f"{_AR}.rollout": "dtype name n temperature top_k top_p max_num_seqs tensor_model_parallel_size "
            "log_prob_max_token_len_per_gpu router_config_path layered_summon",
            f"{_AR}.rollout.val_kwargs": "n temperature top_k top_p",
            f"{_AR}.rollout.agent": "num_workers",
            "algorithm.rollout_correction": "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs "
            "rollout_rs_threshold bypass_mode",
            "critic": "enable",
            "data": "train_batch_size train_max_samples val_max_samples max_prompt_length max_response_length "
            "custom_cls.* apply_chat_template_kwargs.*",
            "reward.custom_reward_function": "path name reward_kwargs.*",
            "trainer": "project_name experiment_name logger device nnodes n_gpus_per_node total_epochs "
            "total_training_steps save_freq test_freq val_before_train val_only log_val_generations balance_batch "
            "max_actor_ckpt_to_keep checkpoint_callback_class default_local_dir",
            "ray_kwargs": "ray_init.* timeline_json_file",
            "transfer_queue": "metrics.* backend.*",
            "global_profiler": "tool steps profile_continuous_steps save_path relocate_results finish_hook_cmd "
            "finish_hook_all_ranks finish_hook_ranks global_tool_config.*",
        }
    ),
    Readers(
        {
            "critic": "strategy ppo_mini_batch_size ppo_epochs ppo_max_token_len_per_gpu forward_max_token_len_per_gpu "
            "ppo_infer_max_token_len_per_gpu profiler.*",
            "critic.optim": _OPTIMISER,
            "critic.fsdp": _ENGINE,
            "critic.checkpoint": _CHECKPOINT,
            "critic.model": _MODEL,
            "trainer": "max_critic_ckpt_to_keep",
        },
        *_where("spear.advantage.estimator", "gae"),
    ),
    Readers(
        {
            f"{_AR}.ref": "strategy log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size pad_to_length "
            "profiler.*",
            f"{_AR}.ref.fsdp_config": _ENGINE,
        },
        "spear.kl.coefficient above 0",
        lambda flat: bool(flat.get("spear.kl.coefficient")),
    ),
    Readers(
        dict.fromkeys((f"{_AR}.actor.fsdp_config", f"{_AR}.ref.fsdp_config", "critic.fsdp"), _FSDP1),
        *_where(_STRATEGY, "fsdp"),
    ),
    Readers({"data": "shuffle dataloader_num_workers"}, *_where("spear.curriculum.choice", "uniform")),
    Readers({f"{_AR}.rollout": "trace.*"}, *_where(_ROLLOUT_NAME, VLLM, VLLM_CPU)),
    Readers({f"{_AR}.rollout.engine_kwargs": f"{VLLM_CPU}.*"}, *_where(_ROLLOUT_NAME, VLLM_CPU)),
    Readers(
        {
            f"{_AR}.rollout": "data_parallel_size expert_parallel_size gpu_memory_utilization ignore_eos enforce_eager "
            "cudagraph_capture_sizes free_cache_engine max_num_batched_tokens max_model_len enable_chunked_prefill "
            "enable_prefix_caching enable_sleep_mode logprobs_mode scheduling_policy load_format disable_log_stats "
            "seed full_determinism limit_images quantization quantization_config_file prometheus.* disaggregation.* "
            "profiler.*",
            f"{_AR}.rollout.engine_kwargs": f"{VLLM}.*",
            f"{_AR}.rollout.checkpoint_engine": "update_weights_bucket_megabytes",
            f"{_AR}.model": "lora.fully_sharded_loras",
        },
        *_where(_ROLLOUT_NAME, VLLM),
    ),
)
"""Keys that verl or our plugin reads. No other key may be changed."""

CHOICES = {
    _STRATEGY: ("fsdp2", "fsdp"),
    "critic.strategy": ("fsdp2", "fsdp"),
    f"{_AR}.ref.strategy": ("fsdp2", "fsdp"),
    _ROLLOUT_NAME: (HF, VLLM_CPU, VLLM),
}
"""Keys of which this trainer supports only these values."""

NULLABLE = (f"{_AR}.actor.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps")
"""Keys with a number by default that verl also takes null for."""

_PAYS = "the environment pays: see spear.reward, or name a function by reward.custom_reward_function.path"
_LORA = "FSDP reads lora_rank, lora_alpha, target_modules and exclude_modules of the model"
_TURNS = "an episode is played by the environment: see spear.env and docs/training.md"
_LOSS = "the losses are SPEAR's: see spear.loss.policy, spear.clip and spear.cov"
_TOKENS = f"micro-batches are cut by tokens: set {_AR}.actor.ppo_max_token_len_per_gpu"
_SCORED = f"set {_AR}.rollout.log_prob_max_token_len_per_gpu"
_KL = "set spear.kl.coefficient, which weighs it in the loss"
_UNEVEN = "rows of a step do not divide evenly otherwise"
_RESUMED = "a run is resumed by naming its --out again"

ADVICE = {
    "model_engine": f"the trainer runs on FSDP: {_STRATEGY} takes fsdp2 or fsdp",
    f"{_AR}.actor.entropy_coeff": "the trainer does not have an entropy bonus",
    f"{_AR}.actor.policy_loss.*": _LOSS,
    f"{_AR}.actor.tau_pos": _LOSS,
    f"{_AR}.actor.tau_neg": _LOSS,
    KL_TYPE: "only low_var_kl (k3) is supported: see spear.kl.coefficient",
    f"{_AR}.actor.use_dynamic_bsz": _UNEVEN,
    f"{_AR}.actor.ppo_micro_batch_size": _TOKENS,
    f"{_AR}.actor.ppo_micro_batch_size_per_gpu": _TOKENS,
    f"{_AR}.actor.shuffle": "rows are always dealt at random, by spear.seed",
    f"{_AR}.actor.optim.total_training_steps": "set trainer.total_training_steps",
    f"{_AR}.actor.fsdp_config.strategy": f"set {_STRATEGY}",
    f"{_AR}.actor.fsdp_config.dtype": f"set {_AR}.actor.fsdp_config.mixed_precision.param_dtype",
    f"{_AR}.ref.fsdp_config.strategy": f"set {_AR}.ref.strategy",
    f"{_AR}.ref.log_prob_use_dynamic_bsz": _UNEVEN,
    f"{_AR}.ref.log_prob_micro_batch_size": _TOKENS,
    f"{_AR}.ref.log_prob_micro_batch_size_per_gpu": _TOKENS,
    f"{_AR}.model.lora.*": _LORA,
    f"{_AR}.rollout.do_sample": f"set {_AR}.rollout.temperature",
    f"{_AR}.rollout.val_kwargs.do_sample": f"set {_AR}.rollout.val_kwargs.temperature=0",
    f"{_AR}.rollout.repetition_penalty": "rollouts are sampled from the unmodified policy",
    f"{_AR}.rollout.log_prob_use_dynamic_bsz": _UNEVEN,
    f"{_AR}.rollout.log_prob_micro_batch_size": _SCORED,
    f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu": _SCORED,
    f"{_AR}.rollout.pipeline_model_parallel_size": f"set {_AR}.rollout.tensor_model_parallel_size",
    f"{_AR}.rollout.multi_turn.*": _TURNS,
    f"{_AR}.rollout.agent.*": _TURNS,
    f"{_AR}.rollout.checkpoint_engine.*": "weights go to the rollouts by verl's naive backend",
    f"{_AR}.rollout.engine_kwargs.sglang.*": f"{_ROLLOUT_NAME} takes {HF}, {VLLM_CPU} or {VLLM}",
    "algorithm.use_kl_in_reward": _KL,
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl.*": _KL,
    "algorithm.rollout_correction.loss_type": "the loss is SPEAR's",
    "algorithm.filter_groups.*": "groups are filtered by their reward: see spear.sampling",
    "critic.loss_agg_mode": "the critic's loss is a token mean",
    "critic.ppo_micro_batch_size": "set critic.ppo_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": "set critic.ppo_max_token_len_per_gpu",
    "critic.fsdp.strategy": "set critic.strategy",
    "critic.model.lora.*": _LORA,
    "data.spear_env.*": "set spear.env",
    "data.train_files": "set spear.env.train_split",
    "data.val_files": "set spear.env.valid_split",
    "data.gen_batch_size": "set data.train_batch_size",
    "data.val_batch_size": "a validation plays all its tasks at once: see data.val_max_samples",
    "data.tokenizer": f"set {_AR}.model.tokenizer_path",
    "data.trust_remote_code": f"set {_AR}.model.trust_remote_code",
    "data.tool_config_path": _TURNS,
    "data.function_tool_path": _TURNS,
    "data.truncation": "a prompt drops its oldest turns: see spear.env.history",
    "reward.*": _PAYS,
    "reward_model.*": _PAYS,
    "sandbox_fusion.*": "set spear.env.kwargs.sandbox",
    "trainer.rollout_data_dir": "spear.record keeps a sample of the episodes",
    "trainer.validation_data_dir": "trainer.log_val_generations keeps a sample of the episodes",
    "trainer.resume_mode": _RESUMED,
    "trainer.resume_from_path": _RESUMED,
    "trainer.remove_previous_ckpt_in_save": "set trainer.max_actor_ckpt_to_keep=1",
    "trainer.v1.*": "`spear train` runs SPEAR's own trainer",
}
"""What to do instead of changing a key; an entry for a key precedes one for its node."""

_READ: dict[str, list[Readers]] = {}
for _readers in READERS:
    for _pattern in _readers.list_patterns():
        _READ.setdefault(_pattern, []).append(_readers)


def find_readers(key: str) -> list[Readers]:
    """Readers of ``key``; empty if there are none."""
    return _READ.get(find_pattern(key, _READ) or "", [])


def find_advice(key: str) -> str | None:
    """Advice on an override of ``key``, or None."""
    return explain_alias(key) or ADVICE.get(find_pattern(key, ADVICE) or "")


def check_keys(before: Flat, after: Flat) -> None:
    """Raise SpearError, with what to set instead, if a user changed a key of verl that has no effect here.

    ``before`` is the configuration of the choices only (preset, algorithm, model, cluster, environment).
    """
    missing = object()
    for key in dict.fromkeys([*after, *before]):  # a replaced node before what was below it
        if key.startswith("spear.") or before.get(key, missing) == after.get(key, missing):
            continue
        value = after.get(key)
        shown, is_reference = "null" if value is None else repr(value), "${" in str(value)
        was_node = before.get(key) == {} or any(other.startswith(f"{key}.") for other in before)
        if was_node and not isinstance(value, Mapping) and not is_reference:
            raise SpearError(f"{key} must be a mapping of settings, not {shown}")
        readers = find_readers(key)
        if not readers:
            advice = find_advice(key)
            if advice is not None or key in before:
                raise SpearError(f"{key} cannot be changed here: {advice or UNREAD}")
            near = difflib.get_close_matches(key, [pattern.removesuffix(".*") for pattern in _READ], 1, cutoff=0.8)
            raise SpearError(f"{key}: {UNREAD}" + (f"; did you mean {near[0]}?" if near else ""))
        if not any(reader.holds(after) for reader in readers):
            needs = " or ".join(str(reader.needs) for reader in readers)
            raise SpearError(f"{key} cannot be changed here: it takes {needs}")
        is_number = isinstance(value, int | float) or is_reference or (value is None and key in NULLABLE)
        if type(before.get(key)) is int and not is_number:
            raise SpearError(f"{key} must be a number, not {shown}")
        if key in CHOICES and value not in CHOICES[key]:
            raise SpearError(f"{key} can only be {' or '.join(CHOICES[key])} here, not {shown}")
