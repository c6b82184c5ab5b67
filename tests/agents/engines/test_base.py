from __future__ import annotations

import subprocess
import sys

import pytest

from spear_agents.engines.base import Sampling, derive_seed


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"temperature": float("nan")},
    ],
)
def test_sampling_refuses_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_derived_seeds_are_the_same_in_every_process() -> None:
    code = "from spear_agents.engines.base import derive_seed; print(derive_seed('sokoban/x', 3, 1))"
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert seeds == {f"{derive_seed('sokoban/x', 3, 1)}\n".encode()}


def test_derived_seeds_tell_their_parts_apart() -> None:
    seeds = {derive_seed(*parts) for parts in [("a", 1, 2), ("a", 12), ("a1", 2), ("a", 2, 1), ("a\ud800", 1)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
