"""``spear data get|verify search``: benchmark and training questions, wiki-18 and its indexes."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import click
from rich.table import Table

from spear_envs.data import RemoteFile, data_folder
from spear_envs.data.archives import join_files
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
from spear_envs.data.fetching import (
    fetch_locked,
    find_digest,
    find_mirror,
    list_given,
    list_remote,
    locate_page,
    record_digest,
)
from spear_envs.data.files import digest_file, hold_lock
from spear_envs.data.progress import say, show_table
from spear_envs.search.tasks import (
    BENCHMARKS,
    DATASETS,
    SAMPLES,
    TRAINING,
    locate_file,
    name_source,
    open_benchmark,
)
from spear_sandbox.terminal import Console

PANEL = 125
"""Questions of each benchmark in the panel that ``verify`` prints; Bamboogle has no more."""
SAMPLED = 3_197
"""Questions in DeepResearcher's evaluation set."""
_GITHUB = "GAIR-NLP/DeepResearcher/{}c93be8fd8637c1ac4a438ce730d118afd308f832/data/test.parquet"


@dataclass(frozen=True)
class Source:
    """Files of one repository of data sets on Hugging Face, or one file of another publisher.

    Names, sizes and SHA-256 of the repository's files come from its listing. Its commit and the SHA-256 of each file
    are locked at the first download.
    """

    repository: str
    folder: str
    """Destination below the folder ``search`` of the data folder."""
    pattern: str
    """Regular expression of their paths in the repository."""
    summary: str
    target: str | None = None
    """File that they become: parts are joined, a single ``.gz`` is unpacked."""
    file: RemoteFile | None = None
    """The file, if the repository is not on Hugging Face."""


# Not tried against Hugging Face or GitHub: the tests run a local server. The digest of DeepResearcher's file is that of
# its blob in a copy of the repository.
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "questions": Source(
            "RUC-NLPIR/FlashRAG_datasets",
            "flashrag",
            "|".join(re.escape(item.path) for item in BENCHMARKS),
            "the questions of the seven benchmarks",
        ),
        "train": Source(
            "PeterJinGo/nq_hotpotqa_train",
            "search-r1",
            r"(?:train|test)\.parquet",
            "Search-R1's training questions, and the seven benchmarks in its form",
        ),
        SAMPLES: Source(
            "GAIR-NLP/DeepResearcher",
            SAMPLES,
            r"test\.parquet",
            "DeepResearcher's evaluation set: 3,197 questions of the seven benchmarks",
            file=RemoteFile(
                "test.parquet",
                f"https://raw.githubusercontent.com/{_GITHUB.format('')}",
                611_936,
                "30c21c7da1872af08d7db1aacb5f45a57d0a7f038dd7f7baed51231bf6c5e10e",
                f"Open https://github.com/{_GITHUB.format('blob/')} in a browser.",
            ),
        ),
        "wiki-18": Source(
            "PeterJinGo/wiki-18-corpus",
            "wiki-18",
            r"wiki-18\.jsonl\.gz",
            "21,015,324 passages of Wikipedia (14 GB unpacked)",
            "wiki-18.jsonl",
        ),
        "e5-flat": Source(
            "PeterJinGo/wiki-18-e5-index",
            "wiki-18",
            r"part_\w+",
            "exact index of wiki-18 by E5-base-v2 (64.6 GB)",
            "e5_Flat.index",
        ),
        "e5-hnsw64": Source(
            "PeterJinGo/wiki-18-e5-index-HNSW64",
            "wiki-18",
            r"part_\w+",
            "HNSW64 index of the same (about 75 GB)",
            "e5_HNSW64.index",
        ),
    }
)
"""Sources to fetch, by name."""


def folder_of(source: Source) -> Path:
    """Return the folder of a source's files."""
    return data_folder() / "search" / source.folder


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SOURCES)), metavar="[WHAT]...")
@source_option
def get(names: tuple[str, ...], source: Path | None) -> None:
    """Fetch WHAT, by default the questions of the seven benchmarks, from Hugging Face (or $HF_ENDPOINT) and GitHub.

    \b
    questions       the questions of the seven benchmarks
    deepresearcher  DeepResearcher's evaluation set: 3,197 questions (GitHub)
    train           Search-R1's training questions (NQ and HotpotQA)
    wiki-18         the corpus: 21,015,324 passages, 14 GB unpacked
    e5-flat         exact index of the corpus by E5-base-v2, 64.6 GB
    e5-hnsw64       HNSW index of the same, about 75 GB

    An interrupted download resumes. An index is joined from its parts, which takes twice its space.

    \b
      spear data get search
      SPEAR_MIRROR=http://files.lab:8000 spear data get search wiki-18
    """
    console = Console()
    for name in names or ("questions",):
        say(console, str(_get(name, SOURCES[name], source, console)))


def _get(name: str, source: Source, given: Path | None, console: Console) -> Path:
    base = folder_of(source)
    if source.file is not None:
        return fetch_locked(source.file, base, source=given, console=console)
    target = base / source.target if source.target else None
    # Separate for files that are joined, since parts of two indexes share names.
    folder = base / f"{name}.files" if target else base
    if target is not None and target.exists() and not folder.exists():
        return target
    if target is not None and find_mirror() and given is None:  # which has it joined
        ((file, _),) = list_remote(source.repository, base, re.escape(target.name))
        return fetch_locked(file, base, console=console)
    if target is not None and target.exists():  # killed, or at work in another process, before its parts were gone
        with hold_lock(base, partial(say, console, f"waiting for another process that joins {target}")):
            return _finish(target, folder)
    if given is not None:
        files = list_given(given, source.pattern)
    else:
        files = list_remote(source.repository, folder, source.pattern)
    parts = []
    for file, path in files:
        origin = given / path if given is not None and given.is_dir() else given
        parts.append(fetch_locked(file, folder / Path(path).parent, source=origin, console=console))
    if target is None:
        return folder
    with hold_lock(base, partial(say, console, f"waiting for another process that joins {target}")):
        if not target.exists():
            for left in base.glob(f".{target.name}.*.tmp"):  # of a killed process: as large as the file
                left.unlink()
            record_digest(target, join_files(parts, target, console=console))
        return _finish(target, folder)


def _finish(target: Path, folder: Path) -> Path:
    """Lock a joined file, if a kill came before that, and remove what it was made of."""
    if folder.exists() and find_digest(target) is None:
        record_digest(target, digest_file(target))
    shutil.rmtree(folder, ignore_errors=True)
    return target


def expect_files() -> Iterator[Expected]:
    """Yield the files that can be fetched; only the hub knows the names of the question files."""
    for source in SOURCES.values():
        path = f"search/{source.folder}/{source.target or ''}"
        if source.file is not None:
            yield expect(path.rstrip("/"), source.file)
        else:
            yield Expected(path, locate_page(source.repository), repository=source.repository)


def list_collections() -> Iterator[Collection]:
    """Yield the data sets of the environment, then the corpus and the indexes of a retriever."""
    for name, splits in DATASETS.items():
        files = [locate_file(path) for paths in splits.values() for path in paths]
        packages = ("pyarrow",) if any(file.suffix == ".parquet" for file in files) else ()
        command = f"spear data get search {name_source(name)}"
        yield Collection(name, all(file.is_file() for file in files), command, packages)
    for name, source in SOURCES.items():
        if source.target is not None:
            target = folder_of(source) / source.target
            yield Collection(name, target.is_file(), f"spear data get search {name}")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SOURCES)), metavar="[WHAT]...")
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> None:
    """Check the checksums of WHAT was fetched, by default all; count the questions and print their fingerprints.

    Exit code 1 if a file is damaged or a benchmark lacks questions, 3 if no files are present.

    \b
      spear data verify search
    """
    conclude({"search": partial(inspect_all, names=names)}, as_json)


def inspect_all(console: Console, names: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Yield what is found in the fetched files and the numbers of questions. Raises AbsentDataError if none is here."""
    present = {name: files for name in names or SOURCES if (files := _list_present(name, SOURCES[name]))}
    if not present:
        raise AbsentDataError(
            f"{data_folder() / 'search'} has no such files: 'spear data get search' fetches the questions."
        )
    for name in names:
        if name not in present:
            yield Finding(name, f"{name} is missing: 'spear data get search {name}' fetches it")
    damaged = False
    for name, files in present.items():
        for path in files:
            finding = inspect_file(path, console)
            damaged |= bool(finding.fault) and SOURCES[name].target is None
            yield finding
    if not damaged and any(SOURCES[name].target is None for name in present):
        yield from _count_questions(console)


def _list_present(name: str, source: Source) -> list[Path]:
    if source.target is not None:
        target = folder_of(source) / source.target
        return [target] if target.exists() else []
    base = folder_of(source)
    paths = sorted(path for path in base.rglob("*") if path.is_file()) if base.is_dir() else []
    return [path for path in paths if re.fullmatch(source.pattern, path.relative_to(base).as_posix())]


def _count_questions(console: Console) -> Iterator[Finding]:
    """Count the questions of the fetched benchmarks and print a table."""
    table = Table(title=f"questions (published); panel of {PANEL} each")
    for column in ("dataset", "split", "questions", "fingerprint", "panel"):
        table.add_column(column, justify="right" if column == "questions" else "left", no_wrap=True)
    published = {item.name: item.count for item in BENCHMARKS}
    for name, splits in DATASETS.items():
        for split, paths in splits.items():
            if not all(locate_file(path).is_file() for path in paths):
                continue
            tasks, panel = open_benchmark(name, split), open_benchmark(name, split, PANEL)
            counts = Counter(question.subtask for question in tasks.questions)
            whole = sum(published[item] for item in counts if item in published)
            due = {TRAINING: len(tasks), SAMPLES: SAMPLED}.get(name, whole)
            fault = f"{name}/{split}: {len(tasks):,} questions instead of {due:,}" if len(tasks) != due else ""
            yield Finding(f"{name}/{split}", fault)
            table.add_row(name, split, f"{len(tasks):,} ({due:,})", tasks.fingerprint[:12], panel.fingerprint[:12])
    if table.row_count:
        show_table(console, table)
