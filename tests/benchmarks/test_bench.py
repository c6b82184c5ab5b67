"""The runner of benchmarks, their registry, and random play."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.parts.random_play import measure_random_play
from benchmarks.runner import cli as runner
from benchmarks.runner import figures, registry, running
from benchmarks.runner.figures import REFERENCE_S, Bar, Size, Status
from benchmarks.runner.registry import FOLDER, Benchmark, choose_benchmarks, find_benchmarks, read_benchmark
from benchmarks.runner.results import Result, Verdict, judge, read_result, read_results, read_summary
from spear_envs import cli
from spear_envs.core.errors import SpearError
from spear_envs.sokoban.engine import Board
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.levels import Level, parse_level
from spear_envs.sokoban.tasks import make_task_set, read_level
from tests.benchmarks.scripts import write_script

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose benchmarks are those that a test writes."""
    place = tmp_path / "checkout" / "benchmarks"
    place.mkdir(parents=True)
    for name in ("__init__.py", "runner"):
        (place / name).symlink_to(ROOT / "benchmarks" / name)
    known = registry.find_benchmarks
    monkeypatch.setattr(runner, "find_benchmarks", lambda: known(place))
    monkeypatch.setattr(runner, "BASELINES", place / "baseline")
    monkeypatch.setattr(running, "ROOT", place.parent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(running, "PATIENCE", tuple((number, 2.0) for number, _ in running.PATIENCE))
    return place


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """``spear bench run`` into the folder ``out``; the exit code."""

    def call(*words: str, command: str = "run") -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", command, "--out", str(tmp_path / "out"), *words])
        return int(caught.value.code or 0)

    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    yield call
    signal.signal(signal.SIGTERM, previous)


def test_a_run(run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(folder, "good")
    write_script(folder, "other")
    assert run("--quick") == 0
    shown = capsys.readouterr().out
    assert "6 bars: 4 held, 0 NOT HELD, 2 not measured" in shown and "needs --full" in shown and "peer: 40 ms" in shown
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {"bench.json", "bench.md", "good.json", "good.log", "other.log"}
    page = (out / "bench.md").read_text("utf-8")
    assert "| step (of three) | 1 ms | peer: 40 ms (40 times ours) | ≤ 20 ms | held |" in page
    assert "| `good` | 1 | needs --full |" in page and "| `good` | step |" not in page
    if (out / "bars.png").exists():  # matplotlib comes with the extra 'train'
        assert (out / "bars.png").read_bytes()[:4] == (out / "peers.png").read_bytes()[:4] == b"\x89PNG"
    result = read_summary(out)["good"]
    assert result.versions["no-such-package"] == "not installed" and result.hardware["cores"] > 0
    assert len(result.load) == len(result.calibration) == 2 and not [*(out / "work").iterdir()]
    verdicts = json.loads((out / "bench.json").read_text("utf-8"))["bars"]
    assert [row["verdict"] for row in verdicts[:3]] == ["held", "held", "not measured"]


def test_what_has_finished_is_not_run_again_and_outlives_what_fails(run: Run, folder: Path, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    write_script(folder, "good", f"open({str(counter)!r}, 'a').write('x')\nyield Figure('step', 1.0, 'ms')")
    for words, count in (((), 1), ((), 1), (("--quick",), 2), (("--quick",), 2)):
        assert run(*words) == 0
        assert len(counter.read_text()) == count, words
    write_script(folder, "good", "yield Figure('step', 2.0, 'ms')\nraise OSError('the moon is full')")
    assert run("good", "--quick", "--again") == 1 and [*(tmp_path / "out" / "work").iterdir()] == [
        tmp_path / "out" / "work" / "good-quick"
    ], "what was built for one size is not taken for another"
    assert run("--quick", "--again") == 1
    result = read_result(tmp_path / "out" / "good.json")
    assert result is not None and result.status is Status.FINISHED and result.figures[0].value == 1.0
    assert not list((tmp_path / "out" / "work").glob("*.json"))


def test_one_that_fails_stops_no_other(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(folder, "a_bad", "yield Figure('step', 1.0, 'ms')\nraise OSError('the moon is full')")
    write_script(folder, "b_slow", "yield Figure('step', 3000.0, 'ms')")  # too slow for any core, and for a busy one
    write_script(folder, "c_out", "raise LeftOut('it needs the moon')\nyield")
    write_script(folder, "d_good")
    assert run() == 1
    captured = capsys.readouterr()
    assert "1 bars do not hold; failed: a_bad." in captured.err
    assert "the moon is full" in (tmp_path / "out" / "a_bad.log").read_text()
    results = read_results(tmp_path / "out", runner.find_benchmarks())
    assert [results[name].status for name in sorted(results)] == [
        Status.RUNNING,
        Status.FINISHED,
        Status.LEFT_OUT,
        Status.FINISHED,
    ]
    known = {one.name: one for one in runner.find_benchmarks()}
    assert next(judge(known["b_slow"], results["b_slow"])).verdict is Verdict.NOT_HELD
    assert next(judge(known["c_out"], results["c_out"])).reason == "it needs the moon"
    write_script(folder, "c_out")
    assert run("c_out") == 0, "it is run again once what it needs is there"
    bad = list(judge(known["a_bad"], results["a_bad"]))
    assert bad[0].verdict is Verdict.HELD and bad[1].verdict is Verdict.NOT_MEASURED, "what it had measured is kept"


@pytest.mark.slow
def test_one_that_hangs_is_ended(run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stubborn = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nif not os.fork(): time.sleep(600)\n"
        "yield Figure('step', 1.0, 'ms')\ntime.sleep(600)"
    )
    write_script(folder, "hangs", stubborn)
    start = time.monotonic()
    assert run("--limit", "0.1") == 1
    assert time.monotonic() - start < 60 and "longer than it may" in capsys.readouterr().out
    result = str(tmp_path / "out" / "work" / "hangs.json")
    assert not subprocess.run(["pgrep", "-f", result], capture_output=True).stdout


def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    write_script(folder, "a_good", f"open({str(counter)!r}, 'a').write('x')\nyield Figure('step', 1.0, 'ms')")
    waits = f"{counter}-waits"
    write_script(folder, "b_waits", f"if not os.path.exists({waits!r}):\n  open({waits!r}, 'w')\n  time.sleep(600)\n"
                                    "yield Figure('gain', 2.0, 'times')")  # fmt: skip
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from benchmarks.runner import cli, registry, running\n"
        "find = registry.find_benchmarks; place = Path(sys.argv[2])\n"
        "cli.find_benchmarks = lambda: find(place); running.ROOT = place.parent\n"
        "from spear_envs.cli import main; main(sys.argv[3:])"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(folder), "bench", "run", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not os.path.exists(waits) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "the same command resumes" in error, error
    assert read_result(tmp_path / "out" / "a_good.json").status is Status.FINISHED  # type: ignore[union-attr]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert counter.read_text() == "x", "the finished one was not run again"


@pytest.mark.parametrize(
    ("bar", "value", "alone", "on_a_slow_core"),
    [
        (Bar("a", "ms", at_most=2.0), 3.0, False, True),
        (Bar("a", "CPU s", at_most=2.0), 5.0, False, False),
        (Bar("a", "episodes/s", at_least=10.0), 6.0, False, True),
        (Bar("a", "turns per CPU-second", at_least=10.0), 6.0, False, True),
        (Bar("a", "min CPU", at_most=2.0), 3.0, False, True),
        (Bar("a", "CPU-min", at_most=2.0), 3.0, False, True),
        (Bar("a", "MB", at_most=2.0), 3.0, False, False),
        (Bar("a", "times", at_least=10.0), 6.0, False, False),
    ],
)
def test_times_and_rates_are_held_as_on_the_reference_core(
    bar: Bar, value: float, alone: bool, on_a_slow_core: bool
) -> None:
    assert (bar.holds(value), bar.holds(value, pace=2.0)) == (alone, on_a_slow_core)
    figures = [{"name": "a", "value": value, "unit": bar.unit, "of": "", "note": ""}]
    for pace, held in ((1.0, alone), (2.0, on_a_slow_core)):
        report = {"figures": figures, "calibration": [pace * REFERENCE_S] * 2, "size": "quick", "status": "finished"}
        report |= {"benchmark": "b", "reason": "", "date": "", "hardware": {}, "versions": {}, "load": [0.0, 0.0]}
        result = Result.read({**report, "seconds": 1.0, "cpu_seconds": 1.0})
        (judgement,) = judge(Benchmark("b", "", (bar,)), result)
        assert judgement.verdict is (Verdict.HELD if held else Verdict.NOT_HELD)


def test_comparing_with_a_baseline(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(folder, "good")
    baseline = folder / "baseline" / "standard.json"
    assert run() == 0 and run("--baseline", str(baseline), command="show") == 0
    assert '"cpu": ""' in baseline.read_text("utf-8")
    assert run(command="compare") == 0 and "0 worse" in capsys.readouterr().out
    write_script(folder, "good", "yield Figure('step', 1.9, 'ms')")
    assert run("--again") == 0
    monkeypatch.setattr(figures, "fmean", lambda values: 1.0)  # the cores are as fast as they were
    assert run(command="compare") == 1
    captured = capsys.readouterr()
    assert "1.9" in captured.out and "missing" in captured.out and "1 figures are worse" in captured.err
    assert run("--tolerance", "2", command="compare") == 0
    assert run(str(baseline), "--tolerance", "2", command="compare") == 0


def test_every_benchmark_keeps_the_contract() -> None:
    known = find_benchmarks()
    assert len(known) >= 14
    for benchmark in known:
        names = [bar.name for bar in benchmark.bars]
        assert len(set(names)) == len(names), f"{benchmark.name} has two bars of one name"
        functions = {node.name for node in ast.parse((FOLDER / f"{benchmark.name}.py").read_text("utf-8")).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert {"measure", "main"} <= functions, f"{benchmark.name} lacks measure or main"


def test_bars_are_those_of_the_script(tmp_path: Path) -> None:
    found = read_benchmark(write_script(tmp_path, "mine"))
    assert (found.name, found.summary) == ("mine", "What mine costs.")
    assert found.bars[0] == Bar("step", "ms", at_most=20.0) and str(found.bars[1]) == "≥ 1.5 times"
    assert [bar.applies_to(Size.STANDARD) for bar in found.bars] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BARS = ()", "no docstring"),
        ('"""X."""', "no literal tuple BARS"),
        ('"""X."""\nBARS = make_bars()', "no literal tuple BARS"),
        ('"""X."""\nBARS = (LIMIT,)', "literal arguments"),
        ('"""X."""\nBARS = (Bar("x", at_most=LIMIT),)', "malformed"),
        ('"""X."""\nBARS = (Bar("x"),)', "at_most or at_least"),
        ('"""X."""\nBARS = (Bar("x", at_most=1.0, size="tiny"),)', "tiny"),
    ],
)
def test_what_is_no_benchmark_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_benchmark(path)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    known = find_benchmarks()
    assert [one.name for one in choose_benchmarks(["sokoban", "agents", "sokoban"], known)] == ["sokoban", "agents"]
    assert choose_benchmarks([], known) == known
    with pytest.raises(SpearError, match="Did you mean 'sokoban'"):
        choose_benchmarks(["sokobn"], known)


def sample_random_play(levels: list[Level], seed: int) -> float:
    """Share of 15-move episodes that random play wins, one a level."""
    rng = np.random.default_rng(seed)
    return sum(is_won(Board(level), rng.integers(1, 5, 15).tolist()) for level in levels) / len(levels)


def is_won(board: Board, moves: list[int]) -> bool:
    for move in moves:
        board.step(move)
        if board.won:
            return True
    return False


def read_levels(recipe: Recipe, split: str, count: int) -> list[Level]:
    tasks = make_task_set(recipe, split)
    return [read_level(tasks[i].content["level"]) for i in range(count)]


def test_exact_values_of_small_boards() -> None:
    corridor = parse_level("#####\n#PXO#\n#####")
    assert measure_random_play(corridor, 1) == 0.25
    assert measure_random_play(corridor, 2) == 1 - 0.75**2
    assert measure_random_play(parse_level("####\n#XP#\n#_O#\n####"), 15) == 0.0


def test_the_default_levels_are_won_by_random_play_as_often_as_recorded() -> None:
    """9.6 % were recorded for levels of 3 to 12 moves; 5,000 episodes on 5,000 training levels."""
    assert 100 * sample_random_play(read_levels(Recipe(), "train", 5_000), 0) == pytest.approx(9.6, abs=1.5)
