"""Files of questions, and the commands that fetch them."""

import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data import archives
from spear_envs.data.fetching import find_digest
from spear_envs.search import data_cli
from spear_envs.search.data_cli import SOURCES
from spear_envs.search.tasks import BENCHMARKS, RawQuestion, choose_panel, open_benchmark, open_tasks, read_questions
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Site, cut, page, ranged, status, whole

ROWS = [
    {"id": "test_0", "question": " who? ", "golden_answers": ["A", " a ", "A", ""], "metadata": {}},
    {"id": "test_1", "question": "Où — 北京?", "golden_answers": ["É"], "metadata": {"benchmark": "nq"}},
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'search'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["nq.jsonl", "nq.jsonl.xz", "nq.jsonl.gz"])
def test_flashrag_s_lines(tmp_path: Path, name: str) -> None:
    assert list(read_questions(write_lines(tmp_path / name, ROWS))) == [
        RawQuestion("test_0", "who?", ("A", "a"), "nq"),
        RawQuestion("test_1", "Où — 北京?", ("É",), "nq"),
    ]


PROMPT = "Answer the given question. Question: an example? Question: who wrote it?\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # Search-R1
            {
                "id": "train_7",
                "question": "who wrote it?",
                "golden_answers": ["Ann", "A. Nn"],
                "data_source": "nq",
                "prompt": [{"role": "user", "content": PROMPT}],
                "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "A. Nn"]}},
                "extra_info": {"index": 7, "split": "train"},
            },
            RawQuestion("train_7", "who wrote it?", ("Ann", "A. Nn"), "nq"),
        ),
        (  # the same without its own columns
            {
                "data_source": "hotpotqa",
                "prompt": [{"role": "user", "content": PROMPT}],
                "reward_model": {"ground_truth": {"target": ["Ann"]}, "style": "rule"},
                "extra_info": {"index": 7, "split": "train"},
            },
            RawQuestion("7", "who wrote it?", ("Ann",), "hotpotqa"),
        ),
        (  # verl
            {
                "data_source": "searchR1_popqa",
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
                "reward_model": {"ground_truth": {"target": ["Ann"]}},
                "extra_info": {"index": 3, "question": "who wrote it?", "need_tools_kwargs": True},
            },
            RawQuestion("3", "who wrote it?", ("Ann",), "popqa"),
        ),
        (  # DeepResearcher
            {
                "data_source": "musique",
                "prompt": [{"role": "user", "content": "who wrote it?"}],
                "reward_model": {"ground_truth": "Ann<|answer_split|>A. Nn", "style": "rule"},
                "extra_info": {"index": 5},
            },
            RawQuestion("5", "who wrote it?", ("Ann", "A. Nn"), "musique"),
        ),
        (  # DeepResearcher, another name of a benchmark
            {"data_source": "tq", "question": "who?", "reward_model": {"ground_truth": "Ann"}},
            RawQuestion("1", "who?", ("Ann",), "triviaqa"),
        ),
    ],
    ids=["search-r1", "search-r1-bare", "verl", "deepresearcher", "deepresearcher-alias"],
)
def test_parquet_files_of_others(tmp_path: Path, row: dict[str, Any], expected: RawQuestion) -> None:
    assert list(read_questions(write_parquet(tmp_path / "x.parquet", [row]))) == [expected]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no questions"),
        (b'{"question": "q", "golden_answers": ["a"]}\n{"question": "q", "gol', "line 2"),
        (b"[1]\n", "row 1.*not an object"),
        (b'{"question": "q"}\n', "no gold answer"),
        (b'{"question": "q", "golden_answers": ["", " "]}\n', "no gold answer"),
        (b'{"question": "q", "golden_answers": [true]}\n', "not a list of strings"),
        (b'{"question": "q", "golden_answers": {"a": 1}}\n', "not a list of strings"),
        (b'{"question": 7, "golden_answers": ["a"]}\n', "no question"),
        (b'{"golden_answers": ["a"]}\n', "no question"),
        (b"\xff\xfe\n", "line 1"),
        (b"[" * 100_000, "line 1"),
        (b"<!DOCTYPE html>\n", "line 1"),
        (b'{"question": "q \\ud800", "golden_answers": ["a"]}\n', "surrogate"),
        (b'{"question": "q", "golden_answers": ["a", "\\udfff"]}\n', "surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpearError, match=words) as caught:
        list(read_questions(path))
    assert "bad.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_a_gold_answer_of_hundreds_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_text(f'{{"question": "q", "golden_answers": [{10**400}, 2.0]}}\n')
    assert [question.golden_answers for question in read_questions(path)] == [(str(10**400), "2")]


def test_panels_are_the_same_ones_and_nest() -> None:
    questions = [RawQuestion(str(i), f"question {i}?", ("x",), "nq") for i in range(200)]
    panel = choose_panel(questions, 20)
    assert len(panel) == 20 and choose_panel(questions, 500) == questions
    assert set(panel) < set(choose_panel(questions, 21))
    assert set(choose_panel(questions[::-1], 20)) == set(panel)
    assert [int(raw.id) for raw in panel] == sorted(int(raw.id) for raw in panel)
    # Written down once: a panel must never change.
    assert [raw.id for raw in choose_panel(questions, 3)] == ["1", "40", "109"]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with three questions of each benchmark."""
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    for item in BENCHMARKS:
        path = tmp_path / "search" / "flashrag" / item.path
        path.parent.mkdir(parents=True)
        rows = [
            {"id": str(i), "question": f"{item.name} {i}?", "golden_answers": [f"a{i}"], "metadata": {"x": i}}
            for i in range(3)
        ]
        write_lines(path, rows)
    return tmp_path


def test_all_seven_and_a_panel_of_them(fetched: Path) -> None:
    whole, panel = open_benchmark("seven", "test"), open_benchmark("seven", "test", 2)
    assert Counter(task.subtask for task in whole) == {item.name: 3 for item in BENCHMARKS}
    assert Counter(task.subtask for task in panel) == {item.name: 2 for item in BENCHMARKS}
    assert whole.fingerprint != panel.fingerprint == open_benchmark("seven", "test", 2).fingerprint
    lines = fetched / "search" / "flashrag" / "nq" / "test.jsonl"
    lines.write_text(lines.read_text().replace("nq 0?", "nq 9?"))
    assert open_benchmark("seven", "test").fingerprint != whole.fingerprint


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", ROWS)
    tasks = open_tasks(str(path), None)
    assert tasks[0].id == "search/mine/all/00000" and tasks[0].subtask == "mine"
    assert tasks[1].subtask == "nq"
    write_lines(path, ROWS[:1])
    assert (len(open_tasks(str(path), None)), len(tasks)) == (1, 2)


def test_training_questions_keep_their_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    folder = tmp_path / "search" / "search-r1"
    folder.mkdir(parents=True)
    rows = [
        {"question": f"{name} {i}?", "golden_answers": ["a"], "data_source": name}
        for name in ("nq", "hotpotqa")
        for i in range(3)
    ]
    write_parquet(folder / "train.parquet", rows)
    assert {asked.subtask for asked in open_benchmark("nq_hotpotqa", "train").questions} == {"nq", "hotpotqa"}
    assert len(open_benchmark("nq_hotpotqa", "train", panel=1)) == 2


def test_real_questions_of_the_seven_benchmarks(shared: Path) -> None:
    path = shared / "data" / "qa" / "seven_benchmarks.jsonl.xz"
    tasks = open_tasks(str(path), "all")
    assert len(tasks) == 960
    counts = Counter(task.subtask for task in tasks)
    assert counts.pop("bamboogle") == 60 and set(counts.values()) == {150} and len(counts) == 6
    assert len(open_tasks(str(path), "all", 10)) == 70


@pytest.mark.parametrize(
    "row",
    [
        {"golden_answers": [1984]},
        {"golden_answers": 1984.0},
        {"reward_model": {"ground_truth": {"target": [1984]}}},
        {"reward_model": {"ground_truth": 1984}},
    ],
)
def test_golds_may_be_numbers(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps({"question": "When?", **row}) + "\n", "utf-8")
    assert [question.golden_answers for question in read_questions(path)] == [("1984",)]


LINES = b"".join(
    json.dumps({"id": str(i), "question": f"question {i}?", "golden_answers": ["x"]}).encode() + b"\n" for i in range(5)
)
PARTS = {"part_aa": b"a" * 100_000, "part_ab": b"b" * 50_000, "part_ac": b"c"}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data", monkeypatch) / "search"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve_hub(monkeypatch) as site:
        yield site


def publish_source(site: Site, name: str, files: dict[str, bytes], *, lfs: bool = True) -> None:
    """Let the repository of a source have these files, and some others."""
    others = ({"rfilename": "nq/train.jsonl", "size": 10**9},)
    hub.publish(site, SOURCES[name].repository, files, others, lfs=lfs)


@pytest.mark.parametrize("lfs", [True, False])
def test_the_questions_of_the_benchmarks(data: Path, site: Site, capsys: pytest.CaptureFixture[str], lfs: bool) -> None:
    publish_source(site, "questions", {item.path: LINES for item in BENCHMARKS}, lfs=lfs)
    code, out, err = run(capsys, "get", "search")
    assert code == 0, err
    assert out.count("its SHA-256 is unknown") == (0 if lfs else 7)
    assert (data / "flashrag" / "hotpotqa" / "dev.jsonl").read_bytes() == LINES
    assert not (data / "flashrag" / "nq" / "train.jsonl").exists()
    asked = len(site.requests)
    assert run(capsys, "get", "search", "questions")[0] == 0
    assert len(site.requests) == asked + 1, "the listing of the locked commit; whole files are kept"
    code, out, err = run(capsys, "verify", "search")
    assert code == 1 and "search: not all of it is as it should be" in err
    assert "nq/test: 5 questions instead of 3,610" in out and "dev.jsonl is as it should be" in out
    (data / "flashrag" / "nq" / "test.jsonl").write_bytes(LINES[:-1] + b" ")
    code, out, _ = run(capsys, "verify", "search", "questions")
    assert code == 1 and "is not the expected file" in out and "dev.jsonl is as it should be" in out


def test_parts_are_joined_and_a_cut_download_goes_on(
    data: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_source(site, "e5-flat", PARTS)
    url = f"/datasets/{SOURCES['e5-flat'].repository}/resolve/{hub.COMMIT}/part_ab"
    site.put(url, cut(PARTS["part_ab"], 20_000, ETag='"v1"'), ranged(PARTS["part_ab"]))
    code, _, err = run(capsys, "get", "search", "e5-flat")
    assert code == 0, err
    target = data / "wiki-18" / "e5_Flat.index"
    assert target.read_bytes() == b"".join(PARTS.values())
    assert "bytes=20000-" in site.ranges()
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name]
    asked = len(site.requests)
    assert run(capsys, "get", "search", "e5-flat")[0] == 0
    assert len(site.requests) == asked, "it is there"
    assert run(capsys, "verify", "search", "e5-flat")[0] == 0
    target.write_bytes(target.read_bytes()[:-1] + b"x")
    code, out, _ = run(capsys, "verify", "search")
    assert code == 1 and "is not the expected file" in out


def test_the_corpus_is_unpacked(data: Path, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = b'{"id": "0", "contents": "\\"T\\"\\ntext"}\n' * 1_000
    publish_source(site, "wiki-18", {"wiki-18.jsonl.gz": gzip.compress(corpus)})
    code, _, err = run(capsys, "get", "search", "wiki-18")
    assert code == 0, err
    target = data / "wiki-18" / "wiki-18.jsonl"
    assert target.read_bytes() == corpus
    assert not (data / "wiki-18" / "wiki-18.files").exists()
    assert run(capsys, "verify", "search", "wiki-18")[0] == 0
    target.write_bytes(corpus[:-1] + b" ")
    assert run(capsys, "verify", "search", "wiki-18")[0] == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(404), "could not be listed"),
        (whole(json.dumps({"id": "a", "sha": hub.COMMIT, "siblings": []}).encode()), "has no file"),
        (whole(b'{"error": "gone"}'), "could not be listed"),
        (page("Sign in"), "could not be listed"),
    ],
)
def test_a_repository_that_is_not_what_it_was(
    data: Path, site: Site, capsys: pytest.CaptureFixture[str], answer: Any, words: str
) -> None:
    publish_source(site, "questions", {})
    site.put(hub.locate_listing(SOURCES["questions"].repository), answer)
    code, _, err = run(capsys, "get", "search")
    assert code == 1 and words in err
    assert "browser" in err and err.count("\n") == 1


@pytest.mark.parametrize("moment", ["put_file", "record_digest", "rmtree"])
def test_an_index_whose_joining_was_killed_leaves_nothing_and_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    data = use_data_folder(tmp_path / "data", monkeypatch)
    (tmp_path / "given").mkdir()
    for name in "ab":
        (tmp_path / "given" / f"part_a{name}").write_text(name)
    child = os.fork()
    if child == 0:
        place: Any = {"put_file": archives, "record_digest": data_cli, "rmtree": shutil}[moment]
        monkeypatch.setattr(place, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        run(capsys, "get", "search", "e5-flat", "--from", tmp_path / "given")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert run(capsys, "get", "search", "e5-flat", "--from", tmp_path / "given")[0] == 0
    (target,) = (path for path in data.rglob("*") if path.is_file() and path.name not in ("lock.json", ".lock"))
    assert target.read_text() == "ab"
    assert find_digest(target) == hashlib.sha256(b"ab").hexdigest()
