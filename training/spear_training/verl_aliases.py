"""Keys of verl with an exact equivalent among ours, to which their overrides are translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from spear_envs.core.errors import SpearError

_AR = "actor_rollout_ref"
_CLIP = f"{_AR}.actor.clip_ratio"
_KL_COEFFICIENT = f"{_AR}.actor.kl_loss_coef"
KL_TYPE = f"{_AR}.actor.kl_loss_type"
_USE_KL = f"{_AR}.actor.use_kl_loss"
_WARMUP = "trainer.critic_warmup"

ALIASES = {
    f"{_AR}.actor.clip_ratio_low": "spear.clip.low",
    f"{_AR}.actor.clip_ratio_high": "spear.clip.high",
    f"{_AR}.actor.clip_ratio_c": "spear.clip.dual",
    f"{_AR}.actor.policy_loss.loss_mode": "spear.loss.policy",
    f"{_AR}.actor.loss_agg_mode": "spear.loss.aggregation",
    f"{_AR}.actor.loss_scale_factor": "spear.loss.scale_factor",
    _KL_COEFFICIENT: "spear.kl.coefficient",
    "algorithm.adv_estimator": "spear.advantage.estimator",
    "algorithm.norm_adv_by_std_in_grpo": "spear.advantage.normalize_std",
    "algorithm.filter_groups.enable": "spear.sampling.enabled",
    "algorithm.filter_groups.max_num_gen_batches": "spear.sampling.max_rounds",
    "data.seed": "spear.seed",
    f"{_AR}.actor.data_loader_seed": "spear.seed",
    "critic.data_loader_seed": "spear.seed",
    f"{_AR}.actor.rollout_n": f"{_AR}.rollout.n",
    "critic.rollout_n": f"{_AR}.rollout.n",
    f"{_AR}.rollout.prompt_length": "data.max_prompt_length",
    f"{_AR}.rollout.response_length": "data.max_response_length",
    f"{_AR}.actor.grad_clip": f"{_AR}.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    f"{_AR}.actor.use_remove_padding": f"{_AR}.model.use_remove_padding",
    f"{_AR}.actor.use_fused_kernels": f"{_AR}.model.use_fused_kernels",
    f"{_AR}.actor.use_torch_compile": f"{_AR}.actor.fsdp_config.use_torch_compile",
    f"{_AR}.ref.use_torch_compile": f"{_AR}.ref.fsdp_config.use_torch_compile",
    f"{_AR}.actor.qat.*": f"{_AR}.actor.fsdp_config.qat.*",
    f"{_AR}.rollout.qat.*": f"{_AR}.actor.fsdp_config.qat.*",
    f"{_AR}.model.lora.rank": f"{_AR}.model.lora_rank",
    f"{_AR}.model.lora.alpha": f"{_AR}.model.lora_alpha",
    f"{_AR}.model.lora.adapter_path": f"{_AR}.model.lora_adapter_path",
    "custom_reward_function.*": "reward.custom_reward_function.*",
}
"""Keys of verl with their equivalents; a node (``name.*``) is translated key by key.

:func:`_expand` has those that need more than another name.
"""

ESTIMATOR_ALIASES = {
    "gae": {
        "algorithm.gamma": "spear.critic.gamma",
        "algorithm.lam": "spear.critic.lam",
        "critic.cliprange_value": "spear.critic.clip",
        _WARMUP: "spear.critic.warmup",
    },
    "gigpo": {"algorithm.gamma": "spear.advantage.gamma"},
}
"""The same, for keys of one advantage estimator."""


def find_pattern(key: str, patterns: Mapping[str, Any]) -> str | None:
    """The entry for ``key``: itself, or the nearest node above (``node.*``, which includes the node)."""
    if key in patterns:
        return key
    parts = key.split(".")
    nodes = (".".join(parts[:end]) + ".*" for end in range(len(parts), 0, -1))
    return next((node for node in nodes if node in patterns), None)


def explain_alias(key: str) -> str | None:
    """What to set instead of ``key``, if an override of it could not be translated."""
    needed = [name for name, aliases in ESTIMATOR_ALIASES.items() if key in aliases]
    if needed:
        return f"it takes spear.advantage.estimator={' or '.join(needed)}"
    if key == _CLIP:
        return "set spear.clip.low and spear.clip.high"
    target = _rename(key, ALIASES)
    return None if target is None else f"set {target}"


def _rename(key: str, aliases: Mapping[str, str]) -> str | None:
    """The equivalent of ``key``, if it has one."""
    pattern = find_pattern(key, aliases)
    return None if pattern is None else aliases[pattern].removesuffix(".*") + key[len(pattern.removesuffix(".*")) :]


def translate_overrides(overrides: Sequence[str], estimator: str) -> list[str]:
    """Translate overrides of verl's keys to their equivalents; others stay unchanged.

    ``estimator`` is the advantage estimator, unless an override sets it. Raises SpearError if two names of one setting
    have different values.
    """
    values = {key.lstrip("+"): value for key, equals, value in (text.partition("=") for text in overrides) if equals}
    for name in ("spear.advantage.estimator", "algorithm.adv_estimator"):
        estimator = str(_read_value(values.get(name, estimator)))
    aliases = ALIASES | ESTIMATOR_ALIASES.get(estimator, {})
    translated: list[str] = []
    setters: dict[str, tuple[str, str, str]] = {}
    for text in overrides:
        given, equals, value = text.partition("=")
        key = given.lstrip("+")
        if not equals or given.startswith("~"):
            translated.append(text)
            continue
        for target, wanted in _expand(key, value, values, aliases):
            other, before, value_before = setters.get(target, (key, text, wanted))
            if other != key and _read_value(value_before) != _read_value(wanted):
                raise SpearError(f"{before} and {text} both set {target}: give one of them")
            setters[target] = (key, text, wanted)
            translated.append(f"{given.removesuffix(key)}{target}={wanted}")
    return translated


def _expand(key: str, value: str, given: Mapping[str, str], aliases: Mapping[str, str]) -> list[tuple[str, str]]:
    """Keys and values that an override sets; ``given`` are the values of all overrides, by the user's names."""
    if key == _CLIP:  # in verl the two sides take precedence
        return [(ALIASES[side], value) for side in (f"{_CLIP}_low", f"{_CLIP}_high") if side not in given]
    if key == _USE_KL and _read_value(value) is False:
        return [(ALIASES[_KL_COEFFICIENT], "0.0")]
    if key == _KL_COEFFICIENT and _read_value(given.get(_USE_KL, "true")) is False:
        return []
    if key == KL_TYPE and _read_value(value) in ("low_var_kl", "k3"):
        return []
    if key == _WARMUP and key in aliases:
        steps = _read_value(value)  # in verl the first step with updates, in ours the steps before it
        return [(aliases[key], str(steps - 1) if type(steps) is int and steps > 0 else value)]
    return [(_rename(key, aliases) or key, value)]


def _read_value(text: str) -> Any:
    """Parse a value like Hydra; unparsable text is returned unchanged."""
    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
