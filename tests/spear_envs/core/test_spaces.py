from __future__ import annotations

import pickle

import gymnasium as gym
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import batch_space, create_shared_memory
from gymnasium.wrappers import FlattenObservation
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.spaces import PermissiveText

PINNED = "iZ=B\"&\t2}j\u304bYe\u093fth^`\uae00>~m\nL\u0416_!xt\xdf2(\u0416 ]'AVOM!\n,\nm\\j<fxKT\U0001f600|\u221a"


@given(st.text())
def test_any_text_is_in_the_space(text: str) -> None:
    assert text in PermissiveText(10_000)


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a"], "x" * 101])
def test_what_is_no_text_or_too_long_is_not(value: object) -> None:
    assert value not in PermissiveText(100)


def test_samples_depend_on_the_seed_alone() -> None:
    first, second = PermissiveText(1000), PermissiveText(1000)
    first.seed(5)
    second.seed(5)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(sample in first for sample in samples)
    assert max(map(len, samples)) <= 64 and len(set(samples)) > 40
    assert PermissiveText(1000, seed=5).sample() == samples[0]
    # pinned: the same text on every machine
    first.seed(0)
    assert first.sample() == PINNED


def test_equality_pickling_and_batching() -> None:
    space = PermissiveText(50)
    assert space == PermissiveText(50)
    assert space != PermissiveText(51)
    assert space != gym.spaces.Text(50)
    again = pickle.loads(pickle.dumps(space))
    assert again == space and "é\n" in again
    assert ("a b", "é") in batch_space(space, 2)
    assert repr(space) == "PermissiveText(0, 50)"
    assert not space.is_np_flattenable


@pytest.mark.parametrize("space", [PermissiveText(9), gym.spaces.Dict(text=PermissiveText(9))])
def test_shared_memory_would_garble_texts_and_is_refused(space: gym.Space) -> None:
    with pytest.raises(CustomSpaceError, match="shared_memory=False"):
        create_shared_memory(space, n=2)


@pytest.mark.parametrize("text", ["", "漢字 ∑ 😀", "\0\ud800", "x" * 90])
def test_any_text_can_be_flattened(text: str) -> None:
    space = PermissiveText(90)
    flat = flatten(space, text)
    assert flat in flatten_space(space) and len(flat) == flatdim(space)
    assert unflatten(space, flat) == text


def test_gymnasium_flattens_observations() -> None:
    env = FlattenObservation(gym.make("spear_envs:spear/Sokoban-v1", modality="text"))
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert "#" in unflatten(env.unwrapped.observation_space, observation)
