"""Samples of a training as three flat arrays in a folder, which every rank maps into memory."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spear_agents.files import explain_unwritable
from spear_envs.core.errors import SpearError
from spear_training.sft.samples import Sample

ARRAYS = ("tokens", "mask", "offsets")


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
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    tokens, mask, offsets = array("i"), array("B"), array("q", [0])
    for sample in samples:
        tokens.extend(sample.ids)
        mask.extend(sample.mask)
        offsets.append(len(tokens))
    try:
        draft.mkdir(parents=True)
        for name, values in zip(ARRAYS, (tokens, mask, offsets), strict=True):
            np.save(draft / f"{name}.npy", np.frombuffer(values, dtype=values.typecode))
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError as error:
        raise explain_unwritable(folder, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(draft)


def open_store(folder: Path) -> SampleStore:
    """The samples of a folder. Raises SpearError where they cannot be read."""
    try:
        return SampleStore(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))
    except (OSError, ValueError) as error:
        raise SpearError(f"the samples in {folder} cannot be read ({error}): remove the folder") from error
