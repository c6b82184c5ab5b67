"""The overview of a run, and two evaluations side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from spear_agents import evaluate
from spear_agents.replay.overview import describe_sources
from spear_agents.replay.page import export_page
from spear_agents.replay.runs import Run
from tests.agents.replay.chromium import Chromium

SOKOBAN = "spear/Sokoban-v1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for engine in ("random", "expert"):
        evaluate(SOKOBAN, engine=engine, tasks=12, out=folder / engine, progress=False)
    return folder


def test_figures_are_those_of_the_evaluation(runs: Path) -> None:
    found = {source["name"]: source for source in Run(runs).summarise()["sources"]}
    assert set(found) == {"random", "expert"} and found["random"]["settings"]["engine"] == "random"
    result = evaluate(SOKOBAN, engine="random", tasks=12, out=runs / "random", progress=False)
    whole, *parts = found["random"]["parts"]
    expected = result.overall.to_json()
    assert whole["success"] == expected["success"] and whole["episodes"] == 12
    assert whole["turns"] == round(expected["turns"], 4)
    assert [part["name"] for part in parts] == list(result.subtasks)
    assert [part["success"] for part in parts] == [part.to_json()["success"] for part in result.subtasks.values()]


def test_faults_and_what_was_played_again_do_not_count() -> None:
    row = {"source": "a", "step": None, "task": "t", "subtask": "s", "won": True, "score": None, "turns": 2}
    row |= {"stop": "won", "counts": True, "tokens": 3, "cost": 0.5}
    rows = [row, {**row, "counts": False, "won": False}, {**row, "stop": "fault", "won": False, "task": "u"}]
    (found,) = describe_sources(rows, {})
    (whole,) = found["parts"]
    assert (whole["episodes"], whole["faults"], whole["success"]["mean"], whole["score"]) == (1, 1, 1.0, None)
    assert found["tokens"] == 6 and found["cost"] == 1.0
    (broken,) = describe_sources([rows[2]], {})
    assert broken["parts"][0]["success"] is None


def test_two_evaluations_lie_side_by_side(browser: Chromium, runs: Path, tmp_path: Path) -> None:
    export_page(Run(runs), tmp_path / "page.html")
    browser.resize(1400, 900)
    browser.open(f"file://{tmp_path}/page.html#overview")
    browser.wait("document.querySelectorAll('.figures').length === 2")
    kinds = browser.evaluate("[...document.querySelectorAll('.kind summary')].map((one) => one.textContent)")
    won = sum(t.won for t in evaluate(SOKOBAN, engine="random", tasks=12, progress=False).trajectories)
    better = "A" if browser.evaluate("pair.a") == "expert" else "B"
    expected = {f"only {better}": 12 - won, "both": won, "neither": 0, f"only {'AB'.replace(better, '')}": 0}
    assert sorted(kinds) == sorted(f"Won by {kind}: {count}" for kind, count in expected.items())
    browser.evaluate("document.querySelector('.kind li button').click()")
    browser.wait("document.querySelectorAll('.columns > div').length === 2")
    assert browser.evaluate("document.querySelectorAll('.columns .why').length") == 2
    # All boards have one instruction, so rows are named by their tasks.
    browser.evaluate("document.querySelector('.figures tbody tr:nth-child(2)').click()")
    browser.wait("state.view === 'episodes' && filters.subtask")
    assert "/00000" in browser.evaluate("document.querySelector('.row .what').textContent")
