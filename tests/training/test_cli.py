from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import yaml
from rich.console import Console

from spear_envs.cli import main
from spear_envs.core.errors import SpearError
from spear_training import runs
from tests.agents.test_metrics import train, write_launch
from tests.training.trainings import save_small_checkpoint

MODEL = "actor_rollout_ref.model.path"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``spear`` with ``arguments``."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


# ---- spear train -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("spear.sil.gama=cosine",), "did you mean spear.sil.gamma?"),
        (
            ("cluster=cup",),
            "there is no cluster 'cup'; did you mean cpu? There are 1gpu, 4x8gpu, 8gpu, cpu, cpu_vllm",
        ),
        ((), "no model: pass actor_rollout_ref.model.path=FOLDER"),
        ((f"{MODEL}=/no/such",), "the model folder /no/such does not exist"),
        (("prset=demo",), "did you mean preset?"),
        (("--dry-run",), "a dry run is model=tiny"),
        (("--overwrite",), "'--overwrite' is not an option: --help lists them"),
        (("spear.sil.gamma=cosin", f"{MODEL}=MODEL"), "did you mean cosine?"),
        (("trainer.total_training_steps=ten", f"{MODEL}=MODEL"), "must be a number"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    overrides: tuple[str, ...],
    expected: str,
) -> None:
    given = [override.replace("MODEL", str(model_folder)) for override in overrides]
    code, out, err = call(capsys, "train", "--out", str(tmp_path / "run"), *given)
    assert code == 1 and out == ""
    assert err.startswith("Error: ") and expected in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.mark.parametrize("choices", [(), ("preset=demo",), ("preset=math_qwen3_32b_16k", "cluster=4x8gpu")])
def test_the_configuration_can_be_printed_without_a_model(
    capsys: pytest.CaptureFixture[str], choices: tuple[str, ...]
) -> None:
    code, out, _ = call(capsys, "train", *choices, "--print-config", "spear.seed=7")
    assert code == 0
    config = yaml.safe_load(out)
    assert config["spear"]["seed"] == 7
    assert {"spear", "actor_rollout_ref", "trainer", "data"} <= set(config)


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
    from spear_agents.metrics import read_history

    observer([])
    observer(read_history(out))
    save_small_checkpoint(out, 2)


def run(tmp_path: Path, model_folder: Path, *overrides: str) -> str:
    console, path = open_console(tmp_path)
    given = (f"{MODEL}={model_folder}", "trainer.total_training_steps=2", *overrides)
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


def test_the_same_command_after_the_end_trains_no_more(tmp_path: Path, model_folder: Path, training: Any) -> None:
    calls = training(finish)
    run(tmp_path, model_folder)
    assert "has its 2 steps already" in run(tmp_path, model_folder)
    assert len(calls) == 1


def test_more_steps_resume_after_the_last_checkpoint(tmp_path: Path, model_folder: Path, training: Any) -> None:
    training(finish)
    run(tmp_path, model_folder)
    calls = training(lambda *_: None)
    assert "after step 2" in run(tmp_path, model_folder, "trainer.total_training_steps=4")
    assert len(calls) == 1


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, model_folder: Path, training: Any) -> None:
    def stop(out: Path, device: str, observer: Any) -> None:
        write_launch(out, 0, train(1, **{"perf/step_seconds": 1.0}))
        raise KeyboardInterrupt

    training(stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model_folder)
    assert "stopped after step 1; the same command resumes it" in (tmp_path / "console.txt").read_text()


def test_a_failure_of_the_training_reaches_the_user(tmp_path: Path, model_folder: Path, training: Any) -> None:
    def fail(out: Path, device: str, observer: Any) -> None:
        raise SpearError("the training stopped: no space (log: x)")

    training(fail)
    with pytest.raises(SpearError, match="no space"):
        run(tmp_path, model_folder)


# ---- spear demo ------------------------------------------------------------------------------------------------------
def test_the_demo_takes_its_steps_from_the_environment_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPEAR_DEMO_STEPS", raising=False)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("spear_training.demo.run_demo", lambda out, **options: calls.append({"out": out, **options}))
    call(capsys, "demo", "--out", str(tmp_path), "--seed", "3")
    monkeypatch.setenv("SPEAR_DEMO_STEPS", "5")
    call(capsys, "demo", "--out", str(tmp_path))
    assert [(made["steps"], made["seed"]) for made in calls] == [(60, 3), (5, 0)]
    assert {made["out"] for made in calls} == {tmp_path}


def test_a_demo_of_no_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "demo", "--steps", "0")
    assert code == 2 and "--steps" in err
