"""Each rule about the metrics of a run speaks where it should and names what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf
from rich.console import Console

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.records import METRICS_FOLDER
from spear_training.algorithms import SpearSettings
from spear_training.launch import CONFIG_FILE, compose_config
from spear_training.review import WINDOW, advise, review_history, watch_metrics

QUIET = {
    "entropy/token-mean": 1.0,
    "clip/ppo_fraction": 0.02,
    "groups/equal": 0.3,
    "groups/same_outcome": 0.4,
    "rows/trained": 100.0,
    "mask/void": 0.1,
    "replay/size": 500.0,
    "replay/drawn": 10.0,
    "training/rollout_log_probs_diff_mean": 1e-6,
    "kl/old": 0.02,
    "replay/ess": 0.9,
    "replay/failed": 0.1,
    "spear/mu": 0.5,
}
APART = {"training/rollout_log_probs_diff_mean": 0.2}


def run(count: int = 25, *, without: tuple[str, ...] = (), **changes: float) -> list[dict[str, Any]]:
    """Metrics of ``count`` equal steps, after a record of validation alone."""
    step = {name: value for name, value in QUIET.items() if name not in without}
    step |= {name.replace("__", "/"): value for name, value in changes.items()}
    steps = [{"step": t, "training/global_step": t, **step} for t in range(1, count + 1)]
    return [{"step": 0, "val/success/all": 0.1}, *steps]


@pytest.mark.parametrize(
    ("records", "topic", "mend"),
    [
        (run(groups__equal=0.95), "equal advantages", "rollout.n"),
        (run(without=("replay/drawn",)), "empty buffer", "spear.replay.max_age"),
        (run(mask__void=0.6), "masks", "spear.filter.void=off"),
        (run(mask__overlong=0.9), "masks", "data.max_response_length"),
        (run(rows__trained=0.0), "idle steps", "fault/"),
        (run(clip__ppo_fraction=0.5), "large updates", "optim.lr"),
        (run(kl__old=0.4), "large updates", "ppo_mini_batch_size"),
        (run(replay__ess=0.3), "stale replay", "spear.replay.max_age"),
        (run(replay__failed=0.74), "imitated failures", "spear.sil.gamma=success"),
        (run(**APART), "rollout engine", "rollout.dtype"),
        ([*run(6), *run(9, **{"entropy/token-mean": 0.05})], "entropy", "spear.sil.warmup_steps"),
        ([*run(6), *run(9, **{"entropy/token-mean": 3.0})], "entropy", "learning rate"),
        (run(groups__same_outcome=0.9, spear__mu=0.0), "petty differences", "spear.reward.format=none"),
    ],
)
def test_a_run_that_goes_wrong_is_reported(records: list[dict[str, Any]], topic: str, mend: str) -> None:
    settings = SpearSettings.from_mapping({"advantage": {"normalize_std": True}})
    ((found, sentence),) = review_history(records, settings).items()
    assert found == topic and mend in sentence


@pytest.mark.parametrize(
    ("records", "nodes"),
    [
        (run(), {}),
        ([], {}),
        (run(groups__equal=1.0), {"advantage": {"estimator": "gae"}}),
        (run(without=("replay/drawn",)), {"sil": {"enabled": False}}),
        (run(8, without=("replay/drawn",)), {}),
        (run(groups__same_outcome=0.9, spear__mu=0.0), {"advantage": {"normalize_std": False}}),
        (run(WINDOW - 1, groups__equal=1.0, rows__trained=0.0, replay__failed=1.0, kl__old=1.0), {}),
        (run(clip__ppo_fraction=0.5), {"loss": {"policy": "gspo"}}),
        ([*run(20), *run(2, kl__old=0.9)], {}),
        (run(**APART, staleness__mean=0.9), {}),
        (run(clip__ppo_fraction=float("nan")), {}),
    ],
)
def test_a_healthy_or_young_run_is_not_reported(records: list[dict[str, Any]], nodes: dict[str, Any]) -> None:
    assert review_history(records, SpearSettings.from_mapping(nodes)) == {}


def test_a_finding_is_printed_once() -> None:
    console, seen = Console(record=True, width=400), []
    observe = watch_metrics(lambda history: seen.append(len(history)), SpearSettings(), console)
    for count in (3, 7, 8):
        observe(run(count, mask__void=0.9))
    assert len(seen) == 3 and console.export_text().count("spear.filter.void=off") == 1


def test_a_run_is_reviewed_by_its_folder(tmp_path: Path) -> None:
    assert "folder of a training" in str(CliRunner().invoke(advise, [str(tmp_path)]).exception)
    OmegaConf.save(compose_config(("preset=demo",), Path("x"), check=False), tmp_path / CONFIG_FILE)
    assert CliRunner().invoke(advise, [str(tmp_path)]).output == "nothing stands out\n"
    (tmp_path / METRICS_FOLDER).mkdir()
    lines = [json.dumps({"step": record["step"], "data": record}) + "\n" for record in run(mask__void=0.9)[1:]]
    (tmp_path / METRICS_FOLDER / "0000.jsonl").write_text("".join(lines))
    assert "spear.filter.void=off" in CliRunner().invoke(advise, [str(tmp_path)]).output
