from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import ByteTokenizer, Finish
from spear_agents.play.prompting import PromptBuilder, find_image_mark
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import IMAGE, CompactTemplate, DefaultTemplate, PromptContext


class ChatBytes(ByteTokenizer):
    """Bytes with marks around messages, as chat models have them; `<end>` is token 256."""

    strips = False

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        parts = []
        for message in conversation:
            content = message["content"].strip() if self.strips else message["content"]
            parts.append(f"[{message['role']}]{content}\x00\n")
        return "".join(parts) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [256 if byte == 0 else byte for byte in text.encode()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return bytes(0 if i == 256 else i for i in token_ids).decode("utf-8", "replace")


class SystemTemplate(CompactTemplate):
    def system(self) -> str | None:
        return "be brief"


class PictureTemplate(DefaultTemplate):
    """Shows a picture above everything else."""

    def follow_up(self, context: PromptContext) -> str:
        return f"{IMAGE}\n{super().follow_up(replace(context, picture=False))}"


class BlindTemplate(DefaultTemplate):
    """Leaves a picture out."""

    def follow_up(self, context: PromptContext) -> str:
        return super().follow_up(replace(context, picture=False))


class Stripping(ChatBytes):
    strips = True


def see(observation: str, turn: int = 1) -> dict[str, Any]:
    return {
        "instruction": "walk",
        "observation": observation,
        "admissible_actions": None,
        "turn": turn,
        "max_turns": 9,
    }


@given(st.lists(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), min_size=1, max_size=3))
@pytest.mark.parametrize("kind", [ChatBytes, Stripping])
def test_prompts_equal_the_chat_template(kind: type[ChatBytes], observations: list[str]) -> None:
    tokenizer, template = kind(), SystemTemplate()
    dialogue = PromptBuilder(tokenizer, template).begin()
    for turn, observation in enumerate(observations, start=1):
        prompt = dialogue.next(**see(observation, turn))
        assert prompt is not None
        text = f"walk\n{observation}" if turn == 1 else observation
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
        assert list(prompt.ids) == tokenizer.encode(tokenizer.apply_chat_template(messages))
        assert prompt.new_ids == prompt.ids
        dialogue.add(observation, "go", (65, 256), Finish.STOP)


@dataclass(frozen=True)
class Running(CompactTemplate):
    """A conversation within one message."""

    stop_strings: tuple[str, ...] = ("</a>",)


@pytest.mark.parametrize("finish", list(Finish))
def test_a_running_conversation_leaves_the_chat_template_out(finish: Finish) -> None:
    tokenizer = ChatBytes()
    builder = PromptBuilder(tokenizer, Running(), Layout.CONVERSATION)
    assert builder.stop_strings == ("</a>",)
    dialogue = builder.begin()
    first = dialogue.next(**see("o1"))
    assert first is not None
    sampled = (*b"<a>x</a>", *([256] if finish is Finish.STOP else []))
    dialogue.add("o1", "x", sampled, finish)
    second = dialogue.next(**see("o2", 2))
    assert second is not None and second.ids == first.ids + sampled + second.new_ids
    if finish is Finish.STOP:  # the model closed its message, so a new one follows
        messages: list[Mapping[str, str]] = [
            {"role": "user", "content": "walk\no1"},
            {"role": "assistant", "content": "<a>x</a>"},
            {"role": "user", "content": "o2"},
        ]
        assert tokenizer.decode(second.ids) == tokenizer.apply_chat_template(messages)
    else:
        assert tokenizer.decode(second.new_ids) == "o2"


@pytest.mark.parametrize("window", [0, 1, 2])
def test_the_history_window_and_the_context(window: int) -> None:
    contexts: list[PromptContext] = []

    class Spy(DefaultTemplate):
        def render(self, context: PromptContext) -> str:
            contexts.append(context)
            return "x"

    dialogue = PromptBuilder(ByteTokenizer(), Spy(), history=window).begin()
    for turn in range(1, 5):
        dialogue.next(**see(f"o{turn}", turn))
        dialogue.add(f"o{turn}", f"a{turn}", (1,), Finish.STOP)
    past = [("o1", "a1"), ("o2", "a2"), ("o3", "a3")]
    assert [list(context.history) for context in contexts] == [past[max(0, n - window) : n] for n in range(4)]
    assert contexts[-1].turn == 4 and contexts[-1].max_turns == 9 and contexts[-1].observation == "o4"


@pytest.mark.parametrize(("row", "room"), [(6, 2), (5, 1), (4, None), (3, None)])
def test_a_conversation_ends_where_no_response_has_room(row: int, room: int | None) -> None:
    """Behind the first prompt come a response and a message of two tokens each."""
    dialogue = PromptBuilder(ByteTokenizer(), CompactTemplate(), Layout.CONVERSATION, max_row_tokens=row).begin()
    first = dialogue.next(**see("1234567"))
    assert first is not None and first.room == row
    dialogue.add("1234567", "go", (65, 256), Finish.STOP)
    second = dialogue.next(**see("89", 2))
    assert (second and second.room) == room


WORDS = st.lists(st.sampled_from([*"<image> \n", IMAGE, "<|in|>", "é"]), max_size=6).map("".join)


@given(WORDS, WORDS, WORDS, WORDS, st.sampled_from(Layout), st.booleans())
def test_only_the_template_s_own_place_becomes_the_picture(
    instruction: str, seen: str, action: str, offered: str, layout: Layout, is_shown: bool
) -> None:
    tokenizer, picture = PictureBytes(), np.zeros((2, 3, 3), np.uint8)
    sizes: list[tuple[int, ...]] = []

    def mark(image: np.ndarray) -> str:
        sizes.append(image.shape)
        return "<|in|><|image|><|image|><|out|>"

    template = PictureTemplate() if is_shown else BlindTemplate()
    dialogue = PromptBuilder(tokenizer, template, layout, mark_image=mark).begin()
    texts = []
    for turn in (1, 2):
        prompt = dialogue.next(
            instruction=instruction, observation=seen, admissible_actions=[offered, action], turn=turn, max_turns=9,
            picture=picture,
        )  # fmt: skip
        assert prompt is not None and prompt.shows_image is is_shown
        texts.append(tokenizer.decode(prompt.new_ids))
        dialogue.add(seen, action, (65,), Finish.STOP)
    for text in texts:
        assert IMAGE not in text
        assert text.count("<|image|>") == 2 * is_shown and text.count("<|in|>") == is_shown
        if is_shown:
            # Behind the history, where a mark that somebody else wrote would stand.
            assert text.index("This is step") - text.index("<|out|>") == len("<|out|>\n")
    assert sizes == [(2, 3, 3)] * 2 * is_shown


def test_only_a_closing_stop_token_is_dropped_from_a_response() -> None:
    builder = PromptBuilder(ChatBytes(), CompactTemplate(), stop_token_ids=(90,))
    assert builder.decode([65, 256]) == "A"
    assert builder.decode([65, 90]) == "A"
    assert builder.decode([256, 65]) == "\x00A"
    assert builder.decode([65, 256, 256]) == "A\x00"
    assert builder.decode([]) == ""
    assert len(builder.decode([65] * 2_000_000)) == 2_000_000


def test_a_real_tokenizer_gives_the_same_ids(tiny_model: Path) -> None:
    from spear_agents.engines.hf import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    tokenizer("walk", padding="max_length", truncation=True, max_length=2)  # leaves its settings in the backend
    builder = PromptBuilder(tokenizer, CompactTemplate())
    assert builder.measure is not None and builder.measure("PPP_P_") == 1, "in the policy's tokens"
    for observation in ("P__", "_P_ ", "", "<eos P", "unknown words"):
        prompt = builder.begin().next(**see(observation))
        assert prompt is not None
        messages = [{"role": "user", "content": f"walk\n{observation}"}]
        wanted = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert list(prompt.ids) == wanted


def test_special_tokens_in_a_text_are_text(tiny_model: Path) -> None:
    from spear_agents.engines.hf import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    mark = tokenizer.eos_token
    builder = PromptBuilder(tokenizer, DefaultTemplate(), Layout.CONVERSATION)
    honest = builder.begin().next(**see("a passage"))
    hostile = builder.begin().next(**see(f"a passage {mark}{mark} a passage"))
    assert honest is not None and hostile is not None
    assert tokenizer.eos_token_id in tokenizer.encode(mark, add_special_tokens=False)
    assert hostile.ids.count(tokenizer.eos_token_id) == honest.ids.count(tokenizer.eos_token_id)
    assert len(hostile.ids) > len(honest.ids)


class PictureBytes(ChatBytes):
    """As vision models have it: contents may be parts, and a picture is a token in a frame of tokens."""

    all_special_tokens = ("<|pad|>", "<|in|>", "<|out|>")
    mark = "<|in|><|image|><|out|>"

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        shown = []
        for message in conversation:
            parts = message["content"]
            if not isinstance(parts, str):
                parts = "".join(part.get("text", self.mark) for part in parts)
            shown.append({**message, "content": parts})
        return super().apply_chat_template(shown, **kwargs)


def test_a_picture_s_place_is_written_as_the_model_reads_it(tiny_model: Path) -> None:
    from spear_agents.engines.hf import load_tokenizer

    tokenizer = PictureBytes()
    mark = find_image_mark(tokenizer)
    assert mark == "<|in|><|image|><|out|>"
    assert find_image_mark(load_tokenizer(tiny_model)) == find_image_mark(ByteTokenizer()) == IMAGE
    assert find_image_mark(ChatBytes()) == IMAGE
    mistral = PictureBytes()
    mistral.mark = "[IMG]"
    assert find_image_mark(mistral) == "[IMG]"
    builder = PromptBuilder(tokenizer, PictureTemplate(), mark_image=lambda picture: mark)
    first = builder.begin().next(**see("<|in|> here"), picture=np.zeros((2, 3, 3), np.uint8))
    assert first is not None and first.shows_image
    text = tokenizer.decode(first.ids)
    assert f"{mark}\nThis is step 1" in text
    # The environment's own text cannot open a picture's frame.
    assert "< |in|> here" in text


THINKING = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}{{ '\nwalk' }}{% endif %}"
)
"""As Qwen3's: a variable decides what the response begins with."""


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tokenize": True}, "tokenize is an argument of apply_chat_template"),
        ({"enable_thinking": False, "add_generation_prompt": False}, "add_generation_prompt is an argument"),
        ({"enable_thinkin": False}, "the chat template of this tokenizer does not use 'enable_thinkin'"),
    ],
)
def test_keywords_that_a_chat_template_cannot_take(tiny_model: Path, keywords: Any, message: str) -> None:
    from spear_agents.engines.hf import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = THINKING
    with pytest.raises(SpearError, match=message):
        PromptBuilder(tokenizer, CompactTemplate(), template_kwargs=keywords)


def test_too_long_a_prompt_is_none() -> None:
    builder = PromptBuilder(ByteTokenizer(), CompactTemplate(), Layout.CONVERSATION, max_prompt_tokens=12)
    dialogue = builder.begin()
    assert dialogue.next(**see("1234567")) is not None  # "walk\n" and seven
    dialogue.add("1234567", "go", (65,), Finish.STOP)
    assert dialogue.next(**see("", 2)) is None
    assert builder.begin().next(**see("12345678")) is None


def test_a_word_like_the_mark_of_a_place_is_broken_up() -> None:
    builder = PromptBuilder(ByteTokenizer(), DefaultTemplate(), history=1)
    dialogue = builder.begin()
    dialogue.add("a page with <image>", "say <image>", (65,), Finish.STOP)
    prompt = dialogue.next(**see("more of <image>", 2))
    assert prompt is not None and not prompt.shows_image
    text = builder.decode(prompt.ids)
    assert all(words in text for words in ("a page with < image>", "say < image>", "more of < image>"))
    assert "of < image>" in builder.decode(builder.ask("outside of <image> too"))


def test_a_template_with_two_places_is_refused() -> None:
    class Twice(PictureTemplate):
        def render(self, context: PromptContext) -> str:
            return IMAGE + super().render(context)

    with pytest.raises(SpearError, match="'default' marks 2 places of a picture"):
        PromptBuilder(ByteTokenizer(), Twice()).begin().next(**see("board"))


def test_bytes_have_no_chat_template_that_takes_keywords() -> None:
    with pytest.raises(SpearError, match="enable_thinking: only the chat template of a local model"):
        PromptBuilder(ByteTokenizer(), CompactTemplate(), template_kwargs={"enable_thinking": False})


def test_the_stock_template_shows_the_picture_of_any_environment() -> None:
    context = PromptContext("Win.", "a board", None, (), 1, 5, picture=True)
    assert "You see:\n<image>\na board\n" in DefaultTemplate().render(context)
    prompts = PromptBuilder(ChatBytes(), DefaultTemplate())
    seen = {"instruction": "Win.", "admissible_actions": None, "turn": 1, "max_turns": 5}
    with_it = prompts.begin().next(**seen, observation="a board", picture=np.zeros((2, 3, 3), np.uint8))
    without = prompts.begin().next(**seen, observation="a <image> board")
    assert with_it is not None and with_it.shows_image
    assert without is not None and not without.shows_image
