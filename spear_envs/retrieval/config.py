"""The file that configures indexes: YAML, checked by pydantic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spear_envs.core.errors import SpearError, explain_invalid, one_line, suggest_name
from spear_envs.data.files import read_yaml_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED = ("retrieve", "health", "metrics")
"""Paths of the service, which cannot be names of indexes."""


class Settings(BaseModel):
    """Base of all parts of the file: without unknown keys and conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Rerank(Settings):
    """See :class:`~spear_envs.retrieval.engines.rerank.Reranker`."""

    model: str
    depth: int = Field(30, ge=1, le=1000)
    batch: int = Field(32, ge=1)
    device: str = "cpu"


class AnyIndex(Settings):
    """Settings of every kind of index."""

    rerank: Rerank | None = None


class Embedded(AnyIndex):
    """A corpus in this process, see :func:`~spear_envs.retrieval.indexes.open_retriever`."""

    kind: Literal["bm25", "dense", "hybrid"]
    corpus: str | None = None
    """JSON lines; by default the embedded knowledge base."""
    index: str | None = None
    encoder: str | None = None
    ef_search: int | None = Field(None, ge=1)
    nprobe: int | None = Field(None, ge=1)
    threads: int = Field(1, ge=1)
    device: str = "cpu"


class Milvus(AnyIndex):
    """See :class:`~spear_envs.retrieval.engines.milvus.MilvusPlace`."""

    kind: Literal["milvus"]
    uri: str
    collection: str = "passages"
    encoder: str
    token_variable: str | None = None
    device: str = "cpu"
    ef_search: int = Field(128, ge=1)
    deadline_s: float = Field(10.0, gt=0)


class Remote(AnyIndex):
    """Settings of engines over HTTP."""

    deadline_s: float = Field(10.0, gt=0)
    """For all tries of a search together."""
    tries: int = Field(4, ge=1)
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests."""


class Service(Remote):
    """See :class:`~spear_envs.retrieval.client.RetrieverClient`."""

    kind: Literal["service"]
    urls: list[str] = Field(min_length=1)
    token_variable: str | None = None


class OpenSearch(Remote):
    """See :class:`~spear_envs.retrieval.engines.opensearch.OpenSearchRetriever`."""

    kind: Literal["opensearch"]
    urls: list[str] = Field(min_length=1)
    index_name: str
    text_field: str = "contents"
    """Searched, and the text of the passage."""
    title_field: str | None = None
    """Put before the text, in quotes, where the text does not begin with it by itself."""
    id_field: str | None = None
    """None for ``_id``."""
    username: str | None = None
    password_variable: str | None = None
    api_key_variable: str | None = None


class Web(Remote):
    """See :class:`~spear_envs.retrieval.engines.web.WebRetriever`."""

    kind: Literal["serper", "brave", "searxng"]
    url: str | None = None
    """Address; None for that of the engine's makers."""
    key_variable: str | None = None
    """Environment variable of the key; None for the engine's usual one."""
    results: int = Field(10, ge=1, le=100)
    """Requested by each search, whatever ``k``."""
    options: dict[str, str] = Field(default_factory=dict)
    """Further parameters of the request, such as ``gl`` of Serper."""
    max_requests: int | None = Field(None, ge=0)
    max_cost: float | None = Field(None, ge=0)
    cost_per_request: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Web:
        if self.kind == "searxng" and self.url is None:
            raise ValueError("searxng needs url: the address of an instance, such as http://127.0.0.1:8888")
        if self.max_cost is not None and not self.cost_per_request:
            raise ValueError("max_cost needs cost_per_request, the price of one")
        return self


KINDS: dict[str, type[AnyIndex]] = {
    kind: model
    for model in (Embedded, Milvus, Service, OpenSearch, Web)
    for kind in get_args(model.model_fields["kind"].annotation)
}


class Config(Settings):
    """The file."""

    indexes: dict[str, Annotated[Embedded | Milvus | Service | OpenSearch | Web, Field(discriminator="kind")]] = Field(
        min_length=1
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


def read_config(path: Path) -> Config:
    """Read the file.

    Raises:
        SpearError: it cannot be read or is invalid; the message is one line with the path of the key.
    """
    try:
        return Config.model_validate(yaml.safe_load(read_yaml_text(path)))
    except OSError as error:
        raise SpearError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except ValidationError as error:
        raise SpearError(f"{path.name}: {_explain(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
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
