"""A small encoder with random weights, its export, and corpora: what the tests of retrieval build upon."""

from __future__ import annotations

import json
import random
import shutil
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_envs.retrieval.corpus import Corpus

WORDS = ["river", "city", "album", "film", "king", "school", "war", "team", "year", "song", "island", "church",
         "battle", "party", "road", "bridge"]  # fmt: skip
DIMENSION = 32
EXTRA = "the extra 'search' is not installed"


def make_documents(size: int, seed: int = 0) -> list[dict[str, str]]:
    """Documents of some words each, no two alike."""
    rng = random.Random(f"documents {seed}")
    return [
        {
            "id": f"d{row}",
            "contents": f'"Title {row}"\n{" ".join(rng.choices(WORDS, k=rng.randint(3, 30)))} number{row}',
        }
        for row in range(size)
    ]


def write_corpus(path: Path, documents: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), "utf-8")
    return path


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """Makes a corpus in a file; another name for each size and seed."""

    def make(size: int, seed: int = 0) -> Corpus:
        return Corpus.open(write_corpus(tmp_path / f"corpus-{size}-{seed}.jsonl", make_documents(size, seed)))

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder: BERT with two layers, words spelt letter by letter, random weights."""
    torch = pytest.importorskip("torch", reason=EXTRA)
    sentence_transformers = pytest.importorskip("sentence_transformers", reason=EXTRA)
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    base, model = folder / "base", folder / "tiny-encoder"
    base.mkdir()
    letters = string.ascii_lowercase + string.digits
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{c}" for c in letters), *".,!?\"'"]
    (base / "vocab.txt").write_text("\n".join(pieces) + "\n", "utf-8")
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=DIMENSION,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(base)
    BertTokenizerFast(str(base / "vocab.txt")).save_pretrained(base)
    # A folder without modules of its own gets mean pooling.
    encoder = sentence_transformers.SentenceTransformer(str(base), device="cpu")
    encoder.max_seq_length = 64
    encoder.save(str(model))
    return model


@pytest.fixture(scope="session")
def tiny_export(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of :func:`tiny_model` for ONNX Runtime."""
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=EXTRA)
    from spear_envs.retrieval.encoders import TorchEncoder, describe_model, export_onnx

    folder = tmp_path_factory.mktemp("export") / "encoder"
    export_onnx(TorchEncoder(tiny_model, describe_model(tiny_model)), folder)
    return folder


@pytest.fixture
def build_index(tiny_model: Path, tiny_export: Path, tmp_path: Path) -> Callable[..., Path]:
    """Builds the part ``dense`` of an index without exporting the model anew; returns the index folder."""
    pytest.importorskip("faiss", reason=EXTRA)
    from spear_envs.retrieval import build
    from spear_envs.retrieval.encoders import describe_model
    from spear_envs.retrieval.vectors import parse_type

    def make(corpus: Corpus, kind: str | None = "flat", name: str = "index", **settings: Any) -> Path:
        prefixes = {key: settings.pop(key) for key in ("query_prefix", "passage_prefix") if key in settings}
        spec = replace(describe_model(tiny_model), **prefixes)
        export = tmp_path / name / "dense.partial" / "encoder"
        if not export.exists():
            shutil.copytree(tiny_export, export)
            (export / build.COMPLETE).write_text(spec.fingerprint, "utf-8")
        on_progress = settings.pop("on_progress", lambda what, done, total: None)
        dense = build.DenseBuild(
            type=None if kind is None else parse_type(kind), model=tiny_model, spec=spec, processes=1, **settings
        )
        build.build_dense(corpus, tmp_path / name, dense, on_progress=on_progress)
        return tmp_path / name

    return make
