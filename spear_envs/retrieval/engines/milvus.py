"""Milvus: vectors and passages in a collection, of a cluster, or of Milvus Lite in this process by the same API."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError, one_line
from spear_envs.retrieval.asking import digest_plain, read_key
from spear_envs.retrieval.encoders import TorchEncoder
from spear_envs.retrieval.manifest import describe_model, find_model
from spear_envs.retrieval.retriever import FaultKind, Passage, Retriever, RetrieverFault

if TYPE_CHECKING:
    from pymilvus import MilvusClient
    from pymilvus.milvus_client import IndexParams

    from spear_envs.retrieval.corpus import Corpus


ROWS = 1_000
"""Documents of one request of a fill."""
LONGEST = 65_535
"""Bytes of a document: the limit of Milvus' text fields."""
GRAPH = {"M": 32, "efConstruction": 200}
ABOUT = "spear.made_of"
QUIET = {"grpc.keepalive_time_ms": 2**31 - 1}
"""Milvus Lite ends a connection that sends keepalives while it builds a graph."""
INDEX_S = 7_200.0
"""How long indexing and loading a collection may take."""


@dataclass(frozen=True)
class MilvusPlace:
    """A collection and its encoder."""

    uri: str
    """``http://host:19530`` of a cluster, or a path that ends in ``.db`` for Milvus Lite."""
    collection: str
    encoder: str
    """Folder of a sentence-transformers model."""
    token_variable: str | None = None
    device: str = "cpu"

    @property
    def is_lite(self) -> bool:
        """Whether it runs in this process."""
        return not self.uri.startswith(("http://", "https://"))

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


class MilvusRetriever(Retriever):
    """Passages whose vectors have the greatest inner product with the query's.

    Args:
        place: a collection that :func:`fill_collection` has completely filled.
        ef_search: candidates of a walk through the graph.

    Raises:
        SpearError: the collection is missing, incomplete, or from another model.
    """

    def __init__(self, place: MilvusPlace, *, ef_search: int, deadline_s: float) -> None:
        self._place = place
        self._ef_search = ef_search
        self._deadline_s = deadline_s
        self._client = place.connect(deadline_s)
        self._pid = os.getpid()
        self._encoder = place.open_encoder()
        about = _read_about(self._client, place)
        if about is None:
            raise SpearError(
                f"{place.uri} lacks the collection {place.collection!r}: fill it with 'spear retriever fill'."
            )
        if about["encoder"] != self._encoder.spec.fingerprint:
            raise SpearError(f"{place.collection} was filled with another model than {place.encoder}: name that one.")
        rows = _count(self._client, place)
        if rows != about["rows"]:
            raise SpearError(
                f"{place.collection} has {rows:,} of {about['rows']:,} passages: finish 'spear retriever fill' first."
            )
        self.passages = rows
        self.fingerprint = digest_plain([about, ef_search])

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the tokens of each query for the encoder."""
        return self._encoder.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. Scores are cosines to six digits, ties by row."""
        if self._pid != os.getpid():  # gRPC's threads are the parent's
            self._client, self._pid = self._place.connect(self._deadline_s), os.getpid()
        vectors = self._encoder.encode_queries(queries)
        try:
            answers = self._client.search(
                self._place.collection,
                vectors.tolist(),
                limit=k,
                anns_field="vector",
                output_fields=["document"],
                search_params={"metric_type": "IP", "params": {"ef": max(self._ef_search, k)}},
                timeout=self._deadline_s,
            )
            return [[_read_hit(hit) for hit in sorted(hits, key=_order)] for hits in answers]
        except (KeyError, TypeError) as error:
            raise RetrieverFault(FaultKind.BAD_REPLY, f"{self._place.collection}: {error!r}.") from error
        except Exception as error:  # pymilvus also raises errors of gRPC
            raise RetrieverFault(FaultKind.UNAVAILABLE, f"{self._place.uri}: {one_line(error)}.") from error

    def describe(self) -> dict[str, Any]:
        """Return kind and settings."""
        return {
            "kind": "milvus",
            "collection": self._place.collection,
            "encoder": self._encoder.spec.model,
            "ef_search": self._ef_search,
        }

    def close(self) -> None:
        """Close the connection; Milvus Lite writes its files."""
        self._client.close()


def fill_collection(
    place: MilvusPlace, corpus: Corpus, on_progress: Callable[[str, int, int], None] = lambda *_: None
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
    try:
        found = _read_about(client, place)
        if found is None:
            _make_collection(client, place, encoder.dimension, about)
        elif found != about:
            raise SpearError(f"{place.collection} was made of another corpus or model: name another collection.")
        done = 0 if found is None else _count(client, place)
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
            client.create_index(place.collection, _describe_graph(client))
        client.load_collection(place.collection)
        _await_index(client, place)
        if (stored := _count(client, place)) != len(corpus):
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


def _make_collection(client: MilvusClient, place: MilvusPlace, dimension: int, about: Mapping[str, Any]) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
    schema.add_field("document", DataType.VARCHAR, max_length=LONGEST)
    # In its properties, since Milvus Lite forgets descriptions.
    made_of = {ABOUT: json.dumps(about)}
    # A cluster only loads, and so counts, what has an index. Milvus Lite would rebuild it again and again.
    params = None if place.is_lite else _describe_graph(client)
    client.create_collection(place.collection, schema=schema, index_params=params, properties=made_of)


def _describe_graph(client: MilvusClient) -> IndexParams:
    params = client.prepare_index_params()
    params.add_index("vector", index_type="HNSW", metric_type="IP", params=GRAPH)
    return params


def _read_about(client: MilvusClient, place: MilvusPlace) -> dict[str, Any] | None:
    """Read the origin of a collection; None if it does not exist."""
    try:
        if not client.has_collection(place.collection):
            return None
        about: dict[str, Any] = json.loads(client.describe_collection(place.collection)["properties"][ABOUT])
        return about
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise SpearError(
            f"{place.collection} was not filled by 'spear retriever fill': name another collection."
        ) from error
    except Exception as error:
        raise SpearError(f"{place.uri} does not answer ({one_line(error)}): check uri.") from error


def _count(client: MilvusClient, place: MilvusPlace) -> int:
    client.load_collection(place.collection)
    answer = client.query(place.collection, filter="", output_fields=["count(*)"])
    return int(answer[0]["count(*)"])


def _await_index(client: MilvusClient, place: MilvusPlace) -> None:
    """Wait until the graph has every row; a cluster builds it during the fill."""
    end = time.monotonic() + INDEX_S
    while client.describe_index(place.collection, "vector").get("pending_index_rows", 0):
        if time.monotonic() > end:
            raise SpearError(f"{place.collection} is still being indexed: run the same command again later.")
        time.sleep(0.2)


def _order(hit: Mapping[str, Any]) -> tuple[float, int]:
    return -round(hit["distance"], 6), hit["id"]


def _read_hit(hit: Mapping[str, Any]) -> Passage:
    score = round(float(hit["distance"]), 6)
    if not math.isfinite(score):
        raise TypeError("a score is not a number")
    return Passage(hit["entity"]["document"].encode(), score)
