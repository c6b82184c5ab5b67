"""Translation of our configuration to verl's: the only module that knows the names of verl's settings.

Read it from top to bottom to find where a value goes. Keys that are not set here keep verl's own default; ``verl`` in a
configuration changes them, after everything else.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spear_envs.core.errors import SpearError
from spear_training.run.config import AUTO, Device, RolloutEngine, RunConfig, flatten

DEFAULTS = "_generated_ppo_trainer.yaml"
"""verl's file with the default of every key."""
CHECKPOINTS = "checkpoints"
"""Folder of verl's checkpoints in a run."""
HF, VLLM_CPU = "spear_hf", "vllm_cpu"
ENGINES = {RolloutEngine.TRANSFORMERS: HF, RolloutEngine.VLLM: "vllm", RolloutEngine.VLLM_CPU: VLLM_CPU}
"""verl's name of each rollout engine; the plugin registers the first and the last."""
OBJECT_STORE_BYTES = 500_000_000
"""Bytes of Ray's object store on a CPU; by default Ray takes 30 % of the memory."""

AR, ENGINE = "actor_rollout_ref", "actor_rollout_ref.actor.fsdp_config"
Values = dict[str, Any]

REFUSED = {
    "actor_rollout_ref.actor.policy_loss.* actor_rollout_ref.actor.loss_agg_mode "
    "actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.tau_*": "the losses are SPEAR's: see loss",
    "actor_rollout_ref.actor.clip_ratio* critic.cliprange_value": "see clip.low, clip.high, clip.dual and critic.clip",
    "actor_rollout_ref.actor.entropy_coeff": "set loss.entropy_coefficient",
    "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_* algorithm.use_kl_in_reward "
    "algorithm.kl_*": "set kl.coefficient, which weighs k3 in the loss",
    "algorithm.adv_estimator algorithm.gamma algorithm.lam algorithm.norm_adv* algorithm.use_pf_ppo algorithm.pf_ppo.* "
    "critic.enable critic.loss_agg_mode trainer.critic_warmup": "advantages are SPEAR's: see advantage and critic",
    "algorithm.rollout_correction.*": "set rollout.correction",
    "algorithm.filter_groups.* data.gen_batch_size": "see sampling and filter.groups",
    "*micro_batch_size* *use_dynamic_bsz actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "micro-batches are cut "
    "by tokens: set train.tokens_per_gpu and train.log_prob_tokens_per_gpu",
    "*.shuffle *.data_loader_seed data.seed": "rows and tasks are drawn by seed: see also curriculum",
    "actor_rollout_ref.rollout.multi_turn.* actor_rollout_ref.rollout.agent.* data.tool_config_path "
    "data.function_tool_path data.truncation data.filter_overlong*": "the environment plays: see env and rollout",
    "actor_rollout_ref.rollout.do_sample actor_rollout_ref.rollout.val_kwargs.do_sample "
    "actor_rollout_ref.rollout.repetition_penalty": "set rollout.temperature and validation.temperature",
    "actor_rollout_ref.rollout.name actor_rollout_ref.rollout.engine_kwargs.sglang.* "
    "actor_rollout_ref.rollout.n": "set rollout.engine and rollout.group_size",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "weights go to the rollouts by verl's naive backend",
    "actor_rollout_ref.model.lora.*": "FSDP reads model.lora_rank and model.lora_alpha",
    "data.train_files data.val_files data.custom_cls.* data.train_batch_size data.val_batch_size trainer.total_epochs "
    "trainer.total_training_steps": "see env, train and validation",
    "reward.* reward_model.* custom_reward_function.*": "the environment pays: see reward, or set reward.function",
    "trainer.resume_mode trainer.resume_from_path trainer.default_local_dir": "--out names the run, and the same "
    "command resumes it: see checkpoint",
    "trainer.logger trainer.rollout_data_dir trainer.validation_data_dir": "see log, record and validation.record",
    "trainer.device trainer.nnodes trainer.n_gpus_per_node *.strategy": "see cluster",
    "transfer_queue.backend.SimpleStorage.total_storage_size distillation.*": "memory alone limits a step's rows",
}
"""Keys of verl that nothing would read here, or that would contradict SPEAR's step, with the reason."""
OPEN = "ray_kwargs.ray_init."
"""Node of verl that takes any keyword, as empty ones do: those of ``ray.init``."""

_log = logging.getLogger(__name__)


def to_verl(config: RunConfig, out: Path) -> DictConfig:
    """Write the configuration from which verl trains into the run folder ``out``.

    Raises SpearError if verl is not installed, or for keys in ``config.verl`` that it does not have or that
    :data:`REFUSED` lists. Overrides of keys that are set here are logged.
    """
    verl = OmegaConf.create(_read_defaults())
    OmegaConf.set_struct(verl, False)
    values = translate(config, out)
    for key, value in values.items():
        OmegaConf.update(verl, key, value, merge=False)
    check_keys(config)
    for key, value in flatten(config.verl):
        if any(f"{ours}.".startswith(f"{key}.") or f"{key}.".startswith(f"{ours}.") for ours in values):
            _log.warning("verl.%s=%s replaces what the other settings make of it", key, value)
        OmegaConf.update(verl, key, value)
    return verl


def check_keys(config: RunConfig) -> None:
    """Raise SpearError, as :func:`to_verl` does, for ``config.verl``; without it nothing is read."""
    if given := dict(flatten(config.verl)):
        _check_keys(given, _list_keys(), on_cpu=config.on_cpu)


def read_node(verl: DictConfig) -> RunConfig:
    """Read our own configuration back from verl's, in the processes that verl starts."""
    node: Any = OmegaConf.to_container(verl.spear, resolve=True)
    return RunConfig.from_mapping(node)


def translate(config: RunConfig, out: Path) -> dict[str, Any]:
    """Return verl's keys with their values, and our own configuration as the node ``spear``, which the plugin reads."""
    own = {"spear": config.to_mapping(), "data.spear_env": config.env.to_mapping()}
    parts = (_set_tasks, _set_model, _set_update, _set_optimizer, _set_rollout, _set_run)
    values = own | {key: value for part in parts for key, value in part(config).items()}
    values["trainer.default_local_dir"] = str(out.resolve() / CHECKPOINTS)
    return values | (_set_cpu(config) if config.on_cpu else {})


def _set_tasks(config: RunConfig) -> Values:
    """Return the keys of the tasks: verl's "files" name splits of the environment, and -1 takes all tasks."""
    return {
        "data.custom_cls": {"path": "pkg://spear_training.verl_plugin.trainer", "name": "TaskDataset"},
        "data.train_files": config.env.train_split,
        "data.val_files": config.env.valid_split,
        "data.seed": config.seed,
        "data.train_batch_size": config.train.batch_size,
        "data.train_max_samples": config.train.max_tasks or -1,
        "data.val_max_samples": config.validation.tasks or -1,
        "data.max_prompt_length": config.rollout.max_prompt_length,
        "data.max_response_length": config.rollout.max_response_length,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 0,  # the environment pays
        "transfer_queue.backend.SimpleStorage.total_storage_size": None,  # the memory alone limits it
    } | ({"data.apply_chat_template_kwargs": dict(config.model.chat_options)} if config.model.chat_options else {})


def _set_model(config: RunConfig) -> Values:
    """Return the keys of the policy, and of the critic, which begins as the same network."""
    model = config.model
    both = {
        "path": model.path,
        "override_config": {"attn_implementation": model.attention},
        "enable_gradient_checkpointing": model.gradient_checkpointing,
        "trust_remote_code": model.trust_remote_code,
    }
    return {
        **{f"{node}.{name}": value for node in (f"{AR}.model", "critic.model") for name, value in both.items()},
        f"{AR}.model.lora_rank": model.lora_rank,
        f"{AR}.model.lora_alpha": model.lora_alpha,
        # Of an adapter: only verl's own vLLM server takes it by itself, our servers take whole weights.
        **({} if config.rollout.engine is RolloutEngine.VLLM else {f"{AR}.model.lora.merge": True}),
    }


def _set_update(config: RunConfig) -> Values:
    """Set verl's keys of updates. Losses and advantages are the plugin's; verl checks its own names of them."""
    train, cluster = config.train, config.cluster
    sharding = {
        "fsdp_size": cluster.shard_size,
        "param_offload": cluster.offload,
        "optimizer_offload": cluster.offload,
        "offload_policy": cluster.memory_saving,
    }
    engines = (ENGINE, "critic.fsdp") if config.advantage.needs_critic else (ENGINE,)
    critic = {"critic.fsdp.ulysses_sequence_parallel_size": cluster.sequence_parallel}
    padded = {f"{AR}.actor.pad_to_length": True, f"{ENGINE}.pad_to_length_bucket": train.pad_tokens_to}
    return {
        "algorithm.adv_estimator": "grpo",
        f"{AR}.actor.use_kl_loss": config.kl.coefficient > 0,
        "critic.enable": config.advantage.needs_critic,
        f"{AR}.actor.ppo_mini_batch_size": train.mini_batch_size,
        f"{AR}.actor.ppo_epochs": train.epochs,
        f"{AR}.actor.use_dynamic_bsz": True,
        f"{AR}.actor.ppo_max_token_len_per_gpu": train.tokens_per_gpu,
        "critic.ppo_max_token_len_per_gpu": train.tokens_per_gpu,
        f"{AR}.rollout.log_prob_max_token_len_per_gpu": train.log_prob_tokens_per_gpu or train.tokens_per_gpu,
        f"{AR}.actor.strategy": cluster.strategy.value,
        "critic.strategy": cluster.strategy.value,
        f"{AR}.actor.ulysses_sequence_parallel_size": cluster.sequence_parallel,
        **{f"{engine}.{name}": value for engine in engines for name, value in sharding.items()},
        **(critic if config.advantage.needs_critic else {}),
        **(padded if train.pad_tokens_to is not None else {}),
    }


def _set_optimizer(config: RunConfig) -> Values:
    """Return the keys of AdamW. verl's own defaults say "none" for a warm-up and a least learning rate."""
    optimizer, node = config.optimizer, f"{AR}.actor.optim"
    return {
        "critic.optim.lr": config.critic.lr,
        f"{node}.lr": optimizer.lr,
        f"{node}.lr_scheduler_type": optimizer.schedule.value,
        f"{node}.betas": list(optimizer.betas),
        f"{node}.weight_decay": optimizer.weight_decay,
        f"{node}.clip_grad": optimizer.clip_grad,
        **({f"{node}.lr_warmup_steps": optimizer.warmup_steps} if optimizer.warmup_steps else {}),
        **({f"{node}.min_lr_ratio": optimizer.min_lr_ratio} if optimizer.min_lr_ratio is not None else {}),
    }


def _set_rollout(config: RunConfig) -> Values:
    """Return the keys of rollouts and validations."""
    rollout, validation = config.rollout, config.validation
    correction = rollout.correction.to_mapping()
    return {
        f"{AR}.rollout.name": ENGINES[rollout.engine],
        f"{AR}.rollout.n": rollout.group_size,
        f"{AR}.rollout.seed": config.seed % 2**31,  # of verl's vLLM server, for requests without one
        f"{AR}.rollout.dtype": _name_dtype(config),
        f"{AR}.rollout.temperature": rollout.temperature,
        f"{AR}.rollout.top_p": rollout.top_p,
        f"{AR}.rollout.top_k": rollout.top_k,
        f"{AR}.rollout.tensor_model_parallel_size": rollout.tensor_parallel,
        f"{AR}.rollout.gpu_memory_utilization": rollout.gpu_memory,
        f"{AR}.rollout.max_num_seqs": rollout.max_requests,
        f"{AR}.rollout.agent.num_workers": rollout.workers,
        f"{AR}.rollout.agent.agent_loop_manager_class": "spear_training.verl_plugin.rollout_worker.RolloutManager",
        **{f"algorithm.rollout_correction.{name}": value for name, value in correction.items()},
        f"{AR}.rollout.val_kwargs.n": validation.samples,
        f"{AR}.rollout.val_kwargs.do_sample": True,
        f"{AR}.rollout.val_kwargs.temperature": validation.temperature,
        f"{AR}.rollout.val_kwargs.top_p": validation.top_p,
        f"{AR}.rollout.val_kwargs.top_k": validation.top_k,
    }


def _set_run(config: RunConfig) -> Values:
    """Return the keys of the run: its trainer, length, checkpoints, validations, loggers and machines."""
    return {
        "model_engine": "dp",
        "trainer.v1.trainer_mode": "spear",
        "trainer.v1.spear": {},
        "trainer.total_training_steps": config.train.steps,
        "trainer.total_epochs": 1_000_000,  # the steps decide
        "trainer.val_before_train": config.validation.at_start or config.validation.only,  # else verl skips val_only
        "trainer.val_only": config.validation.only,
        "trainer.test_freq": config.validation.every or -1,
        "trainer.log_val_generations": config.validation.record,
        "trainer.save_freq": config.checkpoint.every or -1,
        # Told to keep one, verl removes the one before while the new one is not whole; our trainer does so after.
        "trainer.max_actor_ckpt_to_keep": max(2, config.checkpoint.keep),
        "trainer.max_critic_ckpt_to_keep": max(2, config.checkpoint.keep),
        "trainer.logger": list(config.log.to),
        "trainer.project_name": config.log.project,
        "trainer.experiment_name": config.log.run,
        "trainer.device": config.cluster.device.value,
        "trainer.nnodes": config.cluster.nodes,
        "trainer.n_gpus_per_node": config.cluster.gpus_per_node or 1,
    }


def _set_cpu(config: RunConfig) -> Values:
    """Return what verl's defaults for GPUs must become on a CPU."""
    ranks, engines = config.cluster.gpus_per_node or 1, (ENGINE, f"{AR}.ref.fsdp_config", "critic.fsdp")
    precision = {"param_dtype": _name_dtype(config), "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return {
        f"{AR}.model.use_remove_padding": True,
        "critic.model.use_remove_padding": True,
        **{f"{engine}.use_torch_compile": False for engine in engines},
        **{f"{engine}.mixed_precision": precision for engine in engines},
        f"{AR}.actor.use_torch_compile": False,
        f"{AR}.ref.use_torch_compile": False,
        f"{AR}.ref.fsdp_config.model_dtype": "fp32",
        f"{AR}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{AR}.rollout.free_cache_engine": False,
        f"{AR}.rollout.engine_kwargs.vllm_cpu": {"kv_cache_gib": config.rollout.kv_cache_gib},
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # Logical: three CPUs for each rank's placement group, the rest for TransferQueue and the load balancer.
        "ray_kwargs.ray_init.num_cpus": 3 * ranks + 5,
        "ray_kwargs.ray_init.num_gpus": ranks,  # see verl_plugin.platform
        "ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.object_store_memory": OBJECT_STORE_BYTES,
    }


def _name_dtype(config: RunConfig) -> str:
    """Return the type of the numbers; what is still open is bfloat16 on a GPU."""
    dtype = config.rollout.dtype.value
    return dtype if config.on_cpu or dtype != AUTO else "bfloat16"


def find_verl() -> Path:
    """Return the folder of the package verl, which is not imported: that takes three seconds."""
    found = find_spec("verl")
    if found is None or found.origin is None:
        raise SpearError("verl is not installed: pip install spear-training")
    return Path(found.origin).parent


@lru_cache(maxsize=1)
def _read_defaults() -> Any:
    """Return verl's defaults, with interpolations unresolved."""
    return OmegaConf.to_container(OmegaConf.load(find_verl() / "trainer" / "config" / DEFAULTS), resolve=False)


@lru_cache(maxsize=1)
def _list_keys() -> Mapping[str, Any]:
    """List verl's keys, those of nodes included, with their defaults."""
    return dict(flatten(_read_defaults(), keep_nodes=True))


def _check_keys(given: Mapping[str, Any], known: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise SpearError for a key that verl does not have or :data:`REFUSED` lists, or a value instead of a node."""
    for key, value in given.items():
        parts = key.split(".")
        above = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
        nearest = next((name for name in above if name in known), None)
        is_open = f"{key}.".startswith(OPEN) or (nearest is not None and known[nearest] in ({}, None))
        if key not in known and not is_open and not _is_field(parts, known):
            near = difflib.get_close_matches(key, list(known), 1, cutoff=0.6)
            raise SpearError(f"verl has no key {key}" + (f"; did you mean {near[0]}?" if near else ""))
        if reason := find_refusal(key):
            raise SpearError(f"verl.{key} has no effect here: {reason}")
        if on_cpu and "mixed_precision" in parts:
            raise SpearError(f"verl.{key} would differ from the rollouts: set rollout.dtype, on a CPU that of both")
        if key == "trainer.v1.trainer_mode" and (not isinstance(value, str) or value in known["trainer.v1"]):
            raise SpearError(
                f"verl.{key}={value!r} would train without SPEAR: leave it out, or name a trainer of yours"
            )
        before = known.get(key)
        fits = isinstance(value, bool) if isinstance(before, bool) else isinstance(value, int | float) or value is None
        if parts[-1] == "_target_" or (isinstance(before, bool | int | float) and not fits):
            kind = "true or false" if isinstance(before, bool) else "a number"
            what = "cannot be changed" if parts[-1] == "_target_" else f"must be {kind}, not {value!r}"
            raise SpearError(f"verl.{key} {what}")
        if isinstance(known.get(key), Mapping) and not isinstance(value, Mapping):
            raise SpearError(f"verl.{key} is a group of settings, not {value!r}")


def _is_field(parts: list[str], known: Mapping[str, Any]) -> bool:
    """Return whether verl's file leaves out a key that one of its classes has, such as ``enable_sleep_mode``."""
    for end in range(len(parts) - 1, 0, -1):
        target = known.get(".".join([*parts[:end], "_target_"]))
        if isinstance(target, str):
            module, _, name = target.rpartition(".")
            return parts[end] in getattr(getattr(import_module(module), name), "__dataclass_fields__", {})
    return False


def find_refusal(key: str) -> str | None:
    """Return why a key of verl cannot be set, or None."""
    for patterns, reason in REFUSED.items():
        for pattern in patterns.split():
            if fnmatchcase(key, pattern) or (pattern.endswith(".*") and key == pattern[:-2]):
                return reason
    return None


@lru_cache(maxsize=1)
def list_names() -> Mapping[str, tuple[str, ...]]:
    """List each of our settings with the keys of verl that it sets, found by changing one after another."""
    names: dict[str, tuple[str, ...]] = {}
    for device in Device:
        config = RunConfig().change("cluster", device=device)
        before = _flatten_own(config)
        for key in RunConfig.keys():  # noqa: SIM118 - a class method
            if key != "cluster.device" and (changed := _change(config, key)) is not None:
                after = _flatten_own(changed)
                found = (name for name in after if before.get(name, ...) != after[name])
                names[key] = tuple(dict.fromkeys([*names.get(key, ()), *found]))
    return names


def name_ours(key: str) -> str | None:
    """Return what to set instead of a key of verl: our setting, or ``verl.KEY``; None if verl has no such key."""
    if key.partition(".")[0] not in _read_defaults():  # most misspelt settings: the list takes a second
        return None
    ours = [
        name
        for name, keys in list_names().items()
        for one in keys  # a node of free keywords shows as one of its keywords
        if key == one or (one.endswith(".other") and key.startswith(one.removesuffix("other")))
    ]
    if ours:
        return ours[0]
    return f"verl.{key}" if key in _list_keys() else None


def _flatten_own(config: RunConfig) -> dict[str, Any]:
    values = {key: value for key, value in translate(config, Path()).items() if key not in ("spear", "data.spear_env")}
    return {name: value for key, node in values.items() for name, value in flatten(node, key)}


def _change(config: RunConfig, key: str) -> RunConfig | None:
    """Return a copy with another value of a setting, if one of those tried is valid."""
    parts = key.split(".")
    node: Any = config
    for part in parts[:-1]:
        node = getattr(node, part)
    now = getattr(node, parts[-1])
    others = [member for member in type(now) if member is not now] if isinstance(now, Enum) else []
    for value in (*others, not now, 3, 0.5, 0.25, "token", "other", ["file"], [0.5, 0.5], {"other": 1}):
        if value == now and type(value) is type(now):
            continue
        try:
            made: Any = replace(node, **{parts[-1]: value})
            for depth in range(len(parts) - 2, -1, -1):
                above: Any = config
                for part in parts[:depth]:
                    above = getattr(above, part)
                made = replace(above, **{parts[depth]: made})
        except SpearError:
            continue
        return made
    return None
