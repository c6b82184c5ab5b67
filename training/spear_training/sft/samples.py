"""From a line of ``spear collect`` to token ids and the mask of those that are learnt."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from spear_agents.chat import RENDER_S, Tokenizer, check_taken_keywords, within
from spear_envs.core.errors import SpearError
from spear_envs.data.files import draft_folder

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
            raise SpearError(f"token id {wrong} is outside the model's vocabulary of {self.vocabulary:,}")
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
            raise SpearError(f"{name}={made[name]!r} of a {message['role']!r}: it is 0, or 1 for the assistant")
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
        raise SpearError("its response holds the environment's words too: run `spear collect --tokenizer MODEL`")
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


MISFITS = 0.5
"""Share of samples whose tokens read differently from their messages beyond which the tokenizer is another one."""

ARRAYS = ("tokens", "mask", "offsets")
Observer = Callable[[int], None]
"""Called with the number of lines read so far."""


@dataclass(frozen=True)
class Preparation:
    """What became of the lines.

    Attributes:
        samples: those that are trained on, of ``tokens``, of which ``learnt`` are the policy's.
        lost: left out because their episode was lost.
        empty: left out because they hold no token of the policy's.
        dropped, truncated: left out or cut off because they are too long.
        unended: the last response does not end with an end token.
        misfits: the recorded tokens read differently from the messages.
        digest: SHA-256 over what was stored.
    """

    samples: int = 0
    tokens: int = 0
    learnt: int = 0
    longest: int = 0
    lost: int = 0
    empty: int = 0
    dropped: int = 0
    truncated: int = 0
    unended: int = 0
    misfits: int = 0
    digest: str = ""


def prepare_samples(
    files: Sequence[Path],
    reader: SampleReader,
    folder: Path,
    *,
    max_length: int,
    overlong: Overlong = Overlong.DROP,
    keep_lost: bool = False,
    observer: Observer | None = None,
) -> Preparation:
    """Read ``files`` of JSON lines and store their samples in ``folder``.

    Raises SpearError if a file cannot be read or is empty, a line is not a sample for this model, or nothing is left.
    """
    sifter = _Sifter(files, reader, max_length, overlong, keep_lost, observer)
    write_store(folder, sifter.sift())
    counts: dict[str, Any] = sifter.counts
    return Preparation(**counts, digest=sifter.hash.hexdigest())


@dataclass(eq=False)
class _Sifter:
    """Passes on the samples that are wanted and counts the others."""

    files: Sequence[Path]
    reader: SampleReader
    max_length: int
    overlong: Overlong
    keep_lost: bool
    observer: Observer | None
    counts: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def sift(self) -> Iterator[Sample]:
        counts = self.counts
        for where, record in self._read_lines():
            if not self.keep_lost and record.get("won") is False:
                counts["lost"] += 1
                continue
            try:
                sample = self.reader.read(record)
                fits = sample is None or self.reader.fits(sample, record)
            except SpearError as error:
                raise SpearError(f"{where}: {error}") from error
            if sample is None:
                counts["empty"] += 1
                continue
            counts["misfits"] += not fits
            counts["unended"] += not self.reader.ends(sample)
            if len(sample.ids) > self.max_length:
                sample = (
                    trim(sample.ids[: self.max_length], sample.mask[: self.max_length])
                    if self.overlong is Overlong.TRUNCATE
                    else None
                )
                counts["truncated" if sample else "dropped"] += 1
            if sample is None:
                continue
            counts["samples"] += 1
            counts["tokens"] += len(sample.ids)
            counts["learnt"] += sample.learnt
            counts["longest"] = max(counts["longest"], len(sample.ids))
            self.hash.update(repr(sample).encode("ascii"))
            yield sample
        self._complain()

    def _read_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self.files:
            before = self.lines
            try:
                with path.open("rb") as file:
                    for number, line in enumerate(file, 1):
                        where = f"{path}, line {number}"
                        self.lines += 1
                        if self.observer is not None:
                            self.observer(self.lines)
                        try:
                            record = json.loads(line)
                        except (ValueError, RecursionError) as error:
                            raise SpearError(f"{where} is not JSON: give files that `spear collect` wrote") from error
                        if not isinstance(record, dict):
                            raise SpearError(f"{where} is not a sample: give files that `spear collect` wrote")
                        yield where, record
            except OSError as error:
                raise SpearError(f"{path} cannot be read: {error.strerror}") from error
            if self.lines == before:
                raise SpearError(f"{path} is empty: `spear collect ENV --out {path}` fills it")

    def _complain(self) -> None:
        """Raises SpearError where nothing is left, or where the tokens are another model's."""
        counts, files = self.counts, ", ".join(map(str, self.files))
        read = self.lines - counts["lost"]
        if counts["misfits"] > MISFITS * max(1, read):
            raise SpearError(
                f"the token ids of {counts['misfits']:,} of {read:,} samples in {files} do not read as their messages "
                "with this model's tokenizer: they are another model's; run `spear collect --tokenizer MODEL`"
            )
        if counts["samples"]:
            return
        if not read:
            raise SpearError(f"none of {self.lines:,} samples in {files} is of a won episode: collect from a player "
                             "that wins, or give --keep-lost")  # fmt: skip
        raise SpearError(
            f"nothing to learn in {files}: of {read:,} samples {counts['dropped']:,} are longer than "
            f"{self.max_length:,} tokens and {counts['empty']:,} hold no response; raise --max-length, or give "
            "--overlong truncate"
        )


@dataclass(frozen=True)
class SampleStore:
    """Sample ``i`` is ``tokens[offsets[i] : offsets[i + 1]]`` (int32), with ``mask`` (uint8) of the same length."""

    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and mask of a sample, both [L]."""
        start, end = self.offsets[index : index + 2]
        return self.tokens[start:end], self.mask[start:end]


def write_store(folder: Path, samples: Iterable[Sample]) -> None:
    """Write the samples to a folder, atomically. Raises SpearError if it cannot be written."""
    tokens, mask, offsets = array("i"), array("B"), array("q", [0])
    for sample in samples:
        tokens.extend(sample.ids)
        mask.extend(sample.mask)
        offsets.append(len(tokens))
    with draft_folder(folder) as draft:
        for name, values in zip(ARRAYS, (tokens, mask, offsets), strict=True):
            np.save(draft / f"{name}.npy", np.frombuffer(values, dtype=values.typecode))
        shutil.rmtree(folder, ignore_errors=True)


def open_store(folder: Path) -> SampleStore:
    """The samples of a folder. Raises SpearError where they cannot be read."""
    try:
        return SampleStore(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))
    except (OSError, ValueError) as error:
        raise SpearError(f"the samples in {folder} cannot be read ({error}): remove the folder") from error
