from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop import sources
from spear_envs.webshop.sources import (
    JsonReader,
    find_files,
    iterate_array,
    read_entries,
    read_json,
    read_members,
    read_values,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json")


def put(path: Path, text: str) -> Path:
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


@given(st.lists(JSON, max_size=8), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_arrays_come_back_however_they_are_cut(
    place: Path, values: list[Any], chunk: int, ascii_only: bool, indent: int | None, packed: bool
) -> None:
    path = put(place / f"a.json{'.xz' * packed}", json.dumps(values, ensure_ascii=ascii_only, indent=indent) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK", chunk)
        assert list(read_values(path)) == values
        assert read_json(path) == values


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=6), st.integers(1, 40))
def test_objects_come_back_however_they_are_cut(place: Path, members: dict[str, Any], chunk: int) -> None:
    path = put(place / "o.json", json.dumps(members, ensure_ascii=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK", chunk)
        assert dict(read_members(path)) == members


@given(st.lists(JSON, min_size=1, max_size=8), st.data(), st.booleans())
def test_reading_goes_on_from_an_offset(place: Path, values: list[Any], data: st.DataObject, packed: bool) -> None:
    path = put(place / f"r.json{'.xz' * packed}", json.dumps(values, ensure_ascii=False))
    count = data.draw(st.integers(1, len(values)))
    with JsonReader(path) as reader:
        for _ in zip(range(count), iterate_array(reader), strict=False):
            pass
        offset = reader.offset
    with JsonReader(path, offset) as reader:
        assert [value for value, _ in iterate_array(reader, inside=True)] == values[count:]


@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(), max_size=3), max_size=4), st.data())
def test_what_is_cut_short_is_an_error_with_its_place(place: Path, values: list[Any], data: st.DataObject) -> None:
    whole = json.dumps(values).encode()
    size = data.draw(st.integers(0, len(whole) - 1))
    path = place / "cut.json"
    path.write_bytes(whole[:size])
    with pytest.raises(SpearError, match=r"cut\.json: broken JSON at byte [\d,]+: it ends ") as caught:
        list(read_values(path))
    assert int(str(caught.value).split("at byte ")[1].split(":")[0].replace(",", "")) <= size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"it ends where \[ is expected"),
        ('{"a": 1}', r"\[ expected, \{ found"),
        ("[1 2]", r", or \] expected, 2 found"),
        ("[1,]", "Expecting value"),
        ("[1] [2]", "at byte 4: there is more after its end"),
        ("[,1]", "Expecting value"),
        ("<!DOCTYPE html>", r"\[ expected, < found"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_what_is_no_array(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpearError, match=message):
        list(read_values(put(tmp_path / "a.json", text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"\{ expected"),
        ("{1: 2}", '" expected, 1 found'),
        ('{"a" 2}', ": expected"),
        ('{"a": 2', "it ends where"),
        ("{} {", "more after"),
    ],
)
def test_what_is_no_object(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpearError, match=message):
        dict(read_members(put(tmp_path / "a.json", text)))


def test_other_encodings_and_damaged_packing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes('["é"]'.encode("latin-1"))
    with pytest.raises(SpearError, match="not UTF-8"):
        list(read_values(path))
    packed = tmp_path / "b.json.xz"
    packed.write_bytes(lzma.compress(json.dumps(["x" * 1_000] * 50).encode())[:-40])
    with pytest.raises(SpearError, match="cut short or damaged"):
        list(read_values(packed))
    packed.write_bytes(b"[1, 2]")
    with pytest.raises(SpearError, match="cut short or damaged"):
        list(read_values(packed))
    with pytest.raises(SpearError, match=r"none\.json does not exist"):
        list(read_values(tmp_path / "none.json"))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert list(read_values(path)) == [1, 2]


def test_entries_must_be_objects(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", '{"B1": {"attributes": []}, "B2": {}, "B3": 5}')
    with pytest.raises(SpearError, match="entry 'B3' must be an object"):
        read_entries(path, {"B1"})
    assert read_entries(put(path, '{"B1": {"attributes": []}, "B2": {}}'), {"B1"}) == {"B1": {"attributes": []}}


def test_finding_the_files(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="is not a catalogue"):
        find_files(tmp_path)
    put(tmp_path / "items_shuffle_1000.json.xz", "[]")
    with pytest.raises(SpearError, match=r"lacks items_ins_v2\*\.json"):
        find_files(tmp_path)
    put(tmp_path / "items_ins_v2_1000.json", "{}")
    assert find_files(tmp_path).items.name == "items_shuffle_1000.json.xz"
    assert find_files(tmp_path).human is None
    put(tmp_path / "items_shuffle_1000.json", "[]")
    put(tmp_path / "items_human_ins.json.xz", "{}")
    assert find_files(tmp_path).items.name == "items_shuffle_1000.json"
    assert find_files(tmp_path).human == tmp_path / "items_human_ins.json.xz"
    put(tmp_path / "items_shuffle.json", "[]")
    with pytest.raises(SpearError, match="several files"):
        find_files(tmp_path)
