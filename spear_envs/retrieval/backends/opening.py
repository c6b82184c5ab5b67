"""Opening the indexes of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.retrieval.backend import Backend
from spear_envs.retrieval.source import Source

if TYPE_CHECKING:
    from spear_envs.retrieval.backends.milvus import MilvusPlace
    from spear_envs.retrieval.backends.settings import Config, Embedded, Index, Milvus


def read_indexes(path: Path) -> Config:
    """See :func:`~spear_envs.retrieval.backends.settings.read_config`.

    Raises:
        SpearError: also if a package is missing.
    """
    try:
        from spear_envs.retrieval.backends.settings import read_config
    except ImportError as error:
        raise SpearError(
            f"a file of indexes needs pydantic and PyYAML: pip install 'spear-envs[search]'. ({error})"
        ) from error
    return read_config(path)


@dataclass(frozen=True)
class ConfigSource:
    """Indexes of a file to serve; each serving process opens them."""

    path: Path
    index: str | None = None
    """The first one; None for the file's default."""
    only: bool = False
    """Whether to serve only that one."""

    def open(self) -> dict[str, Backend]:
        """Open the indexes by name, the default first.

        Raises:
            SpearError: the file is wrong, or one of them cannot be opened.
        """
        config = read_indexes(self.path)
        first = self.index or config.default or next(iter(config.indexes))
        if first not in config.indexes:
            raise SpearError(
                f"{self.path.name} lacks the index {first!r}: it has {', '.join(config.indexes)}."
                f"{suggest_name(first, config.indexes)}"
            )
        others = [name for name in config.indexes if name != first]
        opened: dict[str, Backend] = {}
        try:
            for name in [first, *([] if self.only else others)]:
                try:
                    opened[name] = open_index(config.indexes[name], self.path.absolute().parent)
                except SpearError as error:
                    raise SpearError(f"{self.path.name}, indexes.{name}: {error}") from error
        except BaseException:
            for backend in opened.values():
                backend.close()
            raise
        return opened


def open_index(settings: Index, folder: Path) -> Backend:
    """Open one index, with reranking.

    Raises:
        SpearError: it cannot be opened.
    """
    backend = _open_bare(settings, folder)
    if settings.rerank is None:
        return backend
    from spear_envs.retrieval.backends.rerank import RerankBackend

    second = settings.rerank
    model = find_path(second.model, folder)
    try:
        return RerankBackend(backend, model, depth=second.depth, batch=second.batch, device=second.device)
    except BaseException:
        backend.close()
        raise


def _open_bare(settings: Index, folder: Path) -> Backend:
    from spear_envs.retrieval.backends.opensearch import OpenSearchBackend
    from spear_envs.retrieval.backends.service import ServiceBackend
    from spear_envs.retrieval.backends.settings import Embedded, Milvus, OpenSearch, Service, Web
    from spear_envs.retrieval.backends.web import WebBackend

    match settings:
        case Embedded():
            return _open_embedded(settings, folder)
        case Milvus():
            from spear_envs.retrieval.backends.milvus import MilvusBackend

            place = place_milvus(settings, folder)
            return MilvusBackend(place, ef_search=settings.ef_search, deadline_s=settings.deadline_s)
        case Service():
            return ServiceBackend(settings)
        case OpenSearch():
            return OpenSearchBackend(settings)
        case Web():
            return WebBackend(settings)
    raise AssertionError(f"{type(settings).__name__} has no backend")


def find_path(name: str, folder: Path) -> str:
    """Resolve a path in the file, or return another name, such as that of an installed model."""
    place = folder / Path(name).expanduser()
    return str(place) if place.exists() or "/" in name else name


def _open_embedded(settings: Embedded, folder: Path) -> Backend:
    return Source(
        None if settings.corpus is None else folder / settings.corpus,
        settings.kind,
        None if settings.index is None else folder / settings.index,
        settings.encoder and find_path(settings.encoder, folder),
        settings.ef_search,
        settings.nprobe,
        settings.threads,
        settings.device,
    ).open_index()


def place_milvus(settings: Milvus, folder: Path) -> MilvusPlace:
    """Find a collection and its model."""
    from spear_envs.retrieval.backends.milvus import MilvusPlace

    remote = settings.uri.startswith(("http://", "https://"))
    if not remote and not settings.uri.endswith(".db"):
        raise SpearError(
            f"uri={settings.uri!r} is not valid: give http://host:19530, or a path that ends in .db for Milvus Lite."
        )
    return MilvusPlace(
        settings.uri if remote else str(folder / settings.uri),
        settings.collection,
        find_path(settings.encoder, folder),
        settings.token_variable,
        settings.device,
    )
