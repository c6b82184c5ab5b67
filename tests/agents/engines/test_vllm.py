"""How vLLM is asked for and what is made of its words; nothing here starts it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from spear_agents.engines import vllm_options
from spear_agents.engines.vision import fold_places
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.engines.vllm_options import EngineLog, VLLMOptions, read_dtype, read_lora_rank, size_cpu_cache
from spear_agents.evaluation.options import add_playing_options, make_settings
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_envs.core.errors import SpearError

WORKER_DIES = """\
(EngineCore pid=7) INFO 11-21 23:12:56 [kernel.py:408] Loading.
(Worker pid=8) ERROR 11-21 23:12:57 [multiproc_executor.py:948] WorkerProc failed to start.
(Worker pid=8) ERROR 11-21 23:12:57 [multiproc_executor.py:948] Traceback (most recent call last):
(Worker pid=8) ERROR 11-21 23:12:57 [multiproc_executor.py:948] ValueError: Head size 16 is not supported.
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Exception: WorkerProc initialization failed. See stack trace for the root cause.
"""


@pytest.fixture
def engine_log() -> Iterator[EngineLog]:
    log = EngineLog(is_wanted=True)
    yield log
    assert log.path is not None
    shutil.rmtree(log.path.parent, ignore_errors=True)


def write_output(log: EngineLog, text: str) -> None:
    with log.take_output():
        subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write({text!r})"], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"dtype": "int8"}, "float32, bfloat16"),
        ({"gpu_memory_utilization": 1.5}, "share"),
        ({"kv_cache_gib": 0.0}, "above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        VLLMOptions(**options)


def test_folders_without_a_model_or_an_adapter_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(vllm_options, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(SpearError, match=r"does not contain config\.json"):
        VLLMEngine(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpearError, match="is not a LoRA adapter"):
        VLLMEngine(tmp_path, VLLMOptions(lora=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1000}))
    with pytest.raises(SpearError, match="rank 1000"):
        VLLMEngine(tmp_path, VLLMOptions(lora=str(tmp_path)))


def test_vllm_is_sent_one_token_for_each_picture() -> None:
    assert fold_places([1, 7, 7, 7, 2, 3, 3, 1, 7, 2, 7], 7) == [1, 7, 2, 3, 3, 1, 7, 2, 7]
    assert fold_places([], 7) == [] and fold_places((7, 7), 7) == [7]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (100, 128)])
def test_room_is_made_for_the_rank_of_an_adapter(tmp_path: Path, rank: int, room: int) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert read_lora_rank(str(tmp_path)) == room


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "float32"),
    ],
)
def test_the_computation_is_of_the_type_of_the_weights(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_dtype(tmp_path) == dtype


MODEL = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
"""A token of it takes 2 (keys, values) x 30 x 3 x 64 x 2 bytes = 23,040 in bfloat16."""


@pytest.mark.parametrize(
    ("config", "options", "free", "gib"),
    [
        ({"max_position_embeddings": 8192}, {"dtype": "bfloat16"}, 2**40, 64 * 8192 * 23_040 / 2**30),
        ({"max_position_embeddings": 8192}, {}, 2**40, 64 * 8192 * 46_080 / 2**30),
        ({"max_position_embeddings": 8192, "dtype": "bfloat16"}, {}, 8 * 2**30, 4.0),
        ({"max_position_embeddings": 8192}, {"tensor_parallel": 2}, 8 * 2**30, 2.0),
        ({"max_position_embeddings": 8192}, {"max_model_len": 64}, 2**40, 1.0),
        ({"max_position_embeddings": 8192}, {}, 2**30, 1.0),
        ({}, {}, 8 * 2**30, 4.0),
        ({"head_dim": 128, "max_position_embeddings": 8192}, {}, 2**40, 64 * 8192 * 92_160 / 2**30),
    ],
)
def test_the_cache_of_a_cpu_is_what_the_contexts_need_and_the_memory_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    options: dict[str, Any],
    free: int,
    gib: float,
) -> None:
    monkeypatch.setattr(vllm_options, "find_free_memory", lambda: free)
    for written in (MODEL | config, {"text_config": MODEL | config}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert size_cpu_cache(tmp_path, VLLMOptions(**options), 64) == pytest.approx(gib)
    (tmp_path / "config.json").write_text("{}")
    assert size_cpu_cache(tmp_path, VLLMOptions(), 64, 0.25) == pytest.approx(max(1, free / 2**32))


def read_options(*words: str) -> EvalSettings:
    """The settings of a command line."""
    import click

    found: list[EvalSettings] = []

    @click.command()
    @add_playing_options()
    def command(**options: Any) -> None:
        options.pop("concurrency")
        found.append(make_settings("spear/Sokoban-v1", options))

    command.main([*words], standalone_mode=False)
    return found[0]


def test_options_of_the_command_line_reach_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = ("--model", str(tmp_path))
    settings = read_options(
        *("--engine", "vllm", *model, "--lora", "l", "--dtype", "bfloat16", "--tensor-parallel", "2"),
        *("--max-model-len", "512", "--gpu-memory-utilization", "0.5", "--kv-cache-gib", "2.5"),
    )
    assert settings.engine is EngineKind.VLLM
    assert settings.vllm == VLLMOptions(2, "l", "bfloat16", 512, 0.5, 2.5)
    assert read_options("--engine", "vllm", *model).vllm == VLLMOptions()
    assert read_options("--engine", "random").vllm is None
    plain = read_options(*model, "--dtype", "bfloat16")
    assert (plain.engine, plain.dtype, plain.vllm) == (EngineKind.HF, "bfloat16", None)
    with pytest.raises(SpearError, match="--tensor-parallel is for vLLM"):
        read_options("--engine", "random", "--tensor-parallel", "2")
    with pytest.raises(SpearError, match="engine vllm needs a model folder"):
        read_options("--engine", "vllm")


def test_what_changes_figures_makes_another_evaluation(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    settings = EvalSettings("e", EngineKind.VLLM, model=str(tmp_path / "model"), vllm=VLLMOptions())
    assert settings.resolve("test", ["default", "compact"]).template == "default"
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}')
    assert settings.resolve("test", ["default", "compact"]).template == "compact"

    def identify(**options: Any) -> dict[str, Any]:
        return replace(settings, vllm=VLLMOptions(**options)).identify("print")

    assert identify(tensor_parallel=2, kv_cache_gib=4.0, gpu_memory_utilization=0.5) == identify()
    assert len({json.dumps(identify(**one)) for one in ({}, {"dtype": "bfloat16"}, {"max_model_len": 9})}) == 3
    plain = replace(settings, engine=EngineKind.HF, vllm=None)
    assert replace(plain, dtype="bfloat16").identify("print") != plain.identify("print")
    for wrong in ({"dtype": "int8"}, {"engine": EngineKind.RANDOM, "dtype": "bfloat16"}):
        with pytest.raises(SpearError, match="only engine hf takes one"):
            replace(plain, **wrong)
    with_adapter = identify(lora=str(tmp_path / "adapter"))
    assert with_adapter != identify()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert identify(lora=str(tmp_path / "adapter")) != with_adapter


def test_the_cause_of_a_failure_is_found_in_the_output(
    engine_log: EngineLog, capfd: pytest.CaptureFixture[str]
) -> None:
    assert engine_log.find_cause() is None
    write_output(engine_log, WORKER_DIES)
    assert engine_log.find_cause() == "ValueError: Head size 16 is not supported."
    assert not engine_log.is_out_of_memory()
    write_output(engine_log, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert engine_log.is_out_of_memory()
    assert (engine_log.find_cause() or "").startswith("torch.OutOfMemoryError")
    assert capfd.readouterr() == ("", "")
    assert str(engine_log.path) in engine_log.keep()
    engine_log.close()
    assert engine_log.path is not None and engine_log.path.exists()


def test_vllm_ends_with_the_process_that_owns_it() -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None
    from spear_agents.engines.vllm_worker import WorkerExtension

    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    owner, core = subprocess.Popen(sleep), subprocess.Popen(sleep)
    try:
        assert WorkerExtension().end_with(owner.pid, core.pid) == os.getpid()
        owner.kill()
        owner.wait(10)
        assert core.wait(10) == -signal.SIGTERM
    finally:
        for process in (owner, core):
            process.kill()
            process.wait()


def test_output_comes_back_and_the_file_goes(engine_log: EngineLog, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), engine_log.take_output():
        raise ZeroDivisionError
    os.write(2, b"here again")
    assert capfd.readouterr().err == "here again"
    engine_log.close()
    assert engine_log.path is not None and not engine_log.path.parent.exists()
