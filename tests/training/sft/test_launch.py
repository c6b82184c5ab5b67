import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from rich.console import Console

from spear_agents.evaluation.records import METRICS_FOLDER
from spear_envs.core.errors import SpearError
from spear_training.run import computing as precision
from spear_training.sft import launch
from spear_training.sft.launch import (
    SftSettings,
    choose_keys,
    complete_keys,
    count_steps,
    find_files,
    read_tuning,
    run_sft,
)
from tests.training.sft.conftest import write_lines

QUIET = Console(quiet=True)
LINE = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "won": True}


@pytest.fixture
def model(tokenizer: Any, tmp_path: Path) -> Path:
    """A folder that says all that is read before a training starts."""
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    sizes = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 64, "hidden_size": 16}
    sizes |= {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def compose_sft(settings: SftSettings, out: Path, facts: dict[str, Any], longest: int) -> Any:
    return complete_keys(choose_keys(settings), settings, out, facts, longest)


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> SftSettings:
    return SftSettings(model, (write_lines(tmp_path / "data.jsonl", *[LINE] * 10),), batch=4, epochs=3)


def test_the_configuration_is_verls_with_our_numbers(settings: SftSettings, tmp_path: Path) -> None:
    plain = SftSettings(settings.model, settings.data)
    config = compose_sft(plain, tmp_path, {"samples_digest": "a"}, 20_000)
    assert (config.data.train_batch_size, config.trainer.total_epochs, config.data.max_length) == (32, 1, 16384)
    assert config.trainer.device == "cpu" and config.engine.strategy == "fsdp2"
    assert config.data.max_token_len_per_gpu == 20_000, "a micro-batch holds the longest sample"
    assert config.spear.samples_digest == "a"
    shared = replace(plain, overrides=("engine.ulysses_sequence_parallel_size=2",))
    assert compose_sft(shared, tmp_path, {}, 40_001).data.max_token_len_per_gpu == 20_001, "of each of two ranks"
    gpu = compose_sft(replace(plain, device="cuda", overrides=("optim.lr=3e-6",)), tmp_path, {}, 5)
    assert gpu.trainer.device == "cuda" and gpu.model.use_remove_padding and gpu.optim.lr == 3e-6


def test_a_preset_is_the_authors_cold_start_and_options_go_before_it(settings: SftSettings, tmp_path: Path) -> None:
    retool = SftSettings(settings.model, settings.data, preset="retool")
    config = compose_sft(retool, tmp_path, {}, 5)
    assert (config.data.train_batch_size, config.optim.lr, config.data.max_length) == (32, 1e-5, 16384)
    assert count_steps(config, 2_000) == (62, 372), "the step that the authors' trainings start from"
    assert (list(config.optim.betas), config.optim.min_lr_ratio) == ([0.9, 0.95], 0)
    changed = compose_sft(replace(retool, epochs=2, overrides=("optim.min_lr_ratio=0.5",)), tmp_path, {}, 5)
    assert (changed.trainer.total_epochs, changed.optim.min_lr_ratio) == (2, 0.5)


def test_data_is_a_file_or_the_name_of_what_was_fetched(
    settings: SftSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    named = Path("retool-sft")
    with pytest.raises(SpearError, match="'spear data get code retool-sft' fetches it"):
        find_files([named])
    fetched = tmp_path / "data" / "code" / "retool-sft" / "a.parquet"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(b"")
    assert find_files([*settings.data, named]) == [*settings.data, fetched]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "did you mean optim.lr?"),
        ("optim.lr=fast", "optim.lr must be a number, not 'fast'"),
        ("optim.lr=.nan", "optim.lr=nan must be a finite number"),
        ("optim.lr=${oc.env:HOME}", "is not resolved"),
        ("trainer.balance_batch=maybe", "trainer.balance_batch must be true or false, not 'maybe'"),
        ("optim=3", "optim must be a mapping of settings, not 3"),
        ("data.train_batch_size=[1", "cannot be read as YAML"),
        ("xyzzy=1", "'xyzzy' is not a key of the configuration; sft_trainer_engine.yaml in .* lists all keys"),
        ("fast", "'fast' is neither an option nor KEY=VALUE"),
        ("data.train_batch_size=0", "data.train_batch_size must be a whole number from 1, not 0"),
        ("data.max_length=-5", "data.max_length must be"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node must be"),
        ("trainer.max_ckpt_to_keep=-1", "trainer.max_ckpt_to_keep must be"),
        ("trainer.save_freq=0", "trainer.save_freq must be"),
        ("trainer.total_epochs=1.5", "trainer.total_epochs must be"),
        ("trainer.nnodes=2", "trainer.nnodes can only be 1 here"),
        ("engine.strategy=megatron", "engine.strategy can only be fsdp2 or fsdp here, not 'megatron'"),
    ],
)
def test_an_override_that_cannot_be_is_said(
    settings: SftSettings, tmp_path: Path, override: str, expected: str
) -> None:
    with pytest.raises(SpearError, match=expected):
        compose_sft(replace(settings, overrides=(override,)), tmp_path, {}, 5)


def test_steps_are_whole_batches(settings: SftSettings, tmp_path: Path) -> None:
    def count(samples: int, *overrides: str) -> tuple[int, int]:
        return count_steps(compose_sft(replace(settings, overrides=overrides), tmp_path, {}, 5), samples)

    assert count(4) == (1, 3) and count(11) == (2, 6)
    assert count(11, "trainer.n_gpus_per_node=2") == (2, 6)
    assert count(9, "trainer.n_gpus_per_node=4") == (2, 6)
    shared = ("trainer.n_gpus_per_node=4", "engine.ulysses_sequence_parallel_size=2", "data.train_batch_size=2")
    assert count(9, *shared) == (4, 12), "two pairs of ranks with a sample each"
    with pytest.raises(SpearError, match="sequence_parallel_size=2 does not divide"):
        count(9, "trainer.n_gpus_per_node=3", shared[1])
    with pytest.raises(SpearError, match=r"3 samples are less than one batch of 4: .* lower --batch"):
        count(3)
    with pytest.raises(SpearError, match="a batch of 4 does not divide over 3 ranks"):
        count(40, "trainer.n_gpus_per_node=3")


def test_a_run_is_that_of_its_settings_data_and_model(
    settings: SftSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, runs = tmp_path / "run", []

    def train(folder: Path, device: str, observer: Any, module: str, threads: int, locked: bool) -> None:
        runs.append((device, module))
        steps = len((folder / "metrics").mkdir(exist_ok=True) or "123456")
        lines = [json.dumps({"step": n, "data": {"train/loss": 1 / n, "train/lr": 1e-5}}) for n in range(1, steps + 1)]
        (folder / METRICS_FOLDER / "0000.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "checkpoints" / "global_step_6" / "huggingface").mkdir(parents=True)

    monkeypatch.setattr(launch, "supervise_training", train)
    assert run_sft(settings, out, QUIET) == out / "model"
    assert runs == [("cpu", "spear_training.sft.launch")]
    report = json.loads((out / "sft.json").read_text())
    assert report["steps"] == 6 and report["losses"][0] == 1.0 and report["samples"]["samples"] == 10
    assert run_sft(settings, out, QUIET) == out / "model" and len(runs) == 1, "it has its steps already"
    with pytest.raises(SpearError, match=r"optim.lr was 1e-05, is now 0\.1"):
        run_sft(replace(settings, learning_rate=0.1), out, QUIET)
    with pytest.raises(SpearError, match=r"another configuration: spear.samples_digest"):
        run_sft(replace(settings, data=(write_lines(tmp_path / "b.jsonl", *[LINE] * 9),)), out, QUIET)
    (settings.model / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{ }")
    with pytest.raises(SpearError, match=r"another configuration: spear.model_digest"):
        run_sft(settings, out, QUIET)


@pytest.mark.parametrize("content", [b"", b"train: {steps: 3}", b"[", b"\xff\xfe", b"a: b: c", b"[1]"])
def test_a_folder_of_another_kind_of_run_or_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(SpearError, match="fine-tuning") as found:
        read_tuning(tmp_path)
    assert "\n" not in str(found.value)


def test_the_type_of_a_fine_tuning_is_chosen_by_cpu_and_model(
    settings: SftSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "prefers_bfloat16", lambda: True)

    def compose(**changes: Any) -> Any:
        return compose_sft(replace(settings, **changes), tmp_path / "run", {}, 5).engine.get("mixed_precision")

    assert compose().param_dtype == "float32", "a tiny model"
    assert compose(dtype="bfloat16").param_dtype == "bfloat16" and compose().reduce_dtype == "fp32"
    with (settings.model / "model.safetensors").open("wb") as file:
        file.truncate(precision.TINY)
    assert compose().param_dtype == "bfloat16"
    assert compose(overrides=("engine.mixed_precision.param_dtype=float32",)).param_dtype == "float32"
    assert compose(device="cuda") is None
    with pytest.raises(SpearError, match="--dtype float32 is for a CPU"):
        compose(device="cuda", dtype="float32")
