"""``spear retriever``: the retrieval service."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.wire import TOKEN_VARIABLE

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever

__all__ = ["retriever"]

# The knowledge base of an environment; named, since this folder knows none, and imported only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.mini_kb:build", "spear.corpora")


@click.group()
def retriever() -> None:
    """Serve passages to search agents over HTTP."""


@retriever.command(name="serve")
@click.option(
    "--corpus",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Passages as JSON lines with 'id' and 'contents'; by default the embedded knowledge base.",
)
@click.option(
    "--retriever",
    "kind",
    type=click.Choice(["bm25", "dense", "hybrid"]),
    default="bm25",
    show_default=True,
    help="How passages are found; dense and hybrid need --index.",
)
@click.option(
    "--index",
    type=click.Path(exists=True, path_type=Path),
    help="Folder that 'spear index build' wrote.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--cache-mb", type=click.IntRange(0), default=64, show_default=True, help="Room for past results.")
@click.option(
    "--max-pending",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Queries that may wait; more are answered with 503.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds after which a request is answered with 504.",
)
@click.option(
    "--batch-queries", type=click.IntRange(1), default=16, show_default=True, help="Queries of a batch; 64-256 on GPU."
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Padded tokens of a batch, for encoders.",
)
def serve_passages(
    corpus: Path | None,
    kind: str,
    index: Path | None,
    host: str,
    port: int,
    cache_mb: int,
    max_pending: int,
    deadline: float,
    batch_queries: int,
    batch_tokens: int,
) -> None:
    """Answer POST /retrieve in Search-R1's form until SIGINT or SIGTERM.

    Listens on this machine only, unless --host says otherwise. If SPEAR_RETRIEVER_TOKEN is set, requests must carry
    it as a bearer token.
    """
    _calm_threads()
    from spear_envs.retrieval.batching import BatchLimits
    from spear_envs.retrieval.server import RetrievalService, ServiceSettings
    from spear_envs.retrieval.serving import bind_socket, is_loopback, serve

    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise SpearError(f"{TOKEN_VARIABLE} has characters that no HTTP header carries: use letters and digits.")
    batches = BatchLimits(
        pending=max_pending, deadline_s=deadline, batch_queries=batch_queries, batch_tokens=batch_tokens
    )
    settings = ServiceSettings(batches=batches, cache_bytes=cache_mb << 20, token=token)
    opened: list[Corpus] = []

    def load() -> tuple[Corpus, Retriever]:
        found = open_source(corpus, kind, index)
        opened.append(found[0])
        return found

    def announce() -> None:
        click.echo(f"ready: {len(opened[0]):,} passages, {kind}, at {url}/retrieve")

    listener = bind_socket(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listener.getsockname()[1]}"
    if not is_loopback(host) and token is None:
        click.echo(f"Warning: whoever reaches {url} may search; set {TOKEN_VARIABLE} to ask for a token.", err=True)
    serve(RetrievalService(load, settings), listener, announce)


def open_source(corpus: Path | None, kind: str, index: Path | None) -> tuple[Corpus, Retriever]:
    """The corpus in a file, or the embedded one, and a retriever over it.

    Raises:
        SpearError: one of them cannot be opened, or they do not belong together.
    """
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.opening import open_retriever

    found = Corpus.in_memory(EMBEDDED_BASE.load()().corpus) if corpus is None else Corpus.open(corpus)
    return found, open_retriever(kind, found, index)


def _calm_threads() -> None:
    """Before the first import of an OpenMP: threads that spin while they wait starve those that work."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
