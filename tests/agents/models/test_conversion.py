"""GGUF files become folders that transformers reads; those that cannot say so in a line."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", reason="needs the extra 'models'")

from spear_agents.engines.hf import HFModel, load_tokenizer  # noqa: E402
from spear_agents.models.conversion import ORIGIN, convert_gguf, read_gguf  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402
from tests.agents.models.gguf_files import CHATML, HIDDEN, LAYERS, list_bytes, write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(write_gguf(folder / "tiny.gguf"), folder / "made", {"from": "a test"})
    return folder / "made"


def test_a_folder_has_the_weights_of_the_file(converted: Path) -> None:
    model = HFModel(converted).model
    assert model.config.model_type == "llama" and model.config.num_hidden_layers == LAYERS
    reader = gguf.GGUFReader(converted.parent / "tiny.gguf")
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    wanted = torch.from_numpy(gguf.quants.dequantize(embedding.data, embedding.tensor_type))
    assert torch.equal(model.model.embed_tokens.weight, wanted.bfloat16().float())
    origin = json.loads((converted / ORIGIN).read_text())
    assert origin["parameters"] == model.num_parameters() and origin["from"] == "a test"
    assert origin["formats"] == {"Q8_0": 1 + 7 * LAYERS, "F32": 1 + 2 * LAYERS}


def test_one_token_ends_a_text_in_every_file(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"
    for name in ("config.json", "generation_config.json"):
        found = json.loads((converted / name).read_text())
        assert (found["eos_token_id"], found["pad_token_id"], found["bos_token_id"]) == (2, 2, 1)
    assert HFModel(converted).stop_token_ids == (2,)


def test_texts_come_back_whole_and_special_tokens_stay_whole(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    text = "hello world, 2026: drawer 12\n\tÄ 水 don't"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("hello world") == ["hello", "Ġworld"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=True, return_dict=False)
    assert prompt[0] == 1 and prompt.count(2) == 1
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a12", ["a", "1", "2"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("llama-bpe", "a1234", ["a", "123", "4"]),
        ("gpt-2", "a12", ["a", "12"]),
    ],
)
def test_texts_fall_into_words_as_the_file_says(pre: str, text: str, pieces: list[str]) -> None:
    from spear_agents.models.tokenizer import SPLITTERS

    assert [piece for piece, _ in SPLITTERS[pre]().pre_tokenize_str(text)] == pieces


def test_what_a_file_lost_is_said(tmp_path: Path) -> None:
    quantised = read_gguf(write_gguf(tmp_path / "a.gguf"))
    assert 8 < quantised.bits < 9.5
    assert "bits of a weight (tensors: Q8_0 in 15, F32 in 5)" in quantised.loss
    assert read_gguf(write_gguf(tmp_path / "b.gguf", quantised=False)).loss == ""
    assert quantised.parameters == (3 + len(list_bytes()) + 9) * HIDDEN + LAYERS * (3 * 32 * 32 + 3 * 64 * 32 + 64) + 32


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for share in (0.001, 0.1, 0.5, 0.99):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(SpearError, match=r"cut\.gguf is not a whole GGUF file .*: fetch it again") as error:
            convert_gguf(cut, tmp_path / "made", {})
        assert "\n" not in str(error.value)
    (tmp_path / "text.gguf").write_text("no model at all, but a text of some length")
    with pytest.raises(SpearError, match="is not a whole GGUF file"):
        read_gguf(tmp_path / "text.gguf")
    with pytest.raises(SpearError, match="there is no file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"template": None}, "holds no chat template, so it is not a chat model"),
        ({"eos": None}, "names no token that ends a text"),
        ({"pre": "klingon"}, "splits texts as 'klingon', which is not known here"),
        ({"architecture": "bert"}, "holds a model of architecture bert, which cannot be converted"),
        ({"architecture": "qwen2"}, r"architecture qwen2, which cannot be converted \(model.*bias is missing"),
        (
            {"architecture": "mamba"},
            r"architecture mamba, which cannot be converted \(.* is missing or of another shape",
        ),
        ({"eos": 99_999}, "names no token that ends a text"),
    ],
)
def test_a_model_that_cannot_chat_is_told(tmp_path: Path, changes: dict[str, str | None], told: str) -> None:
    path = write_gguf(tmp_path / "odd.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(SpearError, match=told) as error:
        convert_gguf(path, tmp_path / "made", {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["add_token_merges", "add_head_count", "add_block_count"])
def test_a_file_without_a_field_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, field, lambda *_: None)
    path = write_gguf(tmp_path / "odd.gguf")
    with pytest.raises(SpearError, match=r"which cannot be converted .*: take its Hugging Face folder") as error:
        convert_gguf(path, tmp_path / "made", {})
    assert "\n" not in str(error.value)


def test_a_disk_that_fills_up_is_told(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(
            SpearError, match=r"made cannot be written \(.*: choose another folder or free the disk"
        ) as error:
            convert_gguf(path, tmp_path / "made", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(error.value)
