"""Folders that hold another kind of model, or half of one, are told in a line before anything loads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EvalSettings
from spear_agents.models import check_folder
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


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_text(text)

    return edit


def shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def break_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("nothing")


def write_header(**facts: object) -> Callable[[Path], None]:
    """A file of weights with one tensor, which is as its header says but for these facts."""

    def edit(folder: Path) -> None:
        header = json.dumps({"layers.%s.x" % ("9" * 5000): {"data_offsets": [0, 0], **facts}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    return edit


def leave_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change(architectures=["BertForMaskedLM"]), "holds a BertForMaskedLM, which does not go on with a text"),
        (change(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), "holds a T5For"),
        (
            change(vocab_size=7),
            r"of another model than its config\.json \(embedding \[.*\] instead of \[7, \d+\]",
        ),
        (cut, r"model\.safetensors has [\d,]+ bytes instead of [\d,]+: fetch or copy the model again"),
        (garble, r"model\.safetensors has 1,000 bytes instead of [\d,]+: fetch"),
        (write_header(), r"model\.safetensors is not a file of weights: fetch or copy"),
        (write_header(shape=3), r"model\.safetensors is not a file of weights: fetch or copy"),
        (write_header(shape=[3]), r"cannot be loaded \("),
        (overwrite("config.json", "[]"), r"config\.json cannot be read .*: fetch or copy"),
        (shard, r"lacks 1 of its 2 files of weights \(model-00002-of-00002\.safetensors\)"),
        (break_index, r"model\.safetensors\.index\.json is not an index of weights: fetch or copy the model again"),
        (leave_adapter, r"holds an adapter \(LoRA\) without its model"),
        (pickle, "holds no weights in safetensors, the only ones read: take a model that has"),
        (change(num_hidden_layers=3), r"another model than its config\.json \(2 layers instead of 3\)"),
        (change(tie_word_embeddings=False), r"another model .* \(lm_head\.weight is missing\)"),
        (
            change(intermediate_size=7),
            r"another model .*mlp.* is missing or of another shape\)",
        ),
        (change(hidden_act="unheard"), r"cannot be loaded \(.*unheard.*"),
        (change(dtype="float8"), r"cannot be read \(.*float8.*"),
        (change(model_type="unheard"), r"cannot be loaded \(.*unheard.*"),
        (overwrite("generation_config.json", "[1]"), r"cannot be loaded \(.*"),
        (overwrite("tokenizer_config.json", "[1]"), r"the tokenizer in .* cannot be read \(.*"),
    ],
)
def test_a_folder_that_holds_no_such_model(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], edit: Callable[[Path], None], text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    check_folder(folder)
    edit(folder)
    settings = EvalSettings("spear/Sokoban-v1", model=str(folder), env_kwargs={"modality": "text"}, tasks="1")
    with pytest.raises(SpearError, match=text) as error:
        run_evaluation(settings)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == "", "warnings of transformers would bury the line"


def test_one_architecture_need_not_be_a_list(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    change(architectures="LlamaForCausalLM")(folder)
    check_folder(folder)
