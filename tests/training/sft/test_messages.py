"""Rows of other tools' data: ReTool-SFT in its two forms, tables, and Qwen's published chat templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from spear_envs.code.prompts import TOOLS
from spear_envs.core.errors import SpearError
from spear_training.sft.messages import read_rows
from spear_training.sft.samples import Preparation, Sample, SampleReader, open_store, prepare_samples
from tests.agents.test_transcript import TOKENIZERS, turns
from tests.training.sft.conftest import write_lines
from tests.training.sft.test_samples import reply, split, user

HEAD = (
    "Solve the following problem step by step. You now have the ability to selectively write executable Python code to "
    "enhance your reasoning process.\n\nEach code snippet is wrapped with <code>\n```python\ncode snippet\n```\n</code>"
    "\n\n*user question:*\n"
)
TAIL = (
    "\n\nRemember to place the final answer in the last part using the format: \n<answer>\n"
    "\\boxed{'The final answer goes here.'}\n</answer>"
)
SOLUTION = (
    "Multiply.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n<interpreter>\n42\n</interpreter>\n\nCheck it.\n<code>\n"
    "```python\nx = 42\nprint(x < 43)\n```\n</code>\n<interpreter>\nTrue\n</interpreter>\n<code>\nprint(1)\n</code>\n"
    "<interpreter>\n1\n</interpreter>\n\nSo it is 42.\n\n<answer>\n\\boxed{42}\n</answer>"
)


def retool(problem: str = "What is 6 times 7?", solution: str = SOLUTION) -> dict[str, Any]:
    """A row of ReTool-SFT as it is published."""
    return {"messages": [user(f"{HEAD}{problem}{TAIL}"), reply(solution)]}


def call(text: str, code: str) -> dict[str, Any]:
    function = {"name": "code_interpreter", "arguments": {"code": code}}
    return {**reply(text), "tool_calls": [{"type": "function", "function": function}]}


PREPARED = {
    "messages": [
        user("What is 6 times 7?" + TAIL.replace("<answer>", "").replace("</answer>", "").rstrip()),
        call("Multiply.", "print(6 * 7)"),
        {"role": "tool", "content": "42"},
        call("Check it.", "x = 42\nprint(x < 43)"),
        {"role": "tool", "content": "True"},
        call("", "\nprint(1)\n"),
        {"role": "tool", "content": "1"},
        reply("So it is 42.\n\n\n\\boxed{42}"),
    ],
    "tools": [TOOLS[0].schema()],
}
"""The same row as the authors' script prepares it."""


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def open_reader(name: str) -> SampleReader:
    tokenizer = TOKENIZERS[name]
    return SampleReader(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def write_call(code: str) -> str:
    """A call as Qwen's templates write it."""
    return f'<tool_call>\n{{"name": "code_interpreter", "arguments": {json.dumps({"code": code})}}}\n</tool_call>'


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3"])
def test_retool_is_learnt_as_published_and_as_the_authors_prepare_it(name: str, tmp_path: Path) -> None:
    reader = open_reader(name)
    # Another number of messages: in a table the fields of a call are empty in the others.
    short = retool(solution="Easy.\n<answer>\n\\boxed{42}\n</answer>")
    prepared = {**PREPARED, "messages": [PREPARED["messages"][0], reply("Easy.\n\n\\boxed{42}")]}
    files = (
        write_lines(tmp_path / "published.jsonl", retool(), short),
        write_table(tmp_path / "published.parquet", [retool(), short]),
        write_lines(tmp_path / "prepared.jsonl", PREPARED, prepared),
        write_table(tmp_path / "prepared.parquet", [PREPARED, prepared]),
    )
    found: list[Preparation] = []
    for file in files:
        found.append(prepare_samples([file], reader, tmp_path / file.name.replace(".", "-"), max_length=9_999))
    assert found[0].samples == 2 and found[0].unended == found[0].split == 0
    assert found == [found[0]] * 4
    ids, mask = open_store(tmp_path / "published-parquet")[0]
    runs = split(Sample(tuple(ids.tolist()), tuple(mask.tolist())), reader.tokenizer)
    first, second, third = map(write_call, ("print(6 * 7)", "x = 42\nprint(x < 43)", "\nprint(1)\n"))
    # Qwen3's template writes an empty thought before the last message, and there alone.
    thought = "<think>\n\n</think>\n\n" if name == "Qwen3" else ""
    assert [text for bit, text in runs if bit] == [
        f"Multiply.\n{first}<|im_end|>",
        f"Check it.\n{second}<|im_end|>",
        f"{third}<|im_end|>",
        f"{thought}So it is 42.\n\n\n\\boxed{{42}}<|im_end|>",
    ]
    read = "".join(text for bit, text in runs if not bit)
    assert "code_interpreter" in read.partition("<|im_start|>user")[0], "the tool is in the system message"
    outputs = [f"<tool_response>\n{output}\n</tool_response>" for output in ("42", "True", "1")]
    assert all(output in read for output in outputs) and "*user question:*" not in read and "<answer>" not in read


@pytest.mark.parametrize(
    "solution",
    [
        "I do not know.",
        "<code>print(1)</code> <answer>1</answer>",
        "<code>print(1)</code> <code>print(2)</code> <interpreter>2</interpreter> <answer>1</answer>",
        "<answer>1</answer> or 2",
        "<code></code>" * 5_000,  # whose tags were once paired in every way
        "<code></code><interpreter>" * 2_000,
    ],
)
def test_a_solution_of_another_form_is_said(solution: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", retool(), retool(solution=solution))
    with pytest.raises(SpearError, match="row 2: its prompt is ReTool's"):
        prepare_samples([path], open_reader("Qwen2.5"), tmp_path / "samples", max_length=9_999)


@pytest.mark.parametrize("calls", [3, {}, "x", [3]])
def test_calls_are_a_list_of_objects(calls: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"messages": [user("a"), {**reply("b"), "tool_calls": calls}]})
    with pytest.raises(SpearError, match=r"row 1: .*tool.call"):
        prepare_samples([path], open_reader("Qwen2.5"), tmp_path / "samples", max_length=99)


def test_empty_fields_of_a_table_are_absent_and_null_arguments_of_json_are_not(tmp_path: Path) -> None:
    rows = [{"messages": [user("a"), reply("b")], "tools": [{"type": "function", "function": {"name": "f"}}]}]
    rows += [{"messages": [user("a"), call("b", "c")]}]
    (_, first), (_, second) = read_rows(write_table(tmp_path / "a.parquet", rows))
    assert (first, second) == tuple(rows)
    line: dict[str, Any] = {"messages": [], "tools": None}
    assert list(read_rows(write_lines(tmp_path / "a.jsonl", line))) == [(1, line)]


@settings(max_examples=40)
@given(played=turns)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_response_is_learnt_after_what_the_model_is_shown_when_it_is_served(name: str, played: Any) -> None:
    reader = open_reader(name)
    messages: list[dict[str, Any]] = []
    served, whole = [], []
    for said, response, _ in played:
        messages.append(user(said))
        served.append(reader.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        messages.append(reply(response))
        whole.append(reader.tokenizer.apply_chat_template(messages, tokenize=False))
    learnt = []
    for sample in reader.read({"messages": messages}):
        runs, before = split(sample, reader.tokenizer), ""
        for bit, text in runs:
            if bit:
                learnt.append((before, text))
            before += text
    assert [before for before, _ in learnt] == served
    for (before, text), full in zip(learnt, whole, strict=True):
        bare = full[len(before) :].removeprefix("<think>\n\n</think>\n\n")
        assert text.removeprefix("<think>\n\n</think>\n\n").rstrip("\n") == bare.rstrip("\n")


def test_thoughts_that_a_template_drops_later_are_learnt_in_samples_of_their_own(tmp_path: Path) -> None:
    reader = open_reader("Qwen3")
    thinking = [{**reply(f"a{n}"), "reasoning_content": f"t{n}"} for n in range(2)]
    record = {"messages": [user("q0"), thinking[0], user("q1"), thinking[1]]}
    samples = reader.read(record)
    assert [[text for bit, text in split(sample, reader.tokenizer) if bit] for sample in samples] == [
        [f"<think>\nt{n}\n</think>\n\na{n}<|im_end|>"] for n in range(2)
    ]
    found = prepare_samples([write_lines(tmp_path / "a.jsonl", record)], reader, tmp_path / "s", max_length=999)
    assert (found.samples, found.split) == (2, 1)
    # In a loop of calls they are kept, and one sample holds the whole of it.
    loop = [user("q"), {**call("", "c"), "reasoning_content": "t"}, {"role": "tool", "content": "o"}, thinking[1]]
    (whole,) = reader.read({"messages": loop, "tools": PREPARED["tools"]})
    assert [text for bit, text in split(whole, reader.tokenizer) if bit] == [
        f"<think>\nt\n</think>\n\n{write_call('c')}<|im_end|>",
        "<think>\nt1\n</think>\n\na1<|im_end|>",
    ]
