from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra 'train'")

import numpy as np
from PIL import Image

from spear_training.plots import PANELS, plot_curves
from tests.agents.test_metrics import train, write_launch


def write_run(out: Path, steps: int = 12) -> None:
    """A run whose every curve has something to show, not at every step."""
    random = np.random.default_rng(0)
    keys = [key for _, series in PANELS for key, _ in series if not key.startswith("val/")]
    records: list[tuple[int, dict[str, Any]]] = [(0, {"val/success/all": 0.1})]
    for step in range(1, steps + 1):
        data: dict[str, Any] = {key: float(random.random()) for key in keys}
        if step % 4:
            data.pop("replay/drawn")
        else:
            data["val/success/all"] = step / steps
        records.append(train(step, **data))
    write_launch(out, 0, *records)


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_a_picture_of_all_curves(tmp_path: Path, suffix: str) -> None:
    write_run(tmp_path)
    path = plot_curves(tmp_path, tmp_path / f"curves.{suffix}", title="a run: spear/Sokoban-v1")
    assert path == tmp_path / f"curves.{suffix}"
    if suffix == "png":
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.width > 1000
            colours = picture.convert("RGB").getcolors(2**24)
            assert colours is not None and len(colours) > 50, "not an empty sheet"
    else:
        assert path.read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["metrics", path.name]), "no temporary file stays"


def test_a_run_of_one_step_with_missing_and_broken_numbers_is_drawn(tmp_path: Path) -> None:
    # verl's logger writes null where a number is not finite.
    write_launch(tmp_path, 0, train(1, **{"success/all": 0.5, "entropy/token-mean": None}))
    assert plot_curves(tmp_path, tmp_path / "c.png").stat().st_size > 10_000


@pytest.mark.parametrize("records", [[], [(0, {"val/success/all": 0.1})]])
def test_a_run_without_a_step_cannot_be_drawn(tmp_path: Path, records: list[Any]) -> None:
    if records:
        write_launch(tmp_path, 0, *records)
    with pytest.raises(ValueError, match="no training step yet"):
        plot_curves(tmp_path, tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_success_is_smoothed_over_the_last_steps_alone() -> None:
    from spear_training.plots import SMOOTH, smooth

    values = np.arange(10.0)
    found = smooth(values)
    assert found[0] == 0.0 and found[1] == 0.5
    assert found[-1] == values[-SMOOTH:].mean()
    assert not any(map(math.isnan, found))
