"""The file of indexes: YAML, checked by pydantic, and opening what it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from spear_envs.core.errors import SpearError, explain_invalid, one_line, suggest_name
from spear_envs.data.files import YAML_MISREAD, UniqueKeys, read_yaml_text
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.engines import (
    AnyIndex,
    OpenSearch,
    Remote,
    Rerank,
    Reranker,
    Settings,
    Web,
    find_path,
)
from spear_envs.retrieval.indexes import open_corpus
from spear_envs.retrieval.milvus import Milvus
from spear_envs.retrieval.retriever import TOKEN_VARIABLE, Retriever

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED = ("retrieve", "health", "metrics")
"""Paths of the service, which cannot be names of indexes."""


class Embedded(AnyIndex):
    """A corpus in this process, see :func:`~spear_envs.retrieval.indexes.open_corpus`."""

    kind: Literal["bm25", "dense", "hybrid"]
    corpus: str | None = None
    """JSON lines; by default the embedded knowledge base."""
    index: str | None = None
    encoder: str | None = None
    ef_search: int | None = Field(None, ge=1)
    nprobe: int | None = Field(None, ge=1)
    threads: int = Field(1, ge=1)
    device: str = "cpu"

    def open(self, folder: Path, base: Corpus | None = None) -> Retriever:
        """See :class:`~spear_envs.retrieval.engines.AnyIndex`; ``base`` is searched if there is no corpus."""
        return open_corpus(
            self.kind,
            None if self.corpus is None else folder / self.corpus,
            None if self.index is None else folder / self.index,
            base=base,
            encoder=self.encoder and find_path(self.encoder, folder),
            **self.model_dump(include={"ef_search", "nprobe", "threads", "device"}),
        )


class RemoteService(Remote):
    """See :class:`~spear_envs.retrieval.client.RetrieverClient`."""

    kind: Literal["service"]
    urls: list[str] = Field(min_length=1)
    token_variable: str = TOKEN_VARIABLE

    def open(self, folder: Path) -> Retriever:
        """See :class:`~spear_envs.retrieval.engines.AnyIndex`."""
        return RetrieverClient(**self.model_dump(exclude={"kind", "rerank"}))


KINDS: dict[str, type[AnyIndex]] = {
    kind: model
    for model in (Embedded, Milvus, RemoteService, OpenSearch, Web)
    for kind in get_args(model.model_fields["kind"].annotation)
}


class Config(Settings):
    """The file."""

    indexes: dict[str, Annotated[Embedded | Milvus | RemoteService | OpenSearch | Web, Field(discriminator="kind")]] = (
        Field(min_length=1)
    )
    default: str | None = None
    """Name of the default index; by default the first."""

    @model_validator(mode="after")
    def _check_names(self) -> Config:
        for name in self.indexes:
            if not NAME.fullmatch(name) or name in RESERVED:
                raise ValueError(f"an index cannot be called {name!r}: use letters, digits, '_', '-' and '.'")
        if self.default is not None and self.default not in self.indexes:
            raise ValueError(f"default is {self.default!r}, which is not an index: there are {', '.join(self.indexes)}")
        return self


class _Loader(UniqueKeys, yaml.SafeLoader):
    pass


def read_config(path: Path) -> Config:
    """Read the file.

    Raises:
        SpearError: it cannot be read or is invalid; the message is one line with the path of the key.
    """
    try:
        return Config.model_validate(_Loader(read_yaml_text(path)).get_single_data())
    except OSError as error:
        raise SpearError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except ValidationError as error:
        raise SpearError(f"{path.name}: {_explain(error)}") from None
    except (yaml.YAMLError, *YAML_MISREAD) as error:
        raise SpearError(f"{path} is not YAML: {one_line(error)}.") from error


def _explain(error: ValidationError) -> str:
    """Describe the first fault; an unknown key before a missing one, since it is often the same, misspelt."""
    extra = [fault for fault in error.errors() if fault["type"] == "extra_forbidden"]
    if not extra:
        return explain_invalid(error, "the file")
    place = [str(step) for step in extra[0]["loc"]]
    model: Any = Config if len(place) == 1 else Rerank if "rerank" in place[3:-1] else KINDS[place[2]]
    known = [name for name in model.model_fields]
    return f"{'.'.join(place)} is not a setting: there are {', '.join(known)}.{suggest_name(place[-1], known)}"


def choose_index(path: Path, config: Config, name: str | None = None) -> str:
    """Return the name of an index of the file, by default the file's own choice.

    Raises:
        SpearError: the file lacks it.
    """
    first = name or config.default or next(iter(config.indexes))
    if first not in config.indexes:
        known = config.indexes
        raise SpearError(
            f"{path.name} lacks the index {first!r}: it has {', '.join(known)}.{suggest_name(first, known)}"
        )
    return first


def open_config(
    path: Path, name: str | None = None, *, only: bool = False, base: Corpus | None = None
) -> dict[str, Retriever]:
    """Open the indexes of a file by name, the default first.

    Args:
        name: the one to be the first; None for the file's default.
        only: open that one alone.
        base: searched by an index without a corpus, by default the embedded knowledge base.

    Raises:
        SpearError: the file is wrong, or one of them cannot be opened.
    """
    config = read_config(path)
    first = choose_index(path, config, name)
    others = [] if only else [other for other in config.indexes if other != first]
    opened: dict[str, Retriever] = {}
    try:
        for each in [first, *others]:
            try:
                opened[each] = open_settings(config.indexes[each], path.absolute().parent, base)
            except SpearError as error:
                raise SpearError(f"{path.name}, indexes.{each}: {error}") from error
    except BaseException:
        for retriever in opened.values():
            retriever.close()
        raise
    return opened


def open_settings(settings: AnyIndex, folder: Path, base: Corpus | None = None) -> Retriever:
    """Open one index, with reranking; paths begin at ``folder``, and ``base`` is as of :func:`open_config`.

    Raises:
        SpearError: it cannot be opened.
    """
    retriever = settings.open(folder, base) if isinstance(settings, Embedded) else settings.open(folder)
    if settings.rerank is None:
        return retriever
    own = settings.rerank.model_dump()
    try:
        return Reranker(retriever, find_path(own.pop("model"), folder), **own)
    except BaseException:
        retriever.close()
        raise
