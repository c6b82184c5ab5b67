"""The command line of a training: choices, files of one's own, and keys."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_training.catalogue import describe_fields, make_schema
from spear_training.run.compose import GROUPS, compose, list_choices, list_official, read_config
from spear_training.run.config import RunConfig

OWN = """
extends: demo
choose: {algorithm: drbot_gigpo}
model: {path: runs/model}
env: {id: "guess:mine/Guess-v0", kwargs: {largest: 9}}
rollout: {max_prompt_length: 256}
train: {steps: 100}
cluster: {nodes: 2}
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(OWN, "utf-8")
    return str(file)


def fail(*words: str) -> str:
    """The message of the error that ``words`` end in, which is one line."""
    with pytest.raises(SpearError) as caught:
        compose(words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- order -----------------------------------------------------------------------------------------------------------
def test_choices_are_laid_over_one_another_and_keys_over_all() -> None:
    assert compose(["preset=alfworld"]).config.rollout.tensor_parallel == 1, "the cluster's, a CPU"
    assert compose(["cluster=8gpu", "preset=alfworld"]).config.rollout.tensor_parallel == 2
    request = compose(["preset=alfworld", "cluster=8gpu", "rollout.tensor_parallel=4", "rollout.tensor_parallel=8"])
    assert request.config.rollout.tensor_parallel == 8
    assert request.given == {"rollout.tensor_parallel"}
    assert request.choices == {
        "preset": "alfworld", "algorithm": "drbot_spear", "cluster": "8gpu", "environment": "alfworld"
    }  # fmt: skip


def test_a_preset_has_values_for_some_algorithms() -> None:
    """As the authors' scripts, which have their own batches for PPO, and another loss with replay."""
    for words, batch in ((["algorithm=ppo"], 128), (["algorithm=ppo", "train.batch_size=7"], 7), ([], 32)):
        assert compose(["preset=official/alfworld", *words]).config.train.batch_size == batch
    assert compose(["preset=official/webshop", "algorithm=ppo"]).config.train.mini_batch_size == 64, "the outer file's"
    assert compose(["preset=official/webshop", "algorithm=grpo_sil"]).config.cov.on_policy
    assert compose(["preset=official/alfworld", "algorithm=ppo", "model=tiny"]).config.train.steps == 2


def test_a_presets_values_for_an_algorithm_hold_also_after_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: official/webshop\n", "utf-8")
    for name in ("drbot_gigpo_spear", "ppo", "grpo"):
        assert compose([str(file), f"algorithm={name}"]).config == (
            compose(["preset=official/webshop", f"algorithm={name}"]).config
        )
    file.write_text("by_algorithm: {ppo: {train: {steps: 1}}}\n", "utf-8")
    assert "by_algorithm" in fail(str(file))
    assert "official/alfworld" in fail("preset=official/alfwrold")


def test_a_file_overrides_what_it_extends_and_a_key_overrides_it(own: str) -> None:
    request = compose([own, "train.steps=7"])
    config = request.config
    assert (config.rollout.max_prompt_length, config.train.steps, config.train.batch_size) == (256, 7, 16)
    assert request.choices["algorithm"] == "drbot_gigpo" and config.advantage.estimator == "gigpo"
    assert {"model.path", "train.steps"} <= request.given


def test_a_choice_on_the_command_line_wins_over_one_in_a_file(own: str) -> None:
    assert compose(["algorithm=ppo", own]).config.advantage.estimator == "gae"
    assert compose([own, "preset=search_tiny"]).config.log.run == "search"


def test_a_choice_after_a_file_wins_over_its_settings(own: str) -> None:
    assert compose(["cluster=8gpu", own]).config.cluster.nodes == 2
    assert compose([own, "cluster=8gpu"]).config.cluster.nodes == 1


def test_keywords_of_another_environment_are_dropped(own: str) -> None:
    assert compose([own]).config.env.kwargs == {"largest": 9}
    assert compose(["preset=demo", "env.id=guess:mine/Guess-v0"]).config.env.kwargs == {}
    assert compose(["preset=demo", "env.kwargs.boxes=1"]).config.env.kwargs == {"modality": "text", "boxes": 1}


def test_a_dry_run_reduces_what_a_file_sets_and_keys_do_not_follow(own: str) -> None:
    config = compose([own, "model=tiny", "train.batch_size=3"]).config
    assert (config.model.path, config.train.steps, config.train.batch_size) == (None, 2, 3)
    # What a tiny policy is shown of Sokoban is not for this environment.
    assert (config.env.kwargs, config.rollout.max_prompt_length) == ({"largest": 9}, 256)


def test_a_dry_run_has_the_rows_that_its_lengths_are_for(tmp_path: Path) -> None:
    """Ten tokens are a turn of ALFWorld; a conversation of ten would end in its first observation."""
    file = tmp_path / "mine.yaml"
    file.write_text("extends: webshop_tiny\nenv: {layout: conversation}\n", "utf-8")
    for words in ("preset=alfworld_smollm2", str(file)):
        assert compose([words]).config.env.layout is Layout.CONVERSATION
        assert compose([words, "model=tiny"]).config.env.layout is Layout.PER_TURN
    assert compose(["preset=code_smollm2", "model=tiny"]).config.env.layout is Layout.CONVERSATION


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_composes(group: str) -> None:
    for name in [*list_choices(group), *(list_official() if group == "preset" else ())]:
        config = compose([f"{group}={name}"]).config
        assert RunConfig.from_mapping(config.to_mapping()) == config


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sil.gama=cosine", "'sil.gama' is not a setting; did you mean sil.gamma?"),
        ("train.step=3", "did you mean train.steps?"),
        ("mini_batch_size=8", "did you mean train.mini_batch_size?"),
        ("xyzzy=1", "there are model, env, rollout"),
        ("train.steps.more=1", "did you mean train.steps?"),
        ("train=3", "train is a group of settings: steps, batch_size"),
        ("steps", "'steps' is neither an option, a file of YAML nor KEY=VALUE"),
        ("--ouput=x", "'--ouput=x' is neither an option"),
        ("+train.steps=3", "write KEY=VALUE, without +"),
        ("~train.steps", "KEY=VALUE"),
        ("log.to=[console", "cannot be read as YAML"),
        ("model.chat_options={a: !!bool x}", "cannot be read as YAML"),
        ("env.kwargs=&a {b: *a}", "cannot be read as YAML: its aliases"),
        ("preset=alfword", "there is no preset 'alfword'; did you mean alfworld?"),
        ("nothing.yaml", "nothing.yaml cannot be read"),
        ("log.run=${seed}", "a reference ${...} is not resolved"),
        ("env.kwargs.a=!!binary /w==", "must be a number, a text"),
        ("env.kwargs=" + "{a: " * 25 + "1" + "}" * 25, "nested more than 20 times"),
        ("actor_rollout_ref.rollout.n=4", "did you mean rollout.group_size?"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "did you mean model.chat_options?"),
        ("actor_rollout_ref.actor.fsdp_config.seed=4", "did you mean verl.actor_rollout_ref.actor.fsdp_config.seed?"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.3", "see clip.low, clip.high"),
        ("reward.custom_reward_function.path=a.py", "set reward.function"),
    ],
)
def test_a_word_that_is_not_understood_names_the_nearest(word: str, expected: str) -> None:
    assert expected in fail(word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sil.warmup_steps=-1", "sil.warmup_steps: input should be greater than or equal to 0 (it is -1)"),
        ("sil.warmup_steps=many", "sil.warmup_steps: must be a whole number (it is 'many')"),
        ("rollout.group_size=true", "rollout.group_size: must be a whole number"),
        ("optimizer.lr=.nan", "optimizer.lr=nan must be a finite number"),
        ("optimizer.lr=1e400", "optimizer.lr=inf must be a finite number"),
        ("env.kwargs.a=[-.inf]", "env.kwargs.a=-inf must be a finite number"),
        ("verl.actor_rollout_ref.actor.optim.lr=.nan", "verl.actor_rollout_ref.actor.optim.lr=nan must be a finite"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.betas=[false, 0.9]", "optimizer.betas: must be a list, each a number (it is [False, 0.9])"),
        ("optimizer.betas=[half, 0.9]", "optimizer.betas"),
        ("rollout.correction.rollout_is_threshold=true", "rollout_is_threshold: must be a number or a text"),
        ("rollout.max_prompt_length=text", "rollout.max_prompt_length: must be a whole number (it is 'text')"),
        ("seed=010", "seed: must be a whole number (it is '010')"),
        (f"train.steps={10**400}", "must be a whole number of at most 64 bits"),
        ("env.kwargs={'${oc.env:HOME}': 1}", "is not resolved"),
        ('env.kwargs={"a\\0": 1}', "without the character 0"),
        (f"seed={2**63}", "seed: input should be less than or equal to 9223372036854775807"),
        ("env.id=null", "env.id: input should be a valid string (it is None)"),
        ("log.to=[console, nowhere]", "log.to='nowhere' is not a logger: take some of console, file, tensorboard"),
        ("sil.gamma_options={value: text}", "sil.gamma=cosine has no option 'value'"),
        ('log.run="\\ud800"', "must be a text of UTF-8"),
        ('model.path="a\\0b"', "without the character 0"),
        ("optimizer.betas=[0.9, 1.0]", "two numbers from 0 to below 1"),
        ("deterministic=maybe", "deterministic: input should be a valid boolean"),
        ("env.kwargs=3", "env.kwargs"),
        ("filter.void=maybe", "(it is 'maybe')"),
        ("cluster.shard_size=0", "cluster.shard_size must be -1 (all GPUs) or a whole number from 1, not 0"),
    ],
)
def test_a_wrong_value_names_the_setting_the_value_and_what_is_allowed(word: str, expected: str) -> None:
    message = fail(word)
    assert expected in message
    assert message.removeprefix("the key '").startswith(word.partition(".")[0].partition("=")[0])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", "{value: text}", "sil.gamma=constant: its option value must be a number, not 'text'"),
        ("constant", "{value: true}", "must be a number, not True"),
        ("constant", "{value: -1}", "sil.gamma=constant gave -1: a weight is a finite number of 0 or more"),
        ("constant", f"{{value: {10**400}}}", "must be a whole number of at most 64 bits"),
        ("entropy", "{low: .nan}", "sil.gamma_options.low=nan must be a finite number"),
        ("success", "{target: null}", "must be a number, not None"),
    ],
)
def test_a_schedule_that_would_fail_in_a_step_is_answered(name: str, options: str, expected: str) -> None:
    assert expected in fail(f"sil.gamma={name}", f"sil.gamma_options={options}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {stepz: 3}", "'train.stepz' is not a setting; did you mean train.steps?"),
        ("train: {steps: many}", "train.steps: must be a whole number"),
        ("- 1\n", "is not a mapping of settings"),
        ("train: [", "is not YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "is not YAML"),
        ("extends: [demo, alfworld]", "names one preset"),
        ("extends: demoo", "there is no preset 'demoo'"),
        ("choose: {colour: red}", "choose takes preset, algorithm"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, "utf-8")
    message = fail(str(file))
    assert expected in message and (str(file) in message or "preset" in expected)


def test_a_file_of_many_keys_is_read_in_linear_time(tmp_path: Path) -> None:
    file, keys = tmp_path / "mine.yaml", 30_000
    file.write_text("env: {kwargs: {" + ", ".join(f"k{n}" for n in range(keys)) + "}}")
    started = time.process_time()
    assert len(read_config(file)["env"]["kwargs"]) == keys
    assert time.process_time() - started < 60, "each key was once compared with all others"


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3))
def test_no_mapping_of_anything_is_more_than_one_line_of_error(values: dict[str, Any]) -> None:
    try:
        RunConfig.from_mapping(values)
    except SpearError as error:
        assert str(error)


# ---- what is derived -------------------------------------------------------------------------------------------------
def test_every_setting_has_a_meaning_a_kind_and_its_default() -> None:
    facts = {fact.key: fact for fact in describe_fields()}
    assert list(facts) == list(RunConfig.keys())
    for fact in facts.values():
        assert fact.meaning.endswith((".", "?", ")", "1")) and fact.kind, fact.key
    assert facts["rollout.top_p"].kind == "number above 0 to 1"
    assert (facts["train.steps"].default, facts["train.max_tasks"].kind) == (200, "whole number from 1 or null")


def test_the_schema_takes_what_composes_and_refuses_what_does_not() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = make_schema()
    jsonschema.validate(yaml.safe_load(OWN), schema)
    jsonschema.validate(compose(["preset=official/math_qwen3_32b_32k"]).config.to_mapping(), schema)
    for wrong in ({"train": {"stepz": 3}}, {"train": {"steps": 0}}, {"rollout": {"engine": "sglang"}}, {"other": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_values_are_yaml() -> None:
    words = ("optimizer.lr=1e-4", "optimizer.betas=[0.8, 0.9]", "log.to=[console]", "validation.every=null")
    config = compose([*words, "deterministic=false", "model.path='a b'", "filter.void=off"]).config
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert (config.log.to, config.validation.every, config.deterministic) == (("console",), None, False)
    assert (config.model.path, config.filter.void.value) == ("a b", "off")
    words = ("rollout.correction.rollout_is_threshold=0.5_5", "rollout.correction.rollout_is=token")
    assert compose(words).config.rollout.correction.rollout_is_threshold == "0.5_5", "YAML 1.1 reads a number"
    assert compose(["model.path=~/model"]).config.model.path == str(Path.home() / "model")
