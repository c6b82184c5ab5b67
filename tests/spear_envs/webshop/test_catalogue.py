"""Catalogues by name or folder, and the JSON files that they are read from."""

import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import check_disjoint
from spear_envs.webshop import catalogue, products
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import open_catalogue
from spear_envs.webshop.goals import write_goals
from spear_envs.webshop.products import (
    JsonReader,
    find_files,
    iterate_array,
    read_json,
    read_members,
    read_values,
)
from tests.spear_envs.webshop import catalogues
from tests.spear_envs.webshop.catalogues import make_entry, make_record


def put(folder: Path, count: int = 6, **more: Any) -> Path:
    records = [make_record(f"B{i:03d}", pricing="$5 - $95") for i in range(count)]
    catalogues.write(folder, records, {record["asin"]: make_entry("soft") for record in records}, **more)
    return folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_mini_catalogue() -> None:
    catalogue = open_catalogue()
    assert len(catalogue) == 1_000 and catalogue is open_catalogue("mini")
    sets = [catalogue.make_tasks(split) for split in ("test", "eval", "train")]
    assert len(sets[0]) == len(sets[1]) == 100 and sum(map(len, sets)) == len(catalogue.goals())
    assert check_disjoint(*sets) == sum(map(len, sets))
    asins = [{task.goal.asin for task in made} for made in sets]
    assert sum(map(len, asins)) == len(set().union(*asins))
    assert len(catalogue.goals("human")) >= 100


def test_a_catalogue_is_opened_once_until_its_files_change(tmp_path: Path) -> None:
    folder = put(tmp_path / "raw")
    first = open_catalogue(folder)
    assert open_catalogue(str(folder)) is first
    assert open_catalogue(folder, price_seed=1) is not first
    put(folder, 7)
    os.utime(folder / "items_shuffle.json", ns=(1, 1))
    second = open_catalogue(folder)
    assert (len(first), len(second)) == (6, 7)


def test_a_large_catalogue_needs_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    monkeypatch.setattr(catalogue, "MOST_IN_MEMORY", 5)
    folder = put(tmp_path / "a folder", human={})
    with pytest.raises(SpearError) as caught:
        open_catalogue(folder)
    command = str(caught.value).split("a store: ")[1]
    assert command == (
        f"spear data build webshop --items '{folder}/items_shuffle.json' --attributes '{folder}/items_ins_v2.json'"
        f" --human-goals '{folder}/items_human_ins.json' --out '{folder}/store'"
    )
    put(data / "webshop" / "full" / "raw")
    with pytest.raises(SpearError, match=r"a store: spear data build webshop --size full$"):
        open_catalogue("full")
    put(folder, 5)
    assert len(open_catalogue(folder)) == 5


def test_names_and_folders(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="'spear data get webshop --size small' fetches it"):
        open_catalogue("small")
    with pytest.raises(
        SpearError, match="the catalogue smal does not exist: give 'mini', 'small', 'full', or a folder"
    ):
        open_catalogue("smal")
    with pytest.raises(SpearError, match="catalog='' is not valid: give 'mini', 'small', 'full', or a folder"):
        open_catalogue("")
    for strange in ("x" * 5_000, "~nobody-of-this-name/x", "a\0b"):
        with pytest.raises(SpearError, match=r"the catalogue .* does not exist"):
            open_catalogue(strange)
    folder = put(data / "webshop" / "small" / "raw").parent
    assert len(open_catalogue("small")) == 6
    with pytest.raises(SpearError, match="is not a catalogue"):
        open_catalogue(data)
    # A store goes before the files that it was made of.
    build_store(catalogues.write(tmp_path / "other", [make_record("B1")]), folder / "store", processes=1)
    assert len(open_catalogue("small")) == len(open_catalogue(folder)) == len(open_catalogue(folder / "store")) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"price_seed": "42"}, "price_seed='42' is not valid"),
        ({"price_seed": True}, "price_seed=True is not valid"),
        ({"draws": "x"}, "draws='x' is not valid"),
        ({"title_nouns": "x"}, "title_nouns='x' is not valid"),
        ({"title_nouns": ""}, "title_nouns='' is not valid"),
        ({"goals": ""}, "goals='' is not valid: name a goals file"),
        ({"goals": 5}, "goals=5 is not valid: name a goals file"),
        ({"goals": "x" * 5_000}, "cannot be read"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        open_catalogue("mini", **settings)


def test_own_nouns(tmp_path: Path) -> None:
    catalogue = open_catalogue(put(tmp_path / "raw"), title_nouns=str.split)
    assert catalogue.nouns(0) == ("Soft", "Thing", "B000") and catalogue.tagger == "custom:builtins.str.split"


@pytest.mark.parametrize("built", [False, True])
def test_goals_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    folder = put(tmp_path / "raw")
    if built:
        build_store(find_files(folder), tmp_path / "store", processes=1)
        folder = tmp_path / "store"
    catalogue = open_catalogue(folder)
    source = catalogue.goals()
    chosen = [source.goal(position) for position in (4, 1)]
    path = tmp_path / "goals.jsonl"
    write_goals(chosen, path)
    opened = open_catalogue(folder, goals=path)
    assert open_catalogue(folder, goals=str(path)) is opened
    monkeypatch.setenv("HOME", str(path.parent))
    assert open_catalogue(folder, goals=f"~/{path.name}") is opened
    tasks = opened.make_tasks()
    assert [task.id for task in tasks] == ["webshop/all/00000", "webshop/all/00001"]
    assert [task.goal for task in tasks] == chosen == [opened.goals("human").goal(i) for i in range(2)]
    assert opened.make_tasks("test").fingerprint != tasks.fingerprint
    assert opened.fingerprint == catalogue.fingerprint
    # Prices beside the file count, and change the fingerprints.
    (tmp_path / "prices.json").write_text('{"B001": 77.5, "B999": 1}')
    os.utime(path, ns=(1, 1))
    priced = open_catalogue(folder, goals=path)
    assert priced.price(1) == 77.5 and priced.price(2) == catalogue.price(2)
    assert priced.fingerprint != catalogue.fingerprint and priced.make_tasks().fingerprint != tasks.fingerprint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json")


def put_sources(path: Path, text: str) -> Path:
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


@given(st.lists(JSON, max_size=8), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_arrays_come_back_however_they_are_cut(
    place: Path, values: list[Any], chunk: int, ascii_only: bool, indent: int | None, packed: bool
) -> None:
    path = put_sources(
        place / f"a.json{'.xz' * packed}", json.dumps(values, ensure_ascii=ascii_only, indent=indent) + "\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "CHUNK", chunk)
        assert list(read_values(path)) == values
        assert read_json(path) == values


@given(st.lists(JSON, min_size=1, max_size=8), st.data(), st.booleans())
def test_reading_goes_on_from_an_offset(place: Path, values: list[Any], data: st.DataObject, packed: bool) -> None:
    path = put_sources(place / f"r.json{'.xz' * packed}", json.dumps(values, ensure_ascii=False))
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
        list(read_values(put_sources(tmp_path / "a.json", text)))


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
        dict(read_members(put_sources(tmp_path / "a.json", text)))


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


def test_finding_the_files(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="is not a catalogue"):
        find_files(tmp_path)
    put_sources(tmp_path / "items_shuffle_1000.json.xz", "[]")
    with pytest.raises(SpearError, match=r"lacks items_ins_v2\*\.json"):
        find_files(tmp_path)
    put_sources(tmp_path / "items_ins_v2_1000.json", "{}")
    assert find_files(tmp_path).items.name == "items_shuffle_1000.json.xz"
    assert find_files(tmp_path).human is None
    put_sources(tmp_path / "items_shuffle_1000.json", "[]")
    put_sources(tmp_path / "items_human_ins.json.xz", "{}")
    assert find_files(tmp_path).items.name == "items_shuffle_1000.json"
    assert find_files(tmp_path).human == tmp_path / "items_human_ins.json.xz"
    put_sources(tmp_path / "items_shuffle.json", "[]")
    with pytest.raises(SpearError, match="several files"):
        find_files(tmp_path)
