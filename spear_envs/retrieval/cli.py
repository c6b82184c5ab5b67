"""``spear retriever``: the retrieval service."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.wire import TOKEN_VARIABLE

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever
    from spear_envs.retrieval.source import Source

__all__ = ["retriever"]

SOURCE_OPTIONS = (
    click.option(
        "--corpus",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Passages as JSON lines with 'id' and 'contents'; by default the embedded knowledge base.",
    ),
    click.option(
        "--retriever",
        "kind",
        type=click.Choice(["bm25", "dense", "hybrid"]),
        default="bm25",
        show_default=True,
        help="How passages are found; dense and hybrid need --index.",
    ),
    click.option(
        "--index",
        type=click.Path(exists=True, path_type=Path),
        help="Folder that 'spear index build' wrote.",
    ),
    click.option("--encoder", help="Model of the index, where the index has no export of it."),
    click.option("--ef-search", type=click.IntRange(1), help="Of HNSW: more finds more and takes longer."),
    click.option("--nprobe", type=click.IntRange(1), help="Of IVF; likewise."),
    click.option(
        "--threads", type=click.IntRange(1), default=1, show_default=True, help="Of the encoder and the index."
    ),
)
ADDRESS_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
    ),
    click.option("--cache-mb", type=click.IntRange(0), default=64, show_default=True, help="Room for past results."),
)


def _take_source(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of both ways of serving; it gets ``source`` in the place of the first ones."""

    @wraps(command)
    def run(
        corpus: Path | None,
        kind: str,
        index: Path | None,
        encoder: str | None,
        ef_search: int | None,
        nprobe: int | None,
        threads: int,
        **others: Any,
    ) -> None:
        # Before the first import of an OpenMP: threads that spin while they wait starve those that work.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from spear_envs.retrieval.source import Source

        command(source=Source(corpus, kind, index, encoder, ef_search, nprobe, threads), **others)

    taken: Callable[..., None] = run
    for option in reversed(SOURCE_OPTIONS + ADDRESS_OPTIONS):
        taken = option(taken)
    return taken


@click.group()
def retriever() -> None:
    """Serve passages to search agents over HTTP."""


@retriever.command(name="serve")
@_take_source
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
    source: Source,
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
    from spear_envs.retrieval.batching import BatchLimits
    from spear_envs.retrieval.server import RetrievalService, ServiceSettings
    from spear_envs.retrieval.serving import bind_socket, serve

    batches = BatchLimits(
        pending=max_pending, deadline_s=deadline, batch_queries=batch_queries, batch_tokens=batch_tokens
    )
    settings = ServiceSettings(batches=batches, cache_bytes=cache_mb << 20, token=_read_token())
    opened: list[Corpus] = []

    def load() -> tuple[Corpus, Retriever]:
        found = source.open()
        opened.append(found[0])
        return found

    listener = bind_socket(host, port)
    url = _write_url(host, listener.getsockname()[1])

    def announce() -> None:
        click.echo(f"ready: {len(opened[0]):,} passages, {source.kind}, at {url}/retrieve")

    _warn_of_open_address(url, host, settings.token)
    serve(RetrievalService(load, settings), listener, announce)


def _read_token() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise SpearError(f"{TOKEN_VARIABLE} has characters that no HTTP header carries: use letters and digits.")
    return token


def _write_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_of_open_address(url: str, host: str, token: str | None) -> None:
    from spear_envs.retrieval.serving import is_loopback

    if not is_loopback(host) and token is None:
        click.echo(f"Warning: whoever reaches {url} may search; set {TOKEN_VARIABLE} to ask for a token.", err=True)
