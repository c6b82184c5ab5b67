import json
import time
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spear_agents.play.chat import LLAMA3, QWEN2, cuts_at_lines, encode_by_line

WORDS = "This is\n\nstep 12.\n'You' may:\n- go\n\t- don't!\n  \n...\r\nX\n"
MARKUP = (
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    ".\n",
    "\t",
    " ",
    "'s",
    "12",
    "go",
    "<|im_end|>",
    "<think>",
    "\u0301",
    "é",
    "\u2028",
    " [",
    "[SEP]",
    "1 [",
    "' [",
)
TEXTS = st.lists(st.sampled_from(MARKUP) | st.text(max_size=4), max_size=24).map("".join)


@lru_cache
def make_tokenizer(pattern: str) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every two of the marks beside each other, so that all that may merge does.
    pairs = [first + second + third for first in MARKUP for second in MARKUP for third in "\na. "]
    backend.train_from_iterator([WORDS * 5, *pairs], trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


@pytest.mark.parametrize("pattern", sorted((LLAMA3, QWEN2)))
@settings(deadline=None, max_examples=100)
@given(TEXTS)
@example("a \n\n b\n\u0301c\n!\n\n...\n\n x\n<think>\n")
def test_lines_give_the_tokens_of_the_whole_text(pattern: str, text: str) -> None:
    backend = make_tokenizer(pattern)

    def encode(part: str) -> tuple[int, ...]:
        return tuple(backend.encode(part, add_special_tokens=False).ids)

    by_line = encode_by_line(encode, backend)
    assert by_line is not encode
    assert by_line(text) == encode(text) == by_line(text)


def test_known_lines_are_not_read_again() -> None:
    backend = make_tokenizer(min((LLAMA3, QWEN2)))
    read: list[str] = []

    def encode(part: str) -> tuple[int, ...]:
        read.append(part)
        return tuple(backend.encode(part, add_special_tokens=False).ids)

    by_line = encode_by_line(encode, backend)
    by_line("Rules.\nYou see a mug.\n")
    by_line("Rules.\nYou see a pan.\n")
    assert read == ["Rules.\n", "You see a mug.\n", "You see a pan.\n"]
    by_line("Page 1 [SEP] Red shoes [SEP] $1! [SEP] Hat\n")
    by_line("Page 2 [SEP] Red shoes [SEP] $1! [SEP] Hat\n")
    assert read[3:] == ["Page 1", " [SEP] Red shoes", " [SEP] $1!", " [SEP] Hat\n", "Page 2"]


def test_a_long_line_takes_linear_time() -> None:
    by_line = encode_by_line(lambda part: (len(part),), make_tokenizer(min((LLAMA3, QWEN2))))
    start = time.process_time()
    assert by_line("é [" * 200_000 + "a [b") == (600_001, 3)
    assert time.process_time() - start < 2, "seconds; each field copied all before it"


def change(description: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**description, name: value}


def test_other_tokenizers_read_whole_texts() -> None:
    description = json.loads(make_tokenizer(min((LLAMA3, QWEN2))).to_str())
    assert cuts_at_lines(description)
    token = {**description["added_tokens"][0]}
    assert not cuts_at_lines(change(description, "normalizer", {"type": "Lowercase"}))
    assert not cuts_at_lines(change(description, "pre_tokenizer", None))
    assert not cuts_at_lines(change(description, "pre_tokenizer", {"type": "ByteLevel", "use_regex": True}))
    assert not cuts_at_lines(change(description, "added_tokens", [{**token, "lstrip": True}]))
    assert not cuts_at_lines(change(description, "added_tokens", [{**token, "content": "a\n"}]))
    assert not cuts_at_lines(change(description, "added_tokens", [{**token, "content": "a [b"}]))
    assert not cuts_at_lines(change(description, "model", {"type": "Unigram"}))
    other = json.loads(json.dumps(description))
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    assert not cuts_at_lines(other)
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

    def encode(part: str) -> tuple[int, ...]:
        return ()

    assert encode_by_line(encode, backend) is encode
