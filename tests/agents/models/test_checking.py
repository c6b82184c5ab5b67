"""Folders that hold another kind of model, or half of one, are told in a line before anything loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from spear_agents.evaluation import run_evaluation
from spear_agents.models.checking import check_folder
from spear_agents.settings import EvalSettings
from spear_envs.core.errors import SpearError


def change(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 1000)


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (change(architectures=["BertForMaskedLM"]), "holds a BertForMaskedLM, which does not go on with a text"),
        (change(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), "holds a T5For"),
        (
            change(vocab_size=7),
            r"of another model than its config\.json \(embedding \[.*\] instead of \[7, \d+\]",
        ),
        (cut, r"model\.safetensors has [\d,]+ bytes instead of [\d,]+: fetch or copy the model again"),
        (garble, r"model\.safetensors has 1,000 bytes instead of [\d,]+: fetch"),
        (break_config, r"config\.json cannot be read .*: fetch or copy"),
    ],
)
def test_a_folder_that_holds_no_such_model(
    tiny_model: Path, tmp_path: Path, edit: Callable[[Path], None], told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    check_folder(folder)
    edit(folder)
    settings = EvalSettings("spear/Sokoban-v1", model=str(folder), env_kwargs={"modality": "text"}, tasks="1")
    with pytest.raises(SpearError, match=told) as error:
        run_evaluation(settings)
    assert "\n" not in str(error.value)
