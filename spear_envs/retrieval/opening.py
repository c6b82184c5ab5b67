"""Opening the indexes that a file names."""

from __future__ import annotations

from pathlib import Path

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.config import AnyIndex, Embedded, Milvus, OpenSearch, Service, Web, read_config
from spear_envs.retrieval.engines.milvus import MilvusPlace, MilvusRetriever
from spear_envs.retrieval.engines.opensearch import OpenSearchRetriever
from spear_envs.retrieval.engines.web import WebRetriever
from spear_envs.retrieval.indexes import open_retriever
from spear_envs.retrieval.retriever import TOKEN_VARIABLE, Retriever


def open_config(path: Path, name: str | None = None, *, only: bool = False) -> dict[str, Retriever]:
    """Open the indexes of a file by name, the default first.

    Args:
        name: the one to be the first; None for the file's default.
        only: open that one alone.

    Raises:
        SpearError: the file is wrong, or one of them cannot be opened.
    """
    config = read_config(path)
    first = name or config.default or next(iter(config.indexes))
    if first not in config.indexes:
        known = config.indexes
        raise SpearError(
            f"{path.name} lacks the index {first!r}: it has {', '.join(known)}.{suggest_name(first, known)}"
        )
    others = [] if only else [other for other in config.indexes if other != first]
    opened: dict[str, Retriever] = {}
    try:
        for each in [first, *others]:
            try:
                opened[each] = _open(config.indexes[each], path.absolute().parent)
            except SpearError as error:
                raise SpearError(f"{path.name}, indexes.{each}: {error}") from error
    except BaseException:
        for retriever in opened.values():
            retriever.close()
        raise
    return opened


def _open(settings: AnyIndex, folder: Path) -> Retriever:
    """Open one index, with reranking."""
    retriever = open_index(settings, folder)
    second = settings.rerank
    if second is None:
        return retriever
    from spear_envs.retrieval.engines.rerank import Reranker

    model = find_path(second.model, folder)
    try:
        return Reranker(retriever, model, depth=second.depth, batch=second.batch, device=second.device)
    except BaseException:
        retriever.close()
        raise


def open_index(settings: AnyIndex, folder: Path) -> Retriever:
    """Open one index, without reranking; paths begin at ``folder``.

    Raises:
        SpearError: it cannot be opened.
    """
    match settings:
        case Embedded():
            return open_retriever(
                settings.kind,
                None if settings.corpus is None else folder / settings.corpus,
                None if settings.index is None else folder / settings.index,
                encoder=settings.encoder and find_path(settings.encoder, folder),
                **settings.model_dump(include={"ef_search", "nprobe", "threads", "device"}),
            )
        case Milvus():
            place = place_milvus(settings, folder)
            return MilvusRetriever(place, ef_search=settings.ef_search, deadline_s=settings.deadline_s)
        case Service():
            return RetrieverClient(
                settings.urls,
                token_variable=settings.token_variable or TOKEN_VARIABLE,
                **settings.model_dump(include={"deadline_s", "tries", "concurrency"}),
            )
        case OpenSearch():
            return OpenSearchRetriever(settings)
        case Web():
            return WebRetriever(settings)
    raise AssertionError(f"{type(settings).__name__} has no retriever")


def place_milvus(settings: Milvus, folder: Path) -> MilvusPlace:
    """Find a collection and its model.

    Raises:
        SpearError: the address is not valid.
    """
    remote = settings.uri.startswith(("http://", "https://"))
    if not remote and not settings.uri.endswith(".db"):
        raise SpearError(
            f"uri={settings.uri!r} is not valid: give http://host:19530, or a path that ends in .db for Milvus Lite."
        )
    uri = settings.uri if remote else str(folder / settings.uri)
    encoder = find_path(settings.encoder, folder)
    return MilvusPlace(uri, settings.collection, encoder, settings.token_variable, settings.device)


def find_path(name: str, folder: Path) -> str:
    """Resolve a path in the file, or return another name, such as that of an installed model."""
    place = folder / Path(name).expanduser()
    return str(place) if place.exists() or "/" in name else name
