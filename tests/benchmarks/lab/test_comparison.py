"""A comparison is registered, run, stopped, gone on with, and reported as it was registered."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from benchmarks.lab.__main__ import lab
from benchmarks.lab.comparison import Arm, Comparison, TrainingSettings
from benchmarks.lab.report import Findings
from benchmarks.lab.runs import TUNING_SEED, Registry, RunPlan, run_all
from spear_agents.comparison.significance import count_pairs, estimate_crossed
from spear_envs.core.errors import SpearError

CONTENT: dict[str, Any] = {
    "title": "Trial",
    "panel": "train",
    "rates": [0.001, 0.004],
    "tuning_seeds": 1,
    "seeds": 3,
    "looks": 2,
    "levels": {"shortest": 2, "longest": 7},
    "start": {"success": 0.12, "levels": 300, "hidden": 16},
    "training": {"levels": 16, "tasks": 4, "group": 4, "turns": 8, "minibatch": 64, "budget": 500},
    "arms": {"grpo": {}, "si": {"algorithm": "grpo_sil", "spear": {"replay": {"capacity": 8}}}},
    "compare": [["si", "grpo"]],
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(lab, arguments, catch_exceptions=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file ``trial.yaml`` and all of its runs in ``whole``."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "trial.yaml").write_text(yaml.safe_dump(CONTENT))
    done = invoke("run", str(folder / "trial.yaml"), "--out", str(folder / "whole"), "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "10/10" in done.output and "registered as" in done.output
    return folder


def read_result(folder: Path) -> dict[str, Any]:
    """Results without what differs from run to run."""
    content = json.loads((folder / "result.json").read_text())
    for run in content["runs"]:
        del run["cpu_seconds"]
    return content


def test_a_stopped_comparison_goes_on_and_ends_the_same(made: Path) -> None:
    comparison = Comparison.read(made / "trial.yaml")
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(Registry(comparison, made / "parted"), 1, stop)
    registry = Registry(comparison, made / "parted")
    assert registry.count() == (7, 10) and not (made / "parted" / "result.json").exists()
    run_all(registry, 1, lambda: None)
    assert read_result(made / "parted") == read_result(made / "whole")


def test_the_rate_is_the_best_of_the_tuning_runs(made: Path) -> None:
    registry = Registry(Comparison.read(made / "trial.yaml"), made / "whole")
    for arm in ("grpo", "si"):
        success = {rate: registry.read(RunPlan(arm, rate, TUNING_SEED))["success"] for rate in (0.001, 0.004)}  # type: ignore[index]
        assert registry.choose_rate(arm) == max(success, key=success.__getitem__)
        assert {plan.seed for plan in registry.list_reported(arm)} == {0, 1, 2}
    with pytest.raises(SpearError, match="lacks grpo"):
        Registry(Comparison.read(made / "trial.yaml"), made / "empty").choose_rate("grpo")


# ---- the report ------------------------------------------------------------------------------------------------------
def test_the_report_holds_what_was_registered(made: Path) -> None:
    file, result = made / "trial.yaml", made / "whole" / "result.json"
    done = invoke("report", str(file), str(result), "--figure", str(made / "figure.png"))
    assert done.exit_code == 0, done.output
    findings = Findings(Comparison.read(file), result)
    assert Comparison.read(file).digest[:12] in done.output and "Explored" not in done.output
    steps = findings.table("si") - findings.table("grpo")
    assert steps.shape == (3, 16)
    wanted = estimate_crossed(steps.tolist())
    assert f"{wanted.mean:+.1f} [{wanted.low:+.1f}, {wanted.high:+.1f}]" in done.output
    assert f"{int((steps.mean(1) > 0).sum())} of 3" in done.output
    needed = count_pairs(float(steps.mean(1).std(ddof=1)), 5.0)
    assert done.output.rstrip().splitlines()[-1].endswith(f"| {needed} |")
    assert (made / "figure.png").stat().st_size > 10_000


def test_results_of_another_file_are_refused(made: Path) -> None:
    other = made / "other.yaml"
    other.write_text(yaml.safe_dump({**CONTENT, "seeds": 4}))
    result = made / "whole" / "result.json"
    refused = invoke("report", str(other), str(result))
    assert isinstance(refused.exception, SpearError) and "is not of this file" in str(refused.exception)
    begun = invoke("run", str(other), "--out", str(made / "whole"))
    assert "is of another comparison" in str(begun.exception)
    content = json.loads(result.read_text())
    content["runs"].pop()
    (made / "short.json").write_text(json.dumps(content))
    assert "lacks some of 3 seeds of si" in str(
        invoke("report", str(made / "trial.yaml"), str(made / "short.json")).exception
    )
    for key, value in (("won", [500] * 15), ("rate", 0.3), ("arm", "none")):
        content = json.loads(result.read_text())
        content["runs"][1][key] = value
        (made / "mixed.json").write_text(json.dumps(content))
        mixed = invoke("report", str(made / "trial.yaml"), str(made / "mixed.json"))
        assert isinstance(mixed.exception, SpearError) and "other arms" in str(mixed.exception)
    (made / "broken.json").write_text("{}")
    assert "is not a result" in str(invoke("report", str(made / "trial.yaml"), str(made / "broken.json")).exception)


def test_the_digest_is_of_what_is_compared_alone() -> None:
    first = Comparison.of(CONTENT)
    assert first.digest == Comparison.of(dict(reversed(CONTENT.items()))).digest
    # YAML reads 4e-3 as a text.
    assert first.digest == Comparison.of({**CONTENT, "rates": ["1e-3", "4e-3"]}).digest
    for change in ({"title": "Other"}, {"seeds": 5}, {"rates": [0.001]}, {"compare": []}):
        assert Comparison.of({**CONTENT, **change}).digest != first.digest


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": []}, "rates above 0"),
        ({"compare": [["si", "gpro"]]}, "'gpro' is not an arm: choose grpo, si"),
        ({"arms": {"A b": {}}}, "cannot name a file"),
        ({"arms": {"a": {"algorithm": "grpoo"}}}, "did you mean grpo"),
        ({"arms": {"a": {"spear": {"sil": {"gama": 1}}}}}, "sil.gama is not a setting"),
        ({"arms": {"a": {"epoch": 2}}}, "arm.epoch is not a setting; did you mean arm.epochs"),
        ({"arms": {"a": {"algorithm": "ppo"}}}, "no critic"),
        ({"levels": {"shortest": 9, "longest": 7}}, "shortest=9"),
        ({"training": {"group": 1}}, "training.group: "),
        ({"speed": 1}, "comparison.speed is not a setting"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**CONTENT, "compare": [], **change}))
    with pytest.raises(SpearError) as raised:
        Comparison.read(tmp_path / "a.yaml")
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["grpo_spear", "gigpo_nostd_sil"])
def test_an_arm_is_what_the_trainer_makes_of_its_algorithm(name: str) -> None:
    pytest.importorskip("omegaconf", reason="needs the extra 'train'")
    from spear_training.run.compose import compose

    assert Arm(algorithm=name).compose(TrainingSettings()) == compose((f"algorithm={name}",)).config.algorithm
