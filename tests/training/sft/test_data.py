from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_agents.collect import collect_episodes
from spear_agents.settings import EngineKind, EvalSettings
from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from spear_training.sft.data import Preparation, open_store, prepare_samples, write_store
from spear_training.sft.samples import Overlong, Sample, SampleReader
from tests.agents.test_evaluation import SplitCorridor
from tests.training.sft.conftest import write_lines

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
    length = len(reader.read(record).ids)  # type: ignore[union-attr]
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


def test_the_digest_is_that_of_the_samples(reader: SampleReader, tmp_path: Path) -> None:
    one = prepare(reader, write_lines(tmp_path / "a.jsonl", say("a"), say("b", won=False)))
    same = prepare(reader, write_lines(tmp_path / "b.jsonl", say("a", task_id="other")))
    other = prepare(reader, write_lines(tmp_path / "c.jsonl", say("c")))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", r"data.jsonl is empty: `spear collect ENV --out .*` fills it"),
        ("{\n", "data.jsonl, line 1 is not JSON"),
        ("\xff\n", "line 1 is not JSON"),
        ("[1]\n", "data.jsonl, line 1 is not a sample: give files that `spear collect` wrote"),
        ('{"won": true}\n', "data.jsonl, line 1: it has neither input_ids nor messages"),
        (
            '{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_ids": [1, 151645], "loss_mask": [0, 1]}\n',
            "data.jsonl, line 2: token id 151645 is outside",
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


def test_a_missing_file_and_samples_that_are_all_too_long_are_said(reader: SampleReader, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"none\.jsonl cannot be read: No such file"):
        prepare(reader, tmp_path / "none.jsonl")
    path = write_lines(tmp_path / "data.jsonl", say("y" * 500))
    with pytest.raises(SpearError, match=r"of 1 samples 1 are longer than 100 tokens .* raise --max-length"):
        prepare(reader, path)


def test_tokens_of_another_model_are_noticed(reader: SampleReader, tmp_path: Path) -> None:
    other = say("left") | {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    path = write_lines(tmp_path / "data.jsonl", other, other, say("right"))
    with pytest.raises(SpearError, match=r"ids of 2 of 3 samples .* they are another model's"):
        prepare(reader, path)
    # A few that cannot be repeated token by token are no reason to stop.
    assert prepare(reader, write_lines(path, other, *[say("right")] * 3)).misfits == 1
