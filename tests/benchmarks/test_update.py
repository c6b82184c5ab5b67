"""Rows and ratios of the benchmark of updates."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train'")

from benchmarks.parts.update_arms import cut_batches
from benchmarks.update import compare, take


def test_some_rows_keep_their_own_tokens() -> None:
    rows = {
        "prompts": np.array([2, 1, 3]),
        "responses": np.array([1, 2, 1]),
        "ids": np.array([10, 11, 12, 20, 21, 22, 30, 31, 32, 33]),
        "mask": np.array([1, 0, 1, 1]),
        "old": np.array([0.1, 0.2, 0.3, 0.4]),
        "advantage": np.array([1.0, 2.0, 3.0]),
    }
    part = take(rows, np.array([False, True, True]))
    assert part["ids"].tolist() == [20, 21, 22, 30, 31, 32, 33]
    assert part["mask"].tolist() == [0, 1, 1] and part["old"].tolist() == [0.2, 0.3, 0.4]
    assert part["advantage"].tolist() == [2.0, 3.0] and part["prompts"].tolist() == [1, 3]


def test_a_padded_batch_holds_as_many_tokens_as_allowed_and_at_least_a_row() -> None:
    lengths = np.array([4, 4, 5, 20, 3, 3])
    batches = [batch.tolist() for batch in cut_batches(lengths, 12)]
    assert batches == [[0, 1], [2], [3], [4, 5]]


def test_ratios_are_taken_round_by_round_ours_over_verls_and_plain_over_ours() -> None:
    def ask(other: str, ours: tuple[float, ...], theirs: tuple[float, ...]) -> dict[str, float]:
        pairs = zip(ours, theirs, strict=True)
        lines = [
            {"arm": arm, "seconds": seconds, "norm": 0.5}
            for pair in pairs
            for arm, seconds in zip(("ours", other), pair, strict=True)
        ]
        return {f"{figure.name} {figure.of}".strip(): figure.value for figure in compare("tiny", lines)}

    verl = ask("verl", (1.0, 2.0, 4.0), (2.0, 8.0, 8.0))
    assert verl["tiny: our update over verl's"] == 0.5 and verl["tiny: update verl"] == 8.0
    plain = ask("plain", (1.0, 2.0, 4.0), (2.0, 8.0, 8.0))
    assert plain["tiny: plain transformers and peft over our update"] == 2.0
