"""From a line of ``spear collect`` to token ids and the mask of those that are learnt."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

from spear_agents.chat import RENDER_S, Tokenizer, check_taken_keywords, within
from spear_envs.core.errors import SpearError

_FLAGS = ("loss_mask", "weight", "train", "training", "loss", "trainable")
"""Fields of a message by which tools say whether it is learnt."""
_SHOWN = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that are learnt where the chat template shows them."""
_UNREAD_OF_MESSAGES = ("function_call", "images", "image", "audio", "videos", "train_detail", "loss_weight", "prefix")
_UNREAD = (
    *("weight", "loss_weight", "sample_weight", "labels", "completion_mask", "assistant_masks", "assistant_mask"),
    *("images", "image", "videos", "audios", "documents", "functions", "system", "train_on_inputs", "chat_template"),
)
"""Fields of a line that other tools read and this one does not."""


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
        _refuse_fields(record, _UNREAD, "it")
        if "input_ids" in record or "loss_mask" in record:
            sample = _read_tokens(record.get("input_ids"), record.get("loss_mask"))
        else:
            sample = self._encode(_read_messages(record), _read_keywords(record))
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

    def _encode(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> Sample | None:
        """The messages as the model reads and writes them: each response is tokenised apart from what precedes it.

        ``keywords`` are variables of the chat template.
        """
        for name in [*keywords, *(key for message in messages for key in message if key in _SHOWN)]:
            if not re.search(rf"\b{re.escape(name)}\b", str(getattr(self.tokenizer, "chat_template", ""))):
                raise SpearError(f"the chat template of this model does not show {name!r}: leave it out")
        if messages and messages[0]["role"] == "assistant":
            raise SpearError("its first message is the assistant's, which answers nothing: put a message before it")
        ids: list[int] = []
        mask: list[int] = []
        shown = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], keywords, prompt=True)
            whole = self._render(messages[: number + 1], keywords, prompt=False)
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
            mask += [0] * len(read) + [int(_is_learnt(message))] * end + [0] * (len(written) - end)
            shown = whole
        return trim(ids, mask)

    def _render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any], *, prompt: bool) -> str:
        keywords = {**keywords, "tokenize": False, "add_generation_prompt": prompt}
        try:
            with within(RENDER_S):
                try:
                    return self.tokenizer.apply_chat_template([*messages], **keywords)
                except TypeError:  # DeepSeek's joins arguments to text
                    messages = [_write_calls(message) for message in messages]
                    return self.tokenizer.apply_chat_template(messages, **keywords)
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


def _read_keywords(record: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template: the tools, and what else a line names."""
    keywords = _read_json(record.get("chat_template_kwargs"), dict, "chat_template_kwargs") or {}
    if record.get("enable_thinking") is not None:
        keywords["enable_thinking"] = record["enable_thinking"]
    check_taken_keywords(keywords)
    tools = _read_json(record.get("tools"), list, "tools")
    return {**keywords, **({"tools": tools} if tools else {})}


def _read_json(value: Any, kind: type, name: str) -> Any:
    """A value that may be written as JSON in a string."""
    try:
        found = json.loads(value) if isinstance(value, str) and value else value or None
    except (ValueError, RecursionError):
        found = value
    if found is not None and not isinstance(found, kind):
        raise SpearError(f"its {name} must be a JSON {'object' if kind is dict else 'array'}, not {str(value)[:60]!r}")
    return found


def _refuse_fields(values: Mapping[str, Any], names: Collection[str], owner: str) -> None:
    for name in names:
        if values.get(name) not in (None, [], {}, ""):
            raise SpearError(f"{owner} has the field {name!r}, which would change what is learnt and is not read here")


def _complete(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty fields, whose calls have arguments as objects: templates write them as JSON."""
    _refuse_fields(message, _UNREAD_OF_MESSAGES, f"a message of {message['role']!r}")
    made = {key: value for key, value in message.items() if value is not None} | {"content": _read_text(message) or ""}
    flags = [name for name in _FLAGS if name in made]
    for name in flags:
        if made[name] not in (0, 1) or (made[name] and message["role"] != "assistant"):
            raise SpearError(
                f"{name}={made[name]!r} of a message of {message['role']!r}: it can be 0, and 1 for the assistant's"
            )
    if "tool_calls" in made:
        made["tool_calls"] = [_read_call(call) for call in made["tool_calls"]]
    return made


def _is_learnt(message: Mapping[str, Any]) -> bool:
    return all(message.get(name, 1) for name in _FLAGS)


def _read_call(call: Any) -> dict[str, Any]:
    holder = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(holder, dict):
        raise SpearError("a tool call is not an object with a name and arguments")
    made = {**holder, "arguments": _read_json(holder.get("arguments"), dict, "arguments of a tool call") or {}}
    return {**call, "function": made} if "function" in call else made


def _write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with arguments as text."""

    def write(call: Mapping[str, Any]) -> dict[str, Any]:
        holder = call.get("function", call)
        made = {**holder, "arguments": json.dumps(holder["arguments"], ensure_ascii=False)}
        return {**call, "function": made} if "function" in call else made

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [write(call) for call in calls]} if calls else dict(message)


def _read_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise SpearError("it has neither input_ids nor messages with a role and a text each")
    messages = [_complete(message) for message in messages]
    if record.get("joined") and "input_ids" not in record:
        raise SpearError(
            "its one response holds the environment's words too, and only token ids tell them apart: "
            "run `spear collect --tokenizer MODEL`"
        )
    return messages


def _is_message(message: Any) -> bool:
    texts = [message.get("role"), _read_text(message)] if isinstance(message, dict) else [None]
    # JSON may hold halves of surrogate pairs, which no tokenizer takes.
    return all(isinstance(text, str) and text == text.encode(errors="replace").decode() for text in texts)


def _read_text(message: Mapping[str, Any]) -> str | None:
    """The text of a message, which may be written in parts, or missing beside calls; None if there is another part."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and content:
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        return "".join(map(str, texts)) if whole else None
    return content if isinstance(content, str) else None


def _find_runs(sample: Sample) -> Iterator[tuple[int, ...]]:
    """Stretches of tokens of the policy."""
    for bit, pairs in groupby(zip(sample.mask, sample.ids, strict=True), key=itemgetter(0)):
        if bit:
            yield tuple(token for _, token in pairs)
