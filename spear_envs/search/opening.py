"""Opening questions and retrievers by name, shared within a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.tasks import TaskSet, check_split
from spear_envs.data.rows import FileState, is_rows_file, list_splits, look_at
from spear_envs.retrieval.retriever import Retriever
from spear_envs.search.embedded import SPLITS, KnowledgeBase, open_base
from spear_envs.search.tasks import DATASETS, Question, QuestionTaskSet, locate_file, open_benchmark

MINI = "mini"
EMBEDDED = {MINI: "standard", "mini-small": "small"}
"""Embedded data sets, and the sizes of their knowledge bases."""
KINDS = ("bm25", "dense", "hybrid")

FILES = (".yaml", ".yml")

RetrieverChoice: TypeAlias = "str | Sequence[str] | Retriever"
"""``"bm25"``, ``"dense"``, ``"hybrid"``; one or several addresses of retrieval services; a file that names indexes
(``"FILE.yaml"``, or ``"FILE.yaml#NAME"`` for another index); a :class:`~spear_envs.retrieval.retriever.Retriever`."""


def _build(dataset: str) -> KnowledgeBase:
    return open_base(EMBEDDED[dataset])


def list_texts(dataset: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return all passages and all questions of an embedded data set."""
    base = _build(dataset)
    return base.corpus, [asked.question for questions in base.questions.values() for asked in questions]


def find_splits(dataset: str) -> tuple[str, ...]:
    """Return the splits of a data set, in the order of ``SpearEnv.splits``.

    Raises:
        SpearError: the data set is unknown.
    """
    return list_splits(dataset, dict.fromkeys(EMBEDDED, SPLITS), DATASETS)


def open_tasks(dataset: str, split: str | None, panel: int | None = None) -> TaskSet:
    """Open the questions of a split as tasks.

    Args:
        dataset: a name, or the path of a file of questions, which has the one split ``all``.
        split: its name; by default the first.
        panel: number of questions per benchmark, see :func:`~spear_envs.search.tasks.choose_panel`.

    Raises:
        SpearError: the data set or split is unknown, or its file is missing or cannot be read.
    """
    splits = find_splits(dataset)
    chosen = check_split(splits[0] if split is None else split, splits)
    if is_rows_file(dataset):
        dataset = os.path.abspath(dataset)
        files = [Path(dataset)]
    else:
        files = [locate_file(path) for path in DATASETS[dataset][chosen]] if dataset in DATASETS else []
    return _open_tasks(dataset, chosen, panel, look_at(files))


@lru_cache(maxsize=16)
def _open_tasks(dataset: str, split: str, panel: int | None, _state: FileState) -> TaskSet:
    if dataset not in EMBEDDED:
        return open_benchmark(dataset, split, panel)
    if panel is not None:
        raise SpearError(f"panel={panel!r}: {dataset} is small enough to be played in full; leave panel out.")
    questions = tuple(
        Question(
            asked.question,
            tuple(asked.golden_answers),
            f"{asked.hops}hop",
            tuple(asked.gold_passages),
            tuple(asked.oracle_queries),
        )
        for asked in _build(dataset).questions[split]
    )
    return QuestionTaskSet(dataset, split, questions)


def read_path(keyword: str, value: object) -> str:
    """Return a path or a name as text.

    Raises:
        SpearError: the value has another type.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise SpearError(f"{keyword}={value!r} is not valid: give a path.")
    return value


def open_retriever(
    retriever: RetrieverChoice,
    corpus: str | os.PathLike[str] | None,
    index: str | os.PathLike[str] | None,
    dataset: str = MINI,
) -> Retriever:
    """Open the retriever for the questions of ``dataset``.

    Args:
        corpus: JSON lines to search in this process; by default the embedded base of an embedded data set.
        index: folder that ``spear index build`` wrote for the corpus.
        dataset: the embedded data set to search if no corpus is given.

    Raises:
        SpearError: a value is not valid, a needed corpus is not given, or files cannot be read.
    """
    if not isinstance(retriever, str):
        if hasattr(retriever, "search"):
            served = False
        elif isinstance(retriever, Sequence) and retriever and all(map(_is_url, retriever)):
            served = True
        else:
            raise SpearError(f"retriever={retriever!r} is not valid: give {_CHOICES}.")
    elif retriever in KINDS:
        if corpus is None and dataset not in EMBEDDED:
            raise SpearError(
                f"dataset={dataset!r} has no passages of its own: give the address of a retrieval service, such as"
                " retriever='http://127.0.0.1:8000', or a corpus to search in this process, corpus=FILE"
                " ('spear data get search wiki-18' fetches Search-R1's)."
            )
        path = None if corpus is None else os.path.abspath(corpus)
        folder = None if index is None else os.path.abspath(index)
        state = look_at([Path(file) for file in (path, folder) if file is not None])
        return _open_local(retriever, path, folder, dataset if corpus is None else "", state)
    elif _is_url(retriever):
        served, retriever = True, (retriever,)
    elif (path := retriever.partition("#")[0]).endswith(FILES):
        served = False
        retriever = _open_file(os.path.abspath(path), retriever.partition("#")[2] or None, look_at([Path(path)]))
    else:
        raise SpearError(f"retriever={retriever!r} is not valid: give {_CHOICES}.{suggest_name(retriever, KINDS)}")
    for name, value in (("corpus", corpus), ("index", index)):
        if value is not None:
            raise SpearError(
                f"{name} is for a retriever named by its kind: leave it out; other retrievers have their own."
            )
    return _open_client(tuple(retriever)) if served else retriever  # type: ignore[arg-type, return-value]


_CHOICES = (
    "'bm25', 'dense' or 'hybrid', the address of a retrieval service (http://…) or several, a file of indexes (.yaml),"
    " or a Retriever"
)


def _is_url(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("http://", "https://"))


@lru_cache(maxsize=4)
def _open_local(kind: str, corpus: str | None, index: str | None, dataset: str, _state: FileState) -> Retriever:
    # Late: dense indexes are heavy, and clients do not need them.
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.indexes import open_index

    documents = Corpus.in_memory(_build(dataset).corpus) if corpus is None else Corpus.open(Path(corpus))
    return open_index(kind, documents, None if index is None else Path(index))


@lru_cache(maxsize=4)
def _open_file(path: str, name: str | None, _state: FileState) -> Retriever:
    try:
        from spear_envs.retrieval.config import open_config
    except ImportError as error:
        raise SpearError(
            f"a file of indexes needs pydantic and PyYAML: pip install 'spear-envs[retriever]' brings them. ({error})"
        ) from error

    return next(iter(open_config(Path(path), name, only=True).values()))


@lru_cache(maxsize=16)
def _open_client(urls: tuple[str, ...]) -> Retriever:
    from spear_envs.retrieval.client import RetrieverClient

    return RetrieverClient(urls)
