from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spear_agents.metrics import METRICS_FOLDER, measure_metrics, read_history


def write_launch(out: Path, number: int, *records: tuple[int, dict[str, Any]], torn: bytes = b"") -> None:
    """One launch as verl's file logger writes it: a JSON line a step."""
    folder = out / METRICS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}).encode() + b"\n" for step, data in records]
    (folder / f"{number:04d}.jsonl").write_bytes(b"".join(lines) + torn)


def train(step: int, **data: Any) -> tuple[int, dict[str, Any]]:
    return step, {"training/global_step": step, **data}


def test_a_run_without_metrics_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) == []
    assert read_history(tmp_path / "not there") == []
    write_launch(tmp_path, 0)
    assert read_history(tmp_path) == []


@pytest.mark.parametrize("torn", [b'{"step": 3, "da', b"{", b"\n\n", b'{"step": 3, "data": {"\xc3'])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    write_launch(tmp_path, 0, train(1), train(2), torn=torn)
    assert [record["step"] for record in read_history(tmp_path)] == [1, 2]


def test_a_resumed_launch_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, (0, {"val/a": 0}), *(train(step, launch=0) for step in range(1, 8)))
    write_launch(tmp_path, 1, (5, {"val/a": 1}), train(6, launch=1))
    history = read_history(tmp_path)
    assert [(record["step"], record.get("launch")) for record in history] == [
        (0, None),
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
        (5, 0),
        (6, 1),
    ], "step 7 was lost with the weights it made"
    # Validation at the checkpoint belongs to the step that made it.
    assert history[5] == {"step": 5, "training/global_step": 5, "launch": 0, "val/a": 1}


def test_launches_follow_each_other_by_number(tmp_path: Path) -> None:
    for number in range(12):
        write_launch(tmp_path, number, train(number + 1, launch=number), train(number + 2, launch=number))
    history = read_history(tmp_path)
    assert [(record["step"], record["launch"]) for record in history] == [
        *((number + 1, number) for number in range(12)),
        (13, 11),
    ]


def test_a_step_logged_in_two_parts_is_one_record(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, train(1, x=1), (1, {"val/a": 2}))
    assert read_history(tmp_path) == [{"step": 1, "training/global_step": 1, "x": 1, "val/a": 2}]


def test_the_size_grows_with_every_step_and_only_then(tmp_path: Path) -> None:
    assert measure_metrics(tmp_path) == 0
    sizes = []
    for steps in (1, 2, 2):
        write_launch(tmp_path, 0, *(train(t) for t in range(1, steps + 1)))
        sizes.append(measure_metrics(tmp_path))
    assert 0 < sizes[0] < sizes[1] == sizes[2]
