from __future__ import annotations

from copy import copy
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_training.sft.samples import Sample, SampleReader, trim

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MASKS = st.lists(st.tuples(st.integers(0, 250), st.integers(0, 1)), min_size=1, max_size=40)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def split(sample: Sample, tokenizer: Any) -> list[tuple[int, str]]:
    """Stretches of equal mask and their texts."""
    runs = groupby(zip(sample.mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [(bit, tokenizer.decode([token for _, token in run])) for bit, run in runs]


@given(tokens=MASKS)
def test_recorded_ids_stay_as_they_are_up_to_the_last_that_is_learnt(
    reader: SampleReader, tokens: list[tuple[int, int]]
) -> None:
    ids, mask = [list(column) for column in zip(*tokens, strict=True)]
    sample = reader.read({"input_ids": ids, "loss_mask": mask, "messages": [user("x")]})
    wanted = [place for place, bit in enumerate(mask) if bit and place]
    if not wanted:
        assert sample is None
        return
    assert sample is not None and sample.learnt == len(wanted)
    assert list(sample.ids) == ids[: wanted[-1] + 1]
    assert [place for place, bit in enumerate(sample.mask) if bit] == wanted


@settings(max_examples=60)
@given(system=st.none() | TEXTS, dialogue=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_of_messages_the_responses_and_their_ends_are_learnt(
    reader: SampleReader, tokenizer: Any, system: str | None, dialogue: list[tuple[str, str]]
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [message for said, answer in dialogue for message in (user(said), reply(answer))]
    # What a user writes may hold the tokenizer's own marks: that is not ours to change here.
    sample = reader.read({"messages": messages})
    assert sample is not None
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.ids) == whole.removesuffix("\n")
    learnt = [text for bit, text in split(sample, tokenizer) if bit]
    assert learnt == [answer + "<|im_end|>" for _, answer in dialogue]
    assert reader.ends(sample) and reader.fits(sample, {"messages": messages})


def test_a_response_behind_the_end_token_is_not_learnt(reader: SampleReader, tokenizer: Any) -> None:
    sample = reader.read({"messages": [user("a"), reply("b"), user("c")]})
    assert sample is not None
    assert split(sample, tokenizer)[-1] == (1, "b<|im_end|>")


def test_messages_without_a_response_are_no_sample(reader: SampleReader) -> None:
    assert reader.read({"messages": [user("a")]}) is None
    assert reader.read({"input_ids": [1, 2], "loss_mask": [0, 0]}) is None
    assert trim([5], [1]) is None, "nothing predicts the first token"


def test_a_sample_is_cut_at_its_end(reader: SampleReader) -> None:
    sample = Sample((1, 2, 3, 4, 5), (0, 0, 1, 0, 1))
    assert trim(sample.ids[:9], sample.mask[:9]) == sample
    assert trim(sample.ids[:4], sample.mask[:4]) == Sample((1, 2, 3), (0, 0, 1))
    assert trim(sample.ids[:2], sample.mask[:2]) is None


def test_tokens_that_read_otherwise_than_their_messages_are_noticed(reader: SampleReader, tokenizer: Any) -> None:
    record: dict[str, Any] = {"messages": [user("a"), reply("left "), user("b"), reply("right")]}
    sample = reader.read(record)
    assert sample is not None
    tokens = {"input_ids": list(sample.ids), "loss_mask": list(sample.mask)}
    assert reader.read(record | tokens) == sample
    assert reader.fits(sample, record | tokens) and reader.fits(sample, {}), "nothing says what they should read as"
    swapped = [user("a"), reply("right"), user("b"), reply("left")]
    assert not reader.fits(sample, {**tokens, "messages": swapped})
    other = Sample(tuple(min(token + 1, 279) for token in sample.ids), sample.mask)
    assert not reader.fits(other, record | tokens)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "neither input_ids nor messages"),
        ({"messages": []}, None),
        ({"messages": "go"}, "neither input_ids nor messages"),
        ({"messages": [{"role": "user"}]}, "neither input_ids nor messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "neither input_ids nor messages"),
        ({"input_ids": [1, 2]}, "two lists of one length"),
        ({"loss_mask": [1, 2]}, "two lists of one length"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "two lists of one length"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "whole numbers"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "whole numbers"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "zeros and ones"),
        ({"input_ids": [1, 999], "loss_mask": [0, 1]}, "token id 999 is outside the model's vocabulary of 280"),
        ({"input_ids": [-1, 2], "loss_mask": [0, 1]}, "token id -1 is outside"),
        ({"messages": [user("a"), reply("b")], "joined": True}, "the environment's words too"),
        ({"messages": [reply("a"), user("b"), reply("c")]}, "its first message is the assistant's"),
        ({"messages": [user("a \ud800"), reply("b")]}, "neither input_ids nor messages"),
    ],
)
def test_what_is_no_sample_is_said(reader: SampleReader, record: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        assert reader.read(record) is None
        return
    with pytest.raises(SpearError, match=expected):
        reader.read(record)


@pytest.mark.parametrize(
    "template",
    [
        # Thoughts of earlier responses are left out, as Qwen3's template does.
        "{% for m in messages %}{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{% endfor %}",
        # The prompt ends with something that no response begins with.
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
    ],
)
def test_a_template_that_rewrites_responses_is_refused(tokenizer: Any, template: str) -> None:
    other = copy(tokenizer)
    other.chat_template = template
    messages = [user("a"), reply("<think>t</think>b"), user("c"), reply("d")]
    with pytest.raises(SpearError, match=r"rewrites responses .*`spear collect --tokenizer"):
        SampleReader(other, 280, (1,)).read({"messages": messages})


def test_an_end_of_the_chat_template_that_is_no_end_token_is_learnt_too(tokenizer: Any) -> None:
    messages = [user("a"), reply("b"), user("c"), reply("d")]
    reader = SampleReader(tokenizer, 280, (0,))
    sample = reader.read({"messages": messages})
    assert sample is not None and not reader.ends(sample)
    assert [text for bit, text in split(sample, tokenizer) if bit] == ["b<|im_end|>\n", "d<|im_end|>\n"]
    assert reader.fits(sample, {"messages": messages}), "these are no other tokenizer's ids"


def test_a_template_that_refuses_is_named(tokenizer: Any) -> None:
    other = copy(tokenizer)
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SpearError, match=r"refuses these messages \(roles must alternate\): take another model"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})
    other.chat_template = None
    with pytest.raises(SpearError, match="refuses these messages"):
        SampleReader(other, 280, (1,)).read({"messages": [user("a"), reply("b")]})
