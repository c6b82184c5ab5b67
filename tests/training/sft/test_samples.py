"""Samples of a fine-tuning, and the data sets made of them."""

import errno
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_agents.evaluation.collect import collect_episodes
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from spear_training.sft.samples import (
    Overlong,
    Preparation,
    Sample,
    SampleReader,
    open_store,
    prepare_samples,
    write_store,
)
from tests.agents.test_evaluation import SplitCorridor
from tests.training.sft.conftest import write_lines

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MASKS = st.lists(st.tuples(st.integers(0, 250), st.integers(0, 1)), min_size=1, max_size=40)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def read_one(reader: SampleReader, record: dict[str, Any]) -> Sample | None:
    """The one sample of a row, or None."""
    found = reader.read(record)
    assert len(found) <= 1
    return found[0] if found else None


def split(sample: Sample, tokenizer: Any) -> list[tuple[int, str]]:
    """Stretches of equal mask and their texts."""
    runs = groupby(zip(sample.mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [(bit, tokenizer.decode([token for _, token in run])) for bit, run in runs]


@given(tokens=MASKS)
def test_recorded_ids_stay_as_they_are_up_to_the_last_that_is_learnt(
    reader: SampleReader, tokens: list[tuple[int, int]]
) -> None:
    ids, mask = [list(column) for column in zip(*tokens, strict=True)]
    sample = read_one(reader, {"input_ids": ids, "loss_mask": mask, "messages": [user("x")]})
    wanted = [place for place, bit in enumerate(mask) if bit and place]
    if not wanted:
        assert sample is None
        return
    assert sample is not None and sample.learnt == len(wanted)
    assert list(sample.ids) == ids[: wanted[-1] + 1]
    assert [place for place, bit in enumerate(sample.mask) if bit] == wanted


@settings(max_examples=60)
@given(system=st.none() | TEXTS, dialogue=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_of_messages_the_responses_and_their_ends_are_learnt(
    reader: SampleReader, tokenizer: Any, system: str | None, dialogue: list[tuple[str, str]]
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [message for said, answer in dialogue for message in (user(said), reply(answer))]
    # What a user writes may hold the tokenizer's own marks: that is not ours to change here.
    sample = read_one(reader, {"messages": messages})
    assert sample is not None
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.ids) == whole.removesuffix("\n")
    learnt = [text for bit, text in split(sample, tokenizer) if bit]
    assert learnt == [answer + "<|im_end|>" for _, answer in dialogue]
    assert reader.ends(sample) and reader.fits(sample, {"messages": messages})


def test_tokens_that_read_otherwise_than_their_messages_are_noticed(reader: SampleReader, tokenizer: Any) -> None:
    record: dict[str, Any] = {"messages": [user("a"), reply("left "), user("b"), reply("right")]}
    sample = read_one(reader, record)
    assert sample is not None
    tokens = {"input_ids": list(sample.ids), "loss_mask": list(sample.mask)}
    assert read_one(reader, record | tokens) == sample
    assert reader.fits(sample, record | tokens) and reader.fits(sample, {}), "nothing says what they should read as"
    swapped = [user("a"), reply("right"), user("b"), reply("left")]
    assert not reader.fits(sample, {**tokens, "messages": swapped})
    other = Sample(tuple(min(token + 1, 279) for token in sample.ids), sample.mask)
    assert not reader.fits(other, record | tokens)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "neither input_ids nor messages"),
        ({"messages": []}, None),
        ({"messages": [{"role": "user"}]}, "neither input_ids nor messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "neither input_ids nor messages"),
        ({"input_ids": [1, 2]}, "two lists of one length"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "two lists of one length"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "whole numbers"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "zeros and ones"),
        ({"input_ids": [1, 999], "loss_mask": [0, 1]}, "token id 999 is outside the model's vocabulary of 280"),
        ({"messages": [user("a"), reply("b")], "joined": True}, "the environment's words too"),
        ({"messages": [reply("a"), user("b"), reply("c")]}, "its first message is the assistant's"),
        ({"messages": [user("a \ud800"), reply("b")]}, "neither input_ids nor messages"),
        ({"messages": [user("a"), reply("b")], "tools": [{"type": "function"}]}, "does not show 'tools'"),
        ({"messages": [user("a"), reply("b")], "tools": "{"}, "its tools must be a JSON array"),
        ({"messages": [user("a"), reply("b")], "enable_thinking": False}, "does not show 'enable_thinking'"),
        (
            {"messages": [user("a"), reply("b")], "chat_template_kwargs": {"tokenize": True}},
            "tokenize is an argument",
        ),
        ({"messages": [user("a"), reply("b")], "weight": 0.5}, "the field 'weight'"),
        ({"messages": [user("a"), reply("b") | {"weight": 0.5}]}, "weight=0.5 of a 'assistant'"),
        ({"messages": [user("a"), reply("b") | {"reasoning_content": "t"}]}, "does not show 'reasoning_content'"),
        ({"messages": [user("a"), reply("b") | {"tool_calls": [CALL]}]}, "does not show 'tool_calls'"),
    ],
)
def test_what_is_no_sample_is_said(reader: SampleReader, record: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        assert reader.read(record) == []
        return
    with pytest.raises(SpearError, match=expected):
        reader.read(record)


@pytest.mark.parametrize("name", ["loss_mask", "weight", "train", "training"])
def test_a_response_that_is_not_to_be_learnt_is_read_only(reader: SampleReader, tokenizer: Any, name: str) -> None:
    messages = [user("a") | {name: 0}, reply("b") | {name: False}, user("c"), reply("d") | {name: 1}, user("e")]
    sample = read_one(reader, {"messages": [*messages, reply("f") | {name: None}]})
    assert sample is not None
    assert [text for bit, text in split(sample, tokenizer) if bit] == ["d<|im_end|>", "f<|im_end|>"]
    assert "b<|im_end|>" in tokenizer.decode(sample.ids)
    assert reader.read({"messages": messages[:2]}) == []


@pytest.mark.parametrize("joining", [False, True])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
@pytest.mark.parametrize("content", ["", None, [{"type": "text", "text": ""}]])
def test_tools_and_calls_reach_the_template_in_any_of_their_forms(
    tokenizer: Any, joining: bool, arguments: Any, content: Any
) -> None:
    other = copy(tokenizer)
    shown = "'' + c.function.arguments" if joining else "c.function.arguments | tojson"
    other.chat_template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% if enable_thinking %}!{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}>{% endif %}{{ m.reasoning_content }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + f"{{{{ {shown} }}}}" + "{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call], "reasoning_content": "t"}
    messages = [user("a"), answer, {"role": "tool", "content": "2", "tool_call_id": "1"}, reply("b")]
    keywords = {"tools": [CALL], "chat_template_kwargs": {"enable_thinking": True}}
    sample = read_one(SampleReader(other, 280, (1,)), {"messages": messages, **keywords})
    assert sample is not None
    assert split(sample, other) == [
        (0, "[f]!a<|im_end|>>"),
        (1, 'tf{"x": 1}<|im_end|>'),
        (0, "2<|im_end|>>"),
        (1, "b<|im_end|>"),
    ]
    wrong = {**call, "function": {"name": "f", "arguments": "{x"}}
    with pytest.raises(SpearError, match="arguments of a tool call must be a JSON object"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), answer | {"tool_calls": [wrong]}]})


def test_a_template_whose_prompts_open_what_it_does_not_show_is_refused(tokenizer: Any) -> None:
    other = copy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    with pytest.raises(SpearError, match=r"does not show before a response.*`spear collect --tokenizer"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})


def test_an_end_of_the_chat_template_that_is_no_end_token_is_learnt_too(tokenizer: Any) -> None:
    messages = [user("a"), reply("b"), user("c"), reply("d")]
    reader = SampleReader(tokenizer, 280, (0,))
    sample = read_one(reader, {"messages": messages})
    assert sample is not None and not reader.ends(sample)
    assert [text for bit, text in split(sample, tokenizer) if bit] == ["b<|im_end|>\n", "d<|im_end|>\n"]
    assert reader.fits(sample, {"messages": messages}), "these are no other tokenizer's ids"


def test_a_template_that_refuses_or_loops_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = copy(tokenizer)
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SpearError, match=r"refuses these messages \(roles must alternate\): take another model"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})
    other.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("spear_training.sft.samples.RENDER_S", 0.1)
    with pytest.raises(SpearError, match="took more than"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})
    other.chat_template = None
    with pytest.raises(SpearError, match="refuses these messages"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})


ENV = "spear-test/SftCorridor-v0"


def say(answer: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "won": True, **more}


def prepare(reader: SampleReader, path: Path, **options: Any) -> Preparation:
    return prepare_samples([path], reader, path.with_suffix(".samples"), **{"max_length": 100, **options})


@settings(max_examples=30)
@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1), max_size=8))
def test_a_store_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, int]]]
) -> None:
    folder = tmp_path_factory.mktemp("store") / "samples"
    samples = [Sample(*map(tuple, zip(*row, strict=True))) for row in rows]
    write_store(folder, samples)
    store = open_store(folder)
    assert len(store) == len(samples)
    for sample, (ids, mask) in zip(samples, (store[i] for i in range(len(store))), strict=True):
        assert (tuple(ids.tolist()), tuple(mask.tolist())) == (sample.ids, sample.mask)
    assert [path.name for path in folder.parent.iterdir()] == ["samples"]


def test_what_was_collected_is_the_same_with_ids_and_without(
    tokenizer: Any, reader: SampleReader, tmp_path: Path
) -> None:
    register_env(ENV, SplitCorridor)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    expert = EvalSettings(ENV, EngineKind.EXPERT, split="test")
    for layout in Layout:
        kinds = []
        for name, folder in (("ids", str(tmp_path / "model")), ("messages", None)):
            path = tmp_path / f"{layout.value}-{name}.jsonl"
            collect_episodes(replace(expert, layout=layout), path, tokenizer=folder)
            kinds.append(prepare(reader, path, max_length=10_000))
        assert kinds[0] == kinds[1] and kinds[0].misfits == kinds[0].unended == 0
        assert kinds[0].samples == (3 if layout is Layout.CONVERSATION else 9)


def test_everything_left_out_is_counted(reader: SampleReader, tmp_path: Path) -> None:
    record = say("y")
    length = len(reader.read(record)[0].ids)
    path = write_lines(
        tmp_path / "data.jsonl",
        record,
        say("z", won=False),
        say("y" * 50),
        {"messages": [{"role": "user", "content": "x"}], "won": True},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
    )
    seen: list[int] = []
    found = prepare(reader, path, max_length=length, observer=seen.append)
    wanted = Preparation(
        samples=2,
        tokens=length + 3,
        learnt=3,
        longest=length,
        lost=1,
        empty=1,
        dropped=1,
        unended=1,
        digest=found.digest,
    )
    assert found == wanted and seen == [1, 2, 3, 4, 5]
    cut = prepare(reader, path, max_length=length, overlong=Overlong.TRUNCATE, keep_lost=True)
    assert (cut.samples, cut.lost, cut.dropped, cut.truncated) == (4, 0, 0, 1)
    store = open_store(path.with_suffix(".samples"))
    assert [len(store[i][0]) for i in range(4)] == [length, length, length, 3]
    # A prompt that fills all the room leaves nothing to learn.
    none = prepare(reader, path, max_length=3, overlong=Overlong.TRUNCATE)
    assert (none.samples, none.truncated, none.dropped) == (1, 0, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "data.jsonl has no samples"),
        ("{\n", "data.jsonl, line 1 cannot be read"),
        ("\xff\n", "line 1 cannot be read"),
        ("[1]\n", "data.jsonl, row 1: this is not a sample"),
        ('{"won": true}\n', "data.jsonl, row 1: it has neither input_ids nor messages"),
        (
            '{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_ids": [1, 151645], "loss_mask": [0, 1]}\n',
            "data.jsonl, row 2: token id 151645 is outside",
        ),
        ('{"input_ids": [1, 2], "loss_mask": [0, 1], "won": false}\n', "none of 1 samples .* is of a won episode"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}\n', "nothing to learn .* 1 hold no response"),
    ],
)
def test_a_file_that_cannot_be_learnt_from_is_said(
    reader: SampleReader, tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpearError, match=expected):
        prepare(reader, path)
    assert not path.with_suffix(".samples").exists()


def test_tokens_of_another_model_are_noticed(reader: SampleReader, tmp_path: Path) -> None:
    other = say("left") | {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    path = write_lines(tmp_path / "data.jsonl", other, other, say("right"))
    with pytest.raises(SpearError, match=r"ids of 2 of 3 samples .* they are another model's"):
        prepare(reader, path)
    # A few that cannot be repeated token by token are no reason to stop.
    assert prepare(reader, write_lines(path, other, *[say("right")] * 3)).misfits == 1


def test_a_full_disk_leaves_nothing_half_written(
    reader: SampleReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "data.jsonl", say("a"))
    prepare(reader, path)
    before = sorted(tmp_path.rglob("*"))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(SpearError, match="No space left on device"):
        prepare(reader, path)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    (tmp_path / "data.samples" / "mask.npy").write_bytes(b"x")
    with pytest.raises(SpearError, match="cannot be read"):
        open_store(tmp_path / "data.samples")
