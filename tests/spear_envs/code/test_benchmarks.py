"""Files of problems, and the commands that fetch them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_envs.code.tasks import (
    BENCHMARKS,
    RETOOL_SFT,
    RawProblem,
    find_splits,
    keep_distinct,
    open_benchmark,
    open_tasks,
    read_problems,
)
from spear_envs.core.errors import SpearError
from tests.spear_envs.code.conftest import make
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Site

HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo(problem: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{HEAD}{problem}{TAIL}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }


def gsm8k(problem: str, extra: dict[str, Any] | None) -> dict[str, Any]:
    asked = f'{problem} Let\'s think step by step and output the final answer after "####".'
    messages = [{"role": "user", "content": asked}]
    return {"prompt": messages, "reward_model": {"ground_truth": "72", "style": "rule"}, "extra_info": extra}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'search'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"Problem": " Who? ", "Answer": 42, "ID": "2024-I-1", "Solution": "x"}, RawProblem("Who?", "42")),
        ({"problem": "Who?", "answer": "073", "solution": "x"}, RawProblem("Who?", "073")),
        ({"problem": "Who?", "answer": 0}, RawProblem("Who?", "0")),
        (dapo("Who?", "-7"), RawProblem("Who?", "-7")),
        *(
            ({"problem": "Who?", "answer": answer}, RawProblem("Who?", text))
            for answer, text in [(42.0, "42"), (-3.0, "-3"), (0.5, "0.5"), (1e20, "1" + "0" * 20), ("42.0", "42.0")]
        ),
        ({"prompt": "Who?", "reward_model": {"ground_truth": "7"}}, RawProblem("Who?", "7")),
        (gsm8k("How many?", {"question": "How many?", "answer": "so\n#### 72"}), RawProblem("How many?", "72")),
        (gsm8k("How many?", {"question": None}), RawProblem("How many?", "72")),
        (gsm8k("How many?", None), RawProblem("How many?", "72")),
        ({"question": "How many?", "answer": "2+3 = <<2+3=5>>5 clips\n#### 1,205"}, RawProblem("How many?", "1,205")),
    ],
)
def test_rows(tmp_path: Path, row: dict[str, Any], expected: RawProblem) -> None:
    assert list(read_problems(write_lines(tmp_path / "a.jsonl", [row]))) == [expected]
    assert list(read_problems(write_parquet(tmp_path / "a.parquet", [row]))) == [expected]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "not an object"),
        ({"answer": "1"}, "lacks a problem"),
        ({"problem": "", "answer": "1"}, "lacks a problem"),
        ({"problem": 3, "answer": "1"}, "lacks a problem"),
        ({"prompt": [], "answer": "1"}, "lacks a problem"),
        ({"prompt": [3], "answer": "1"}, "lacks a problem"),
        ({"problem": "Who?"}, "lacks an answer"),
        ({"problem": "Who?", "answer": " "}, "lacks an answer"),
        ({"problem": "Who?", "answer": True}, "lacks an answer"),
        ({"problem": "Who?", "answer": [1.5]}, "lacks an answer"),
        ({"problem": "Who?", "answer": float("nan")}, "lacks an answer"),
        ({"problem": "Who?", "reward_model": "1"}, "lacks an answer"),
    ],
)
def test_rows_that_are_no_problems_are_named(tmp_path: Path, row: Any, words: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"problem": "Who?", "answer": "1"}, row])
    with pytest.raises(SpearError, match=f"row 2: .*{words}") as caught:
        list(read_problems(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"{", "line 1 cannot be read"),
        ("a.jsonl", b'{"problem": "a", "answer": "1"}\n{"prob', "line 2 cannot be read"),
        ("a.jsonl", b"\xff\n", "cannot be read"),
        ("a.jsonl", b"[" * 100_000, "line 1 cannot be read"),
        ("a.jsonl", b"", "no problems"),
        ("a.parquet", b"no table", "cannot be read"),
        ("a.csv", b"", "give a .jsonl"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'search'")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpearError, match=words) as caught:
        list(read_problems(tmp_path / name))
    assert "\n" not in str(caught.value)
    with pytest.raises(SpearError, match="nowhere"):
        list(read_problems(tmp_path / "nowhere.jsonl"))


def test_a_byte_order_mark_is_no_text_and_a_file_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"problem": "a", "answer": "1"}\r\n')
    assert [task.instruction for task in open_tasks(str(path), "all")] == ["a"]
    write_lines(path, [{"problem": "One?", "answer": 1}, {"problem": "Two?", "answer": 2}])
    assert [task.instruction for task in open_tasks(str(path), "all")] == ["One?", "Two?"]


def test_each_problem_once() -> None:
    rows = [RawProblem("Who is  it?", "1"), RawProblem("What?", "2"), RawProblem("who is it?", "1")] * 100
    found = keep_distinct(iter([*rows, RawProblem("Both?", "1"), RawProblem("Both?", "2")]))
    assert found == ((RawProblem("Who is  it?", "1"), RawProblem("What?", "2")), 302, 1)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "code"


def test_dapo_is_trained_on(data: Path) -> None:
    write_parquet(data / "dapo-math-17k" / "dapo.parquet", [dapo("Who?", "7"), dapo("What?", "12")] * 50)
    assert find_splits("dapo-math-17k") == ("train",)
    tasks = open_benchmark("dapo-math-17k", "train")
    assert [task.instruction for task in tasks] == ["Who?", "What?"]
    assert tasks[1].id == "code/dapo-math-17k/train/00001" and tasks[1].subtask == "dapo-math-17k"
    assert tasks.get(tasks[1].id) is tasks[1] and "code" not in tasks[1].content


def test_the_paper_s_three_as_one(data: Path) -> None:
    for name, text in (("dapo-math-17k", "Who?"), ("aime-2024", "What?"), ("aime-2025", "When?")):
        write_lines(data / name / "problems.jsonl", [{"problem": text, "answer": "7"}])
    assert find_splits("dapo-aime") == ("train", "valid", "test")
    tasks = [open_benchmark("dapo-aime", split)[0] for split in find_splits("dapo-aime")]
    assert [task.subtask for task in tasks] == ["dapo-math-17k", "aime-2024", "aime-2025"]
    assert [task.instruction for task in tasks] == ["Who?", "What?", "When?"]
    assert tasks[1].id == "code/dapo-aime/valid/00000"


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    rows = [{"problem": "Half?", "answer": "1/2"}, {"problem": "One?", "answer": 1}]
    path = write_lines(tmp_path / "own.v2.jsonl", rows[::-1])
    with pytest.raises(SpearError, match="cannot grade code/own/all/00001, whose answer is '1/2'"):
        make(dataset=path)
    path = write_lines(tmp_path / "own.v3.jsonl", rows[:1])
    assert find_splits(str(path)) == ("all",)
    tasks = open_tasks(str(path), None)
    assert tasks[0].id == "code/own/all/00000" and open_tasks(str(path), "all") is tasks
    pytest.importorskip("math_verify", reason="needs the extra 'sandbox'")
    env = make(dataset=path, grader="math_verify")
    env.reset(seed=0)
    *_, info = env.step("\\boxed{0.5}")
    assert info["won"] and info["grader"] == "math_verify"


LINES = b"".join(json.dumps({"Problem": f"Problem {i}?", "Answer": i}).encode() + b"\n" for i in range(30))


@pytest.fixture
def data_data_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data_data_cli", monkeypatch) / "code"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve_hub(monkeypatch) as site:
        yield site


def publish_source(site: Site, name: str, files: dict[str, bytes], *, lfs: bool = True) -> None:
    """Let the repository of a benchmark have these files, and another."""
    hub.publish(site, BENCHMARKS[name].repository, files, lfs=lfs)


@pytest.mark.parametrize("lfs", [True, False])
def test_aime_is_fetched_and_counted(
    data_data_cli: Path, site: Site, capsys: pytest.CaptureFixture[str], lfs: bool
) -> None:
    publish_source(site, "aime-2024", {"aime.jsonl": LINES}, lfs=lfs)
    code, out, err = run(capsys, "get", "code", "aime-2024")
    assert code == 0, err
    assert out.count("its SHA-256 is unknown") == (0 if lfs else 1)
    assert (data_data_cli / "aime-2024" / "aime.jsonl").read_bytes() == LINES
    assert not (data_data_cli / "aime-2024" / "README.md").exists()
    code, out, err = run(capsys, "verify", "code")
    assert code == 0 and "30 (30)" in out and "aime.jsonl is as it should be" in out, err
    (data_data_cli / "aime-2024" / "aime.jsonl").write_bytes(LINES[:-2] + b" \n")
    code, out, err = run(capsys, "verify", "code")
    assert code == 1 and "is not the expected file" in out and "'spear data get code' fetches" in err


def test_problems_that_are_missing_are_told(
    tmp_path: Path, data_data_cli: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "aime.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1] * 2)
    code, _, err = run(capsys, "get", "code", "aime-2024", "--from", tmp_path / "given")
    assert code == 0, err
    code, out, err = run(capsys, "verify", "code", "aime-2024")
    assert code == 1 and "1 problems instead of 30" in out and "code: not all of it" in err


def test_files_of_several_data_sets_do_not_mix(
    tmp_path: Path, data_data_cli: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given"
    for name in ("aime-2024", "aime-2025"):
        (given / name).mkdir(parents=True)
        (given / name / f"{name}.jsonl").write_bytes(LINES)
    assert run(capsys, "get", "code", "--from", given / "aime-2024")[0] == 2
    assert not data_data_cli.exists()
    code, _, err = run(capsys, "get", "code", "aime-2024", "aime-2025", "--from", given)
    assert code == 0, err
    for name in ("aime-2024", "aime-2025"):
        assert [path.name for path in (data_data_cli / name).iterdir()] == [f"{name}.jsonl"]


def test_retool_is_fetched_and_counted(
    tmp_path: Path, data_data_cli: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<answer>7</answer>"}]}
    for rows, code in ((2_000, 0), (1_999, 1)):
        table = write_parquet(tmp_path / "train.parquet", [row] * rows).read_bytes()
        hub.publish(site, RETOOL_SFT.repository, {"train.parquet": table}, lfs=True)
        assert run(capsys, "get", "code", "retool-sft")[0] == 0
        found, out, _ = run(capsys, "verify", "code", "retool-sft")
        assert found == code and ("1999 solutions instead of 2000" in out) == bool(code)
        (data_data_cli / "retool-sft" / "train.parquet").unlink()
        assert run(capsys, "unlock", "code")[0] == 0
