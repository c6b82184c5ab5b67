"""A byte-level tokenizer with a chat template, as most models have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from spear_training.sft.samples import SampleReader

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """256 bytes, a few merges and three special tokens."""
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["<think></think><action>go</action> walk to the end of the corridor"] * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = CHATML
    return made


@pytest.fixture(scope="session")
def reader(tokenizer: Any) -> SampleReader:
    return SampleReader(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def write_lines(path: Path, *records: Any) -> Path:
    """Samples as ``spear collect`` writes them."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
