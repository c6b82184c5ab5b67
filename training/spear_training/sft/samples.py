"""Token ids of a row of fine-tuning data, and the mask of those that are learnt."""

from __future__ import annotations

import hashlib
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from spear_agents.play.chat import RENDER_S, Tokenizer, within
from spear_envs.core.errors import SpearError
from spear_envs.data.files import draft_folder
from spear_training.sft.messages import (
    is_learnt,
    read_keywords,
    read_messages,
    read_rows,
    refuse_unread,
    unfold_solution,
    write_calls,
)

_SHOWN = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that are learnt where the chat template shows them."""
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


class Overlong(str, Enum):
    """Treatment of a sample of more than ``max_length`` tokens."""

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
    """Return the sample up to the policy's last token, or None."""
    mask = [0, *mask[1:]]
    end = max((place for place, bit in enumerate(mask, 1) if bit), default=0)
    return Sample(tuple(ids[:end]), tuple(mask[:end])) if end else None


@dataclass(eq=False)
class SampleReader:
    """Reads the samples of one model, whose embedding has ``vocabulary`` rows; ``end_ids`` end a response."""

    tokenizer: Tokenizer
    vocabulary: int
    end_ids: Sequence[int]

    def read(self, record: Mapping[str, Any]) -> list[Sample]:
        """Return the samples in a row: its recorded ids where it has some, else its messages through the chat template.

        They are one, or several if the chat template rewrites earlier responses: then a response whose prompt does not
        continue the tokens before it begins a sample of its own, as a turn begins a row when the model is trained
        (:class:`spear_agents.play.transcript.Transcript`). There is none without a token of the policy's.

        Raises:
            SpearError: the row is not a sample for this model.
        """
        refuse_unread(record)
        found: Iterable[Sample | None]
        if "input_ids" in record or "loss_mask" in record:
            found = [_read_tokens(record.get("input_ids"), record.get("loss_mask"))]
        else:
            record = unfold_solution(record)
            found = self._encode(read_messages(record), read_keywords(record))
        samples = [sample for sample in found if sample is not None]
        for token in chain.from_iterable(sample.ids for sample in samples):
            if not 0 <= token < self.vocabulary:
                raise SpearError(f"token id {token} is outside the model's vocabulary of {self.vocabulary:,}")
        return samples

    def fits(self, sample: Sample, record: Mapping[str, Any]) -> bool:
        """Return whether recorded tokens of the policy read as what the messages say it wrote; True without either."""
        if "messages" not in record or "input_ids" not in record:
            return True
        said = _squeeze("".join(m["content"] for m in read_messages(record) if m["role"] == "assistant"))
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
        """Return whether the last response ends with an end token, which the policy has to learn."""
        return sample.ids[-1] in self.end_ids

    def _encode(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> Iterator[Sample | None]:
        """Return the messages as the model reads and writes them: each response is tokenised apart from what precedes
        it.

        ``keywords`` are variables of the chat template.
        """
        for name in [*keywords, *(key for message in messages for key in message if key in _SHOWN)]:
            if not re.search(rf"\b{re.escape(name)}\b", str(getattr(self.tokenizer, "chat_template", ""))):
                raise SpearError(f"the chat template of this model does not show {name!r}: leave it out")
        if messages and messages[0]["role"] == "assistant":
            raise SpearError("its first message is the assistant's, which answers nothing: put a message before it")
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [self._render(messages[:place], keywords, prompt=True) for place in places]
        ids: list[int] = []
        mask: list[int] = []
        shown = ""
        for place, prompt, later in zip(places, prompts, [*prompts[1:], ""], strict=False):
            whole = self._render(messages[: place + 1], keywords, prompt=False)
            if not whole.startswith(prompt):
                raise SpearError(
                    "the chat template of this model ends a prompt with words that it does not show before a response, "
                    "so that nobody can say which tokens are the policy's: run `spear collect --tokenizer MODEL`"
                )
            if not prompt.startswith(shown):
                yield trim(ids, mask)
                ids, mask, shown = [], [], ""
            response = whole[len(prompt) :]
            thought = _EMPTY_THOUGHT.match(response)
            bare = response[thought.end() :] if thought else response
            if not later.startswith(whole) and later.startswith(prompt + bare):
                response = bare  # Qwen3's template writes an empty thought before the last response alone
            read = self.tokenizer.encode(prompt[len(shown) :], add_special_tokens=False)
            written = self.tokenizer.encode(response, add_special_tokens=False)
            # What the template adds after the end token (a line break) is not the policy's.
            end = max((place for place, token in enumerate(written, 1) if token in self.end_ids), default=len(written))
            ids += [*read, *written]
            mask += [0] * len(read) + [int(is_learnt(messages[place]))] * end + [0] * (len(written) - end)
            shown = prompt + response
        yield trim(ids, mask)

    def _render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any], *, prompt: bool) -> str:
        keywords = {**keywords, "tokenize": False, "add_generation_prompt": prompt}
        try:
            with within(RENDER_S):
                try:
                    return self.tokenizer.apply_chat_template([*messages], **keywords)
                except TypeError:  # DeepSeek's joins arguments to text
                    messages = [write_calls(message) for message in messages]
                    return self.tokenizer.apply_chat_template(messages, **keywords)
        except Exception as error:  # a template is a program: it may refuse with anything
            why = " ".join(str(error).split())
            raise SpearError(f"the model's chat template refuses these messages ({why}): take another model") from error


def _squeeze(text: str) -> str:
    """Return the text without blanks, which some tokenizers set between words or leave out at the beginning."""
    return "".join(text.split())


def _read_tokens(ids: Any, mask: Any) -> Sample | None:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise SpearError("input_ids and loss_mask must be two lists of one length")
    if not all(type(token) is int for token in ids) or not all(type(bit) is int and bit in (0, 1) for bit in mask):
        raise SpearError("input_ids must be whole numbers, loss_mask zeros and ones")
    return trim(ids, mask)


def _find_runs(sample: Sample) -> Iterator[tuple[int, ...]]:
    """Return the stretches of tokens that are the policy's."""
    for bit, pairs in groupby(zip(sample.mask, sample.ids, strict=True), key=itemgetter(0)):
        if bit:
            yield tuple(token for _, token in pairs)


MISFITS = 0.5
"""Share of samples whose tokens read differently from their messages beyond which the tokenizer is another one."""

ARRAYS = ("tokens", "mask", "offsets")
Observer = Callable[[int], None]
"""Called with the number of rows read so far."""


@dataclass(frozen=True)
class Preparation:
    """Counts of the rows by what became of them.

    Attributes:
        samples: those that are trained on, of ``tokens``, of which ``learnt`` are the policy's.
        split: rows of several samples, because the chat template rewrites earlier responses.
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
    split: int = 0
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
    """Read ``files`` of rows (``.jsonl`` or ``.parquet``) and store their samples in ``folder``.

    Raises SpearError if a file cannot be read or is empty, a row is not a sample for this model, or nothing is left.
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
    rows: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def sift(self) -> Iterator[Sample]:
        counts = self.counts
        for path in self.files:
            for number, record in read_rows(path):
                self.rows += 1
                if self.observer is not None:
                    self.observer(self.rows)
                if not self.keep_lost and record.get("won") is False:
                    counts["lost"] += 1
                    continue
                try:
                    samples = self.reader.read(record)
                    counts["misfits"] += not all(self.reader.fits(sample, record) for sample in samples)
                except SpearError as error:
                    raise SpearError(f"{path}, row {number}: {error}") from error
                counts["empty"] += not samples
                counts["split"] += len(samples) > 1
                yield from filter(None, map(self._limit, samples))
        self._complain()

    def _limit(self, sample: Sample) -> Sample | None:
        """Return the sample as it is trained on, counted; None if it is left out."""
        counts = self.counts
        counts["unended"] += not self.reader.ends(sample)
        found: Sample | None = sample
        if len(sample.ids) > self.max_length:
            cut = self.overlong is Overlong.TRUNCATE
            found = trim(sample.ids[: self.max_length], sample.mask[: self.max_length]) if cut else None
            counts["truncated" if found else "dropped"] += 1
        if found is not None:
            counts["samples"] += 1
            counts["tokens"] += len(found.ids)
            counts["learnt"] += found.learnt
            counts["longest"] = max(counts["longest"], len(found.ids))
            self.hash.update(repr(found).encode("ascii"))
        return found

    def _complain(self) -> None:
        """Raises SpearError where nothing is left, or where the tokens are another model's."""
        counts, files = self.counts, ", ".join(map(str, self.files))
        read = self.rows - counts["lost"]
        if counts["misfits"] > MISFITS * max(1, read):
            raise SpearError(
                f"the token ids of {counts['misfits']:,} of {read:,} samples in {files} do not read as their messages "
                "with this model's tokenizer: they are another model's; run `spear collect --tokenizer MODEL`"
            )
        if counts["samples"]:
            return
        if not read:
            raise SpearError(f"none of {self.rows:,} samples in {files} is of a won episode: collect from a player "
                             "that wins, or give --keep-lost")  # fmt: skip
        raise SpearError(
            f"nothing to learn in {files}: of {read:,} samples {counts['dropped']:,} are longer than "
            f"{self.max_length:,} tokens and {counts['empty']:,} hold no response; raise --max-length, or give "
            "--overlong truncate"
        )


@dataclass(frozen=True)
class SampleStore:
    """The prepared samples of a fine-tuning, mapped from the files that :func:`write_store` wrote.

    Sample ``i`` is ``tokens[offsets[i] : offsets[i + 1]]`` (int32), with ``mask`` (uint8) of the same length.
    """

    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and mask of a sample, both [L]."""
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
    """Return the samples of a folder. Raises SpearError where they cannot be read."""
    try:
        return SampleStore(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))
    except (OSError, ValueError) as error:
        raise SpearError(f"the samples in {folder} cannot be read ({error}): remove the folder") from error
