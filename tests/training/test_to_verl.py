"""What verl gets of a configuration, keys that are passed on, and the correction of rollouts."""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from hydra import compose as compose_hydra
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from spear_envs.core.errors import SpearError
from spear_training.run.compose import compose, list_choices
from spear_training.run.config import RolloutCorrection, RunConfig, describe_staleness, flatten
from spear_training.run.launch import resolve_machine
from spear_training.run.to_verl import REFUSED, find_refusal, find_verl, list_names, name_ours, read_node, to_verl

OUT = Path("runs/x")
PLUGIN = (
    *("env.", "advantage.", "reward.", "sil.", "replay.", "baseline.", "cov.", "clip.", "loss.", "filter.", "critic."),
    *("sampling.", "curriculum.", "branch.", "record.", "deterministic", "verl", "checkpoint.", "validation."),
    *("model.warm_start", "model.vision_start", "rollout.staleness", "rollout.tries", "rollout.agent"),
    "rollout.correction.rollout_rs",  # which needs a threshold, too
    "cluster.device",  # both of whose values are tried
)
"""Settings that our plugin reads, or that are resolved before verl starts; some of these nodes' are verl's, too."""
VERL = {"critic.lr", "env.train_split", "env.valid_split", "checkpoint.every", "checkpoint.keep", "validation.every",
        "validation.at_start", "validation.only", "validation.tasks", "validation.samples", "validation.temperature",
        "validation.top_p", "validation.top_k", "validation.record"}  # fmt: skip
"""Those of these nodes that are verl's."""


@pytest.fixture(scope="module")
def leaves() -> dict[str, Any]:
    """verl's own configuration, as its entry point composes it."""
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return dict(flatten(OmegaConf.to_container(compose_hydra("ppo_trainer")), keep_nodes=True))


def make(*words: str) -> Any:
    return to_verl(compose(words).config, OUT)


def fail(*words: str) -> str:
    with pytest.raises(SpearError) as caught:
        make(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_only_validates_does_so_whatever_its_preset_says_of_the_start() -> None:
    for start in ("true", "false"):
        made = make("preset=demo", f"validation.at_start={start}", "validation.only=true")
        assert made.trainer.val_before_train and made.trainer.val_only
    assert not make("preset=demo", "validation.at_start=false").trainer.val_before_train


# ---- what is written -------------------------------------------------------------------------------------------------
def test_the_defaults_are_those_of_verl_s_entry_point(leaves: dict[str, Any]) -> None:
    file = OmegaConf.load(find_verl() / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    found = dict(flatten(OmegaConf.to_container(file), keep_nodes=True))
    assert {key for key in leaves.keys() | found.keys() if leaves.get(key) != found.get(key)} == {"model_engine"}


@pytest.mark.parametrize("words", [("preset=demo",), ("cluster=8gpu", "algorithm=ppo"), ("model.lora_rank=8",)])
def test_nothing_is_written_that_verl_does_not_have(words: tuple[str, ...], leaves: dict[str, Any]) -> None:
    ours = ("spear.", "data.spear_env.", "trainer.v1.spear", "actor_rollout_ref.rollout.engine_kwargs.vllm_cpu")
    ours += ("actor_rollout_ref.rollout.agent.agent_loop_manager_class",)
    written = dict(flatten(OmegaConf.to_container(make(*words)), keep_nodes=True))
    added = {key for key in written.keys() - leaves.keys() if not f"{key}.".startswith(ours)}
    opened = ("override_config", "mixed_precision", "ray_init", "pad_to_length")  # null or free keywords there
    assert {key for key in added if not any(name in key for name in opened)} == set()


@pytest.mark.parametrize("cluster", list_choices("cluster"))
def test_the_plugin_reads_back_what_was_composed(cluster: str) -> None:
    config = compose(["preset=search", f"cluster={cluster}", "seed=3", "verl.trainer.balance_batch=false"]).config
    assert read_node(to_verl(config, OUT)) == config


def test_every_setting_is_verl_s_or_the_plugin_s() -> None:
    silent = {key for key, theirs in list_names().items() if not theirs}
    others = {key for key in RunConfig.keys() if key not in list_names()}  # noqa: SIM118 - a class method
    for key in silent | others:
        assert f"{key}".startswith(PLUGIN), f"{key} reaches nothing"
    assert {key for key, theirs in list_names().items() if theirs} >= VERL


def test_each_key_of_verl_has_one_setting() -> None:
    setters: dict[str, list[str]] = {}
    for ours, keys in list_names().items():
        for key in keys:
            setters.setdefault(key, []).append(ours)
    shared = {key: names for key, names in setters.items() if len(names) > 1}
    assert set(shared) <= {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"}, shared
    assert name_ours("actor_rollout_ref.actor.optim.lr") == "optimizer.lr"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("kl.coefficient=0.1",), {"actor_rollout_ref.actor.use_kl_loss": True}),
        (("algorithm=ppo",), {"critic.enable": True, "critic.optim.lr": 1e-5}),
        (("validation.every=null", "checkpoint.every=null"), {"trainer.test_freq": -1, "trainer.save_freq": -1}),
        (("train.tokens_per_gpu=4096",), {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096}),
        (("train.pad_tokens_to=256",), {"actor_rollout_ref.actor.fsdp_config.pad_to_length_bucket": 256}),
        (("rollout.kv_cache_gib=2",), {"actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.kv_cache_gib": 2.0}),
        (("cluster=1gpu",), {"actor_rollout_ref.rollout.dtype": "bfloat16", "trainer.device": "cuda"}),
        (("cluster=1gpu", f"seed={2**31 + 5}"), {"actor_rollout_ref.rollout.seed": 5, "data.seed": 2**31 + 5}),
        (("cluster=1gpu", "model.lora_rank=8"), {"actor_rollout_ref.model.lora.merge": False}),
        (
            ("cluster=1gpu", "model.lora_rank=8", "rollout.engine=transformers"),
            {"actor_rollout_ref.model.lora.merge": True},
        ),
        (("algorithm=ppo", "cluster=1gpu"), {"critic.fsdp.param_offload": True, "critic.fsdp.offload_policy": False}),
        (
            ("algorithm=ppo", "preset=search", "cluster=4x8gpu"),
            {"critic.fsdp.ulysses_sequence_parallel_size": 8, "critic.fsdp.fsdp_size": 8},
        ),
        (("cluster.gpus_per_node=3",), {"ray_kwargs.ray_init.num_cpus": 14, "ray_kwargs.ray_init.num_gpus": 3}),
    ],
)
def test_values_arrive(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    made = make(*words)
    assert {key: OmegaConf.select(made, key) for key in expected} == expected


# ---- keys of verl ----------------------------------------------------------------------------------------------------
def test_a_key_is_passed_on_last_and_said_where_it_replaces_ours(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = make(
            "rollout.temperature=0.5",
            "verl.actor_rollout_ref.rollout.temperature=0.7",
            "verl.trainer.balance_batch=false",
            "verl.actor_rollout_ref.rollout.engine_kwargs.vllm.anything=1",
            "verl.ray_kwargs.ray_init.runtime_env.env_vars={NCCL_DEBUG: INFO}",
        )
    assert made.actor_rollout_ref.rollout.temperature == 0.7
    assert made.trainer.balance_batch is False
    assert made.actor_rollout_ref.rollout.engine_kwargs.vllm.anything == 1
    assert made.ray_kwargs.ray_init.runtime_env.env_vars == {"NCCL_DEBUG": "INFO"}
    (line,) = caplog.messages
    assert "verl.actor_rollout_ref.rollout.temperature=0.7 replaces" in line


def test_a_file_may_pass_keys_on_nested_or_dotted(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("verl: {trainer: {balance_batch: false}, critic.optim.lr: 0.5}", "utf-8")
    made = make(str(tmp_path / "mine.yaml"))
    assert (made.trainer.balance_batch, made.critic.optim.lr) == (False, 0.5)


def test_a_key_that_verl_does_not_have_is_said() -> None:
    assert fail("verl.nonsense.key=1").startswith("verl has no key nonsense.key")
    assert "did you mean trainer.balance_batch?" in fail("verl.trainer.balance_batches=true")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("verl.trainer.balance_batch=foo", "must be true or false, not 'foo'"),
        ("verl.actor_rollout_ref.rollout.temperature=hot", "must be a number, not 'hot'"),
        ("verl.actor_rollout_ref.rollout._target_=os.system", "cannot be changed"),
        ("verl.actor_rollout_ref.rollout.n=3", "rollout.group_size"),
        ("verl.trainer=3", "is a group of settings"),
    ],
)
def test_a_value_of_another_kind_is_refused(word: str, text: str) -> None:
    assert text in fail(word)


def test_a_field_of_verl_s_classes_that_its_file_leaves_out_is_passed_on() -> None:
    made = make("verl.actor_rollout_ref.rollout.enable_sleep_mode=false")
    assert made.actor_rollout_ref.rollout.enable_sleep_mode is False
    assert "SPEAR" not in fail("verl.actor_rollout_ref.rollout.repetition_penalty=1.3")


def test_each_refusal_is_of_keys_that_verl_has(leaves: dict[str, Any]) -> None:
    """And a key of each is refused, with the reason."""
    assert len(REFUSED) <= 20
    for patterns, reason in REFUSED.items():
        refused = [key for key, value in leaves.items() if find_refusal(key) == reason and not isinstance(value, dict)]
        assert refused, patterns
        assert reason in fail(f"verl.{refused[0]}=1")
    assert find_refusal("algorithm.rollout_correction") == "set rollout.correction", "a whole node, too"


def test_a_trainer_on_a_cpu_computes_as_its_rollouts() -> None:
    key = "verl.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
    assert "set rollout.dtype" in fail(key)
    assert make("cluster=1gpu", key).actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "bf16"


# ---- correction ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": "5"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
        {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.1"},
        {"rollout_rs": "token_k2, token_k3", "rollout_rs_threshold": 0.1},
    ],
)
def test_what_makes_sense_is_taken(values: dict[str, Any]) -> None:
    made = RolloutCorrection.from_mapping(values)
    assert made.corrects and {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_is": "tokens"}, "tokens"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "2_1"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "above"),
        ({"rollout_is": "token", "rollout_is_threshold": "many"}, "many"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, "seq_max_k1"),
        ({"rollout_rs": "token_k1"}, "needs"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "0.1_0.2"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "each"),
        ({"rollout_is": "token", "bypass_mode": True}, "bypass_mode"),
    ],
)
def test_what_makes_none_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        RolloutCorrection.from_mapping(values)


@pytest.mark.parametrize(
    ("words", "level", "text"),
    [
        (["rollout.staleness=0"], None, ""),
        (["rollout.staleness=2"], "token", "2 versions old; corrected by weights of each token, cut at 2.0"),
        (["rollout.correction.rollout_is=sequence", "rollout.staleness=1"], "sequence", "each sequence"),
        (["rollout.correction.bypass_mode=true", "rollout.staleness=1"], None, "clipped ratio"),
        (
            [
                "rollout.correction.rollout_rs=token_k1",
                "rollout.correction.rollout_rs_threshold=2",
                "rollout.staleness=1",
            ],
            None,
            "token_k1",
        ),
    ],
)
def test_old_weights_are_corrected_for_unless_something_is_chosen(
    words: list[str], level: str | None, text: str
) -> None:
    rollout = resolve_machine(compose(["preset=demo", *words]).config).rollout
    assert rollout.correction.rollout_is == level
    assert text in describe_staleness(rollout.staleness, rollout.correction)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_verl_never_removes_the_only_whole_checkpoint(keep: int) -> None:
    """It removes old ones before the new one is whole; those of ours go after."""
    trainer = make("preset=demo", f"checkpoint.keep={keep}").trainer
    assert trainer.max_actor_ckpt_to_keep == trainer.max_critic_ckpt_to_keep == max(2, keep)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("cluster.gpus_per_node=4", "cluster.shard_size=3"), "shard_size=3"),
        (("cluster.memory_saving=true",), "memory_saving"),
        (("loss.policy=kl_cov", "loss.policy_options.share=2"), "share"),
        (("rollout.group_size=1",), "advantage.singleton=zero"),
        (("rollout.group_size=1", "advantage.singleton=raw", "sampling.enabled=true"), "sampling.enabled"),
        (("rollout.group_size=1", "advantage.singleton=raw", "curriculum.choice=thompson"), "curriculum.choice"),
    ],
)
def test_what_would_end_in_a_worker_is_refused_at_once(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(SpearError, match=named):
        compose(words).config.check_together()


@pytest.mark.parametrize(
    "words",
    [("cluster=4x8gpu",), ("cluster=8gpu", "cluster.memory_saving=true"), ("cluster=8gpu", "cluster.shard_size=4"),
     ("cluster=8gpu", "cluster.shard_size=16"), ("loss.policy=kl_cov", "loss.policy_options.share=1"),
     ("algorithm=ppo", "rollout.group_size=1"), ("advantage.singleton=raw", "rollout.group_size=1")],
)  # fmt: skip
def test_what_fits_together_is_taken(words: tuple[str, ...]) -> None:
    compose(words).config.check_together()
