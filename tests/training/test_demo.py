"""The demo with scripted players for policies and a function for the training: its stages, and what comes out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("matplotlib", reason="needs the extra 'train'")

from PIL import Image
from rich.console import Console

from spear_agents.evaluation.run import SUMMARY
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.models import digest_model
from spear_envs.core.errors import SpearError
from spear_training import demo
from spear_training.run.compose import compose
from spear_training.run.launch import prepare_training
from tests.agents.test_cli import train, write_launch
from tests.training.conftest import TINY_CONFIG

TASKS = 4


class Stage:
    """What the demo did, and the stand-ins it did it with."""

    def __init__(self) -> None:
        self.policies = 0
        self.trainings: list[tuple[str, ...]] = []
        self.evaluations: list[str] = []

    def make_policy(self, recipe: object, folder: Path, console: Console) -> None:
        self.policies += 1
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(TINY_CONFIG))

    def run_training(self, words: tuple[str, ...], out: Path, console: Console) -> None:
        config = prepare_training(compose(words), out).config
        assert Path(str(config.model.path)) == out.resolve().parent / "warmstart"
        self.trainings.append(words)
        steps = config.train.steps
        for older in (out / "checkpoints").glob("global_step_*"):  # a longer training keeps its newest checkpoints
            if int(older.name.rpartition("_")[2]) < steps:
                shutil.rmtree(older)
        write_launch(out, 0, *(train(t, **{"perf/step_seconds": float(t)}) for t in range(1, steps + 1)))
        Image.new("RGB", (4, 4)).save(out / "curves.png")
        if not any((out / "checkpoints").glob("global_step_*")):
            (out / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface").mkdir(parents=True)

    def settings(self, model: Path, temperature: float, size: demo.DemoSize) -> EvalSettings:
        """The warm start plays at random, the trained policy as the expert does."""
        self.evaluations.append(model.name)
        kind = EngineKind.EXPERT if "checkpoints" in model.parts else EngineKind.RANDOM
        plain = EvalSettings(demo.ENV_ID, engine=kind, env_kwargs=demo.ENV_KEYWORDS, tasks=str(TASKS))
        return replace(plain, episodes_per_task=size.samples, temperature=temperature, history=0)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(demo, "make_policy", made.make_policy)
    monkeypatch.setattr(demo, "_settings", made.settings)
    monkeypatch.setattr(demo, "run_training", made.run_training)
    return made


def play(out: Path, steps: int | None = 3, seed: int = 1, size: demo.DemoSize = demo.FULL) -> str:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "console.txt"
    with path.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=200, color_system=None)
        demo.run_demo(out, steps=steps, seed=seed, size=size, console=console)
    return path.read_text(encoding="utf-8")


def test_the_demo_leaves_a_table_curves_and_a_picture(tmp_path: Path, stage: Stage) -> None:
    text = play(tmp_path / "demo")
    out = tmp_path / "demo"
    assert [line.split()[0] for line in text.splitlines() if line[1:3] == "/5"] == [f"{n}/5" for n in range(1, 6)]
    for name in ("curves.png", "episode.gif", "results.md"):
        assert (out / name).is_file() and name in text
    assert set(stage.trainings[0][2:]) == {
        "train.steps=3",
        "seed=1",
        "rollout.correction.bypass_mode=true",
        "rollout.temperature=0.7",
    }

    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 3 and results["step_seconds_median"] == 2.0
    assert set(results["comparison"]) == {"1", "0.4"}
    comparison = results["comparison"]["1"]
    assert comparison["after"]["mean"] == 1.0, "the expert solves all"
    assert comparison["difference"]["mean"] == pytest.approx(1.0 - comparison["before"]["mean"])
    assert set(results["baselines"]) == {"random", "expert"}
    assert sum(part["before"]["tasks"] for part in results["subtasks"].values()) == TASKS

    table = (out / "results.md").read_text(encoding="utf-8").splitlines()
    assert table[0] == "| success | warm start | after SPEAR | points |"
    assert all(line.count("|") == 5 for line in table if line.startswith("|"))
    assert "100.0%" in table[2] and "3 training steps of 2.0 s" in table[-1]
    with Image.open(out / "episode.gif") as picture:
        assert picture.format == "GIF" and picture.n_frames > 2


def test_the_quick_demo_says_what_it_is_and_keeps_out_of_the_full_one(tmp_path: Path, stage: Stage) -> None:
    out = tmp_path / "demo"
    text = play(out, steps=None, size=demo.QUICK)
    assert "--quick" in text and "--quick" in (out / "results.md").read_text(encoding="utf-8")
    results = json.loads((out / "results.json").read_text())
    assert (results["size"], results["steps"]) == ("quick", demo.QUICK.steps)
    assert stage.trainings[0][2:] == (f"train.steps={demo.QUICK.steps}", "seed=1", *demo.QUICK.training)
    with pytest.raises(SpearError, match="quick"):
        play(out)


def test_an_evaluation_of_another_policy_is_not_taken_for_this_one_s(tmp_path: Path, stage: Stage) -> None:
    out = tmp_path / "demo"
    play(out)
    trained = out / "train" / "checkpoints" / "global_step_3" / "actor" / "huggingface"
    for folder in (out / "eval").glob("after-*"):  # as the episodes of a language model have it
        summary = json.loads((folder / SUMMARY).read_text())
        (folder / SUMMARY).write_text(json.dumps({**summary, "model_digest": digest_model(trained)}))
    played = len(stage.evaluations)
    play(out)
    assert len(stage.evaluations) == played
    (trained / "config.json").write_text("{}")
    play(out)
    assert stage.evaluations[played:] == ["huggingface"] * 2, "at both temperatures"


def test_a_second_call_repeats_nothing_and_a_longer_training_is_evaluated(tmp_path: Path, stage: Stage) -> None:
    out = tmp_path / "it's [x]{y} a=b,c (1)"  # YAML or a shell has a meaning for each of these
    play(out, steps=3)
    played = len(stage.evaluations)
    first = (out / "results.json").read_text()
    play(out, steps=3)
    assert stage.policies == 1
    assert len(stage.evaluations) == played, "no panel is played again, nor the baselines"
    assert (out / "results.json").read_text() == first

    play(out, steps=5)
    folders = {path.name for path in (out / "eval").iterdir()}
    assert {"after-3-steps-temperature-1", "after-5-steps-temperature-1", "before-temperature-1"} <= folders
    assert json.loads((out / "results.json").read_text())["steps"] == 5

    with pytest.raises(SpearError, match="more than 4 steps"):
        play(out, steps=4)
