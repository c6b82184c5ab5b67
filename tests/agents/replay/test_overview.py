"""The overview of a run, and two evaluations side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from spear_agents import evaluate
from spear_agents.replay.runs import Run, describe_sources
from spear_agents.replay.server import export_page
from tests.agents.replay.chromium import Chromium
from tests.agents.replay.conftest import serve

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


def test_transcripts_are_searched(browser: Chromium, runs: Path, tmp_path: Path) -> None:
    """The same episodes in the exported page and at the server."""
    run = Run(runs)
    bodies = [run.read_episode(row["i"]) for row in run.rows()]
    wanted = [body["i"] for body in bodies if any("down" in turn["said"] for turn in body["turns"])]
    assert 0 < len(wanted) < len(bodies) and run.search("  DOWN action ") == wanted and run.search("zebra") == []
    export_page(run, tmp_path / "page.html")
    with serve(run) as server:
        for address in (f"file://{tmp_path}/page.html", server.address):
            browser.open(f"{address}#f.said=DOWN%20action")
            browser.wait(f"state.shown.length === {len(wanted)}")
            assert browser.evaluate("state.shown.map((row) => row.i)") == wanted
            browser.evaluate("filters.said = ''; searchTranscripts()")
            browser.wait(f"state.shown.length === {len(bodies)}")


def test_a_page_of_a_run_that_goes_on_takes_up_what_comes(browser: Chromium, tmp_path: Path) -> None:
    evaluate(SOKOBAN, engine="random", tasks=2, out=tmp_path / "run", progress=False)
    with serve(Run(tmp_path)) as server:
        browser.open(server.address)
        browser.wait("state.rows.length === 2 && document.body.dataset.ready")
        browser.evaluate("watchRun()")
        browser.wait("data.mark")
        evaluate(SOKOBAN, engine="random", tasks=5, out=tmp_path / "run", progress=False)
        browser.evaluate("watchRun()")
        browser.wait("state.rows.length === 5")
        assert "5 of 5 episodes" in browser.evaluate("document.getElementById('count').textContent")
        raw = browser.evaluate("document.querySelector('.raw pre').textContent")
        assert f'"env": "{SOKOBAN}"' in raw and '"image"' not in raw


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
