"""Lists of observations and infos of single environments to one of each, by gymnasium's conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

__all__ = ["batch_infos", "batch_observations"]


def batch_observations(space: gym.Space[Any], observations: Sequence[Any]) -> Any:
    """One batched observation of K single ones.

    Texts become a tuple of K strings, arrays a fresh array [K, …], dictionaries a dictionary of those.
    """
    return concatenate(space, observations, create_empty_array(space, n=len(observations)))  # type: ignore[arg-type]


def batch_infos(infos: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One dictionary of the infos of K environments, as ``gymnasium.vector.VectorEnv`` defines it.

    Every key gets an array of length K and a boolean array ``_key`` that says which environments have it; inner
    dictionaries are treated alike; ``final_obs`` is an array of whole observations. Unlike gymnasium, which takes the
    type of the first value for all, values of unlike types go into an array of objects, so that none is bent.

    Args:
        infos: one for each environment, None for one that has nothing to say.
    """
    size = len(infos)
    keys: dict[str, None] = {}
    for info in infos:
        if info is not None:
            keys.update(dict.fromkeys(info))
    batched: dict[str, Any] = {}
    for key in keys:
        places = [i for i, info in enumerate(infos) if info is not None and key in info]
        values = [infos[i][key] for i in places]  # type: ignore[index]
        mask = np.zeros(size, dtype=np.bool_)
        mask[places] = True
        batched[key] = _batch_values(values, places, size, whole=key == "final_obs")
        batched[f"_{key}"] = mask
    return batched


def _batch_values(values: list[Any], places: list[int], size: int, whole: bool) -> Any:
    first = values[0]
    kind = type(first)
    alike = all(type(value) is kind for value in values)
    if alike and not whole:
        if kind in (int, float, bool) or isinstance(first, np.number):
            numbers = np.zeros(size, dtype=kind)
            numbers[places] = values
            return numbers
        if kind is dict:
            inner: list[Any] = [None] * size
            for place, value in zip(places, values, strict=True):
                inner[place] = value
            return batch_infos(inner)
        if kind is np.ndarray and all(v.shape == first.shape and v.dtype == first.dtype for v in values):
            arrays = np.zeros((size, *first.shape), dtype=first.dtype)
            for place, value in zip(places, values, strict=True):
                arrays[place] = value
            return arrays
    objects = np.full(size, None, dtype=object)
    for place, value in zip(places, values, strict=True):
        objects[place] = value
    return objects
