import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.ablation import RESULTS
from benchmarks.ablations.plan import ARMS, BASES, SCENARIOS, TUNING_SEED, Scenario, Trial, list_trials
from benchmarks.ablations.report import make_tables
from benchmarks.ablations.results import ArmResult, compare_arms, compare_with_start, pool_seeds, read_arms
from benchmarks.ablations.run import CURVES, WARM_START, Ablation, choose_rates
from spear_agents.comparison.statistics import estimate_difference
from spear_training.run.compose import compose

SOKOBAN = SCENARIOS["sokoban"]
SMALL = replace(SOKOBAN, arms=("grpo", "grpo_spear"), rates=("1e-4", "3e-4"), seeds=(0, 1))


def make_panel(won: dict[str, float], split: str = "test") -> dict[str, Any]:
    return {
        "split": split,
        "samples": 2,
        "temperature": 1.0,
        "fingerprint": "f" * 64,
        "mean": sum(won.values()) / len(won),
        "won": won,
    }


def record(results: Path, scenario: Scenario, name: str, won: dict[str, float], **others: Any) -> None:
    path = results / scenario.name / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    panels = {"valid_panel": make_panel(won, "valid"), "test_panel": make_panel(won)}
    path.write_text(json.dumps({**panels, **others}))


def record_trial(results: Path, trial: Trial, won: dict[str, float]) -> None:
    curve = [0.1 * step for step in range(20)]
    record(
        results,
        trial.scenario,
        trial.name,
        won,
        steps=20,
        episodes=2560,
        code="abc",
        seed=trial.seed,
        curves=dict.fromkeys(CURVES, curve),
    )


def record_all(results: Path, scenario: Scenario) -> None:
    record(results, scenario, WARM_START, {"a": 0.0, "b": 0.5, "c": 0.0})
    for arm in scenario.arms:
        for trial in scenario.list_tuning(arm):
            # The higher rate is better for one arm and worse for the other.
            better = (trial.rate == "3e-4") == (arm == "grpo_spear")
            record_trial(results, trial, {"a": float(better), "b": 0.0, "c": 0.0})
        rate = choose_rates(results, scenario)[arm]
        for trial in scenario.list_reported(arm, rate):
            high = 1.0 if arm == "grpo_spear" else 0.5
            record_trial(results, trial, {"a": high, "b": high, "c": 0.0 if trial.seed else high})


@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS.values() if not each.closed], ids=lambda each: each.name
)
def test_arms_differ_in_the_algorithm_alone(scenario: Scenario) -> None:
    def read_rest(trial: Trial) -> dict[str, Any]:
        plain = compose(trial.list_overrides("model")).config.to_mapping()
        for name in ("sil", "reward", "advantage", "clip", "loss", "filter", "cov"):
            plain.pop(name)
        return plain

    rate, seed = scenario.rates[0], scenario.seeds[0]
    first, *others = [read_rest(Trial(scenario, arm, rate, seed)) for arm in scenario.arms]
    for other in others:
        assert other == first


def test_every_arm_is_tuned_with_the_same_effort() -> None:
    for scenario in SCENARIOS.values():
        assert set(scenario.arms) <= set(ARMS)
        efforts = {len(scenario.list_tuning(arm)) for arm in scenario.arms}
        assert efforts == {len(scenario.rates) if len(scenario.rates) > 1 else 0}
        assert TUNING_SEED not in scenario.seeds
        assert len(scenario.seeds) >= 3
        assert {"grpo", "grpo_sil", "grpo_spear"} <= set(scenario.arms)
    assert set(SOKOBAN.arms) == set(ARMS)
    assert set(BASES) | set(BASES.values()) <= set(ARMS)


def test_tuning_comes_first_and_reported_trials_follow_the_chosen_rate(tmp_path: Path) -> None:
    trials = list(list_trials(SMALL, {}))
    assert [trial.seed for trial in trials] == [TUNING_SEED] * 4
    assert [(trial.arm, trial.rate) for trial in trials[:2]] == [("grpo", "1e-4"), ("grpo_spear", "1e-4")]
    record_all(tmp_path, SMALL)
    assert choose_rates(tmp_path, SMALL) == {"grpo": "1e-4", "grpo_spear": "3e-4"}
    names = [trial.name for trial in list_trials(SMALL, choose_rates(tmp_path, SMALL))][4:]
    assert names == ["grpo-lr1e-4-seed0", "grpo_spear-lr3e-4-seed0", "grpo-lr1e-4-seed1", "grpo_spear-lr3e-4-seed1"]


def test_the_difference_is_paired_by_task() -> None:
    before = {"a": 0.0, "b": 0.5, "c": 1.0}
    after = ArmResult("grpo", "1e-4", [{"seed": 0, "test_panel": {"won": {"c": 1.0, "a": 0.5, "b": 1.0}}}])
    difference = compare_with_start(before, after)
    assert difference.mean == pytest.approx(1 / 3)
    assert difference == estimate_difference([0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match="same tasks"):
        compare_with_start({"a": 1.0}, after)


def test_the_recorded_gains_over_seeds_and_tasks() -> None:
    found = {}
    arms = {name: read_arms(SCENARIOS[name], RESULTS) for name in ("sokoban", "alfworld", "webshop")}
    for name, each in arms.items():
        spear = next(arm for arm in each if arm.arm == "grpo_spear")
        beside = compare_arms(each, spear)
        assert beside is not None and beside.tasks_alone.half < beside.difference.half
        found[name] = [round(100 * value, 1) for value in (beside.difference.low, beside.difference.high)]
    # Computed independently of this code, by another implementation of the same model.
    assert found == {"sokoban": [-7.9, 9.1], "alfworld": [-0.5, 4.0], "webshop": [-2.5, 13.2]}
    rollouts = pool_seeds(arms.values(), "grpo_sil", "grpo", None)
    assert len(rollouts) == 9 and min(rollouts) > 0


def test_the_report_has_means_over_seeds_and_paired_differences(tmp_path: Path) -> None:
    record_all(tmp_path, SMALL)
    text = make_tables(SMALL, tmp_path)
    # Seeds 0 and 1 of GRPO win a half of each task and a half of two: 50.0 and 33.3 %; SPEAR twice as much.
    table = text.split("\n\n")[1]
    grpo, spear = (line for line in table.splitlines() if line.startswith("| GRPO"))
    assert "50.0 / 33.3" in grpo and "| 41.7 [" in grpo and "+25.0 [" in grpo
    assert "100.0 / 66.7" in spear and "| 83.3 [" in spear and "+66.7 [" in spear
    assert "+41.7 [" in spear and "(GRPO)" in spear


def test_an_arm_is_compared_on_the_seeds_that_both_have(tmp_path: Path) -> None:
    record_all(tmp_path, SMALL)
    (tmp_path / SMALL.name / "grpo-lr1e-4-seed1.json").unlink()
    spear = next(line for line in make_tables(SMALL, tmp_path).splitlines() if line.startswith("| GRPO + SI + IR"))
    # Of seed 0 alone: 100 % beside 50 %.
    assert "+50.0 [" in spear and "(GRPO, seeds 0 of both)" in spear


def test_two_calls_share_the_work(tmp_path: Path) -> None:
    first, second = (Ablation(tmp_path / "out", tmp_path / "results", [SMALL], Console(quiet=True)) for _ in range(2))
    with first.claim(SMALL, "trial") as mine, second.claim(SMALL, "trial") as free:
        assert mine and not free
    with second.claim(SMALL, "trial") as free:
        assert free


@pytest.mark.nightly
def test_an_arm_runs_through_verl_and_is_recorded(tmp_path: Path) -> None:
    warm_start = replace(SOKOBAN.warm_start, episodes=30, epochs=1, panel_tasks=0)
    overrides = (
        *SOKOBAN.overrides,
        "train.batch_size=4",
        "rollout.group_size=2",
        "validation.tasks=4",
    )
    tiny = replace(
        SOKOBAN,
        overrides=overrides,
        warm_start=warm_start,
        arms=("grpo_spear",),
        rates=("1e-4",),
        seeds=(0,),
        steps=2,
        samples=1,
    )
    out, results = tmp_path / "out", tmp_path / "results"
    first = Ablation(out, results, [tiny], Console(quiet=True))
    first.run(0.0)  # over as soon as the training has begun
    assert not first.finished and not first.failed
    second = Ablation(out, results, [tiny], Console(quiet=True))
    second.run(600.0)
    assert second.finished and not second.failed, second.failed
    start = json.loads((results / "sokoban" / f"{WARM_START}.json").read_text())
    (path,) = (results / "sokoban").glob("grpo_spear-*.json")
    trial = json.loads(path.read_text())
    assert trial["steps"] == 2 and trial["episodes"] == 16
    assert [len(trial["curves"][name]) for name in ("success", "entropy", "drawn")] == [2, 2, 2]
    assert trial["settings"]["sil"]["enabled"] and trial["settings"]["env"]["kwargs"]["shortest"] == 6
    assert len(trial["test_panel"]["won"]) == 256
    assert trial["test_panel"]["fingerprint"] == start["test_panel"]["fingerprint"]
    assert "GRPO + SI + IR" in make_tables(tiny, results)
