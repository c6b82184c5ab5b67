"""A key of verl that has an exact equivalent of ours sets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.algorithms.settings import SpearSettings
from spear_training.launch import compose_config, flatten_config
from spear_training.verl_aliases import ALIASES, ESTIMATOR_ALIASES, translate_overrides
from spear_training.verl_keys import find_readers

AR = "actor_rollout_ref"
ACTOR = f"{AR}.actor"
KL = "spear.kl.coefficient"


def compose(*overrides: str) -> dict[str, Any]:
    return flatten_config(compose_config(("spear.env.kwargs.modality=text", *overrides), Path("x"), check=False))


@pytest.mark.parametrize(
    ("theirs", "ours", "estimator"),
    [
        (f"{ACTOR}.clip_ratio_low=0.1", "spear.clip.low=0.1", "grpo"),
        (f"{ACTOR}.clip_ratio_high=0.31", "spear.clip.high=0.31", "grpo"),
        (f"{ACTOR}.clip_ratio_c=4", "spear.clip.dual=4", "grpo"),
        (f"{ACTOR}.clip_ratio=0.15", "spear.clip.low=0.15 spear.clip.high=0.15", "grpo"),
        (f"{ACTOR}.clip_ratio=1 {ACTOR}.clip_ratio_high=0.3", "spear.clip.low=1 spear.clip.high=0.3", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "spear.loss.policy=gspo", "grpo"),
        (f"{ACTOR}.loss_agg_mode=token-mean", "spear.loss.aggregation=token-mean", "grpo"),
        (f"{ACTOR}.loss_scale_factor=100", "spear.loss.scale_factor=100", "grpo"),
        (f"{ACTOR}.kl_loss_coef=0.01", f"{KL}=0.01", "grpo"),
        (f"{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.01", f"{KL}=0.0", "grpo"),
        (f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=low_var_kl", f"{KL}=0.01", "grpo"),
        (f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=k3", f"{KL}=0.01", "grpo"),
        ("algorithm.adv_estimator=rloo", "spear.advantage.estimator=rloo", "grpo"),
        ("algorithm.norm_adv_by_std_in_grpo=True", "spear.advantage.normalize_std=True", "grpo"),
        ("algorithm.filter_groups.enable=True", "spear.sampling.enabled=True", "grpo"),
        ("algorithm.filter_groups.max_num_gen_batches=10", "spear.sampling.max_rounds=10", "grpo"),
        ("algorithm.lam=0.9", "spear.critic.lam=0.9", "gae"),
        ("algorithm.gamma=0.9", "spear.critic.gamma=0.9", "gae"),
        ("algorithm.gamma=0.9", "spear.advantage.gamma=0.9", "gigpo"),
        ("algorithm.adv_estimator=gae algorithm.gamma=1", "spear.advantage.estimator=gae spear.critic.gamma=1", "grpo"),
        ("critic.cliprange_value=0.3", "spear.critic.clip=0.3", "gae"),
        ("trainer.critic_warmup=0", "spear.critic.warmup=0", "gae"),
        ("trainer.critic_warmup=20", "spear.critic.warmup=19", "gae"),
        ("data.seed=7", "spear.seed=7", "grpo"),
        (f"{ACTOR}.data_loader_seed=7 critic.data_loader_seed=7", "spear.seed=7 spear.seed=7", "grpo"),
        (f"{ACTOR}.rollout_n=4", f"{AR}.rollout.n=4", "grpo"),
        (f"{ACTOR}.qat.mode=w4a4", f"{ACTOR}.fsdp_config.qat.mode=w4a4", "grpo"),
        ("custom_reward_function.path=a.py", "reward.custom_reward_function.path=a.py", "grpo"),
        ("++critic.rollout_n=3", f"++{AR}.rollout.n=3", "grpo"),
    ],
)
def test_an_override_is_translated(theirs: str, ours: str, estimator: str) -> None:
    assert translate_overrides(theirs.split(), estimator) == ours.split()


@pytest.mark.parametrize(
    ("choices", "theirs", "ours"),
    [
        (
            (),
            f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_c=4 {ACTOR}.loss_agg_mode=token-mean {ACTOR}.use_kl_loss=True "
            f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=k3 algorithm.norm_adv_by_std_in_grpo=True data.seed=7 "
            f"{ACTOR}.grad_clip=0.3 {AR}.rollout.prompt_length=99 {AR}.model.lora.rank=8 {ACTOR}.qat.mode=w4a4 "
            "+custom_reward_function.reward_kwargs.a=1",
            f"spear.clip.low=0.1 spear.clip.high=0.1 spear.clip.dual=4 spear.loss.aggregation=token-mean {KL}=0.01 "
            f"spear.advantage.normalize_std=True spear.seed=7 {ACTOR}.optim.clip_grad=0.3 data.max_prompt_length=99 "
            f"{AR}.model.lora_rank=8 {ACTOR}.fsdp_config.qat.mode=w4a4 "
            "+reward.custom_reward_function.reward_kwargs.a=1",
        ),
        (("algorithm=gigpo",), "algorithm.gamma=0.9", "spear.advantage.gamma=0.9"),
        (
            (),
            "algorithm.adv_estimator=gae algorithm.gamma=0.9 algorithm.lam=0.8 critic.cliprange_value=0.3 "
            "trainer.critic_warmup=3 critic.ulysses_sequence_parallel_size=2",
            "spear.advantage.estimator=gae spear.critic.gamma=0.9 spear.critic.lam=0.8 spear.critic.clip=0.3 "
            "spear.critic.warmup=2 critic.fsdp.ulysses_sequence_parallel_size=2",
        ),
    ],
)
def test_verl_s_names_compose_to_the_configuration_of_ours(choices: tuple[str, ...], theirs: str, ours: str) -> None:
    wanted = compose(*choices, *ours.split())
    assert wanted != compose(*choices)
    assert compose(*choices, *theirs.split()) == wanted


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("spear.loss.policy", f"{ACTOR}.policy_loss.loss_mode=gspo"),
        ("spear.sampling.enabled", "algorithm.filter_groups.enable=True"),
        ("spear.sampling.max_rounds", "algorithm.filter_groups.max_num_gen_batches=10"),
    ],
)
def test_settings_to_come_are_reached(key: str, override: str) -> None:
    if key not in SpearSettings.keys():  # noqa: SIM118 - a class method, no mapping
        pytest.skip(f"there is no {key} yet")
    assert compose(override)[key] == compose(f"{key}={override.partition('=')[2]}")[key]


def test_every_alias_leads_to_a_setting() -> None:
    flat = compose()
    coming = ("spear.loss.policy", "spear.sampling.enabled", "spear.sampling.max_rounds")
    for key, target in (pair for table in (ALIASES, *ESTIMATOR_ALIASES.values()) for pair in table.items()):
        node = key.removesuffix(".*")
        known = any(name == node or name.startswith(f"{node}.") for name in flat)
        assert known or node in (f"{ACTOR}.qat", f"{AR}.rollout.qat"), key
        if target.startswith("spear."):
            assert target in flat or target in coming, target
        else:
            assert find_readers(target.removesuffix(".*")) or find_readers(f"{target.removesuffix('.*')}.path"), target


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (f"{ACTOR}.kl_loss_coef=0.01", f"{KL}=0.02"),
            f"{ACTOR}.kl_loss_coef=0.01 and {KL}=0.02 both set {KL}: give one of them",
        ),
        ((f"{KL}=0.02", f"{ACTOR}.use_kl_loss=false"), f"{KL}=0.02 and {ACTOR}.use_kl_loss=false both set {KL}"),
        (("data.seed=1", f"{ACTOR}.data_loader_seed=2"), "both set spear.seed: give one of them"),
        (("spear.clip.high=0.2", f"{ACTOR}.clip_ratio=0.3"), "both set spear.clip.high"),
        (("algorithm.adv_estimator=opo",), "spear.advantage.estimator cannot be 'opo'; "),
        ((f"{ACTOR}.loss_agg_mode=token-sum",), "spear.loss.aggregation cannot be 'token-sum'; did you mean"),
        ((f"{ACTOR}.kl_loss_type=mse",), "kl_loss_type cannot be changed here: only low_var_kl (k3) is supported"),
        (("algorithm.lam=0.9",), "algorithm.lam cannot be changed here: it takes spear.advantage.estimator=gae"),
        (("~data.seed",), "data.seed cannot be changed here: set spear.seed"),
        (("algorithm=ppo", "trainer.critic_warmup=many"), "spear.critic.warmup"),
    ],
)
def test_what_cannot_be_is_one_line(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpearError) as caught:
        compose(*overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)
