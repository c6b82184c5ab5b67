from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.engines.stops import StopFinder, cut_at_stop

CLOSING = ("</search>", "</answer>")


class Pieces:
    """A tokenizer whose ids are places in a list of texts."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.calls = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return "".join(self.pieces[i] for i in token_ids)


@given(st.lists(st.sampled_from(["</search>", "</answer>", "<", "/", "search", ">", " x", "é", "</", "rch>"])))
def test_the_first_stop_string_is_found_at_its_last_byte(parts: list[str]) -> None:
    text = "".join(parts)
    ids = ByteTokenizer().encode(text)
    finder = StopFinder(ByteTokenizer(), CLOSING)
    reached = next((n for n in range(1, len(ids) + 1) if finder.is_reached(ids[:n])), None)
    kept, cut = cut_at_stop(text, CLOSING)
    assert cut == (reached is not None)
    assert kept == (text if reached is None else ByteTokenizer().decode(ids[:reached]))


def test_a_token_may_hold_more_than_the_end_of_the_string() -> None:
    tokenizer = Pieces("<search>q", "</", "search", ">\n", "")
    finder = StopFinder(tokenizer, CLOSING)
    assert [finder.is_reached(range(n)) for n in range(5)] == [False] * 4 + [True]
    assert finder.is_reached([0, 1, 4, 2, 4, 3]), "tokens without a text in between"


def test_tokens_that_cannot_end_a_string_cost_nothing() -> None:
    tokenizer = Pieces("word", ">")
    finder = StopFinder(tokenizer, CLOSING)
    for n in range(1, 1000):
        assert not finder.is_reached([0] * n)
    assert tokenizer.calls == 1


def test_no_strings_never_stop() -> None:
    assert not StopFinder(ByteTokenizer(), ()).is_reached(list(b"</search>"))
    assert cut_at_stop("</search>", ()) == ("</search>", False)


class BytePieces:
    """Shows a run of bytes as U+FFFD throughout if any of it is broken, as tokenizers with byte fallback do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)


@given(st.lists(st.sampled_from(["。終", "わり", "é", "😀", "x"])))
def test_a_stop_string_beyond_ascii_is_found(parts: list[str]) -> None:
    text = "".join([*parts, "。終わり"])
    ids = list(text.encode())
    finder = StopFinder(BytePieces(), ("。終わり",))
    reached = next(n for n in range(1, len(ids) + 1) if finder.is_reached(ids[:n]))
    assert bytes(ids[:reached]).decode() == cut_at_stop(text, ("。終わり",))[0]
