from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.spaces import PermissiveText
from spear_envs.core.vector import batch_infos, batch_observations

infos = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(0, 99),
        "share": st.floats(0, 1),
        "won": st.booleans(),
        "name": st.text(),
        "fault": st.none(),
        "terms": st.fixed_dictionaries({"a": st.floats(0, 1)}, optional={"b": st.integers(0, 9)}),
        "actions": st.lists(st.text(), max_size=2),
    },
)


@given(st.lists(infos, min_size=1, max_size=4))
def test_infos_are_batched_as_gymnasium_does(many: list[dict[str, Any]]) -> None:
    vector = gym.vector.VectorEnv()
    vector.num_envs = len(many)
    expected: dict[str, Any] = {}
    for i, info in enumerate(many):
        expected = vector._add_info(expected, info, i)
    compare(batch_infos(many), expected)


def compare(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            compare(ours[key], value)
    else:
        assert ours.dtype == theirs.dtype
        assert list(ours) == list(theirs)


def test_unlike_values_are_kept_as_they_are() -> None:
    batch = batch_infos([{"a": 1, "b": True}, {"a": 2.5, "b": None}, None])
    assert list(batch["a"]) == [1, 2.5, None] and type(batch["a"][0]) is int
    assert list(batch["b"]) == [True, None, None]
    assert list(batch["_a"]) == [True, True, False]


def test_arrays_in_infos() -> None:
    batch = batch_infos([{"x": np.zeros(2)}, {"x": np.ones(2)}])
    assert batch["x"].shape == (2, 2)
    ragged = batch_infos([{"x": np.zeros(2)}, {"x": np.ones(3)}])
    assert ragged["x"].dtype == object and ragged["x"][1].shape == (3,)


def test_observations() -> None:
    assert batch_observations(PermissiveText(), ["a", "é"]) == ("a", "é")
    space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), text=PermissiveText())
    single = [{"image": np.full((2, 2, 3), i, np.uint8), "text": str(i)} for i in range(3)]
    batch = batch_observations(space, single)
    assert batch["text"] == ("0", "1", "2") and batch["image"].shape == (3, 2, 2, 3)
    single[1]["image"][:] = 9
    assert batch["image"][1, 0, 0, 0] == 1
