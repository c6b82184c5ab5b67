"""From the GGUF file of a packaged model to a folder of Hugging Face.

The files are known by their checksums, so only their kind is read: a llama with a byte-level vocabulary.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spear_agents.files import write_json
from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import check_space

ORIGIN = "origin.json"
"""File of a converted folder: what it was made from."""
BYTES_PER_PARAMETER = 2
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens (``tokenizer.ggml.token_type``) that are never made by merges."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names of Hugging Face and of GGUF."""


def convert_gguf(path: Path, out: Path, origin: Mapping[str, Any]) -> None:
    """Write the model of a GGUF file as a Hugging Face folder with weights in bfloat16.

    Args:
        out: a new folder, incomplete until this returns.
        origin: facts for ``origin.json``.

    Raises:
        SpearError: the file cannot be converted, or the disk is full.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from spear_agents.engines.hf import quiet_transformers, save_weights

    # On Python 3.10 transformers cannot map the module to its distribution, and asks the module for its version.
    gguf.__version__ = version("gguf")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        out.mkdir(parents=True, exist_ok=True)
        check_space(out, parameters * BYTES_PER_PARAMETER, out.name)
        with quiet_transformers(), redirect_stderr(io.StringIO()):  # a bar that quiet_transformers() does not know
            tokenizer = build_tokenizer(fields)
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except SpearError:
        raise
    except Exception as error:  # transformers may raise anything
        raise SpearError(f"{path.name} cannot be converted ({first_line(error)})") from error
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**{f"{role}_token_id": index for role, index in ids.items()})
    model.config.update({f"{role}_token_id": index for role, index in ids.items()})
    with quiet_transformers():
        save_weights(model, out)
        tokenizer.save_pretrained(out)
    write_json(out / ORIGIN, {"file": path.name, "parameters": model.num_parameters(), **origin})


def build_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Build the fast tokenizer that the metadata of a GGUF file describe.

    The conversion in transformers takes another pre-tokenizer, and the end token for the start token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise SpearError(f"its texts fall into words as {fields.get('tokenizer.ggml.pre')!r}, not as 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    for index, kind in enumerate(fields.get("tokenizer.ggml.token_type") or ()):
        if kind in (CONTROL, USER_DEFINED):
            core.add_tokens([AddedToken(tokens[index], normalized=False, special=kind == CONTROL)])
    special = {
        f"{role}_token": tokens[place]
        for role, name in ROLES.items()
        if (place := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    special.setdefault("pad_token", special["eos_token"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.model_max_length = int(fields[f"{fields['general.architecture']}.context_length"])
    return tokenizer
