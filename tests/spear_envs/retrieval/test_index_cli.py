"""``spear index`` from the outside, and the progress that it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.cli import index
from spear_envs.retrieval.corpus import Corpus

MakeCorpus = Callable[..., Corpus]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(index, [str(argument) for argument in arguments])


def test_words_are_built_and_checked(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus, out = make_corpus(80).path, tmp_path / "index"
    done = call("build", "--corpus", corpus, "--out", out, "--processes", 1)
    assert done.exit_code == 0, done.output
    assert "index words" in done.output and "bm25" in done.output.splitlines()[-1]
    done = call("check", out, "--corpus", corpus)
    assert done.exit_code == 0 and "80 documents, sound" in done.output
    data = out / "bm25" / "postings" / "data.bin"
    data.write_bytes(data.read_bytes()[:-2] + b"\x07\x07")
    with pytest.raises(SpearError, match="damaged"):
        raise call("check", out, "--corpus", corpus).exception or AssertionError
    other = make_corpus(81).path
    with pytest.raises(SpearError, match="another corpus"):
        raise call("check", out, "--corpus", other).exception or AssertionError


@pytest.mark.slow
def test_vectors_are_built_and_checked(make_corpus: MakeCorpus, tmp_path: Path, tiny_model: Path) -> None:
    for package in ("faiss", "onnx", "onnxruntime"):
        pytest.importorskip(package, reason="the extra 'search' is not installed")
    corpus, out = make_corpus(120).path, tmp_path / "index"
    arguments = ("--corpus", corpus, "--out", out, "--encoder", tiny_model, "--processes", 1)
    done = call("build", *arguments, "--type", "bm25", "--type", "hnsw8", "--query-prefix", "q: ")
    assert done.exit_code == 0, done.output
    assert "prefixes 'q: ' and ''" in done.output and "encode" in done.output
    done = call("check", out, "--corpus", corpus)
    assert done.exit_code == 0 and done.output.count("sound") == 2
    done = call("check", out, "--corpus", corpus, "--encoder", tiny_model)
    assert done.exit_code == 0 and done.output.count("sound") == 2, "the words need no model"
    adopted = tmp_path / "adopted"
    again = ("--corpus", corpus, "--out", adopted, "--encoder", tiny_model, "--query-prefix", "q: ")
    done = call("build", *again, "--adopt", out / "dense" / "index.faiss")
    assert done.exit_code == 0 and "adopted/dense: HNSW8" in done.output.replace("\n", "")
    done = call("check", adopted, "--corpus", corpus)
    assert done.exit_code == 0 and "dense: HNSW8" in done.output and "sound" in done.output
    done = call("plan", "--corpus", corpus, "--encoder", tiny_model)
    assert done.exit_code == 0 and "measured here" in done.output and "× 32 dimensions" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--type", "hnsw"), "needs --encoder"),
        (("--type", "hnsw", "--type", "Flat", "--encoder", "x"), "one type"),
        (("--adopt", "a", "--type", "Flat", "--encoder", "x"), "leave --type out"),
        (("--memory", "much"), "64GB"),
        (("--vectors", "v", "--max-length", "64"), "--max-length and --vectors"),
        (("--type", "bm25", "--encoder", "x"), "--encoder x"),
    ],
)
def test_contradictions_are_usage_errors(
    arguments: tuple[str, ...], words: str, make_corpus: MakeCorpus, tmp_path: Path
) -> None:
    done = call("build", "--corpus", make_corpus(3).path, "--out", tmp_path / "index", *arguments)
    assert done.exit_code == 2 and words in done.output


def test_what_a_user_can_mend(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus = make_corpus(3).path
    for arguments, words in (
        (("--corpus", tmp_path / "none"), "none does not exist"),
        (("--corpus", corpus, "--type", "hsnw", "--encoder", "x"), "type 'hsnw' is not valid"),
        (("--corpus", corpus, "--encoder", tmp_path / "none"), "does not exist"),
    ):
        with pytest.raises(SpearError, match=words):
            raise call("build", "--out", tmp_path / "index", *arguments).exception or AssertionError


def test_plan_shows_wiki18_by_default(make_corpus: MakeCorpus) -> None:
    done = call("plan", "--memory", "32GiB")
    assert done.exit_code == 0, done.output
    assert "21,015,324 passages × 768 dimensions" in done.output
    assert "HNSW32,SQ8" in done.output and "21.9 GB" in done.output and "64.6 GB" in done.output
    done = call("plan", "--corpus", make_corpus(500).path, "--dimension", 384)
    assert "500 passages × 384" in done.output and "--type Flat" in done.output
    assert call("plan", "--corpus", make_corpus(5).path, "--passages", 7).exit_code == 2
