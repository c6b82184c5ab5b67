"""``spear data get|build|verify webshop``: fetch the official files and build a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, data_folder, fetch_locked
from spear_envs.data.cli import (
    AbsentDataError,
    Collection,
    Expected,
    Finding,
    conclude,
    expect,
    inspect_file,
    json_option,
    source_option,
)
from spear_envs.data.progress import count_bytes, say, show_phases
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import PRICE_SEED, SIZES
from spear_envs.webshop.goals import GoalKind
from spear_envs.webshop.products import CatalogueFiles, JsonReader, find_files
from spear_envs.webshop.reward import RULE
from spear_envs.webshop.stock import DrawMode
from spear_envs.webshop.store import MANIFEST, StoreManifest, check_store
from spear_sandbox.console import FilePath
from spear_sandbox.terminal import Console

# Not tried against Google Drive itself: the tests run a local server.
ADDRESS = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
PAGE = "https://drive.google.com/file/d/{}/view"


def _describe(name: str, drive_id: str, size: int | None = None) -> RemoteFile:
    manual = (
        f"Open {PAGE.format(drive_id)} in a browser and download it as {name}"
        " (a copy is said to be in the data set YWZBrandon/webshop-data on Hugging Face)."
    )
    return RemoteFile(name, ADDRESS.format(drive_id), size=size, manual=manual)


FILES: dict[str, tuple[RemoteFile, ...]] = {
    "small": (
        _describe("items_shuffle_1000.json", "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib", 4_467_013),
        _describe("items_ins_v2_1000.json", "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu", 147_099),
    ),
    "full": (
        _describe("items_shuffle.json", "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB"),
        _describe("items_ins_v2.json", "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi"),
    ),
}
"""The files of WebShop's authors by size: 1,000 products, and 1.18 million (5.2 GB and 178 MB)."""
HUMAN_FILE = _describe("items_human_ins.json", "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O")
"""12,087 instructions written by people (5.1 MB)."""

size_option = click.option("--size", type=click.Choice(SIZES), help="1,000 products, or 1.18 million.")
path_type = FilePath()
file_type = FilePath(exists=True, dir_okay=False)


def folder_of(size: str) -> Path:
    """Return the folder with the files and the store of a size."""
    return data_folder() / "webshop" / size


@click.command()
@click.option("--size", type=click.Choice(SIZES), default="small", help="1,000 products, or 1.18 M.")
@click.option("--human", is_flag=True, help="Also the 12,087 instructions written by people.")
@source_option
def get(size: str, human: bool, source: Path | None) -> None:
    """Fetch WebShop's official files: 4.6 MB (small) or 5.4 GB (full) from Google Drive.

    \b
      spear data get webshop --size small
      spear data get webshop --size full --from downloads
    """
    console = Console()
    folder = folder_of(size) / "raw"
    for file in (*FILES[size], *([HUMAN_FILE] if human else [])):
        check = partial(_require_json, manual=file.manual)
        path = fetch_locked(file, folder, check=check, source=source, console=console)
        say(console, str(path))
    say(console, f"Then: spear data build webshop --size {size}")


def _require_json(path: Path, manual: str) -> None:
    """Raise unless the file begins and ends as JSON: a server may send a web page, or break off."""
    begins = "[" if path.name.startswith("items_shuffle") else "{"
    try:
        with JsonReader(path) as reader:
            reader.take(begins)
        with path.open("rb") as file:  # of a length that no server has to announce
            file.seek(-min(64, path.stat().st_size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"]" if begins == "[" else b"}"):
                raise SpearError("it is cut short")
    except SpearError:
        raise SpearError(
            f"the server sent something other than {path.name} (a page, or a part?): try again later."
            f" By hand: {manual} Then name its folder: --from FOLDER."
        ) from None


@click.command()
@size_option
@click.option("--items", type=file_type, help="items_shuffle*.json[.xz], instead of --size.")
@click.option("--attributes", type=file_type, help="items_ins_v2*.json[.xz], with --items.")
@click.option("--human-goals", type=file_type, help="items_human_ins.json[.xz], with --items.")
@click.option("--out", type=path_type, help="Folder of the store; by default 'store' next to the files.")
@click.option("--nouns", default=RULE, help="Tagger of titles: rule or spacy:MODEL.")
@click.option("--price-seed", default=PRICE_SEED, help="Seed of prices and ceilings.")
@click.option(
    "--draws",
    type=click.Choice([mode.value for mode in DrawMode]),
    default=DrawMode.KEYED.value,
    help="Prices and ceilings by product, or from one generator as in the original.",
)
@click.option("--processes", default=2, help="Worker processes; 1 for none.")
@click.option("--limit", type=int, help="Use only the first LIMIT records.")
def build(
    size: str | None,
    items: Path | None,
    attributes: Path | None,
    human_goals: Path | None,
    out: Path | None,
    nouns: str,
    price_seed: int,
    draws: str,
    processes: int,
    limit: int | None,
) -> None:
    """Build a store of fetched or your own files.

    --size builds one of fetched files, --items and --attributes one of your own.

    An interrupted build resumes when the same command is run again.

    \b
      spear data build webshop --size full
      spear data build webshop --items items_shuffle.json --attributes items_ins_v2.json --out shop
    """
    if (size is None) == (items is None) or (items is None) != (attributes is None):
        raise click.UsageError("Give either --size, or --items together with --attributes.")
    if size is not None:
        if human_goals is not None:
            raise click.UsageError("--human-goals goes with --items; with --size, 'get --human' fetches them.")
        folder = folder_of(size)
        if not (folder / "raw").is_dir():
            raise SpearError(f"{folder / 'raw'} is missing: 'spear data get webshop --size {size}' fetches it.")
        files = find_files(folder)
    else:
        assert items is not None and attributes is not None
        files, folder = CatalogueFiles(items, attributes, human_goals), items.parent
    out = out or folder / "store"
    console = Console()
    with show_phases(console) as report:
        manifest = build_store(
            files,
            out,
            title_nouns=nouns,
            price_seed=price_seed,
            draws=draws,
            processes=processes,
            limit=limit,
            on_progress=report,
        )
    _show(console, out, manifest)


def expect_files() -> Iterator[Expected]:
    """Yield the official files of both sizes."""
    for size, files in FILES.items():
        for file in (*files, HUMAN_FILE):
            yield expect(f"webshop/{size}/raw", file)


def list_collections() -> Iterator[Collection]:
    """Yield both catalogues. The large one needs a built store; the small one opens from the files as well."""
    for size in SIZES:
        folder = folder_of(size)
        try:
            find_files(folder)
            fetched = True
        except SpearError:
            fetched = False
        here = (folder / "store" / MANIFEST).is_file() or (fetched and size == "small")
        verb = "build" if fetched and not here else "get"
        yield Collection(size, here, f"spear data {verb} webshop --size {size}")


@click.command()
@size_option
@click.option("--store", type=path_type, help="Folder of a store, instead of --size.")
@json_option
def verify(size: str | None, store: Path | None, as_json: bool) -> None:
    """Check the checksums of fetched files and of all files of stores, and describe the stores.

    Exit code 1 if something is damaged, 3 if no files are present.

    \b
      spear data verify webshop --size small
    """
    if size is not None and store is not None:
        raise click.UsageError("Give either --size or --store.")
    if store is not None:
        conclude({"webshop": lambda console: [_inspect_store(store, console)]}, as_json)
    else:
        conclude({"webshop": partial(inspect_all, sizes=(size,) if size else SIZES)}, as_json)


def inspect_all(console: Console, sizes: tuple[str, ...] = SIZES) -> Iterator[Finding]:
    """Yield what is found in the fetched files and the stores of these sizes. Raises AbsentDataError without one."""
    nothing = True
    for size in sizes:
        raw, store = folder_of(size) / "raw", folder_of(size) / "store"
        for file in (*FILES[size], HUMAN_FILE):
            if (raw / file.name).is_file():
                nothing = False
                yield inspect_file(raw / file.name, console, file)
        if store.is_dir():
            nothing = False
            yield _inspect_store(store, console)
    if nothing:
        raise AbsentDataError(
            f"{data_folder() / 'webshop'} has no files of {' or '.join(sizes)} size: 'spear data get webshop --size"
            f" {sizes[0]}' fetches them."
        )


def _inspect_store(folder: Path, console: Console) -> Finding:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        with show_phases(console) as report:
            manifest = check_store(folder, count_bytes(report, "reading", total))
    except SpearError as error:
        return Finding(str(folder), str(error))
    _show(console, folder, manifest)
    return Finding(str(folder))


def _show(console: Console, folder: Path, manifest: StoreManifest) -> None:
    counts = manifest.counts
    goals = ", ".join(f"{counts[kind.value]:,} {kind.value}" for kind in GoalKind if kind.value in counts)
    for line in (
        f"{folder}",
        f"{counts['products']:,} products; goals: {goals}",
        f"nouns by {manifest.tagger}; prices {manifest.draws} from seed {manifest.price_seed}",
        f"fingerprint {manifest.fingerprint}",
    ):
        say(console, line)
