"""From a line of ``spear collect`` to token ids and the mask of those that are learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

from spear_agents.chat import Tokenizer
from spear_envs.core.errors import SpearError


class Overlong(str, Enum):
    """What happens to a sample of more than ``max_length`` tokens."""

    DROP = "drop"
    """It is left out."""
    TRUNCATE = "truncate"
    """Its end is cut off; it is left out where no token of the policy remains."""


@dataclass(frozen=True)
class Sample:
    """One sequence: ``ids`` and, of equal length, ``mask``, which is 1 on tokens of the policy.

    The last token is one of the policy's, the first never is: nothing comes before it to predict it from.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]

    @property
    def learnt(self) -> int:
        """Tokens in the loss."""
        return sum(self.mask)


def trim(ids: Sequence[int], mask: Sequence[int]) -> Sample | None:
    """The sample up to the policy's last token, or None."""
    mask = [0, *mask[1:]]
    end = max((place for place, bit in enumerate(mask, 1) if bit), default=0)
    return Sample(tuple(ids[:end]), tuple(mask[:end])) if end else None


@dataclass(eq=False)
class SampleReader:
    """Reads the samples of one model, whose embedding has ``vocabulary`` rows; ``end_ids`` end a response."""

    tokenizer: Tokenizer
    vocabulary: int
    end_ids: Sequence[int]

    def read(self, record: Mapping[str, Any]) -> Sample | None:
        """The sample in a line: its recorded ids where it has some, else its messages through the chat template.

        None if it has no token of the policy's. Raises SpearError if the line is not a sample for this model.
        """
        if "input_ids" in record or "loss_mask" in record:
            sample = _read_tokens(record.get("input_ids"), record.get("loss_mask"))
        else:
            sample = self._encode(_read_messages(record))
        if sample is not None and not all(0 <= token < self.vocabulary for token in sample.ids):
            wrong = next(token for token in sample.ids if not 0 <= token < self.vocabulary)
            raise SpearError(
                f"token id {wrong} is outside the model's vocabulary of {self.vocabulary:,}: these are another "
                "tokenizer's ids; run `spear collect --tokenizer MODEL`"
            )
        return sample

    def fits(self, sample: Sample, record: Mapping[str, Any]) -> bool:
        """Whether recorded tokens of the policy read as what the messages say it wrote; True without either."""
        if "messages" not in record or "input_ids" not in record:
            return True
        said = _squeeze("".join(m["content"] for m in _read_messages(record) if m["role"] == "assistant"))
        place = 0
        for run in _find_runs(sample):
            while run and run[-1] in self.end_ids:
                run = run[:-1]
            text = _squeeze(self.tokenizer.decode(list(run), skip_special_tokens=False))
            place = said.find(text, place)
            if place < 0:
                return False
            place += len(text)
        return True

    def ends(self, sample: Sample) -> bool:
        """Whether the last response ends with an end token, which the policy has to learn."""
        return sample.ids[-1] in self.end_ids

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> Sample | None:
        """The messages as the model reads and writes them: each response is tokenised apart from what precedes it."""
        if messages and messages[0]["role"] == "assistant":
            raise SpearError("its first message is the assistant's, which answers nothing: put a message before it")
        ids: list[int] = []
        mask: list[int] = []
        shown = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, whole = self._render(messages[:number], True), self._render(messages[: number + 1], False)
            if not prompt.startswith(shown) or not whole.startswith(prompt):
                raise SpearError(
                    "the chat template of this model rewrites responses or what comes before them, so that nobody "
                    "can say which tokens are the policy's: run `spear collect --tokenizer MODEL`"
                )
            read = self.tokenizer.encode(prompt[len(shown) :], add_special_tokens=False)
            written = self.tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
            # What the template adds after the end token (a line break) is not the policy's.
            end = max((place for place, token in enumerate(written, 1) if token in self.end_ids), default=len(written))
            ids += [*read, *written]
            mask += [0] * len(read) + [1] * end + [0] * (len(written) - end)
            shown = whole
        return trim(ids, mask)

    def _render(self, messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program: it may refuse with anything
            why = " ".join(str(error).split())
            raise SpearError(f"the model's chat template refuses these messages ({why}): take another model") from error


def _squeeze(text: str) -> str:
    """Without blanks, which some tokenizers set between words or leave out at the beginning."""
    return "".join(text.split())


def _read_tokens(ids: Any, mask: Any) -> Sample | None:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise SpearError("input_ids and loss_mask must be two lists of one length")
    if not all(type(token) is int for token in ids) or not all(type(bit) is int and bit in (0, 1) for bit in mask):
        raise SpearError("input_ids must be whole numbers, loss_mask zeros and ones")
    return trim(ids, mask)


def _read_messages(record: Mapping[str, Any]) -> list[Mapping[str, str]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise SpearError("it has neither input_ids nor messages with a role and a text each")
    if record.get("joined") and "input_ids" not in record:
        raise SpearError(
            "its one response holds the environment's words too, and only token ids tell them apart: "
            "run `spear collect --tokenizer MODEL`"
        )
    return messages


def _is_message(message: Any) -> bool:
    texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
    # JSON may hold halves of surrogate pairs, which no tokenizer takes.
    return all(isinstance(text, str) and text == text.encode(errors="replace").decode() for text in texts)


def _find_runs(sample: Sample) -> Iterator[tuple[int, ...]]:
    """Stretches of tokens of the policy."""
    for bit, pairs in groupby(zip(sample.mask, sample.ids, strict=True), key=itemgetter(0)):
        if bit:
            yield tuple(token for _, token in pairs)
