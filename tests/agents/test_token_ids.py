"""Token ids go in and out as they are: whatever the texts and the sampled ids, nothing is tokenised a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_agents.chat import Tokenizer
from spear_agents.engines.base import ByteTokenizer, ChatByteTokenizer, Finish, Generation, Sampling
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Layout, Trajectory
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from tests.agents.corridor import CorridorEnv

TURNS = 4
TAGS = ("<think>", "</think>", "<action>", "</action>", "<|im_end|>", "<|im_start|>assistant\n", "<image>", "\n\n", " ")
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=6), max_size=6).map("".join)
SAYING = CompactTemplate().respond


class Parrot(CorridorEnv):
    """A corridor that shows any texts, one after the other."""

    templates: ClassVar[dict[str, Any]] = {"compact": CompactTemplate(), "default": DefaultTemplate()}

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        super().__init__(max_turns=TURNS)

    def _observe(self, message: str) -> str:
        return self.texts[self.turn % len(self.texts)]


@dataclass(frozen=True)
class Running(CompactTemplate):
    """A conversation within one message."""

    stop_strings: tuple[str, ...] = ("</action>",)


class Dice:
    """Gives the responses that it is told and keeps the prompts it is given."""

    def __init__(self, responses: Sequence[tuple[tuple[int, ...], Finish]]) -> None:
        self.responses = responses
        self.given: list[tuple[tuple[int, ...], Generation]] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        ids, finish = self.responses[len(self.given)]
        generation = Generation(ids, tuple(-float(i % 7) - 0.25 for i in range(len(ids))), finish)
        self.given.append((tuple(prompt_ids), generation))
        return generation


def make_bpe() -> Any:
    """A byte-level tokenizer that merges across what is written beside each other, with ChatML's marks."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [SAYING(word, thought) for word in ("go", "back") for thought in ("", "Where am I?\n\nI see.")]
    backend.train_from_iterator([*words, *(f"\n{word}\n{word}" for word in words), "".join(words)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


TOKENIZERS: dict[str, Any] = {}


def find_tokenizer(name: str) -> Any:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = {"bytes": ByteTokenizer, "chat": ChatByteTokenizer, "bpe": make_bpe}[name]()
    return TOKENIZERS[name]


def play(
    tokenizer: Tokenizer, template: PromptTemplate, layout: Layout, texts: Sequence[str], engine: Any
) -> Trajectory:
    prompts = PromptBuilder(tokenizer, template, layout)
    return asyncio.run(
        play_episode(
            Parrot(texts), engine, prompts, task_id="corridor/test/002", sampling=Sampling(), seed=0, env_id="parrot"
        )
    )


def check_ids(trajectory: Trajectory, given: Sequence[tuple[tuple[int, ...], Generation]]) -> None:
    """The record and its rows hold what the engine was given and what it gave, and nothing else."""
    turns, rows = trajectory.turns, trajectory.rows()
    assert len(turns) == len(given)
    for turn, (_, generation) in zip(turns, given, strict=True):
        assert (turn.response_ids, turn.log_probs) == (generation.token_ids, generation.log_probs)
    sampled = [
        (i, p) for _, generation in given for i, p in zip(generation.token_ids, generation.log_probs, strict=True)
    ]
    in_rows = [
        (token, log_prob)
        for row in rows
        for token, is_sampled, log_prob in zip(row.response_ids, row.response_mask, row.log_probs, strict=True)
        if is_sampled
    ]
    assert in_rows == sampled
    if trajectory.layout is Layout.PER_TURN:
        assert [turn.prompt_ids for turn in turns] == [prompt for prompt, _ in given]
        assert [(row.prompt_ids, row.response_ids) for row in rows] == [(p, g.token_ids) for p, g in given]
    else:
        grown = accumulate((turn.prompt_ids + turn.response_ids for turn in turns), lambda a, b: a + b)
        assert list(grown) == [prompt + generation.token_ids for prompt, generation in given]
        (row,) = rows
        assert row.prompt_ids + row.response_ids == given[-1][0] + given[-1][1].token_ids


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("tokenizer", ["bytes", "chat", "bpe"])
@pytest.mark.parametrize(
    "template", [CompactTemplate(), DefaultTemplate(), Running()], ids=["compact", "default", "run"]
)
@settings(deadline=None, max_examples=25)
@given(st.lists(TEXTS, min_size=1, max_size=TURNS), st.data())
def test_a_record_holds_the_engine_s_ids(
    template: PromptTemplate, tokenizer: str, layout: Layout, texts: list[str], data: st.DataObject
) -> None:
    known = find_tokenizer(tokenizer)
    greatest = len(known) - 1 if tokenizer == "bpe" else 256
    wild = st.lists(st.integers(0, greatest), max_size=8)
    # Whole, readable ones play moves; the others are what a policy that is lost may sample, half characters included.
    tame = st.sampled_from(["go", "back"]).map(lambda word: known.encode(SAYING(word), add_special_tokens=False))
    ended = st.tuples(wild | tame, st.sampled_from(Finish)).map(
        lambda drawn: ((*drawn[0], *([known.eos_token_id] if drawn[1] is Finish.STOP else [])), drawn[1])
    )
    engine = Dice(data.draw(st.lists(ended, min_size=TURNS, max_size=TURNS)))
    trajectory = play(known, template, layout, texts, engine)
    check_ids(trajectory, engine.given)
    again = Trajectory.from_json(trajectory.to_json())
    assert again == trajectory
    check_ids(again, engine.given)


def test_tokens_that_another_spelling_would_merge_stay_apart() -> None:
    tokenizer = find_tokenizer("bpe")
    text = SAYING("back")
    letters = tuple(tokenizer.convert_tokens_to_ids(list(text)))
    assert tokenizer.decode(letters) == text and len(tokenizer.encode(text)) < len(letters)
    for layout in Layout:
        engine = Dice([(letters, Finish.LENGTH)] * TURNS)
        trajectory = play(tokenizer, CompactTemplate(), layout, ["P"], engine)
        check_ids(trajectory, engine.given)
        assert [turn.action for turn in trajectory.turns] == ["back"] * TURNS


@pytest.mark.parametrize("layout", Layout)
def test_a_model_s_own_ids_come_through(layout: Layout, tiny_model: Any) -> None:
    from spear_agents.engines.hf import HFEngine, HFModel, load_tokenizer

    class Kept:
        def __init__(self, inner: HFEngine) -> None:
            self.inner = inner
            self.given: list[tuple[tuple[int, ...], Generation]] = []

        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Generation:
            generation = await self.inner.generate(prompt_ids, sampling, **options)
            self.given.append((tuple(prompt_ids), generation))
            return generation

    inner = HFEngine(HFModel(tiny_model))
    engine = Kept(inner)
    try:
        trajectory = play(load_tokenizer(tiny_model), CompactTemplate(), layout, ["P<think>", "<eos>\u0301é"], engine)
    finally:
        inner.close()
    check_ids(trajectory, engine.given)
    assert len({turn.response_ids for turn in trajectory.turns}) > 1
