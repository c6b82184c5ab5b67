"""Retrievers by name, address or file, shared within a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data.rows import FileState, look_at
from spear_envs.retrieval.retriever import Retriever
from spear_envs.search.embedded import open_base
from spear_envs.search.tasks import EMBEDDED, MINI

KINDS = ("bm25", "dense", "hybrid")
"""Kinds of index that this process can search."""
FILES = (".yaml", ".yml")
"""Endings of a file that names indexes."""

RetrieverChoice: TypeAlias = "str | Sequence[str] | Retriever"
"""``"bm25"``, ``"dense"``, ``"hybrid"``; one or several addresses of retrieval services; a file that names indexes
(``"FILE.yaml"``, or ``"FILE.yaml#NAME"`` for another index); a :class:`~spear_envs.retrieval.retriever.Retriever`."""


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
        dataset: the embedded data set to search if no corpus is given, here or in the file.

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
        retriever = _open_named(Path(os.path.abspath(path)), retriever.partition("#")[2] or None, dataset)
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

    documents = Corpus.in_memory(open_base(EMBEDDED[dataset]).corpus) if corpus is None else Corpus.open(Path(corpus))
    return open_index(kind, documents, None if index is None else Path(index))


def _open_named(path: Path, name: str | None, dataset: str) -> Retriever:
    """Open an index of a file, anew if the file, its corpus or its index has changed."""
    try:
        from spear_envs.retrieval.config import Embedded, choose_index
    except ImportError as error:
        raise SpearError(
            f"a file of indexes needs pydantic and PyYAML: pip install 'spear-envs[retriever]' brings them. ({error})"
        ) from error

    config = _read_config(path, look_at([path]))
    chosen = choose_index(path, config, name)
    settings, files, base = config.indexes[chosen], [path], ""
    if isinstance(settings, Embedded):
        files += [path.parent / file for file in (settings.corpus, settings.index) if file is not None]
        base = dataset if settings.corpus is None else ""
    if base and base not in EMBEDDED:
        raise SpearError(
            f"dataset={dataset!r} has no passages of its own, and {path.name}, indexes.{chosen} names no corpus."
        )
    return _open_file(path, chosen, base, look_at(files))


@lru_cache(maxsize=16)
def _read_config(path: Path, _state: FileState) -> Any:
    # Every environment asks for it, and parsing takes longer than making one.
    from spear_envs.retrieval.config import read_config

    return read_config(path)


@lru_cache(maxsize=4)
def _open_file(path: Path, name: str, base: str, _state: FileState) -> Retriever:
    from spear_envs.retrieval.config import open_config
    from spear_envs.retrieval.corpus import Corpus

    corpus = Corpus.in_memory(open_base(EMBEDDED[base]).corpus) if base else None
    return open_config(path, name, only=True, base=corpus)[name]


@lru_cache(maxsize=16)
def _open_client(urls: tuple[str, ...]) -> Retriever:
    from spear_envs.retrieval.client import RetrieverClient

    return RetrieverClient(urls)
