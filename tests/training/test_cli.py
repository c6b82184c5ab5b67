"""``spear train`` and its neighbours: mistakes, listings, exports, completion, and earlier folders."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("omegaconf", reason="needs the extra 'train'")

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import save_file

from spear_envs.cli import main
from spear_envs.core.errors import SpearError
from spear_training.run import training as runs
from spear_training.run.checkpoints import FORMAT, finish_checkpoint, keep_best, read_state, write_state
from spear_training.run.compose import compose
from spear_training.run.config import RunConfig
from spear_training.run.launch import read_run
from spear_training.run.store import export_policy
from spear_training.run.to_verl import read_node
from spear_training.run.training import read_progress
from tests.agents.test_cli import train, write_launch
from tests.spear_envs.test_completion import ask_line
from tests.training.trainings import save_small_checkpoint

MODEL = "model.path"
QWENS = ("2.5_32b_16k", "2.5_32b_32k", "3_32b_16k", "3_32b_32k")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``spear`` with ``arguments``."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


# ---- spear train -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sil.gama=cosine",), "did you mean sil.gamma?"),
        (("cluster=cup",), "there is no cluster 'cup'; did you mean cpu? There are 1gpu"),
        ((), "no model: pass model.path=FOLDER"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    words: tuple[str, ...],
    expected: str,
) -> None:
    given = [word.replace("MODEL", str(model_folder)) for word in words]
    code, out, err = call(capsys, "train", "--out", str(tmp_path / "run"), *given)
    assert code == 1 and out == ""
    assert err.startswith("Error: ") and expected in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.mark.parametrize("choices", [(), ("preset=demo",), ("preset=math_qwen3_32b_16k", "cluster=4x8gpu")])
def test_the_configuration_can_be_printed_without_a_model(
    capsys: pytest.CaptureFixture[str], choices: tuple[str, ...]
) -> None:
    code, out, _ = call(capsys, "train", *choices, "--print-config", "seed=7")
    config = RunConfig.from_mapping(yaml.safe_load(out))
    assert code == 0 and config == compose([*choices, "seed=7"]).config and config.seed == 7
    code, out, _ = call(capsys, "train", *choices, "--print-verl", "seed=7", "verl.trainer.esi_redundant_time=9")
    verl = OmegaConf.create(out)
    assert code == 0 and read_node(verl).seed == verl.data.seed == 7 and verl.trainer.esi_redundant_time == 9


def test_settings_choices_and_the_schema_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "train", "--describe", "rollout.group_size")
    assert out.splitlines()[0] == "rollout.group_size = 8  (whole number from 1)" and len(out.splitlines()) == 2
    _, out, _ = call(capsys, "train", "--describe", "all")
    assert {line.split()[0] for line in out.splitlines() if " = " in line} == set(RunConfig.keys())
    code, _, err = call(capsys, "train", "--describe", "rolout")
    assert code == 1 and "there is no node 'rolout': take all, or model, env, rollout" in err
    _, out, _ = call(capsys, "train", "--list")
    assert {"preset", "  demo", "  4x8gpu", "  tiny_vl"} <= {line[:26].rstrip() for line in out.splitlines()}
    _, out, _ = call(capsys, "train", "--schema")
    properties = json.loads(out)["properties"]
    assert {"extends", "choose", "rollout", "seed"} <= set(properties)
    _, out, _ = call(capsys, "train", "--help")
    assert "rollout.*" in out and "seed" in out


# ---- what the command does around the training -----------------------------------------------------------------------
Training = Callable[[Path, str, Any], None]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[Training], list[Path]]:
    """Replaces the supervised process by a function; returns the run folders it was called with."""

    def install(function: Training) -> list[Path]:
        calls: list[Path] = []

        def run_training(out: Path, device: str, observer: Any, **_: Any) -> None:
            calls.append(out)
            function(out, device, observer)

        monkeypatch.setattr(runs, "supervise_training", run_training)
        return calls

    return install


def open_console(tmp_path: Path) -> tuple[Console, Path]:
    path = tmp_path / "console.txt"
    return Console(file=path.open("w"), width=200, color_system=None), path


def finish(out: Path, device: str, observer: Any) -> None:
    """A training of two steps that leaves a checkpoint."""
    write_launch(
        out,
        len(list(out.glob("metrics/*"))),
        (0, {"val/success/all": 0.25}),
        train(1, **{"success/all": 0.5, "perf/step_seconds": 1.5, "entropy/token-mean": 0.7}),
        train(2, **{"perf/step_seconds": 1.5, "entropy/token-mean": None}),
    )
    from spear_agents.evaluation.records import read_history

    observer([])
    observer(read_history(out))
    save_small_checkpoint(out, 2)


def run(tmp_path: Path, model_folder: Path, *words: str) -> str:
    console, path = open_console(tmp_path)
    given = (f"{MODEL}={model_folder}", "train.steps=2", *words)
    try:
        runs.run_training(("preset=demo", *given), tmp_path / "run", console)
    finally:
        console.file.close()
    return path.read_text()


def test_a_run_ends_with_its_curves(tmp_path: Path, model_folder: Path, training: Any) -> None:
    calls = training(finish)
    text = run(tmp_path, model_folder)
    assert [path.name for path in calls] == ["run"]
    assert (tmp_path / "run" / "curves.png").is_file() and "curves.png" in text
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_more_steps_resume_after_the_last_checkpoint(tmp_path: Path, model_folder: Path, training: Any) -> None:
    training(finish)
    run(tmp_path, model_folder)
    calls = training(lambda *_: None)
    assert "after step 2" in run(tmp_path, model_folder, "train.steps=4")
    assert len(calls) == 1


def test_a_last_step_without_metrics_or_curves_gets_them(tmp_path: Path, model_folder: Path, training: Any) -> None:
    """A run may be killed after its last checkpoint, while it validates, and before its curves are drawn."""
    training(finish)
    run(tmp_path, model_folder)
    (metrics,) = (tmp_path / "run" / "metrics").iterdir()
    curves = tmp_path / "run" / "curves.png"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    calls = training(lambda *_: None)
    run(tmp_path, model_folder)
    assert len(calls) == 1, "the process that logs the step is started"
    metrics.write_text(whole)
    curves.unlink()
    assert "has its 2 steps already" in run(tmp_path, model_folder)
    assert len(calls) == 1 and curves.is_file()


def test_a_finished_run_can_be_validated(tmp_path: Path, model_folder: Path, training: Any) -> None:
    training(finish)
    run(tmp_path, model_folder)
    calls = training(lambda *_: None)
    run(tmp_path, model_folder, "validation.only=true")
    assert len(calls) == 1


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, model_folder: Path, training: Any) -> None:
    def stop(out: Path, device: str, observer: Any) -> None:
        write_launch(out, 0, train(1, **{"perf/step_seconds": 1.0}))
        raise KeyboardInterrupt

    training(stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model_folder)
    assert "stopped after step 1; the same command resumes it" in (tmp_path / "console.txt").read_text()


def test_a_policy_made_for_other_settings_is_made_anew_unless_a_checkpoint_holds_it(
    tmp_path: Path, model_folder: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make_policy(settings: Any, folder: Path, console: Console) -> None:
        made.append(settings.env_id)
        shutil.copytree(model_folder, folder)

    def begin(preset: str, *words: str) -> None:
        console, _ = open_console(tmp_path)
        runs.run_training((f"preset={preset}", "model=tiny", *words), tmp_path / "run", console)

    monkeypatch.setattr(runs, "make_policy", make_policy)
    training(lambda *_: None)
    begin("demo")
    begin("demo")
    assert made == ["spear/Sokoban-v1"]
    begin("alfworld_tiny")
    assert made == ["spear/Sokoban-v1", "spear/ALFWorld-v0"]


# ---- spear demo ------------------------------------------------------------------------------------------------------


def save_policy(run: Path, step: int, *, value: float = 1.0) -> Path:
    """A checkpoint whose policy is whole, as on a CPU."""
    folder = save_small_checkpoint(run, step)
    whole = folder / "actor" / "huggingface"
    whole.mkdir()
    save_file({"a": torch.full((2, 3), value), "b": torch.ones(4)}, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    finish_checkpoint(folder)
    return folder


def test_the_latest_the_best_or_a_given_step_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        keep_best(save_policy(run, step), "success/all", {1: 0.2, 2: 0.9, 3: 0.5}[step])
    for number, (options, step) in enumerate((({}, 3), ({"best": True}, 2), ({"step": 1}, 1))):
        made = export_policy(run, tmp_path / f"out{number}", **options)
        assert (made.step, made.parameters, made.dtypes) == (step, 10, ("F32",))
        assert {path.name for path in made.folder.iterdir()} == {"model.safetensors", "config.json"}
        assert json.loads((made.folder / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}


@pytest.mark.parametrize(("played", "dtype"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("auto", "float32")])
def test_an_exported_policy_computes_as_its_rollouts_did(tmp_path: Path, played: str, dtype: str) -> None:
    run = tmp_path / "run"
    save_policy(run, 1)
    (run / "config.yaml").write_text(yaml.safe_dump({"rollout": {"dtype": played}}))
    made = export_policy(run, tmp_path / "out")
    assert made.dtype == dtype and json.loads((made.folder / "config.json").read_text())["dtype"] == dtype
    assert made.dtypes == ("F32",), "for another training the weights keep their precision"


def test_what_cannot_be_exported_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with pytest.raises(SpearError, match="a complete checkpoint yet"):
        export_policy(run, out)
    with pytest.raises(SpearError, match="does not contain a best checkpoint"):
        export_policy(run, out, best=True)
    folder = save_policy(run, 2)
    with pytest.raises(SpearError, match="of step 7, only of 2"):
        export_policy(run, out, step=7)
    with pytest.raises(SpearError, match="exists: choose another"):
        export_policy(run, run)
    (folder / "actor" / "huggingface" / "config.json").unlink()
    with pytest.raises(SpearError, match="is missing"):
        export_policy(run, out)
    finish_checkpoint(folder)
    with pytest.raises(SpearError, match=r"lacks weights in safetensors or config\.json"):
        export_policy(run, out)
    (folder / "actor" / "huggingface" / "model.safetensors").write_bytes(b"torn")
    (folder / "actor" / "huggingface" / "config.json").write_text("{}")
    finish_checkpoint(folder)
    with pytest.raises(SpearError, match="cannot be read"):
        export_policy(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("content", ["[]", "null", '"a"', "{", "[" * 100_000])
def test_a_checkpoint_with_a_damaged_configuration_is_one_error(tmp_path: Path, content: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    folder = save_policy(run, 2)
    (folder / "actor" / "huggingface" / "config.json").write_text(content)
    finish_checkpoint(folder)
    with pytest.raises(SpearError, match=f"the policy in {folder} cannot be read"):
        export_policy(run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("content", ["[" * 5_000, "rollout: [1]", "rollout: {dtype: [a]}", "- 1"])
def test_the_type_of_the_weights_stands_in_for_a_run_without_one(tmp_path: Path, content: str) -> None:
    save_policy(tmp_path / "run", 1)
    (tmp_path / "run" / "config.yaml").write_text(content)
    assert export_policy(tmp_path / "run", tmp_path / "out").dtype == "float32"


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    folder = save_policy(run, 2)
    (folder / "actor" / "huggingface" / "big.json").write_bytes(b"x" * 200_000)
    finish_checkpoint(folder)
    write_state(tmp_path / "state", {"format": FORMAT, "a": np.zeros(3)})
    request.getfixturevalue("full_disk")
    with pytest.raises(SpearError, match="File too large"):
        export_policy(run, out)
    with pytest.raises(SpearError, match=r"cannot be written .*File too large"):
        write_state(tmp_path / "state", {"format": FORMAT, "a": np.zeros(100_000)})
    assert read_state(tmp_path / "state")["a"].shape == (3,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "state"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("algorithm=drbot_g", {"drbot_gigpo", "drbot_gigpo_sil", "drbot_gigpo_spear"}),
        ("rollout.top", {"rollout.top_p=", "rollout.top_k="}),
        ("preset=official/math_q", {f"official/math_qwen{kind}" for kind in QWENS}),
    ],
)
def test_groups_choices_and_keys_are_completed(line: str, expected: set[str]) -> None:
    assert set(ask_line(f"spear train {line}")) == expected


@pytest.mark.parametrize(
    "content",
    [b"engine: {strategy: fsdp2}", b"data: {}", b"[", b"\xff\xfe", b"a: b: c", b"[1]", b"seed: -1", b"", b"3"],
)
def test_a_folder_of_another_kind_of_run_or_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(SpearError, match=r"config\.yaml is not .* a training .*: name another folder") as found:
        read_run(tmp_path)
    assert "\n" not in str(found.value)


def test_the_progress_is_that_of_the_last_step() -> None:
    assert read_progress([{"step": 0}]) is None
    steps = [{"step": n, "training/global_step": n, "success/all": n / 10, "perf/step_seconds": n} for n in (1, 2)]
    assert read_progress([{"val/success/all": 0.5}, *steps]) == (2, "success 20% · valid 50% · 2.0 s/step")


WRONG = {
    "no model": ("preset=demo",),
    "did you mean trainer.v1": ("preset=demo", "model=tiny", "verl.trainer.v1.foo=1"),
    "did you mean optimizer.lr": ("preset=demo", "optimizer.lrr=1"),
    "does not exist": ("preset=demo", "model.path=nowhere"),
    "raise train.tokens_per_gpu": ("preset=demo", "model.path=nowhere", "train.tokens_per_gpu=1"),
    "needs the package clearml": ("preset=demo", "model.path=nowhere", "log.to=[clearml]"),
    "would train without SPEAR": ("preset=demo", "model.path=nowhere", "verl.trainer.v1.trainer_mode=sync"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_settings_are_answered_before_torch_is_imported(reason: str, tmp_path: Path) -> None:
    code = (
        "import sys; from spear_envs.cli import main\n"
        "try: main()\nfinally: print('imported:', 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "train", *WRONG[reason], "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1 and reason in done.stderr and "imported: False" in done.stderr
    assert not (tmp_path / "run").exists()
