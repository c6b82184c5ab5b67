"""The catalogue on disk, and the products in it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import Catalogue, open_catalogue, open_store
from spear_envs.webshop.products import (
    make_entry,
    parse_prices,
    read_options,
    read_product,
)
from spear_envs.webshop.store import (
    Packer,
    check_store,
    decode_entry,
    encode_entry,
    make_dictionary,
    read_store,
)
from tests.spear_envs.webshop import catalogues
from tests.spear_envs.webshop.catalogues import make_options, make_record


def make_records(count: int = 40) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    records = [
        make_record(
            f"B{(i * 7) % count:03d}",
            pricing="$5 - $95",
            customization_options=make_options(Size=["s", "m", "s"]),
            full_description=f"Text number {i} " + "and more " * (i % 7),
        )
        for i in range(count)
    ]
    row = {"instruction": "I need x.", "instruction_attributes": ["soft"], "instruction_options": ["s"]}
    entries = {record["asin"]: catalogues.make_entry("soft", record["asin"]) for record in records[::2]}
    return records, entries, {"B001": [row, row], "B005": [row], "B999": [row]}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build_store(catalogues.write(folder / "raw", *make_records()), folder / "store", processes=1)
    return folder / "store"


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def assert_equal(one: Catalogue, other: Catalogue) -> None:
    """Both catalogues say the same of everything."""
    assert len(one) == len(other) and one.fingerprint == other.fingerprint and one.tagger == other.tagger
    for number in range(len(one)):
        assert one.product(number) == other.product(number) and one.nouns(number) == other.nouns(number)
        assert one.price(number) == other.price(number)
        asin = one.product(number).asin
        assert one.number_of(asin) == other.number_of(asin) == number
    for query in ("thing", "soft b001 red", "", "é 😀"):
        assert one.search(query) == other.search(query)
    for kind in ("synthetic", "human"):
        try:
            source = one.goals(kind)
        except SpearError:
            with pytest.raises(SpearError):
                other.goals(kind)
            continue
        wanted = other.goals(kind)
        assert [source.goal(i) for i in range(len(source))] == [wanted.goal(i) for i in range(len(wanted))]
        for scheme in ("original", "product", "verl-agent"):
            for split in ("train", "eval", "test", "all"):
                try:
                    tasks = one.make_tasks(split, goal_kind=kind, split_scheme=scheme)
                except SpearError:
                    with pytest.raises(SpearError):
                        other.make_tasks(split, goal_kind=kind, split_scheme=scheme)
                else:
                    same = other.make_tasks(split, goal_kind=kind, split_scheme=scheme)
                    assert tasks.fingerprint == same.fingerprint and list(tasks) == list(same)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(catalogues.catalogues(), st.sampled_from(["keyed", "sequential"]))
def test_what_goes_into_a_store_comes_out(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Any, Any, Any], draws: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    records, entries, human = drawn
    files = catalogues.write(folder, records, entries, human)
    try:
        loaded = catalogues.load(records, entries, human, draws=draws)
    except SpearError:
        with pytest.raises(SpearError):
            build_store(files, folder / "store", draws=draws, processes=1)
        return
    manifest = build_store(files, folder / "store", draws=draws, processes=1)
    assert_equal(open_store(folder / "store"), loaded)
    assert check_store(folder / "store") == read_store(folder / "store")
    assert manifest.counts["products"] == len(loaded)


def test_the_store_is_the_catalogue(built: Path) -> None:
    assert_equal(open_catalogue(built), catalogues.load(*make_records()))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_packing(dictionary: bytes, record: bytes) -> None:
    packer = Packer(make_dictionary([dictionary]))
    assert packer.unpack(packer.pack(record)) == record
    assert packer.pack(record) == packer.pack(record)


def test_packed_records_know_when_they_are_damaged() -> None:
    packer = Packer(b"all sorts of things" * 10)
    packed = packer.pack(b"some sorts of things, and other things")
    for place in range(len(packed) - 1):  # of the last byte some bits mean nothing
        wrong = bytes([*packed[:place], packed[place] ^ 0x55, *packed[place + 1 :]])
        with pytest.raises(SpearError, match="damaged"):
            packer.unpack(wrong)
    for size in range(len(packed) - 1):
        with pytest.raises(SpearError, match="damaged"):
            packer.unpack(packed[:size])


@given(st.text(), st.text(), st.floats(0, 1e9), st.lists(st.text(), max_size=3))
def test_entries_come_back_from_their_bytes(name: str, text: str, price: float, bullets: list[str]) -> None:
    record = make_record("B1", name=name, full_description=text, small_description=bullets, pricing=f"${price:.2f}")
    entry = make_entry(record, catalogues.make_entry("soft", instruction=text))._replace(nouns=tuple(bullets))
    assert decode_entry(encode_entry(entry)) == entry
    assert isinstance(entry.product.prices[0], float)


def test_half_a_surrogate_pair_survives() -> None:
    entry = make_entry(make_record("B1", name=json.loads('"\\ud83d x"')), None)
    assert decode_entry(encode_entry(entry)) == entry


# ---------------------------------------------------------------- stores that are not what they should be


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\udcff"])
def test_a_broken_manifest(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SpearError, match=r"manifest\.json (cannot be read|is not of a WebShop store)"):
        open_catalogue(copy)


@pytest.mark.parametrize("name", ["records.bin", "asins.bin", "goal_order.bin", "index/data.bin", "human.jsonl"])
def test_truncated_and_missing_files(copy: Path, name: str) -> None:
    path = copy / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SpearError, match=f"{name} is damaged, it has .* bytes instead of .*: build it again"):
        open_catalogue(copy)
    path.unlink()
    with pytest.raises(SpearError, match=f"{name} is missing: build it again"):
        open_catalogue(copy)


def test_damage_within_a_file(copy: Path) -> None:
    data = bytearray((copy / "records.bin").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (copy / "records.bin").write_bytes(data)
    catalogue = open_catalogue(copy)
    with pytest.raises(SpearError, match=r"record \d+ of the store .* is damaged"):
        for number in range(len(catalogue)):
            catalogue.product(number)
    with pytest.raises(SpearError, match=r"records\.bin is damaged"):
        check_store(copy)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("manifest.json", '"version": 1', '"version": 99', "version is 99, not 1: build it again"),
        ("manifest.json", '"price_seed": 42', '"price_seed": 43', r"manifest\.json was changed or cut short"),
        ("index/manifest.json", '"version": 3', '"version": 2', r"version is 2, not 3: .*'spear data build webshop'"),
    ],
)
def test_a_changed_manifest(copy: Path, file: str, old: str, new: str, message: str) -> None:
    text = (copy / file).read_text("utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), "utf-8")
    with pytest.raises(SpearError, match=message):
        open_catalogue(copy)


@pytest.mark.parametrize("name", ["offsets", "goal_order", "goal_numbers"])
def test_damaged_numbers_are_one_clear_error(copy: Path, name: str) -> None:
    path = copy / f"{name}.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    catalogue = open_catalogue(copy)
    with pytest.raises(SpearError, match=r"is damaged.*: build"):
        catalogue.goals().goal(0)
    with pytest.raises(SpearError, match=f"{name}.bin is damaged"):
        check_store(copy)


def test_the_wrong_settings(built: Path) -> None:
    assert open_catalogue(built, price_seed=42, draws="keyed", title_nouns="rule") is open_catalogue(built)
    for settings_, message in (
        ({"price_seed": 7}, r"price_seed=42, not 7: .* --price-seed"),
        ({"draws": "sequential"}, r"draws='keyed', not 'sequential': .* --draws"),
        ({"title_nouns": "spacy:x"}, r"title_nouns='rule', not 'spacy:x': .* --nouns"),
        ({"title_nouns": str.split}, "title_nouns='rule', not 'custom:"),
    ):
        with pytest.raises(SpearError, match=message):
            open_catalogue(built, **settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("", (100.0,), "$100.0"),
        ("$18.00", (18.0,), "$18.0"),
        ("$19.99 - $27.99", (19.99, 27.99), "$19.99 to $27.99"),
        ("$1,234.56", (1234.56,), "$1234.56"),
        ("from $5 to $7 or $9", (5.0, 7.0), "$5.0 to $7.0"),
        ("19.99", (100.0,), "$100.0"),
        ("US$3", (3.0,), "$3.0"),
    ],
)
def test_prices_and_tags(pricing: str, prices: tuple[float, ...], tag: str) -> None:
    assert parse_prices(pricing) == prices
    assert read_product(make_record("B1", pricing=pricing)).price_tag == tag


@pytest.mark.parametrize("pricing", ["$", "$1.2.3", "$.", "$ - $5", "$" + "9" * 400])
def test_prices_that_are_none(pricing: str) -> None:
    with pytest.raises(SpearError, match=r"product B1: the price .* cannot be read"):
        read_product(make_record("B1", pricing=pricing))


def test_options() -> None:
    raw = {"Color": [{"value": " Navy/Blue "}, {"value": "RED", "image": "x"}], "Size": None, "Style": []}
    assert read_options(raw) == {"color": ("navy | blue", "red"), "style": ()}


def test_a_later_group_of_the_same_name_replaces_the_earlier_in_its_place() -> None:
    options = read_options(make_options(Color=["red"], Size=["l"], COLOR=["blue", "green"]))
    assert list(options.items()) == [("color", ("blue", "green")), ("size", ("l",))]


def test_index_text_takes_the_first_bullet_and_the_options() -> None:
    record = make_record(
        "B1",
        name="A <b>Lamp</b>",
        full_description="For READING",
        small_description=["Bright", "Cheap"],
        customization_options=make_options(Size=["S", "M"], Color=["Red"]),
    )
    assert read_product(record).index_text == "a <b>lamp</b> for reading bright size: s, m, and color: red"
    assert read_product({**record, "small_description": []}).index_text.startswith("a <b>lamp</b> for reading  size")


def test_what_may_be_missing() -> None:
    product = read_product({"asin": "B1", "name": "Thing"})
    assert product.prices == (100.0,) and product.options == {} and product.bullets == ("",)
    assert product.category == product.query == product.product_category == product.description == ""
    assert product.attributes == ("DUMMY_ATTR",)
    assert read_product(make_record("B1"), {"instruction": "x"}).attributes == ("DUMMY_ATTR",)
    assert read_product(make_record("B1"), {"attributes": ["soft"]}).attributes == ("soft",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"asin": None}, "lacks an asin"),
        ({"asin": 7}, "lacks an asin"),
        ({"asin": "Ä"}, "plain letters"),
        ({"name": None}, "B1: name is null"),
        ({"name": ["x"]}, "B1: name is a list"),
        ({"full_description": 3}, "full_description is a number"),
        ({"small_description": ["a", None]}, "small_description must be a list of texts"),
        ({"small_description": {"a": 1}}, "small_description is an object"),
        ({"pricing": 19.99}, "pricing is a number"),
        ({"customization_options": "size: large"}, "customization_options is a text"),
        ({"customization_options": {"Size": "large"}}, "option 'Size' is a text"),
        ({"customization_options": {"Size": ["large"]}}, "option 'Size' is not an object"),
        ({"customization_options": {"Size": [{"value": 3}]}}, "option 'Size' is not an object"),
        ({"query": True}, "query is a truth value"),
    ],
)
def test_odd_types_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        read_product({**make_record("B1"), **fields})


def test_odd_attributes_are_named() -> None:
    with pytest.raises(SpearError, match="B1: attributes must be a list of texts"):
        read_product(make_record("B1"), {"attributes": "soft"})
