"""``spear eval`` as a command, what a server charged for, and the metrics that a training left."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spear_agents.cli import evaluate
from spear_agents.comparison.significance import compare
from spear_agents.engines.base import Finish, Served
from spear_agents.evaluation.records import METRICS_FOLDER, measure_metrics, read_history, sum_usage
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory, TrajectoryWriter, Turn
from spear_envs.core import ActionResult, EnvFault
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from tests.agents.test_evaluation import SplitCorridor
from tests.agents.test_trajectory import make_trajectory

SOKOBAN = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "6"]
SERVED = ["spear/Sokoban-v1", "--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]


def test_it_prints_success_by_subtask_with_baselines_and_fingerprint(tmp_path: Path) -> None:
    result = CliRunner().invoke(evaluate, [*SOKOBAN, "--baselines", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for words in ("won %", "CI95", "(random)", "(expert)", "100.0", summary["fingerprint"], *summary["subtasks"]):
        assert words in result.output
    assert set(summary["baselines"]) == {"random", "expert"}


def test_faults_are_told_by_their_kind(corridor_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(env: SplitCorridor, action: str) -> ActionResult:
        raise EnvFault("door_stuck", "the door is stuck")

    register_env(corridor_id, SplitCorridor)
    monkeypatch.setattr(SplitCorridor, "_act", fail)
    result = CliRunner().invoke(evaluate, [corridor_id, "--engine", "expert", "--tasks", "2"])
    assert "won %" in result.output
    assert str(result.exception) == "2 of 2 episodes were lost to faults (2 door_stuck)" and result.exit_code == 1


def test_a_baseline_that_there_is_not_does_not_take_the_figures_along() -> None:
    result = CliRunner().invoke(evaluate, ["spear/SearchR1-v0", "--engine", "expert", "--tasks", "2", "--baselines"])
    assert result.exit_code == 0, result.exception
    assert "100.0" in result.output and "no baseline random" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spear/Sokobn-v0", "--engine", "random"], "Sokoban"),
        (["spear/Sokoban-v1"], "--model"),
        ([*SOKOBAN, "--split", "tset"], "'test'"),
        ([*SOKOBAN, "--tasks", "sokoban/none"], "Unknown task"),
        ([*SOKOBAN, "--tasks", "ten"], "Give a number of tasks, all, or ids"),
        ([*SOKOBAN, "--out", "/proc/nowhere"], "cannot be written"),
        ([*SOKOBAN, "--model", "gpt-4o"], "leave --model gpt-4o out"),
        (["spear/Sokoban-v1", "--engine", "random", "--model", "gpt-4o"], "leave --model gpt-4o out"),
        ([*SOKOBAN, "--price", "1,2"], "--price is for a server"),
        ([*SOKOBAN, "--key-variable", "KEY"], "--key-variable is for a server"),
        *(([*SERVED, "--price", price], "--price") for price in ("1", "1,x")),
        ([*SERVED, "--method", "react", "--layout", "per_turn"], "--layout"),
        ([*SERVED, "--trials", "4"], "reflexion"),
        (["spear/Sokoban-v1", "--model", "gpt-4o"], "--engine openai"),
        (["spear/Sokoban-v1", "--model", "openai/gpt-4o"], "--engine openai"),
        (["FrozenLake-v1"], "is a FrozenLakeEnv, which is not a SpearEnv"),
        (["FrozenLake-v1", "--engine", "random"], "is a FrozenLakeEnv, which is not a SpearEnv"),
    ],
)
def test_errors_are_one_line_with_the_mend(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(evaluate, arguments)
    assert isinstance(result.exception, SpearError)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)


def test_figures_are_printed_in_one_form() -> None:
    result = CliRunner().invoke(evaluate, [*SOKOBAN, "--json", "--latex"])
    assert result.exit_code == 2 and "--latex" in result.output


def test_scripted_policies_need_no_torch(root: Path) -> None:
    code = (
        "import sys; from spear_agents.cli import evaluate; "
        f"evaluate({SOKOBAN!r}, standalone_mode=False); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


def turn(prompt: int, response: int, cached: int | None = None, served: Served | None = None) -> Turn:
    ids = (0,) * response
    return Turn((0,) * prompt, ids, (0.0,) * response, "", "", "", True, True, "", 0.0, Finish.STOP, served, 0, cached)


def episode(*turns: Turn, layout: Layout = Layout.CONVERSATION) -> Trajectory:
    if layout is Layout.CONVERSATION:
        turns = tuple(replace(turn, follows=place - 1 if place else None) for place, turn in enumerate(turns))
    return Trajectory("e", "t", "s", "", "f", layout, turns, {}, 0.0, 0.0, False, 0, StopReason.FAILED)


def test_tokens_from_a_local_cache_are_counted() -> None:
    played = episode(turn(300, 10, 0), turn(40, 10, 256), turn(40, 10, 256))
    usage = sum_usage([played])
    assert (usage.prompt_tokens, usage.completion_tokens) == (300 + 350 + 400, 30)
    assert usage.cached_tokens == 512
    assert usage.cacheable_tokens == (310 - 32) + (360 - 32)
    assert usage.cached_share == pytest.approx(512 / 1050) and not usage.is_thrashing
    assert Trajectory.from_json(played.to_json()).turns[1].cached_tokens == 256, "the record keeps it"
    assert usage.to_json()["cached_tokens"] == 512
    whole = sum_usage([episode(turn(300, 10, 128), turn(340, 10, 0), layout=Layout.PER_TURN)])
    assert (whole.prompt_tokens, whole.cached_tokens, whole.is_thrashing) == (640, 128, False)


def test_a_cache_that_forgets_what_comes_next_is_told() -> None:
    turns = [turn(300, 10, 0), turn(40, 10, 100), turn(40, 10, 0)]
    assert sum_usage([episode(*turns)]).is_thrashing
    short = [turn(20, 10, 0), turn(40, 10, 0)]
    assert not sum_usage([episode(*short)]).is_thrashing, "less than a block cannot be kept"


def test_engines_without_a_cache_say_nothing() -> None:
    plain = episode(turn(300, 10), turn(40, 10))
    usage = sum_usage([plain, replace(plain, tokens=TokenKind.BYTES)])
    assert (usage.cached_tokens, usage.cached_share, usage.is_thrashing) == (0, None, False)
    assert "cached_tokens" not in plain.to_json()
    served = Served(prompt_tokens=200, completion_tokens=5, cached_tokens=50)
    assert sum_usage([episode(turn(9, 9, served=served))]).cached_share == 0.25


def write_launch(out: Path, number: int, *records: tuple[int, dict[str, Any]], torn: bytes = b"") -> None:
    """One launch as verl's file logger writes it: a JSON line a step."""
    folder = out / METRICS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}).encode() + b"\n" for step, data in records]
    (folder / f"{number:04d}.jsonl").write_bytes(b"".join(lines) + torn)


def train(step: int, **data: Any) -> tuple[int, dict[str, Any]]:
    return step, {"training/global_step": step, **data}


def test_the_size_grows_with_every_step_and_only_then(tmp_path: Path) -> None:
    assert measure_metrics(tmp_path) == 0
    sizes = []
    for steps in (1, 2, 2):
        write_launch(tmp_path, 0, *(train(t) for t in range(1, steps + 1)))
        sizes.append(measure_metrics(tmp_path))
    assert 0 < sizes[0] < sizes[1] == sizes[2]


@pytest.mark.parametrize("width", [20, 30, 40, 80, 200])
def test_figures_are_whole_at_any_width(width: int, tmp_path: Path) -> None:
    outs = [str(tmp_path / name) for name in ("a-rather-long-name-of-a-folder", "b", "c")]
    shown = ""
    for out in outs:
        shown += CliRunner().invoke(evaluate, [*SOKOBAN, "--out", out], env={"COLUMNS": str(width)}).output
    for runs in (outs[:2], outs):
        shown += CliRunner().invoke(compare, runs, env={"COLUMNS": str(width)}).output
    whole = " ".join(shown.split())
    tables = [line for line in shown.splitlines() if re.fullmatch(r"(CI95|mean|won %)?[\s\d.–\[\],+─-]*", line.strip())]
    assert "61.0–100.0" in whole and whole.count("[61.0, 100.0]") == 5 and whole.count("[-48.3, +48.3]") == 3
    assert max(len(line.rstrip()) for line in tables) <= width


def test_several_runs_are_each_compared_with_the_first(tmp_path: Path) -> None:
    outs = [str(tmp_path / name) for name in ("a", "b", "c")]
    for out, engine in zip(outs, ("random", "random", "expert"), strict=True):
        CliRunner().invoke(evaluate, [SOKOBAN[0], "--engine", engine, "--tasks", "12", "--out", out])
    shown = CliRunner().invoke(compare, outs).output
    assert "b: not shown to differ from a." in shown and "c: better than a." in shown
    found = json.loads(CliRunner().invoke(compare, [*outs, "--json"]).output)
    pair = json.loads(CliRunner().invoke(compare, [outs[0], outs[2], "--json"]).output)
    last = found["compared"][1]
    assert (found["first"], last["name"]) == ("a", "c") and last["difference"] == pair["difference"]
    assert last["adjusted_p"] == pytest.approx(2 * pair["judgement"]["permutation_p"])
    back = CliRunner().invoke(compare, [outs[2], outs[0], outs[1]]).output
    assert "a, b: worse than c." in back
    twice = f"{tmp_path}/./a"
    paired = [*outs[1:], "--pair", outs[0], twice]
    for refused in (outs[:1], [*outs, "--pair", *outs[:2]], [outs[0], twice], [*outs, twice], paired):
        done = CliRunner().invoke(compare, refused)
        assert done.exit_code == 2 and (twice not in refused or f"{tmp_path}/a is given twice" in done.output)


def write_outcomes(folder: Path, shares: list[float], **changes: Any) -> str:
    """A run of ten episodes of each task, of which a share is won."""
    with TrajectoryWriter(folder / "episodes.jsonl") as writer:
        for task, share in enumerate(shares):
            for seed in range(10):
                won = seed < round(10 * share)
                stop, terms = (StopReason.WON, {}) if won else (StopReason.FAILED, {})
                kept = {"task_id": f"t/{task}", "seed": seed, "won": won, "stop": stop, "reward_terms": terms}
                writer.write(make_trajectory(count=1, **(kept | changes)))
    (folder / "settings.json").write_text("{}")
    return str(folder)


def test_differences_that_cancel_out_ask_for_no_tasks_and_pairs(tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="needs the extra 'stats'")
    shares = [(0.0, 0.1), (0.0, 0.2), (0.9, 0.6)]
    assert math.fsum(after - before for before, after in shares) != 0, "the rounding of floats"
    old = write_outcomes(tmp_path / "old", [before for before, _ in shares])
    new = write_outcomes(tmp_path / "new", [after for _, after in shares])
    found = json.loads(CliRunner().invoke(compare, [old, new, "--json"]).output)
    assert found["judgement"]["tasks_needed"] is None and "would be needed" not in " ".join(found["sentences"])
    pairs = [
        (write_outcomes(tmp_path / f"old{i}", [before]), write_outcomes(tmp_path / f"new{i}", [after]))
        for i, (before, after) in enumerate(shares)
    ]
    words = [*pairs[0], *(word for pair in pairs[1:] for word in ("--pair", *pair))]
    done = CliRunner().invoke(compare, words)
    assert done.exit_code == 0, done.exception
    assert "+0.0 points may well be chance" in done.output and "would be needed" not in done.output


def test_of_several_runs_the_one_of_other_tasks_is_named(tmp_path: Path) -> None:
    runs = [write_outcomes(tmp_path / name, [0.5]) for name in ("a", "b")]
    runs.append(write_outcomes(tmp_path / "c", [0.5], fingerprint="g"))
    done = CliRunner().invoke(compare, runs)
    assert isinstance(done.exception, SpearError) and str(done.exception).startswith("a and c: ")


@pytest.mark.parametrize("score", [1e308, float("nan")])
def test_a_score_that_is_none_is_one_error(tmp_path: Path, score: float) -> None:
    runs = [write_outcomes(tmp_path / name, [0.5], score=score) for name in ("a", "b")]
    done = CliRunner().invoke(compare, [*runs, "--metric", "score"])
    assert isinstance(done.exception, SpearError) and "score" in str(done.exception)


@pytest.mark.parametrize("settings", [{"fingerprint": "f"}, {"fingerprint": "f", "env_id": 5}, {"fingerprint": 5}, []])
def test_edited_settings_are_read_or_one_error(tmp_path: Path, settings: object) -> None:
    runs = [write_outcomes(tmp_path / name, [0.5]) for name in ("a", "b")]
    (tmp_path / "b" / "settings.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(compare, runs)
    assert done.exit_code == 0 or (isinstance(done.exception, SpearError) and "settings.json" in str(done.exception))


def steps(*numbers: int, **data: Any) -> list[tuple[int, dict[str, Any]]]:
    return [train(number, **data) for number in numbers]


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[(0, {"val/a": 2}), *steps(1, 2, launch=0)]], [(0, None, 2), (1, 0, None), (2, 0, None)]),
        ([[*steps(1, launch=0), (1, {"val/a": 2})]], [(1, 0, 2)]),
        # Step 3 was lost with the weights it made; validation at the checkpoint belongs to the step that made it.
        ([steps(1, 2, 3, launch=0), [(1, {"val/a": 1}), *steps(2, launch=1)]], [(1, 0, 1), (2, 1, None)]),
        ([steps(1, 2, launch=0), [(1, {"val/a": 1})]], [(1, 0, 1)]),
        ([steps(1, 2, launch=0), []], [(1, 0, None), (2, 0, None)]),
        ([steps(n + 1, n + 2, launch=n) for n in range(12)], [*((n + 1, n, None) for n in range(12)), (13, 11, None)]),
    ],
    ids=["none", "empty", "validated", "in parts", "resumed", "only validated", "wrote nothing", "in their order"],
)
@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "da', b"\n\n", b'{"step": 3, "data": {"\xc3'])
def test_a_history_is_that_of_the_weights(
    tmp_path: Path, launches: list[list[tuple[int, dict[str, Any]]]], expected: list[tuple[Any, ...]], torn: bytes
) -> None:
    for number, records in enumerate(launches):
        write_launch(tmp_path, number, *records, torn=torn)
    assert [(one["step"], one.get("launch"), one.get("val/a")) for one in read_history(tmp_path)] == expected
