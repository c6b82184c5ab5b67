"""The presets of the authors' flavour beside the settings of their scripts.

The scripts are those of the authors' repository at commit 7e84315: ``verl-agent/examples/*_trainer/run_*.sh`` and
``verl/recipe/spear/run_qwen3-32b_*.sh``. :data:`SCRIPTS` has their settings as facts, by the scripts' own names; a key
that a script leaves out has the value of its trainer's configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from spear_training.algorithms import FormatMode
from spear_training.run.compose import compose, list_official
from spear_training.run.config import RunConfig, flatten


def count_rows(config: RunConfig) -> int:
    """Rows of a mini-batch: where turns are rows, ours are tasks times the group."""
    conversation = config.env.layout.value == "conversation"
    return config.train.mini_batch_size * (1 if conversation else config.rollout.group_size)


READ: Mapping[str, Callable[[RunConfig], Any]] = {
    "data.train_batch_size": lambda c: c.train.batch_size,
    "data.max_prompt_length": lambda c: c.rollout.max_prompt_length,
    "data.max_response_length": lambda c: c.rollout.max_response_length,
    "rollout.n": lambda c: c.rollout.group_size,
    "rollout.tensor_model_parallel_size": lambda c: c.rollout.tensor_parallel,
    "rollout.val_kwargs.temperature": lambda c: c.validation.temperature,
    "rollout.val_kwargs.top_p": lambda c: c.validation.top_p,
    "rollout.val_kwargs.n": lambda c: c.validation.samples,
    "rollout.rollout_filter_ratio": lambda c: c.filter.groups,
    "actor.ppo_mini_batch_size": count_rows,
    "actor.optim.lr": lambda c: c.optimizer.lr,
    "actor.optim.weight_decay": lambda c: c.optimizer.weight_decay,
    "actor.grad_clip": lambda c: c.optimizer.clip_grad,
    "actor.kl_loss_coef": lambda c: c.kl.coefficient,
    "actor.entropy_coeff": lambda c: c.loss.entropy_coefficient,
    "actor.clip_ratio_low": lambda c: c.clip.low,
    "actor.clip_ratio_high": lambda c: c.clip.high,
    "actor.clip_ratio_c": lambda c: c.clip.dual,
    "actor.loss_mode": lambda c: "clip_cov" if c.cov.on_policy else "vanilla",
    "actor.loss_agg_mode": lambda c: c.loss.aggregation.value,
    "actor.invalid_action_penalty_coef": lambda c: 0.1 if c.reward.format is FormatMode.PENALTY_PER_ROW else 0.0,
    "actor.enable_trajectory_replay": lambda c: c.sil.enabled,
    "algorithm.adv_estimator": lambda c: c.advantage.estimator,
    "algorithm.norm_by_std": lambda c: c.advantage.normalize_std,
    "algorithm.filter_overlong_responses": lambda c: c.filter.overlong,
    "algorithm.filter_repetitive_responses": lambda c: c.filter.repetition,
    "algorithm.filter_unreadable_responses": lambda c: c.filter.unreadable,
    "algorithm.filter_incomplete_responses": lambda c: c.filter.void.value == "incomplete",
    "algorithm.use_toolcall_reward": lambda c: c.reward.mu,
    "env.max_steps": lambda c: c.env.kwargs["max_turns"],
    "trainer.test_freq": lambda c: c.validation.every,
}
"""What a script's setting is in a composed configuration."""
OF_REPLAY: Mapping[str, Callable[[RunConfig], Any]] = {
    "actor.trajectory_buffer_size": lambda c: c.replay.capacity,
    "actor.baseline_buffer_size": lambda c: c.baseline.capacity,
    # Rows over 5 steps older than the newest leave after a draw, whose own step is one further.
    "actor.trajectory_tolerate_steps": lambda c: c.replay.max_age - 2,
    "actor.max_replay_loss_steps": lambda c: c.sil.warmup_steps,
    "actor.clip_cov_replay": lambda c: (c.cov.ratio, c.cov.lower, c.cov.upper),
    "actor.clip_cov": lambda c: (c.cov.on_policy_ratio, c.cov.on_policy_lower, c.cov.on_policy_upper),
    "algorithm.max_toolcall_steps": lambda c: c.reward.decay_steps,
    "trainer.gpus": lambda c: c.sil.min_rows,
}
"""The same of settings that only a script with replay uses."""

AGENT = {
    "data.train_batch_size": 32,
    "data.max_response_length": 512,
    "rollout.n": 8,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.val_kwargs.temperature": 0.4,
    "rollout.val_kwargs.top_p": 1.0,
    "rollout.val_kwargs.n": 1,
    "actor.entropy_coeff": 0.001,
    "actor.invalid_action_penalty_coef": 0.1,
    "trainer.test_freq": 5,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.grad_clip": 1.0,
}
ALFWORLD = AGENT | {"data.max_prompt_length": 2048, "env.max_steps": 50, "actor.ppo_mini_batch_size": 1024}
WEBSHOP = AGENT | {"data.max_prompt_length": 4096, "env.max_steps": 15, "actor.ppo_mini_batch_size": 256}
MATH = AGENT | {
    "data.train_batch_size": 128,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 16384,
    "rollout.n": 16,
    "rollout.tensor_model_parallel_size": 4,
    "rollout.val_kwargs.temperature": 1.0,
    "rollout.val_kwargs.top_p": 0.6,
    "rollout.val_kwargs.n": 32,
    "actor.ppo_mini_batch_size": 64,
    "actor.entropy_coeff": 0.0,
    "actor.invalid_action_penalty_coef": 0.0,
    "env.max_steps": 8,
}
PLAIN = {
    "rollout.rollout_filter_ratio": 1.0,
    "actor.kl_loss_coef": 0.0,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 10.0,
    "actor.loss_mode": "vanilla",
    "actor.loss_agg_mode": "token-mean",
    "actor.enable_trajectory_replay": False,
    "algorithm.norm_by_std": True,
    **{f"algorithm.filter_{name}_responses": False for name in ("overlong", "repetitive", "unreadable", "incomplete")},
    "algorithm.use_toolcall_reward": "none",
}
DRBOT = PLAIN | {
    "rollout.rollout_filter_ratio": 0.75,
    "actor.clip_ratio_high": 0.28,
    "actor.loss_agg_mode": "seq-mean-token-sum-norm",
    "algorithm.norm_by_std": False,
    **{f"algorithm.filter_{name}_responses": True for name in ("overlong", "repetitive", "unreadable", "incomplete")},
}
SPEAR = DRBOT | {
    "actor.loss_mode": "clip_cov",
    "actor.clip_ratio_c": None,  # that loss has no clip from above
    "actor.enable_trajectory_replay": True,
    "algorithm.use_toolcall_reward": "cosine",
    "actor.trajectory_buffer_size": 2048,
    "actor.baseline_buffer_size": 10240,
    "actor.trajectory_tolerate_steps": 5,
    "actor.clip_cov": (2e-4, 1.0, 5.0),
    "algorithm.max_toolcall_steps": 200,
}
SPEAR_AGENT = SPEAR | {
    "actor.max_replay_loss_steps": 200,  # the trainer's: the scripts' variable of 100 does not reach it
    "actor.clip_cov_replay": (0.02, 2.0, 60.0),
    "trainer.gpus": 2,
}
SPEAR_MATH = SPEAR | {
    "actor.max_replay_loss_steps": 300,
    "actor.clip_cov_replay": (2e-4, 1.0, 5.0),  # the loss reads those of fresh rows, whatever the script says
    "trainer.gpus": 128,
    "algorithm.filter_incomplete_responses": False,  # on in the script, but nothing sets what it reads
}
# They are for GPUs of another size: rollout.tensor_model_parallel_size=2.
BASELINE = PLAIN | {
    "data.train_batch_size": 16,
    "actor.kl_loss_coef": 0.01,
    "actor.clip_ratio_c": 3.0,
    "algorithm.norm_by_std": False,
}
PPO = BASELINE | {"algorithm.adv_estimator": "gae", "data.train_batch_size": 128, "rollout.n": 1}
RLOO = BASELINE | {"algorithm.adv_estimator": "rloo"}
GRPO, GIGPO = {"algorithm.adv_estimator": "grpo"}, {"algorithm.adv_estimator": "gigpo", "algorithm.norm_by_std": True}

SCRIPTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **{
        (preset, algorithm): environment | settings
        for preset, environment, small in (("alfworld", ALFWORLD, 256), ("webshop", WEBSHOP, 64))
        for algorithm, settings in {
            "grpo": PLAIN | GRPO,
            "gigpo": PLAIN | GIGPO,
            "drbot": DRBOT | GRPO,
            "drbot_gigpo": DRBOT | GIGPO,
            "drbot_spear": SPEAR_AGENT | GRPO,
            "drbot_gigpo_spear": SPEAR_AGENT | GIGPO,
            "ppo": PPO | {"actor.ppo_mini_batch_size": small},
            "rloo": RLOO | {"actor.ppo_mini_batch_size": small},
        }.items()
    },
    ("math_qwen3_32b_16k", "grpo"): MATH | PLAIN | GRPO,
    ("math_qwen3_32b_16k", "drbot"): MATH | DRBOT | GRPO | {"algorithm.filter_incomplete_responses": False},
    ("math_qwen3_32b_16k", "drbot_spear"): MATH | SPEAR_MATH | GRPO,
}
"""Settings of each script, by the preset and the algorithm that stand for it."""


@pytest.mark.parametrize(("preset", "algorithm"), SCRIPTS)
def test_a_preset_is_what_the_authors_script_says(preset: str, algorithm: str) -> None:
    wanted = SCRIPTS[preset, algorithm]
    config = compose([f"preset=official/{preset}", f"algorithm={algorithm}", "cluster=8gpu"]).config
    read = READ | (OF_REPLAY if config.sil.enabled else {})
    assert {key: function(config) for key, function in read.items()} == dict(wanted)
    if preset in ("alfworld", "webshop"):
        steps = {"alfworld": 200, "webshop": 350}[preset]
        assert config.train.steps == (150 if algorithm in ("ppo", "rloo") else steps)
        assert config.advantage.weight.value == "row", "a group's mean is over all its rows"
        assert (config.advantage.gamma, config.advantage.step_weight) == (0.95, 1.0)
    assert config.critic.lr == 1e-5


def find(*words: str) -> dict[str, Any]:
    return dict(flatten(compose([*words, "cluster=8gpu"]).config.to_mapping()))


@pytest.mark.parametrize("preset", [name for name in list_official() if "search" not in name and "math" not in name])
def test_replay_alone_brings_what_the_authors_loss_of_replay_has(preset: str) -> None:
    for algorithm in ("grpo", "drbot", "gigpo", "drbot_gigpo", "ppo", "rloo"):
        assert find(f"preset={preset}", f"algorithm={algorithm}")["cov.on_policy"] is False
    assert find(f"preset={preset}", "algorithm=drbot_gigpo_spear")["advantage.normalize_std"] is True
    assert find(f"preset={preset}", "algorithm=gigpo_nostd")["advantage.normalize_std"] is False
    assert find(f"preset={preset.rpartition('/')[2]}", "algorithm=drbot_gigpo")["advantage.normalize_std"] is False
