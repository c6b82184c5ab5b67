"""Tool calls as model families write them, and token ids that go in and out as they are."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import ByteTokenizer, ChatByteTokenizer, Finish, Generation, Sampling
from spear_agents.play.chat import Tokenizer
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, Trajectory
from spear_agents.play.transcript import CallForm, ToolCall, find_form, read_calls, spell_out
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from tests.agents.corridor import CorridorEnv

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, st.text("abc_", min_size=1), st.dictionaries(st.text("xyz", min_size=1), json_values))
words = st.text("ab <>{}\n", max_size=12).map(str.strip)


@given(st.lists(calls, min_size=1, max_size=3), words)
def test_hermes_calls_come_back(made: list[ToolCall], before: str) -> None:
    text = "\n".join([before, *(call.write() for call in made)])
    assert read_calls(text, CallForm.HERMES) == (before, made)


@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(["", "<|python_tag|>"]))
def test_llama_calls_come_back(made: list[ToolCall], tag: str) -> None:
    text = tag + "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in made)
    assert read_calls(text, CallForm.LLAMA) == ("", made)


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "{", '"name"', ":", "}", "1;"])


@given(st.text() | st.lists(PIECES).map("".join))
def test_whatever_is_written_is_read_without_an_error_and_stays_text(text: str) -> None:
    for form in CallForm:
        kept, found = read_calls(text, form)
        assert found or kept == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "go"</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "go", "arguments": [1]}</tool_call>',
        '<tool_call>["go"]</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '{"name": "go", "parameters": 1}',
        '{"name": "go", "parameters": {}} and more',
    ],
)
def test_broken_calls_stay_text(text: str) -> None:
    assert read_calls(text, CallForm.HERMES) == (text, [])
    assert read_calls(text, CallForm.LLAMA) == (text, [])


def test_what_models_write_beside_the_form_is_read() -> None:
    unclosed = read_calls('I go.\n<tool_call>{"name": "go", "arguments": "{\\"to\\": 1}"}', CallForm.HERMES)
    assert unclosed == ("I go.", [ToolCall("go", {"to": 1})])
    assert read_calls('<tool_call>{"name": "look"}</tool_call>', CallForm.HERMES) == ("", [ToolCall("look", {})])


GET = ToolCall("get", {"city": "Paris"})
ARGUMENTS = '{"city": "Paris"}'
PLAIN = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
SCHEMA = {
    "city": {"type": "string"},
    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "raw": {"type": "string"},
}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": SCHEMA}}}]


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", [GET]),
        ("<function=get>\n<parameter=days>\n3\n</parameter>\n<parameter=raw>\n3\n</parameter>\n</function>",
         [ToolCall("get", {"days": 3, "raw": "3"})]),
        ("<function=get>\n<parameter=days>\nNaN\n</parameter>\n</function>", [ToolCall("get", {"days": "NaN"})]),
        ("<tool_call>\n<function=get>\n<parameter=raw>\na </parameter> b\n\nc\n</parameter>\n</function>\n</tool_call>",
         [ToolCall("get", {"raw": "a </parameter> b\n\nc"})]),
        ("<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", [GET]),
        ("<tool_call>get<arg_key>days</arg_key><arg_value>null</arg_value></tool_call>",
         [ToolCall("get", {"days": None})]),
        ("<tool_call>get</tool_call>", [ToolCall("get", {})]),
        (f'[TOOL_CALLS] [{{"name": "get", "arguments": {ARGUMENTS}, "id": "VvvODy9mT"}}, {PLAIN}]', [GET, GET]),
        (f"[TOOL_CALLS]get[CALL_ID]VvvODy9mT[ARGS]{ARGUMENTS}[TOOL_CALLS]get{ARGUMENTS}", [GET, GET]),
        (f"<|tool_call|>[{PLAIN}]<|/tool_call|>", [GET]),
        (f"<|tool_call|>[{PLAIN}, {PLAIN}]", [GET, GET]),
        (f"functools[{PLAIN}]", [GET]),
        (f"<TOOLCALL>[{PLAIN}]</TOOLCALL>", [GET]),
        (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         [GET]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
         f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [GET]),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
         f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>", [GET]),
        (f"<tool_call>\n{PLAIN}\n{PLAIN}\n</tool_call>", [GET, GET]),
        ('<tool_call>{"name": "get", "arguments": {"raw": "a\nb"}}</tool_call>', [ToolCall("get", {"raw": "a\nb"})]),
        (f"```json\n{PLAIN}\n```", [GET]),
        (f"<think>\nOr <tool_call>{PLAIN}</tool_call>?\n</think>\n\n<tool_call>{PLAIN}</tool_call>", [GET]),
        (f"Or <tool_call>{PLAIN}</tool_call>?</think>\n<tool_call>{PLAIN}</tool_call>", [GET]),
        ('<tool_call>{"name": "get", "arguments": {"raw": "</think> <think>"}}</tool_call>',
         [ToolCall("get", {"raw": "</think> <think>"})]),
    ],
)  # fmt: skip
def test_calls_of_each_family_are_read(written: str, made: list[ToolCall]) -> None:
    assert read_calls(written, CallForm.HERMES, TOOLS)[1] == made
    kept, found = read_calls(f"I look.\n{written}", CallForm.HERMES, TOOLS)
    assert (found == made and kept.startswith("I look.")) or written.startswith("```")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>I could write <tool_call>{PLAIN}</tool_call> but no.</think>\n\nThe answer is 3.",
        f"I could write <tool_call>{PLAIN}</tool_call> but no.</think>\n\nThe answer is 3.",
        f"[THINK]<tool_call>{PLAIN}</tool_call>[/THINK]3",
        f"<think>I could write <tool_call>{PLAIN}</tool_call>",
        f"<think>{PLAIN.replace('arguments', 'parameters')}</think>",
        '{"name": "Ada Lovelace", "born": 1815}',
        '{"name": "get"}',
        '{"name": "other", "arguments": {}}',
        f"<tool_call>{PLAIN} and more",
        "<tool_call><function=get><parameter=city>Par",
        '<tool_call>{"name": "get", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"days": -1e999}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for form in CallForm:
        assert read_calls(text, form, TOOLS) == (text, [])


def test_a_thought_that_the_prompt_opened_holds_no_call() -> None:
    call = f"<tool_call>{PLAIN}</tool_call>"
    assert read_calls(f"Or {call}", CallForm.HERMES, TOOLS, thinking=True) == (f"Or {call}", [])
    assert read_calls(f"{call}</think>{call}", CallForm.HERMES, TOOLS, thinking=True)[1] == [GET]


def test_llamas_call_may_come_with_other_keys_and_after_prose() -> None:
    for written in (PLAIN, PLAIN.replace("arguments", "parameters"), f'{{"type": "function", {PLAIN[1:]}'):
        assert read_calls(f"Let me look. {written}", CallForm.LLAMA, TOOLS) == ("Let me look.", [GET])


def test_reading_takes_linear_time() -> None:
    def measure(size: int) -> float:
        start = time.process_time()
        for piece in ("<tool_call>", "<tool_call>{", "{};", "</tool_call>", "<function=a><parameter=b>", "<think>"):
            for form in CallForm:
                read_calls(piece * size, form)
        return time.process_time() - start

    measure(100)
    assert measure(10_000) < 30 * max(measure(1_000), 1e-3)


def test_what_a_model_or_a_program_repeats_takes_linear_time() -> None:
    start = time.process_time()
    assert read_calls("</think>" * 100_000, CallForm.HERMES) == ("</think>" * 100_000, [])
    written = "<tool_call>" + '{"name": "a"}' * 30_000 + "</tool_call>"
    assert len(read_calls(written, CallForm.HERMES)[1]) == 30_000
    (whole,) = spell_out([{"role": "tool", "content": "x" * 400}] * 10_000, [])
    assert whole["content"].count("</tool_response>\n<tool_response>") == 9_999
    assert time.process_time() - start < 2, "seconds; each copied all that came before it"


@pytest.mark.parametrize(
    "begin",
    [
        "```",
        "```json",
        "<tool_call>",
        "<tool_call>get<arg_key>",
        "<tool_call>get<arg_key>a",
        "<tool_call>get<arg_key>a</arg_key>",
        "<function=get><parameter=a>b</parameter>",
        "[TOOL_CALLS]get",
        "[TOOL_CALLS]get[CALL_ID]1",
        "<｜tool▁call▁begin｜>get",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get",
        "<|tool_call_begin|>functions.get:0",
    ],
)
@pytest.mark.parametrize("blank", [" ", "\n"])
def test_blanks_without_end_take_linear_time(begin: str, blank: str) -> None:
    written = f"{begin}{blank * 30_000}x"
    start = time.process_time()
    for form in CallForm:
        assert read_calls(written, form, TOOLS) == (written, [])
    assert time.process_time() - start < 1, "seconds; three blanks that meet would take hours"


def test_the_form_is_read_off_the_chat_template() -> None:
    assert find_form("{% if tools %}<tool_call>{{ '\"parameters\"' }}") is CallForm.HERMES
    assert find_form('{"name": function name, "parameters": dictionary}') is CallForm.LLAMA
    assert find_form("") is CallForm.HERMES
    assert find_form("{% if tools %}[TOOL_CALLS]{% endif %}") is CallForm.HERMES
    assert find_form("{% for tool in tools %}<|call|>{% endfor %}") is CallForm.UNKNOWN
    # Command R7B: a schema has parameters too, and a call is {"tool_name": …}, which stayed text.
    schema = '{"name": "{{ name }}", "description": "{{ text }}", "parameters": {{ schema }}}'
    assert find_form(schema + '<|START_ACTION|>[{"tool_name": "{{ n }}", "parameters": {}}]') is CallForm.UNKNOWN


def test_tools_are_spelled_out_for_templates_that_know_none() -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": {}}}
    call = {"type": "function", "id": "1", "function": {"name": "go", "arguments": {"to": "x"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "gone", "tool_call_id": "1"},
        {"role": "tool", "content": "again", "tool_call_id": "2"},
    ]
    plain = spell_out(messages, [tool])
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert '"name": "go"' in plain[0]["content"] and plain[0]["content"].endswith("\n\nBe brief.")
    assert read_calls(plain[2]["content"], CallForm.HERMES) == ("Well.", [ToolCall("go", {"to": "x"})])
    assert plain[3]["content"].count("<tool_response>") == 2
    assert spell_out(messages[1:2], []) == messages[1:2]
    folded = spell_out(messages, [tool], system="user")
    assert [message["role"] for message in folded] == ["user", "assistant", "user"]
    assert folded[0]["content"].endswith("\n\nBe brief.\n\nGo.")


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
@given(
    st.sampled_from([CompactTemplate(), DefaultTemplate(), Running()]),
    st.lists(TEXTS, min_size=1, max_size=TURNS),
    st.data(),
)
def test_a_record_holds_the_engine_s_ids(
    tokenizer: str, layout: Layout, template: PromptTemplate, texts: list[str], data: st.DataObject
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
