"""In a conversation a model is asked what it would be asked when it is served, for the chat templates in use."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spear_agents.engines.base import ContextExceededError, Finish
from spear_agents.play.chat import Chat
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout
from spear_agents.play.transcript import ToolCall, Transcript
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import CompactTemplate
from tests.agents.test_prompting import see

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PUBLISHED = Path(__file__).parent / "chat_templates"
# Qwen's are whole. The others follow the published rules of each family; what is left out (tools, dates, system texts)
# comes before all messages.
TEMPLATES = {
    "SmolLM2": (CHATML, ["<|im_start|>"], "<|im_end|>", True),
    "Qwen2.5": ((PUBLISHED / "qwen2.5.jinja").read_text(), ["<|im_start|>"], "<|im_end|>", True),
    # Thoughts of responses before the last question are dropped.
    "Qwen3": ((PUBLISHED / "qwen3.jinja").read_text(), ["<|im_start|>"], "<|im_end|>", False),
    # Every content is stripped.
    "Llama 3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|eot_id|>",
        False,
    ),
    "Gemma": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ["<bos>", "<start_of_turn>"],
        "<end_of_turn>",
        False,
    ),
}


_REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
_WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}FORM{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)
_TOOL = {"type": "function", "function": {"name": "act", "description": "d", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (_REFUSED + CHATML, "<|im_start|>user\nYou may call these functions"),  # as Gemma's
        (_WITH_TOOLS.replace("FORM", "<tool_call>"), '"name": "act"'),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML, "<|im_start|>system\nYou may call these functions"),
    ],
)
def test_tools_are_shown_as_the_chat_template_can(template: str, words: str) -> None:
    tokenizer = make_tokenizer("SmolLM2")
    tokenizer.chat_template = template
    asked = Transcript(Chat(tokenizer)).ask([{"role": "user", "content": "hi"}], [_TOOL])
    assert words in asked.text


@pytest.mark.parametrize("most", [1, 2])
def test_a_response_has_as_many_calls_as_the_chat_template_shows_again(most: int) -> None:
    """Llama 3's refuses several, and the program that sends them back would fail."""
    tokenizer = make_tokenizer("SmolLM2")
    refusal = "{{ raise_exception('only single tool-calls at once') }}"
    single = f"{{% for m in messages if m.tool_calls and m.tool_calls | length > {most} %}}{refusal}{{% endfor %}}"
    tokenizer.chat_template = single + _WITH_TOOLS.replace("FORM", "<tool_call>")
    transcript = Transcript(Chat(tokenizer))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    first = transcript.ask(asked, [_TOOL])
    said = transcript.add(first, tuple(tokenizer.encode(ToolCall("act", {}).write() * 3)), Finish.STOP)
    _, calls = transcript.read(first, said, [_TOOL])
    assert len(calls) == (1 if most == 1 else 3)
    two = [{"id": f"call0000{i}", "function": {"name": "act", "arguments": {}}} for i, _ in enumerate(calls[:2])]
    transcript.ask([*asked, {"role": "assistant", "content": "", "tool_calls": two}], [_TOOL])


def test_tools_of_an_unknown_form_are_refused() -> None:
    tokenizer = make_tokenizer("SmolLM2")
    tokenizer.chat_template = _WITH_TOOLS.replace("FORM", "<|call|>")
    transcript = Transcript(Chat(tokenizer))
    transcript.ask([{"role": "user", "content": "hi"}])
    with pytest.raises(SpearError, match="unknown form"):
        transcript.ask([{"role": "user", "content": "hi"}], [_TOOL])


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Bytes and two merges as tokens, the family's marks and its chat template."""
    template, marks, end, _ = TEMPLATES[name]
    merges = [("i", "n"), ("t", "h")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, additional_special_tokens=marks)
    if name.startswith("Qwen"):  # tokens of their own, which are no special ones
        tokenizer.add_tokens(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: make_tokenizer(name) for name in TEMPLATES}


@pytest.mark.parametrize("name", TEMPLATES)
def test_half_a_character_in_a_call_is_asked_about_as_any_text(name: str) -> None:
    transcript = Transcript(Chat(TOKENIZERS[name]))
    call = {"type": "function", "function": {"name": "act", "arguments": {"action": "say \ud83d"}}}
    messages = [
        {"role": "user", "content": "hi \udc00"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "\ud800 said"},
    ]
    assert "? said" in TOKENIZERS[name].decode(transcript.ask(messages, [_TOOL]).ids)


responses = st.sampled_from(["", " ", "\n", "<think>\nwhy\n</think>\n\n", "<think>t</think>"]).flatmap(
    lambda before: st.text("ab é<>/\n", max_size=6).map(lambda text: before + text)
)
turns = st.lists(st.tuples(st.text("xy é\n", max_size=4), responses, st.booleans()), min_size=1, max_size=4)


@given(turns)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_is_trained_on_what_it_would_see_when_it_is_served(
    name: str, played: list[tuple[str, str, bool]]
) -> None:
    tokenizer, keeps = TOKENIZERS[name], TEMPLATES[name][3]
    builder = PromptBuilder(tokenizer, CompactTemplate(), Layout.CONVERSATION)
    assert builder.rewrites is not keeps
    dialogue = builder.begin()
    messages: list[dict[str, str]] = []
    for number, (seen, response, stopped) in enumerate(played, start=1):
        prompt = dialogue.next(**see(seen, number))
        assert prompt is not None
        messages.append({"role": "user", "content": f"walk\n{seen}" if number == 1 else seen})
        served = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert list(prompt.ids) == tokenizer.encode(served, add_special_tokens=False)
        assert prompt.follows == (number - 2 if keeps and number > 1 else prompt.follows)
        ids = tuple(tokenizer.encode(response, add_special_tokens=False))
        ids, finish = ((*ids, tokenizer.eos_token_id), Finish.STOP) if stopped else (ids, Finish.LENGTH)
        dialogue.add(seen, "go", ids, finish)
        messages.append({"role": "assistant", "content": response})


def talk(transcript: Transcript, tokenizer: Any, *contents: str) -> list[int | None]:
    """Ask and answer in turn; which call each one continues."""
    messages: list[dict[str, str]] = []
    found = []
    for content in contents:
        messages.append({"role": "user", "content": "q"})
        asked = transcript.ask(messages)
        found.append(asked.follows)
        ids = (*tokenizer.encode(content, add_special_tokens=False), tokenizer.eos_token_id)
        messages.append({"role": "assistant", "content": transcript.add(asked, ids, Finish.STOP)})
    return found


def test_rows_fork_where_thoughts_are_dropped_and_nowhere_else() -> None:
    chats = {name: Chat(tokenizer) for name, tokenizer in TOKENIZERS.items()}
    thinking = ["<think>\nt\n</think>\n\na"] * 3
    for name, expected in (("SmolLM2", [None, 0, 1]), ("Qwen3", [None, None, None]), ("Llama 3", [None, 0, 1])):
        assert talk(Transcript(chats[name]), TOKENIZERS[name], *thinking) == expected
    assert talk(Transcript(chats["Qwen3"]), TOKENIZERS["Qwen3"], "a", "b", "c") == [None, 0, 1]
    assert talk(Transcript(chats["Gemma"]), TOKENIZERS["Gemma"], "a", "b ", "c") == [None, 0, None]
    silent = Chat(TOKENIZERS["Qwen3"], template_kwargs={"enable_thinking": False})
    assert talk(Transcript(silent), TOKENIZERS["Qwen3"], "a", "b") == [None, None], (
        "the empty thought is not shown later"
    )


def test_what_goes_on_behind_an_end_token_is_another_row() -> None:
    tokenizer = TOKENIZERS["SmolLM2"]
    transcript = Transcript(Chat(tokenizer))
    question = {"role": "user", "content": "q"}
    asked = transcript.ask([question])
    transcript.add(asked, (*tokenizer.encode("ab"), tokenizer.eos_token_id), Finish.STOP)
    longer = transcript.ask([question, {"role": "assistant", "content": "abc"}, question])
    assert longer.follows is None, "the model ended its message where this one goes on"


def test_room_is_that_of_the_row() -> None:
    tokenizer = TOKENIZERS["SmolLM2"]
    transcript = Transcript(Chat(tokenizer), max_prompt_tokens=40, max_row_tokens=60)
    with pytest.raises(ContextExceededError, match="of at most 40"):
        transcript.ask([{"role": "user", "content": "x" * 40}])
    asked = transcript.ask([{"role": "user", "content": "x" * 10}])
    assert asked.room == 60 and asked.opening == len(asked.ids) <= 40
    transcript.add(asked, (*tokenizer.encode("y" * 20), tokenizer.eos_token_id), Finish.STOP)
    forked = transcript.ask([{"role": "user", "content": "z" * 50}])
    assert forked.follows is None and forked.room == 100 - len(forked.ids)
    left = 100 - (len(forked.ids) - 50)
    assert transcript.ask([{"role": "user", "content": "z" * (left - 1)}]).room == 1
    with pytest.raises(ContextExceededError, match="no room for a response"):
        transcript.ask([{"role": "user", "content": "z" * left}])
