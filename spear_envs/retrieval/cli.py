"""``spear retriever``: the retrieval service, its MCP form, and filling an engine."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import TOKEN_VARIABLE, Retriever
from spear_sandbox.console import echo
from spear_sandbox.web.listening import bind_socket, is_loopback, read_token, write_url
from spear_sandbox.web.options import Number, take_address, warn_of_open_address

if TYPE_CHECKING:
    from spear_envs.retrieval.service import Load, ServiceSettings


file_type = click.Path(exists=True, dir_okay=False, path_type=Path)
EMBEDDED_ONLY = ("corpus", "kind", "index", "encoder", "ef_search", "nprobe", "threads", "device")


@click.group()
def retriever() -> None:
    """Serve passages to search agents over HTTP."""


@retriever.command(name="serve")
@click.option("--config", type=file_type, help="YAML of indexes, instead of the options up to --device.")
@click.option(
    "--corpus",
    type=file_type,
    help="Passages as JSON lines with 'id' and 'contents'; by default the embedded knowledge base.",
)
@click.option(
    "--retriever",
    "kind",
    type=click.Choice(["bm25", "dense", "hybrid"]),
    default="bm25",
    help="How passages are found; dense and hybrid need --index.",
)
@click.option("--index", type=click.Path(exists=True, path_type=Path), help="Folder that 'spear index build' wrote.")
@click.option("--encoder", help="Model of the index, if the index lacks its export.")
@click.option("--ef-search", type=click.IntRange(1), help="Of HNSW: more finds more and takes longer.")
@click.option("--nprobe", type=click.IntRange(1), help="Of IVF; likewise.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads of the encoder and the index.")
@click.option("--device", default="cpu", help="For encoding queries: cpu, cuda, cuda:1, …")
@take_address(8000)
@click.option("--cache-mb", type=click.IntRange(0), default=64, help="Room for past results.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    help="Processes that answer at the same address and share the mapped index.",
)
@click.option(
    "--max-pending", type=click.IntRange(1), default=4096, help="Queries that may wait; more are answered with 503."
)
@click.option(
    "--deadline",
    type=Number(0, min_open=True),
    default=30.0,
    help="Seconds after which a request is answered with 504.",
)
@click.option("--batch-queries", type=click.IntRange(1), default=16, help="Queries of a batch; 64-256 on GPU.")
@click.option("--batch-tokens", type=click.IntRange(1), default=512, help="Padded tokens of a batch, for encoders.")
@click.pass_context
def serve_passages(
    context: click.Context,
    config: Path | None,
    corpus: Path | None,
    kind: str,
    index: Path | None,
    encoder: str | None,
    ef_search: int | None,
    nprobe: int | None,
    threads: int,
    device: str,
    host: str,
    port: int,
    cache_mb: int,
    workers: int,
    max_pending: int,
    deadline: float,
    batch_queries: int,
    batch_tokens: int,
) -> None:
    """Serve POST /retrieve in Search-R1's form.

    Listens on this machine only, unless --host says otherwise. If SPEAR_RETRIEVER_TOKEN is set, requests must carry
    it as a bearer token. Each worker has its own cache, queue and metrics.

    \b
      spear retriever serve --corpus wiki-18.jsonl --retriever bm25 --index indexes/wiki
      spear retriever serve --config indexes.yaml --port 8000
    """
    given = [name for name in EMBEDDED_ONLY if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if config is not None and given:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given).replace("--kind", "--retriever")
        raise click.UsageError(f"{options} belong in {config.name}: leave them out, or --config.")
    # Before the first import of an OpenMP: threads that spin while they wait starve those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from spear_envs.retrieval.batching import BatchLimits
    from spear_envs.retrieval.service import ServiceSettings

    load: Load = partial(
        open_one,
        kind,
        corpus,
        index,
        encoder=encoder,
        ef_search=ef_search,
        nprobe=nprobe,
        threads=threads,
        device=device,
    )
    if config is not None:
        from spear_envs.retrieval.opening import open_config

        load = partial(open_config, config)
    batches = BatchLimits(
        pending=max_pending, deadline_s=deadline, batch_queries=batch_queries, batch_tokens=batch_tokens
    )
    settings = ServiceSettings(
        batches=batches, cache_bytes=cache_mb << 20, token=read_token(TOKEN_VARIABLE), local=is_loopback(host)
    )
    _serve(load, settings, host, port, workers)


def open_one(*choice: Any, **settings: Any) -> dict[str, Retriever]:
    """Open the only index of a service, see :func:`~spear_envs.retrieval.indexes.open_retriever`."""
    from spear_envs.retrieval.indexes import open_retriever

    return {"default": open_retriever(*choice, **settings)}


@retriever.command(name="fill")
@click.option("--config", type=file_type, required=True, help="YAML of indexes.")
@click.option("--index", "name", required=True, help="The one to fill, of kind milvus.")
@click.option("--corpus", type=file_type, required=True, help="Passages as JSON lines with 'id' and 'contents'.")
def fill_index(config: Path, name: str, corpus: Path) -> None:
    """Encode a corpus into an engine, or resume an interrupted fill.

    \b
      spear retriever fill --config indexes.yaml --index wiki --corpus wiki-18.jsonl
    """
    from spear_envs.data.progress import show_rows
    from spear_envs.retrieval.config import Milvus, read_config
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.engines.milvus import fill_collection
    from spear_envs.retrieval.opening import place_milvus
    from spear_sandbox.terminal import Console

    settings = read_config(config).indexes.get(name)
    if not isinstance(settings, Milvus):
        raise SpearError(f"{config.name} lacks an index {name!r} of kind milvus: only that kind can be filled.")
    with show_rows(Console()) as report:
        documents = Corpus.open(corpus)
        added = fill_collection(place_milvus(settings, config.absolute().parent), documents, report)
    echo(f"{settings.collection}: {len(documents):,} passages, {added:,} of them new")


def _serve(load: Load, settings: ServiceSettings, host: str, port: int, workers: int) -> None:
    """Answer until a signal to stop."""
    from spear_envs.retrieval.service import RetrievalService, serve
    from spear_envs.retrieval.workers import Job, serve_workers

    listener = bind_socket(host, port)
    port = listener.getsockname()[1]
    url = write_url(host, port)
    warn_of_open_address(url, host, settings.token, allows="search", variable=TOKEN_VARIABLE)
    several = f", {workers} workers" if workers > 1 else ""

    def announce(what: str) -> None:
        echo(f"ready: {what}{several}, at {url}/retrieve")

    if workers == 1:
        service = RetrievalService(load, settings)
        serve(service, listener, lambda: announce(service.summarize()))
    else:
        listener.close()  # the port is free; each worker opens its own socket
        serve_workers(Job(load, settings, host, port), workers, announce)


@retriever.command(name="mcp")
@click.option(
    "--retriever", "choice", default="bm25", help="bm25, dense, hybrid, or the address of a retrieval service."
)
@click.option("--corpus", type=file_type, help="As for 'serve'.")
@click.option("--index", type=click.Path(exists=True, path_type=Path), help="As for 'serve'.")
@click.option("--config", type=file_type, help="YAML of indexes, instead of these.")
@click.option("--name", help="The index of that file.  [default: the file's default]")
@click.option("--http", is_flag=True, help="Listen at --host and --port, path /mcp, instead of stdin and stdout.")
@take_address(8001)
def serve_mcp(
    choice: str,
    corpus: Path | None,
    index: Path | None,
    config: Path | None,
    name: str | None,
    http: bool,
    host: str,
    port: int,
) -> None:
    """Offer search as a tool of MCP (extra 'mcp').

    Over stdin and stdout, or with --http over HTTP.

    \b
    Example, for a client that starts it:
        {"mcpServers": {"search": {"command": "spear", "args": ["retriever", "mcp"]}}}

    \b
      spear retriever mcp --config indexes.yaml
    """
    from spear_envs.retrieval.mcp_server import make_mcp_server
    from spear_sandbox.web.mcp import serve_http

    served = "://" in choice
    if (served or config) and (corpus or index):
        raise SpearError("--corpus and --index are for --retriever bm25, dense or hybrid: leave them out.")
    found: Retriever
    if served:
        from spear_envs.retrieval.client import RetrieverClient

        found = RetrieverClient(choice)
    elif config:
        from spear_envs.retrieval.opening import open_config

        found = next(iter(open_config(config, name, only=True).values()))
    else:
        found = open_one(choice, corpus, index)["default"]
    server = make_mcp_server(found)
    if not http:
        server.run("stdio")
        return
    token = read_token(TOKEN_VARIABLE)
    listener = bind_socket(host, port)
    url = write_url(host, listener.getsockname()[1])
    warn_of_open_address(url, host, token, allows="search", variable=TOKEN_VARIABLE)
    echo(f"ready: search at {url}/mcp")
    serve_http(server, listener, host=host, token=token)
