"""Presets and algorithms: composed as before, valid for verl, and reduced by a dry run."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf

from spear_training.catalogue import survey_presets
from spear_training.run.compose import compose, list_choices
from spear_training.run.config import RunConfig
from spear_training.run.to_verl import to_verl
from tests.goldens.__main__ import find_differences, make_plain, read_golden
from tests.goldens.subjects import flatten
from tests.training.presets.rows import load_preset

GPU_CLUSTERS = [name for name in list_choices("cluster") if not name.startswith("cpu")]
MODELS = {preset.name: preset.model for preset in survey_presets() if preset.of_paper and preset.model}


def read(*words: str) -> RunConfig:
    return compose(words).config


def make(*words: str) -> Any:
    return to_verl(read(*words), Path("runs/x"))


def list_composed() -> list[str]:
    """Words of the golden configurations: each preset by itself, and every algorithm with one."""
    return [
        words
        for words in read_golden("configurations")
        if len(words.split()) == 1 or words.startswith(("preset=demo algorithm=", "preset=official/webshop algorithm="))
    ]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return read_golden("configurations")


@pytest.mark.parametrize("words", list_composed())
def test_presets_and_algorithms_are_as_before(golden: dict[str, Any], words: str) -> None:
    """Our part of the configuration, without the time that verl's takes."""
    values = golden["preset=demo"] | ({} if words == "preset=demo" else golden[words])
    left_out = {"spear.rollout.workers", *values.get("(gone)", [])}  # the first is chosen for a machine
    wanted = {key: value for key, value in values.items() if key.startswith("spear.") and key not in left_out}
    made = make_plain(flatten(read(*words.split()).to_mapping(), "spear."))
    found = {key: value for key, value in made.items() if key not in left_out}
    assert list(find_differences(wanted, found)) == []


def validate(config: Any) -> None:
    """verl's own checks, and the data classes that its workers make of the configuration."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    OmegaConf.set_struct(config, True)
    assert not need_critic(config) and not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    for node in (config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(node)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_the_paper_on_each_cluster_is_a_configuration_of_verl(name: str) -> None:
    preset = load_preset(name)
    for cluster in GPU_CLUSTERS:
        config = make(f"preset={name}", f"cluster={cluster}")
        validate(config)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        alone = cluster == "1gpu"
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        assert ranks == {"1gpu": 1, "8gpu": 8, "4x8gpu": 32}[cluster] and config.trainer.device == "cuda"
        assert rollout.name == "vllm" and actor.strategy == "fsdp2"
        assert rollout.tensor_model_parallel_size == (1 if alone else preset["tensor_parallel_size"])
        assert actor.ulysses_sequence_parallel_size == (1 if alone else preset["sequence_parallel_size"])
        assert config.ray_kwargs.ray_init.get("num_gpus") is None, "Ray refuses it in a cluster that is there already"
        assert actor.fsdp_config.optimizer_offload == (alone or MODELS[name].endswith("32b"))
        # Only a row of 32K tokens does not fit into the micro-batch of a single GPU: a start says so.
        fits = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        assert fits >= preset["max_prompt_length"] + preset["max_response_length"] or (
            alone and preset["max_response_length"] == 30000
        )
        assert config.actor_rollout_ref.model.path.startswith("Qwen/")


@pytest.mark.parametrize("name", ["alfworld", "webshop", "sokoban", "math_qwen3_32b_16k", "search"])
def test_the_authors_variant_is_a_configuration_of_verl(name: str) -> None:
    validate(make(f"preset=official/{name}", "cluster=8gpu"))
    settings = read(f"preset=official/{name}")
    assert settings.sil.coupling.value == "sequential" and settings.replay.power_of_two


@pytest.mark.parametrize("name", ["alfworld_qwen2.5_7b", "math_32k", "sokoban_qwen2.5_vl_3b"])
def test_a_dry_run_shrinks_everything_but_the_algorithm(name: str) -> None:
    full, dry = read(f"preset={name}"), read(f"preset={name}", "model=tiny")
    validate(make(f"preset={name}", "model=tiny"))
    before, after = (config.algorithm.to_mapping() for config in (full, dry))
    before["replay"]["capacity"] = after["replay"]["capacity"]
    assert before == after, "only the buffer is smaller"
    assert dry.train.steps == 2 and dry.model.path is None
    assert dry.env.template == "compact" and dry.rollout.max_prompt_length <= 256


def test_an_algorithm_wins_over_the_preset_and_the_command_line_over_both() -> None:
    words = ("preset=webshop_qwen2.5_7b", "algorithm=grpo", "clip.low=0.1")
    config = read(*words)
    assert (config.sil.enabled, config.clip.high, config.clip.low) == (False, 0.2, 0.1)
    assert read(*reversed(words)) == config, "their order does not matter"
