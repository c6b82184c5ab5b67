from __future__ import annotations

import os
from pathlib import Path

import pytest

from spear_agents.models import digest_model, has_words
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_json


def test_a_json_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    with pytest.raises(SpearError, match="cannot be written"):
        write_json(path / "below", {})
    with pytest.raises(SpearError, match="is a folder"):
        write_json(path.parent, {})
    assert os.listdir(path.parent) == ["x.json"]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SpearError, match="is a device or a pipe: name a file"):
        write_json(pipe, {})
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "x.json")
    for value in (1, 2):
        write_json(link, value)
        assert link.is_symlink() and (tmp_path / "far" / "x.json").read_text() == f"{value}\n"
    assert os.listdir(tmp_path / "far") == ["x.json"]


def test_a_model_s_digest_follows_its_weights_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20))
    first = digest_model(tmp_path)
    (tmp_path / "warmstart.json").write_text("notes")
    assert digest_model(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20 - 1) + b"x")
    assert digest_model(tmp_path) != first


def test_a_tokenizer_of_words_is_told_from_one_that_builds_them(tmp_path: Path, tiny_model: Path) -> None:
    assert has_words(tiny_model)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}')
    assert not has_words(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    assert has_words(tmp_path)
    for damaged in ("", "[]", '{"model": null}', "[" * 9999):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert not has_words(tmp_path)
