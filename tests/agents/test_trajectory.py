"""Records of episodes on disk, and files that are whole or the old ones."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import Finish, Served
from spear_agents.models import digest_model, has_words
from spear_agents.play.trajectory import (
    Layout,
    Row,
    StopReason,
    TokenKind,
    Trajectory,
    TrajectoryWriter,
    Turn,
    read_trajectories,
)
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_json

texts = st.text(st.characters(), max_size=12)
floats = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 200_000), max_size=5).map(tuple)


counts = st.none() | st.integers(0, 10**6)
served = st.none() | st.builds(
    Served,
    model=texts,
    prompt_tokens=counts,
    completion_tokens=counts,
    cached_tokens=counts,
    tries=st.integers(1, 9),
    cost=st.none() | floats,
    prompt_ids=st.none() | ids,
    token_ids=st.none() | ids,
    log_probs=st.none() | st.lists(floats, max_size=3).map(tuple),
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    response = draw(ids)
    log_probs = tuple(draw(st.lists(floats, min_size=len(response), max_size=len(response))))
    strings = [draw(texts) for _ in range(4)]
    response_text, action, observation, anchor = strings
    return Turn(
        prompt_ids=draw(ids),
        response_ids=response,
        log_probs=log_probs,
        response=response_text,
        action=action,
        observation=observation,
        format_ok=draw(st.booleans()),
        native_thought=draw(st.booleans()),
        action_ok=draw(st.booleans()),
        anchor=anchor,
        reward=draw(floats),
        finish=draw(st.sampled_from(Finish)),
        served=draw(served),
        dropped_turns=draw(st.integers(0, 3)),
    )


trajectories = st.builds(
    Trajectory,
    env_id=texts,
    task_id=texts,
    subtask=texts,
    instruction=texts,
    fingerprint=texts,
    layout=st.sampled_from(Layout),
    turns=st.lists(turns(), max_size=3).map(tuple),
    reward_terms=st.dictionaries(texts, floats, max_size=3),
    reward=floats,
    score=floats,
    won=st.booleans(),
    tool_calls=st.integers(0, 100),
    stop=st.sampled_from(StopReason),
    fault=st.none() | texts,
    seed=st.integers(-(2**70), 2**70),
    final_observation=texts,
    tokens=st.sampled_from(TokenKind),
    trial=st.integers(1, 5),
    memory=st.lists(texts, max_size=3).map(tuple),
    reflection=st.none() | texts,
).map(lambda made: made if made.stop is StopReason.FAULT else replace(made, won=made.stop is StopReason.WON))


def make_trajectory(layout: Layout = Layout.PER_TURN, count: int = 2, **changes: object) -> Trajectory:
    made = [
        Turn(
            (10 + i, 20 + i),
            (30 + i, 40 + i, 2),
            (-0.1, -0.2, -0.3),
            f"r{i}",
            f"a{i}",
            f"o{i}",
            True,
            True,
            f"s{i}",
            -0.1,
            Finish.STOP,
            follows=i - 1 if i and layout is Layout.CONVERSATION else None,
        )
        for i in range(count)
    ]
    fields = {
        "env_id": "e",
        "task_id": "t/0",
        "subtask": "s",
        "instruction": "i",
        "fingerprint": "f",
        "layout": layout,
        "turns": tuple(made),
        "reward_terms": {"outcome": 1.0},
        "reward": 1.0,
        "score": 1.0,
        "won": True,
        "tool_calls": 1,
        "stop": StopReason.WON,
    }
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


@given(trajectories)
def test_a_trajectory_comes_back_as_it_was_written(trajectory: Trajectory) -> None:
    line = trajectory.to_json()
    assert "\n" not in line and line.isascii()
    back = Trajectory.from_json(line)
    assert back == trajectory
    assert back.to_json() == line
    assert isinstance(back.stop, StopReason) and isinstance(back.layout, Layout)
    assert all(isinstance(turn.finish, Finish) and isinstance(turn.prompt_ids, tuple) for turn in back.turns)


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
@pytest.mark.parametrize("log_prob", [0.0, -0.5])
def test_a_long_response_of_bytes_is_written_once(finish: Finish, log_prob: float) -> None:
    text = "go \ud800é" * 10_000
    ids = (*text.encode("utf-8", "surrogatepass"), *([256] if finish is Finish.STOP else []))
    turn = make_trajectory().turns[0]
    turn = replace(turn, response=text, response_ids=ids, log_probs=(log_prob,) * len(ids), finish=finish)
    trajectory = make_trajectory(turns=(turn,), tokens=TokenKind.BYTES)
    line = trajectory.to_json()
    assert Trajectory.from_json(line) == trajectory
    assert log_prob or len(line) < len(json.dumps(text)) + 1000


@given(st.lists(trajectories, max_size=4))
def test_a_file_of_them_too(tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("t") / "a" / "episodes.jsonl"
    for trajectory in written:  # reopened each time: appending loses nothing
        with TrajectoryWriter(path) as writer:
            writer.write(trajectory)
    assert (list(read_trajectories(path)) if written else []) == written


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "episodes.jsonl"
    first, second = make_trajectory(seed=1), make_trajectory(seed=2)
    with TrajectoryWriter(path) as writer:
        writer.write(first)
        writer.write(second)
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_trajectories(path)) == [first]
    assert "torn" in caplog.text
    with TrajectoryWriter(path) as writer:
        writer.write(second)
    assert list(read_trajectories(path)) == [first, second]


def test_a_long_file_is_opened_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 32)  # a hole, which takes no space
        file.seek(0, 2)
        file.write(b"\n{torn")
    with TrajectoryWriter(path):
        pass
    assert path.stat().st_size == (1 << 32) + 1


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "null", "no json", "[" * 100_000, json.dumps({"turns": [{}], "layout": "x", "stop": "won"})],
    ids=["object", "list", "null", "text", "deep", "turn"],
)
def test_a_whole_line_that_is_no_trajectory_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(make_trajectory().to_json() + "\n" + line + "\n")
    with pytest.raises(SpearError, match="line 2"):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_id", ["t"]), ("subtask", {}), ("instruction", 5), ("fingerprint", None), ("seed", "0"), ("seed", 0.5),
        ("trial", None), ("won", "yes"), ("score", None), ("reward", "1"), ("reward_terms", [1]), ("fault", 3),
        ("turns.response_ids", [1, "2"]), ("turns.prompt_ids", [1.5]), ("turns.log_probs", "-1"),
        ("turns.action", None), ("turns.format_ok", "no"), ("turns.reward", [0]), ("turns.served", {"cost": "dear"}),
        ("turns.served", {"token_ids": ["a"]}),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_no_trajectory(field: str, value: object) -> None:
    record = json.loads(make_trajectory().to_json())
    _, is_of_turn, name = field.rpartition("turns.")
    (record["turns"][0] if is_of_turn else record)[name] = value
    with pytest.raises(TypeError, match="" if is_of_turn else field):
        Trajectory.from_json(json.dumps(record))


def test_unreadable_and_unwritable_places_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="cannot be read"):
        list(read_trajectories(tmp_path / "absent.jsonl"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match="cannot be written"), TrajectoryWriter(tmp_path / "file" / "x.jsonl"):
        pass
    with pytest.raises(RuntimeError, match="with TrajectoryWriter"):
        TrajectoryWriter(tmp_path / "x.jsonl").write(make_trajectory())


def test_per_turn_rows_are_the_turns() -> None:
    trajectory = make_trajectory()
    assert trajectory.rows() == [
        Row((10, 20), (30, 40, 2), (1, 1, 1), (-0.1, -0.2, -0.3), 0),
        Row((11, 21), (31, 41, 2), (1, 1, 1), (-0.1, -0.2, -0.3), 1),
    ]


def test_a_conversation_is_one_row_that_masks_the_environment() -> None:
    (row,) = make_trajectory(Layout.CONVERSATION, count=3).rows()
    assert row.prompt_ids == (10, 20)
    assert row.response_ids == (30, 40, 2, 11, 21, 31, 41, 2, 12, 22, 32, 42, 2)
    assert row.response_mask == (1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1)
    assert row.log_probs == (-0.1, -0.2, -0.3, 0, 0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2, -0.3)
    assert make_trajectory(Layout.CONVERSATION, count=0).rows() == []


def test_records_without_the_newer_fields_are_read() -> None:
    old = json.loads(make_trajectory().to_json())
    for key in ("final_observation", "tokens", "trial", "memory", "reflection"):
        del old[key]
    for turn in old["turns"]:
        del turn["served"], turn["dropped_turns"]
    assert Trajectory.from_json(json.dumps(old)) == make_trajectory()


def test_a_json_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    with pytest.raises(SpearError, match="cannot be written"):
        write_json(path / "below", {})
    with pytest.raises(SpearError, match="is a folder"):
        write_json(path.parent, {})
    assert os.listdir(path.parent) == ["x.json"]
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with pytest.raises(SpearError, match="is a device or a pipe: name a file"):
        write_json(pipe, {})
    assert pipe.is_fifo()
    link.symlink_to(path)
    write_json(link, 2)
    assert link.is_symlink() and path.read_text() == "2\n"


def test_a_model_s_digest_follows_its_weights_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20))
    first = digest_model(tmp_path)
    (tmp_path / "warmstart.json").write_text("notes")
    assert digest_model(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20 - 1) + b"x")
    assert digest_model(tmp_path) != first


def test_a_tokenizer_of_words_is_told_from_one_that_builds_them(tmp_path: Path, tiny_model: Path) -> None:
    assert has_words(tiny_model)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}')
    assert not has_words(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    assert has_words(tmp_path)
    for damaged in ("", "[]", '{"model": null}', "[" * 9999):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert not has_words(tmp_path)
