import codecs
import fcntl
import os
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.files import digest_file
from spear_envs.webshop import build, products
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import open_catalogue
from spear_envs.webshop.products import CatalogueFiles
from tests.spear_envs.webshop import catalogues
from tests.spear_envs.webshop.catalogues import make_entry, make_options, make_record


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNK_RECORDS", 8)
    monkeypatch.setattr(products, "CHUNK", 512)


def make_files(folder: Path, count: int = 50, *, packed: bool = False) -> CatalogueFiles:
    records = [make_record(f"B{i:03d}", full_description=f"Text {i}") for i in range(count)]
    return catalogues.write(folder, records, {f"B{i:03d}": make_entry("soft") for i in range(count)}, packed=packed)


def digest(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


class Stop(Exception):
    """What the user does when it takes too long."""


@pytest.mark.parametrize(
    ("stage", "packed"),
    [
        ("checking", False),
        ("reading attributes", False),
        ("reading products", False),
        ("reading products", True),
        ("making goals", True),
        ("indexing", False),
    ],
)
def test_a_build_goes_on_where_it_was(tmp_path: Path, stage: str, packed: bool) -> None:
    files = make_files(tmp_path / "raw", packed=packed)
    build_store(files, tmp_path / "whole", processes=1)

    def stop(what: str, done: int, total: int | None) -> None:
        if what.startswith(stage) and (stage != "reading products" or done > 2_000):
            raise Stop

    with pytest.raises(Stop):
        build_store(files, tmp_path / "store", processes=1, on_progress=stop)
    assert not (tmp_path / "store").exists()
    with pytest.raises(SpearError, match="is incomplete: run the same build command"):
        open_catalogue(tmp_path / "store")
    read: list[int] = []
    build_store(
        files,
        tmp_path / "store",
        processes=1,
        on_progress=lambda what, done, total: read.append(done) if what == "reading products" else None,
    )
    if stage == "reading products":
        assert read and read[0] > 2_000, "the chunks that were finished are not read again"
    elif stage in ("making goals", "indexing"):
        assert not read
    assert digest(tmp_path / "store") == digest(tmp_path / "whole")
    assert not (tmp_path / "store.partial").exists()


def test_damaged_remains_are_made_anew(tmp_path: Path) -> None:
    files = make_files(tmp_path / "raw")
    build_store(files, tmp_path / "whole", processes=1)

    def stop(what: str, done: int, total: int | None) -> None:
        if what == "indexing":
            raise Stop

    with pytest.raises(Stop):
        build_store(files, tmp_path / "store", processes=1, on_progress=stop)
    os.truncate(tmp_path / "store.partial" / "chunk-00002.npz", 300)
    os.truncate(tmp_path / "store.partial" / "chunk-00004.bin", 10)
    # As a build leaves it that is killed before the folder gets its name.
    (tmp_path / "store.partial" / "store" / "manifest.json").write_text("{}")
    build_store(files, tmp_path / "store", processes=1)
    assert digest(tmp_path / "store") == digest(tmp_path / "whole")


def test_remains_of_other_files_are_thrown_away(tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int | None) -> None:
        if what == "indexing":
            raise Stop

    with pytest.raises(Stop):
        build_store(make_files(tmp_path / "raw"), tmp_path / "store", processes=1, on_progress=stop)
    other = catalogues.write(tmp_path / "raw", [make_record("B1", name="Another")])
    manifest = build_store(other, tmp_path / "store", processes=1)
    assert manifest.counts == {"products": 1, "synthetic": 0}
    assert open_catalogue(tmp_path / "store").product(0).title == "Another"


def test_only_one_build_at_a_time(tmp_path: Path) -> None:
    files = make_files(tmp_path / "raw")
    (tmp_path / "store.partial").mkdir()
    handle = os.open(tmp_path / "store.partial", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(SpearError, match="another process is building"):
        build_store(files, tmp_path / "store", processes=1)
    os.close(handle)
    build_store(files, tmp_path / "store", processes=1)


def test_folders_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    files = make_files(tmp_path / "raw")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for folder in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(SpearError, match="holds files that are not a store"):
            build_store(files, folder, processes=1)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    (tmp_path / "empty").mkdir()
    build_store(files, tmp_path / "empty", processes=1)


@pytest.mark.parametrize("manifest", ['{"name": "my app"}', '{"format": "spear-bm25-index"}', "// mine", None])
def test_a_manifest_of_something_else_is_no_store(tmp_path: Path, manifest: str | None) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    if manifest is None:
        os.mkfifo(mine / "manifest.json")
    else:
        (mine / "manifest.json").write_text(manifest)
    with pytest.raises(SpearError, match="holds files that are not a store"):
        build_store(make_files(tmp_path / "raw"), mine, processes=1)
    assert (mine / "thesis.txt").read_text() == "x"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "spear-webshop-store", "version": 0}'])
def test_a_damaged_or_old_store_is_built_again(tmp_path: Path, text: str) -> None:
    files = make_files(tmp_path / "raw")
    build_store(files, tmp_path / "store", processes=1)
    (tmp_path / "store" / "manifest.json").write_text(text)
    build_store(files, tmp_path / "store", processes=1)
    assert open_catalogue(tmp_path / "store")


@pytest.mark.parametrize("remains", [b'{"limit": 1}', b"\xff"])
def test_a_build_of_a_file_with_a_byte_order_mark_goes_on(tmp_path: Path, remains: bytes) -> None:
    files = make_files(tmp_path / "raw")
    files.items.write_bytes(codecs.BOM_UTF8 + files.items.read_bytes())

    def stop(what: str, done: int, total: int | None) -> None:
        if what == "reading products" and done > 2_000:
            raise Stop

    with pytest.raises(Stop):
        build_store(files, tmp_path / "store", processes=1, on_progress=stop)
    assert build_store(files, tmp_path / "store", processes=1).counts["products"] == 50
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "again.partial" / "plan.json").write_bytes(remains)
    assert build_store(files, tmp_path / "again", processes=1).counts["products"] == 50


def test_a_new_store_takes_the_place_of_the_old(tmp_path: Path) -> None:
    files = make_files(tmp_path / "raw")
    build_store(files, tmp_path / "store", processes=1)
    first = open_catalogue(tmp_path / "store")
    build_store(files, tmp_path / "store", processes=1, price_seed=7)
    second = open_catalogue(tmp_path / "store", price_seed=7)
    assert second is not first
    assert first.product(3) == second.product(3)  # what is open stays readable
    assert [path.name for path in tmp_path.iterdir() if path.name != "raw"] == ["store"]


@pytest.mark.parametrize("workers", [1, 2])
def test_options_of_more_goals_than_can_be_numbered(tmp_path: Path, workers: int) -> None:
    groups = {group: [str(i) for i in range(8)] for group in "abcdefghijklmnopqrstu"}
    records = [make_record("B1"), make_record("B2", customization_options=make_options(**groups))]
    files = catalogues.write(tmp_path / "raw", records, {"B2": make_entry("soft")})
    for load in (
        lambda: build_store(files, tmp_path / "store", processes=workers),
        lambda: open_catalogue(tmp_path / "raw"),
    ):
        with pytest.raises(SpearError, match="product B2: its options make 9,223,372,036,854,775,808 goals"):
            load()


def test_attributes_given_twice_and_for_strange_products(tmp_path: Path) -> None:
    text = '{"B1": {"attributes": ["a"]}, "é": {}, "B0123456789": {}, "": {}, "B2": {}, "B1": {"attributes": ["b"]}}'
    files = catalogues.write(tmp_path / "raw", [make_record("B1"), make_record("B2"), make_record("B3")], text)
    build_store(files, tmp_path / "store", processes=1)
    catalogue = open_catalogue(tmp_path / "store")
    assert [catalogue.product(number).attributes for number in range(3)] == [("b",), ("DUMMY_ATTR",), ("DUMMY_ATTR",)]


@pytest.mark.parametrize("workers", [1, 2])
def test_duplicates_limits_and_unlisted_products(tmp_path: Path, workers: int) -> None:
    asins = ["B3", "nan", "B1", "B3", "B" * 11, "B2", "B1", "B9"]
    records = [make_record(asin, name=f"Title {i}") for i, asin in enumerate(asins)]
    files = catalogues.write(tmp_path / "raw", records * 3)
    for limit, expected in (
        (None, "B1 B2 B3 B9"),
        (3, "B1 B3"),
        (8, "B1 B2 B3 B9"),
        (7, "B1 B2 B3"),
        (100, "B1 B2 B3 B9"),
    ):
        manifest = build_store(files, tmp_path / "store", processes=workers, limit=limit)
        catalogue = open_catalogue(tmp_path / "store")
        found = [catalogue.product(number) for number in range(len(catalogue))]
        assert " ".join(product.asin for product in found) == expected
        assert found[0].title == "Title 2" and manifest.counts["products"] == len(found)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("[]", "has no products"),
        ('[{"asin": "nan"}]', "has no products"),
        ('{"asin": "B1"}', r"\[ expected, \{ found"),
        ("[1]", "is not an array of products"),
        ('[{"asin": "B1", "name": "x"}, 7]', "record 1: a product must be an object"),
        ('[{"asin": "B1", "name": "x"}, {"asin": "B2", "name": null}]', "record 1: product B2: name is null"),
        ('[{"asin": "B1", "name": "x"}, {"name": "y"}]', "record 1: a product lacks an asin"),
        ('[{"asin": "B1", "name": "x"}, {"asin": "B2"', r"broken JSON at byte 43: it ends"),
        ('[{"asin": "B1", "name": "x"}] and more', "there is more after its end"),
        (f'[{{"asin": "B1", "name": "x", "n": {"1" * 5_000}}}]', "a number has too many digits"),
    ],
)
def test_bad_items(tmp_path: Path, items: str, message: str) -> None:
    with pytest.raises(SpearError, match=message) as caught:
        build_store(catalogues.write(tmp_path / "raw", items), tmp_path / "store", processes=1)
    assert "items_shuffle.json" in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_bad_attributes(tmp_path: Path) -> None:
    for text, message in (
        ("[]", r"\{ expected"),
        ('{"B1": 5}', "entry 'B1' must be an object"),
        ('{"B1": {"attributes": "x"}}', "product B1: attributes must be a list of texts"),
        ('{"B1": {"instruction": 5, "instruction_attributes": ["a"]}}', "B1: its instruction must be a text"),
        ('{"B1": {"attrib', "it ends within a value"),
    ):
        files = catalogues.write(tmp_path / "raw", [make_record("B1")], text)
        with pytest.raises(SpearError, match=message):
            build_store(files, tmp_path / "store", processes=1)
