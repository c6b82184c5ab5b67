from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf

from spear_training.algorithms import SpearSettings
from spear_training.choices import GROUPS, list_choices
from spear_training.launch import compose_config
from spear_training.settings import RunSettings
from spear_training.presets import FLAVOURS, build_configuration, list_presets, load_preset
from spear_training.presets.configuration import DERIVED, PATH_OF_KEY

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NOT_IN_IT = {
    *("environment", "model"),  # choices of other groups
    *("max_epochs", "total_steps", "ppo_mini_batch_size", "ppo_mini_batch_unit"),  # steps and tasks are derived
    *("use_dynamic_batch", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),  # tokens are derived
    *("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "loss_aggregation"),
    "entropy_coefficient",  # the trainer has no entropy bonus
}
"""Keys of a preset that do not appear in the configuration as they are."""
GPU_CLUSTERS = [name for name in list_choices("cluster") if name != "cpu"]


def compose(*overrides: str) -> Any:
    return compose_config(overrides, Path("runs/x"), check=False)


def test_every_key_of_a_preset_goes_somewhere() -> None:
    assert set(PATH_OF_KEY) | NOT_IN_IT == set(load_preset("alfworld"))
    assert not set(PATH_OF_KEY) & NOT_IN_IT


def get(node: Mapping[str, Any], path: str) -> Any:
    for name in path.split("."):
        node = node[name]
    return node


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", list_presets())
def test_a_preset_gives_settings_that_hold(name: str, flavour: str) -> None:
    preset = load_preset(name, flavour)
    node = build_configuration(preset)
    own = {key: value for key, value in node["spear"].items() if key != "env"}
    settings = SpearSettings.from_mapping(own).to_mapping()
    for key, path in PATH_OF_KEY.items():
        assert get(node, path) == preset[key] or key == "env_kwargs", key
        if path.startswith("spear.") and not path.startswith("spear.env"):
            assert get({"spear": settings}, path) == preset[key], key
    assert node["spear"]["env"]["kwargs"] == {**preset["env_kwargs"], "max_turns": preset["max_turns"]}


@pytest.mark.parametrize(
    ("name", "flavour", "expected"),
    [
        # 1,024, 256 and 64 rows are tasks times eight; rows of a micro-batch count as tokens.
        ("alfworld", "paper", (200, 128, 8 * 2560, 8 * 2560)),
        ("webshop", "paper", (350, 32, 4 * 5120, 4 * 5120)),
        ("webshop", "official", (350, 32, 4 * 4608, 4 * 4608)),
        ("sokoban", "paper", (200, 8, 8 * 2048, 8 * 2048)),
        ("math", "paper", (300, 32, 18432, 73728)),
        ("math", "official", (300, 64, 18432, 73728)),
        ("search", "paper", (300, 32, None, 73728)),
    ],
)
def test_what_is_derived(name: str, flavour: str, expected: tuple[int | None, ...]) -> None:
    preset = load_preset(name, flavour)
    values = tuple(derive(preset) for derive in DERIVED.values())
    assert values == (*expected, "seq-mean-token-sum-norm"), "sum-norm is taken for its invariant form"


def validate(config: Any) -> None:
    """verl's own checks, and the data classes that its workers make of the configuration."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    OmegaConf.set_struct(config, True)
    assert not need_critic(config) and not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    for node in (config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(node)
    RunSettings.from_config(config).algorithm


@pytest.mark.parametrize("name", [name for name in list_presets() if load_preset(name)["model"]])
def test_a_row_of_the_paper_on_each_cluster_is_a_configuration_of_verl(name: str) -> None:
    preset = load_preset(name)
    for cluster in GPU_CLUSTERS:
        config = compose(f"preset={name}", f"cluster={cluster}")
        validate(config)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        alone = cluster == "1gpu"
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        assert ranks == {"1gpu": 1, "8gpu": 8, "4x8gpu": 32}[cluster] and config.trainer.device == "cuda"
        assert rollout.name == "vllm" and actor.strategy == "fsdp2"
        assert rollout.tensor_model_parallel_size == (1 if alone else preset["tensor_parallel_size"])
        assert actor.ulysses_sequence_parallel_size == (1 if alone else preset["sequence_parallel_size"])
        assert config.ray_kwargs.ray_init.get("num_gpus") is None, "Ray refuses it in a cluster that is there already"
        assert actor.fsdp_config.optimizer_offload == (alone or preset["model"].endswith("32b"))
        # Only a row of 32K tokens does not fit into the micro-batch of a single GPU: `check_config` says so.
        fits = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        assert fits >= preset["max_prompt_length"] + preset["max_response_length"] or (
            alone and preset["max_response_length"] == 30000
        )
        assert config.actor_rollout_ref.model.path.startswith("Qwen/")


@pytest.mark.parametrize("name", ["alfworld", "webshop", "sokoban", "math_qwen3_32b_16k", "search"])
def test_the_authors_variant_is_a_configuration_of_verl(name: str) -> None:
    config = compose(f"preset=official/{name}", "cluster=8gpu")
    validate(config)
    settings = RunSettings.from_config(config).algorithm
    assert settings.sil.coupling.value == "sequential" and settings.replay.power_of_two


@pytest.mark.parametrize("name", ["alfworld_qwen2.5_7b", "math_32k", "sokoban_qwen2.5_vl_3b"])
def test_a_dry_run_shrinks_everything_but_the_algorithm(name: str) -> None:
    full, dry = compose(f"preset={name}"), compose(f"preset={name}", "model=tiny")
    validate(dry)
    before, after = (RunSettings.from_config(config).algorithm.to_mapping() for config in (full, dry))
    before["replay"]["capacity"] = after["replay"]["capacity"]
    assert before == after, "only the buffer is smaller"
    assert dry.trainer.total_training_steps == 2 and dry.actor_rollout_ref.model.path is None
    assert dry.spear.env.template == "compact" and dry.data.max_prompt_length <= 256


def test_an_algorithm_wins_over_the_preset_and_the_command_line_over_both() -> None:
    settings = RunSettings.from_config(compose("preset=webshop_qwen2.5_7b", "algorithm=grpo", "spear.clip.low=0.1")).algorithm
    assert (settings.sil.enabled, settings.clip.high, settings.clip.low) == (False, 0.2, 0.1)
    # The order in which they are given does not matter.
    again = RunSettings.from_config(compose("spear.clip.low=0.1", "algorithm=grpo", "preset=webshop_qwen2.5_7b")).algorithm
    assert settings == again


def test_a_model_of_ones_own_takes_the_place_of_the_presets() -> None:
    config = compose("preset=alfworld_qwen2.5_7b", "model=qwen2.5_1.5b", "cluster=8gpu")
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_every_group_has_choices_that_say_what_they_are() -> None:
    for group in GROUPS:
        assert list_choices(group) and all(list_choices(group).values()), group
