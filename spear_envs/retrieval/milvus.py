"""Milvus: vectors and passages in a collection of a cluster, or of Milvus Lite in this process by the same API."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from spear_envs.core.errors import SpearError, one_line
from spear_envs.retrieval.client import read_key
from spear_envs.retrieval.corpus import digest_plain
from spear_envs.retrieval.encoders import TorchEncoder, describe_model, find_model
from spear_envs.retrieval.engines import AnyIndex, find_path
from spear_envs.retrieval.retriever import FaultKind, Passage, Retriever, RetrieverFault

if TYPE_CHECKING:
    from pymilvus import MilvusClient
    from pymilvus.milvus_client import IndexParams

    from spear_envs.retrieval.corpus import Corpus


ROWS = 1_000
"""Documents of one request of a fill."""
LONGEST = 65_535
"""Bytes of a document: the limit of Milvus' text fields."""
INDEX_S = 7_200.0
"""How long indexing and loading a collection may take."""
ABOUT = "spear.made_of"
"""Property of a collection: what it was made of. Milvus Lite forgets descriptions."""
QUIET = {"grpc.keepalive_time_ms": 2**31 - 1}
"""Milvus Lite ends a connection that sends keepalives while it builds a graph."""


class Milvus(AnyIndex):
    """A collection of vectors and passages of a Milvus cluster, or of Milvus Lite in this process by the same API."""

    kind: Literal["milvus"] = "milvus"
    uri: str
    """``http://host:19530`` of a cluster, or a path that ends in ``.db`` for Milvus Lite."""
    collection: str = "passages"
    encoder: str
    """Folder of a sentence-transformers model."""
    token_variable: str | None = None
    device: str = "cpu"
    ef_search: int = Field(128, ge=1)
    """Candidates of a walk through the graph."""
    deadline_s: float = Field(10.0, gt=0)

    @field_validator("uri")
    @classmethod
    def _check(cls, uri: str) -> str:
        if not uri.startswith(("http://", "https://")) and not uri.endswith(".db"):
            raise ValueError("give http://host:19530, or a path that ends in .db for Milvus Lite")
        return uri

    @property
    def is_lite(self) -> bool:
        """Return whether it runs in this process."""
        return not self.uri.startswith(("http://", "https://"))

    def resolve(self, folder: Path) -> Milvus:
        """Return the same settings with paths that begin at ``folder``."""
        uri = str(folder / self.uri) if self.is_lite else self.uri
        return self.model_copy(update={"uri": uri, "encoder": find_path(self.encoder, folder)})

    def open(self, folder: Path) -> Retriever:
        """See :class:`AnyIndex`."""
        return MilvusRetriever(self.resolve(folder))

    def open_encoder(self) -> TorchEncoder:
        """Open the encoder."""
        folder = find_model(self.encoder)
        return TorchEncoder(folder, describe_model(folder), device=self.device)

    def connect(self, timeout: float) -> MilvusClient:
        """Open a client.

        Raises:
            SpearError: the extra ``milvus`` is not installed, or there is no answer.
        """
        try:
            from pymilvus import MilvusClient
        except ImportError as error:
            raise SpearError(f"Milvus needs pymilvus ({error}): pip install 'spear-envs[search,milvus]'.") from error
        if self.is_lite:
            Path(self.uri).absolute().parent.mkdir(parents=True, exist_ok=True)
        token = read_key(self.token_variable) if self.token_variable else ""
        try:
            return MilvusClient(self.uri, token=token, timeout=timeout, grpc_options=QUIET)
        except Exception as error:
            raise SpearError(f"{self.uri} cannot be opened ({one_line(error)}): check uri.") from error

    def read_about(self, client: MilvusClient) -> dict[str, Any] | None:
        """Read what the collection was made of; None if it does not exist."""
        try:
            if not client.has_collection(self.collection):
                return None
            about: dict[str, Any] = json.loads(client.describe_collection(self.collection)["properties"][ABOUT])
            return about
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise SpearError(f"{self.collection} was not filled by 'spear retriever fill'.") from error
        except Exception as error:
            raise SpearError(f"{self.uri} does not answer ({one_line(error)}): check uri.") from error

    def count(self, client: MilvusClient) -> int:
        """Count the passages."""
        client.load_collection(self.collection)
        answer = client.query(self.collection, filter="", output_fields=["count(*)"])
        return int(answer[0]["count(*)"])


class MilvusRetriever(Retriever):
    """Passages whose vectors have the greatest inner product with the query's.

    Args:
        place: a collection that ``spear retriever fill`` has completely filled.

    Raises:
        SpearError: the collection is missing, incomplete, or from another model.
    """

    def __init__(self, place: Milvus) -> None:
        self._place = place
        self._client, self._pid = place.connect(place.deadline_s), os.getpid()
        self._encoder = place.open_encoder()
        about = place.read_about(self._client)
        if about is None:
            raise SpearError(
                f"{place.uri} lacks the collection {place.collection!r}: fill it with 'spear retriever fill'."
            )
        if about["encoder"] != self._encoder.spec.fingerprint:
            raise SpearError(f"{place.collection} was filled with another model than {place.encoder}: name that one.")
        self.passages = place.count(self._client)
        if self.passages != about["rows"]:
            raise SpearError(
                f"{place.collection} has {self.passages:,} of {about['rows']:,} passages: "
                "finish 'spear retriever fill' first."
            )
        self.fingerprint = digest_plain([about, place.ef_search])

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. Scores are cosines to six digits, ties by row."""
        place = self._place
        if self._pid != os.getpid():  # gRPC's threads are the parent's
            self._client, self._pid = place.connect(place.deadline_s), os.getpid()
        vectors = self._encoder.encode_queries(queries)
        try:
            answers = self._client.search(
                place.collection,
                vectors.tolist(),
                limit=k,
                anns_field="vector",
                output_fields=["document"],
                search_params={"metric_type": "IP", "params": {"ef": max(place.ef_search, k)}},
                timeout=place.deadline_s,
            )
            return [[_read_milvus_hit(hit) for hit in sorted(hits, key=_order_milvus)] for hits in answers]
        except (KeyError, TypeError) as error:
            raise RetrieverFault(FaultKind.BAD_REPLY, f"{place.collection}: {error!r}.") from error
        except Exception as error:  # pymilvus also raises errors of gRPC
            raise RetrieverFault(FaultKind.UNAVAILABLE, f"{place.uri}: {one_line(error)}.") from error

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the tokens of each query for the encoder."""
        return self._encoder.lengths(queries)

    def describe(self) -> dict[str, Any]:
        """Return kind and settings."""
        own = self._place.model_dump(include={"kind", "collection", "ef_search"})
        return {**own, "encoder": self._encoder.spec.model}

    def close(self) -> None:
        """Close the connection; Milvus Lite writes its files."""
        self._client.close()


def _order_milvus(hit: Mapping[str, Any]) -> tuple[float, int]:
    return -round(hit["distance"], 6), hit["id"]


def _read_milvus_hit(hit: Mapping[str, Any]) -> Passage:
    score = round(float(hit["distance"]), 6)
    if not math.isfinite(score):
        raise TypeError("a score is not a number")
    return Passage(hit["entity"]["document"].encode(), score)


def fill_collection(
    place: Milvus, corpus: Corpus, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> int:
    """Encode a corpus into a collection, or resume an interrupted fill.

    Args:
        corpus: its rows are the collection's keys.
        on_progress: called with a description, the amount done and the total.

    Returns:
        How many passages were added.

    Raises:
        SpearError: the collection is of another corpus or model, or Milvus failed.
    """
    client = place.connect(INDEX_S)
    encoder = place.open_encoder()
    about = {"corpus": corpus.fingerprint, "rows": len(corpus), "encoder": encoder.spec.fingerprint}
    graph: IndexParams = client.prepare_index_params()
    graph.add_index("vector", index_type="HNSW", metric_type="IP", params={"M": 32, "efConstruction": 200})
    try:
        found = place.read_about(client)
        if found is None:
            _make_collection(client, place, encoder.dimension, about, graph)
        elif found != about:
            raise SpearError(f"{place.collection} was made of another corpus or model: name another collection.")
        done = 0 if found is None else place.count(client)
        # Rows are sent in order, and one sent twice is stored once. All but the last request of a killed process are
        # complete.
        start = max(0, done - ROWS) if done < len(corpus) else done
        for first in range(start, len(corpus), ROWS):
            rows = range(first, min(first + ROWS, len(corpus)))
            client.upsert(place.collection, _encode(corpus, rows, encoder))
            on_progress("fill (passages)", rows.stop, len(corpus))
        client.flush(place.collection)
        if not client.list_indexes(place.collection):
            on_progress("index (graphs)", 0, 1)
            client.create_index(place.collection, graph)
        end = time.monotonic() + INDEX_S
        while client.describe_index(place.collection, "vector").get("pending_index_rows", 0):  # a cluster's graph
            if time.monotonic() > end:
                raise SpearError(f"{place.collection} is still being indexed: run the same command again later.")
            time.sleep(0.2)
        if (stored := place.count(client)) != len(corpus):
            raise SpearError(
                f"{place.collection} has {stored:,} of {len(corpus):,} passages: drop it and fill it again."
            )
    except SpearError:
        raise
    except Exception as error:
        raise SpearError(f"{place.uri} failed ({one_line(error)}): the same command resumes.") from error
    finally:
        client.close()
    return len(corpus) - done


def _make_collection(
    client: MilvusClient, place: Milvus, dimension: int, about: Mapping[str, Any], graph: IndexParams
) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
    schema.add_field("document", DataType.VARCHAR, max_length=LONGEST)
    # A cluster only loads, and so counts, what has an index. Milvus Lite would rebuild it again and again.
    params = None if place.is_lite else graph
    client.create_collection(
        place.collection, schema=schema, index_params=params, properties={ABOUT: json.dumps(about)}
    )


def _encode(corpus: Corpus, rows: range, encoder: TorchEncoder) -> list[dict[str, Any]]:
    raws = [corpus.raw(row) for row in rows]
    for row, raw in zip(rows, raws, strict=True):
        if len(raw) > LONGEST:
            raise SpearError(f"row {row} has {len(raw):,} bytes, but Milvus holds {LONGEST:,}: split that passage.")
    vectors = encoder.encode_passages([json.loads(raw)["contents"] for raw in raws])
    return [
        {"id": row, "vector": vector.tolist(), "document": raw.decode()}
        for row, vector, raw in zip(rows, vectors, raws, strict=True)
    ]
