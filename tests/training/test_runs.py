"""Progress of a training on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from spear_training.runs import read_progress, show_progress


def test_no_figure_is_cut_on_a_narrow_terminal() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, color_system=None, width=80)
    last = {"step": 1000, "training/global_step": 1000, "success/all": 0.66, "perf/step_seconds": 125.5}
    with show_progress(screen, 1000, "starting Ray and verl", read_progress) as observe:
        observe([last | {"val/success/all": 0.48}])
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1000/1000 success 66% · valid 48% · 125.5 s/step 0:00:00 0:00:00" in shown and "…" not in shown


def test_the_progress_is_that_of_the_last_step() -> None:
    assert read_progress([{"step": 0}]) is None
    steps = [{"step": n, "training/global_step": n, "success/all": n / 10, "perf/step_seconds": n} for n in (1, 2)]
    assert read_progress([{"val/success/all": 0.5}, *steps]) == (2, "success 20% · valid 50% · 2.0 s/step")
