"""Presets as parts of verl's configuration: what ``spear train preset=NAME`` composes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

PATH_OF_KEY: Mapping[str, str] = {
    "env_kwargs": "spear.env.kwargs",
    "valid_split": "spear.env.valid_split",
    "max_turns": "spear.env.kwargs.max_turns",
    "train_batch_size": "data.train_batch_size",
    "val_data_size": "data.val_max_samples",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "group_size": f"{ROLLOUT}.n",
    "rollout_temperature": f"{ROLLOUT}.temperature",
    "rollout_top_p": f"{ROLLOUT}.top_p",
    "validation_temperature": f"{ROLLOUT}.val_kwargs.temperature",
    "validation_top_p": f"{ROLLOUT}.val_kwargs.top_p",
    "validation_samples": f"{ROLLOUT}.val_kwargs.n",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "learning_rate": f"{ACTOR}.optim.lr",
    "grad_clip": f"{ACTOR}.optim.clip_grad",
    "sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "sil_coupling": "spear.sil.coupling",
    "warmup_steps": "spear.sil.warmup_steps",
    "trigger_ratio": "spear.sil.trigger_ratio",
    "always_add": "spear.sil.always_add",
    "outcome_success": "spear.reward.success",
    "outcome_failure": "spear.reward.failure",
    "format_mode": "spear.reward.format",
    "tool_count": "spear.reward.tool_count",
    "tool_shape": "spear.reward.tool_shape",
    "decay_steps": "spear.reward.decay_steps",
    "baseline_capacity": "spear.baseline.capacity",
    "replay_capacity": "spear.replay.capacity",
    "max_age": "spear.replay.max_age",
    "require_tool_call": "spear.replay.require_tool_call",
    "power_of_two": "spear.replay.power_of_two",
    "cov_bounds": "spear.cov.bounds",
    "cov_lower": "spear.cov.lower",
    "cov_upper": "spear.cov.upper",
    "cov_ratio": "spear.cov.ratio",
    "cov_scope": "spear.cov.scope",
    "cov_budget": "spear.cov.budget",
    "cov_floor_one": "spear.cov.floor_one",
    "cov_on_policy": "spear.cov.on_policy",
    "cov_on_policy_ratio": "spear.cov.on_policy_ratio",
    "cov_on_policy_lower": "spear.cov.on_policy_lower",
    "cov_on_policy_upper": "spear.cov.on_policy_upper",
    "clip_low": "spear.clip.low",
    "clip_high": "spear.clip.high",
    "dual_clip": "spear.clip.dual",
    "kl_coefficient": "spear.kl.coefficient",
    "normalize_std": "spear.advantage.normalize_std",
    "group_weight": "spear.advantage.weight",
    "singleton": "spear.advantage.singleton",
    "filter_ratio": "spear.filter.groups",
    "overlong_filter": "spear.filter.overlong",
    "repetition_filter": "spear.filter.repetition",
    "void_filter": "spear.filter.void",
}
"""Where the value of a preset's key stands in the configuration, if it is the same there."""


def _steps(preset: Mapping[str, Any]) -> int:
    # An epoch of the agents' code is one batch, so that its epochs are steps; the others name their steps.
    return int(preset["total_steps"] or preset["max_epochs"])


def _mini_batch(preset: Mapping[str, Any]) -> int:
    """In tasks, as verl counts; its rows are the tasks times the group size."""
    size = int(preset["ppo_mini_batch_size"])
    return size if preset["ppo_mini_batch_unit"] == "prompts" else size // int(preset["group_size"])


def _tokens(rows_key: str, tokens_key: str) -> Callable[[Mapping[str, Any]], int | None]:
    """Tokens of a micro-batch; where the table counts rows, as many as those rows can have."""

    def count(preset: Mapping[str, Any]) -> int | None:
        if preset["use_dynamic_batch"]:
            return preset[tokens_key]
        return preset[rows_key] * (preset["max_prompt_length"] + preset["max_response_length"])

    return count


def _aggregation(preset: Mapping[str, Any]) -> str:
    # sum-norm is the same up to a factor that depends on the cut into micro-batches, which the trainer cannot make.
    mode = str(preset["loss_aggregation"])
    return "seq-mean-token-sum-norm" if mode == "sum-norm" else mode


DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "trainer.total_training_steps": _steps,
    f"{ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _tokens("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": _tokens(
        "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"
    ),
    "spear.loss.aggregation": _aggregation,
}
"""Values of the configuration that are computed from several keys of a preset; None leaves verl's own."""


def build_configuration(preset: Mapping[str, Any]) -> dict[str, Any]:
    """The part of verl's configuration that a preset of :func:`load_preset` stands for, with Hydra's defaults list."""
    values = {path: preset[key] for key, path in PATH_OF_KEY.items()}
    values |= {path: value for path, derive in DERIVED.items() if (value := derive(preset)) is not None}
    model = [f"/model/{preset['model']}"] if preset["model"] else []
    nested: dict[str, Any] = {"defaults": [*model, "_self_", {"override /environment": preset["environment"]}]}
    for path, value in values.items():
        *nodes, last = path.split(".")
        node = nested
        for name in nodes:
            node = node.setdefault(name, {})
        node[last] = dict(value) if isinstance(value, Mapping) else value
    return nested
