from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from benchmarks._models_plot import plot_learning
from spear_agents.statistics import Estimate
from spear_training.runs import smooth


def test_arms_are_drawn_with_what_they_won_before_and_after(tmp_path: Path) -> None:
    won = {"GRPO": [[0.1, 0.2, 0.4], [0.3, 0.2, 0.2]], "SPEAR": [[0.2, 0.3, 0.5]]}
    unseen = {title: Estimate(0.4, 0.3, 0.5, 120) for title in won}
    plot_learning(won, unseen, Estimate(0.25, 0.2, 0.3, 120), 32, tmp_path / "learning.png")
    picture = matplotlib.image.imread(tmp_path / "learning.png")
    assert picture.shape[1] > 1000


def test_the_running_mean_begins_with_what_there_is() -> None:
    assert smooth(np.asarray([4.0, 2.0, 0.0, 0.0, 4.0, 9.0])) == pytest.approx([4.0, 3.0, 2.0, 1.5, 2.0, 3.0])
