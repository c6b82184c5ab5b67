from __future__ import annotations

from dataclasses import replace

import pytest

from spear_agents.engines.base import Finish, Served
from spear_agents.records import sum_usage
from spear_agents.trajectory import Layout, StopReason, TokenKind, Trajectory, Turn


def turn(prompt: int, response: int, cached: int | None = None, served: Served | None = None) -> Turn:
    ids = (0,) * response
    return Turn((0,) * prompt, ids, (0.0,) * response, "", "", "", True, True, "", 0.0, Finish.STOP, served, 0, cached)


def episode(*turns: Turn, layout: Layout = Layout.CONVERSATION) -> Trajectory:
    if layout is Layout.CONVERSATION:
        turns = tuple(replace(turn, follows=place - 1 if place else None) for place, turn in enumerate(turns))
    return Trajectory("e", "t", "s", "", "f", layout, turns, {}, 0.0, 0.0, False, 0, StopReason.FAILED)


def test_tokens_from_a_local_cache_are_counted() -> None:
    played = episode(turn(300, 10, 0), turn(40, 10, 256), turn(40, 10, 256))
    usage = sum_usage([played])
    assert (usage.prompt_tokens, usage.completion_tokens) == (300 + 350 + 400, 30)
    assert usage.cached_tokens == 512
    assert usage.cacheable_tokens == (310 - 32) + (360 - 32)
    assert usage.cached_share == pytest.approx(512 / 1050) and not usage.is_thrashing
    assert Trajectory.from_json(played.to_json()).turns[1].cached_tokens == 256, "the record keeps it"
    assert usage.to_json()["cached_tokens"] == 512
    whole = sum_usage([episode(turn(300, 10, 128), turn(340, 10, 0), layout=Layout.PER_TURN)])
    assert (whole.prompt_tokens, whole.cached_tokens, whole.is_thrashing) == (640, 128, False)


def test_a_cache_that_forgets_what_comes_next_is_told() -> None:
    turns = [turn(300, 10, 0), turn(40, 10, 100), turn(40, 10, 0)]
    assert sum_usage([episode(*turns)]).is_thrashing
    short = [turn(20, 10, 0), turn(40, 10, 0)]
    assert not sum_usage([episode(*short)]).is_thrashing, "less than a block cannot be kept"


def test_engines_without_a_cache_say_nothing() -> None:
    plain = episode(turn(300, 10), turn(40, 10))
    usage = sum_usage([plain, replace(plain, tokens=TokenKind.BYTES)])
    assert (usage.cached_tokens, usage.cached_share, usage.is_thrashing) == (0, None, False)
    assert "cached_tokens" not in plain.to_json()
    served = Served(prompt_tokens=200, completion_tokens=5, cached_tokens=50)
    assert sum_usage([episode(turn(9, 9, served=served))]).cached_share == 0.25
