"""Prepares the files of ``spear collect`` for a model: reads, checks, counts, and stores them in three flat arrays."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spear_envs.core.errors import SpearError
from spear_training.checkpoints import draft_folder
from spear_training.sft.samples import Overlong, Sample, SampleReader, trim

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
