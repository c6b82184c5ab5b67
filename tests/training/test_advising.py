"""Advice on the console: said once, before, during and after a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.metrics import METRICS_FOLDER
from spear_training.advising import Adviser, advise
from spear_training.environments import count_turns
from spear_training.guidance import RunShape
from spear_training.launch import CONFIG_FILE, compose_config
from spear_training.settings import RunSettings


@pytest.fixture(scope="module")
def config() -> DictConfig:
    """A run whose buffer is too large and whose warm-up is too long."""
    return compose_config(
        ("preset=demo", "spear.replay.capacity=100000", "spear.sil.warmup_steps=500"), Path("x"), check=False
    )


def make_steps(count: int) -> list[dict[str, Any]]:
    return [{"step": t, "training/global_step": t, "mask/void": 0.9, "rows/trained": 9.0} for t in range(1, count + 1)]


def test_each_piece_is_said_once(config: DictConfig) -> None:
    console = Console(record=True, width=400)
    settings = RunSettings.from_config(config)
    adviser = Adviser(console, settings.algorithm, RunShape.of_config(config, count_turns(settings.env)))
    adviser.review_start()
    adviser.review_start()
    seen: list[int] = []
    observe = adviser.watch(lambda history: seen.append(len(history)))
    for count in (3, 7, 7, 8):
        observe(make_steps(count))
    assert seen == [3, 7, 7, 8], "the observer is asked every time"
    lines = console.export_text().splitlines()
    mends = ("spear.replay.capacity=", "spear.sil.warmup_steps=60", "spear.filter.void=off")
    assert len(lines) == 3 and all(mend in line for mend, line in zip(mends, lines, strict=True))
    assert all(line.startswith("advice ") for line in lines)
    assert adviser.told == {"replay buffer", "warm-up", "masks"}


def test_a_run_that_is_over_is_reviewed_by_its_folder(config: DictConfig, tmp_path: Path) -> None:
    result = CliRunner().invoke(advise, [str(tmp_path)])
    assert "name the folder of a training" in str(result.exception)
    OmegaConf.save(config, tmp_path / CONFIG_FILE)
    metrics = tmp_path / METRICS_FOLDER
    metrics.mkdir()
    records = [{"step": step.pop("step"), "data": step} for step in make_steps(6)]
    (metrics / "0000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = " ".join(CliRunner().invoke(advise, [str(tmp_path)]).output.split())
    assert "set spear.replay.capacity=" in found and "set spear.filter.void=off" in found
    good = OmegaConf.merge(config, {"spear": {"replay": {"capacity": 512}, "sil": {"warmup_steps": 20}}})
    OmegaConf.save(good, tmp_path / CONFIG_FILE)
    (metrics / "0000.jsonl").unlink()
    assert CliRunner().invoke(advise, [str(tmp_path)]).output == "nothing to advise\n"
