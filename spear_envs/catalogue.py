"""The available environments, and the extras and official data that they lack."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spear_envs.core.env import SpearEnv
from spear_envs.core.making import find_creator, list_registered
from spear_envs.core.registration import ENVIRONMENTS, PREFIX, EnvEntry
from spear_envs.data.cli import DATASETS, Dataset
from spear_envs.data.listing import Collection
from spear_envs.doctor import find_version, read_requirements

DISTRIBUTION = "spear-envs"


@dataclass(frozen=True)
class ExtraState:
    """An extra that unlocks more of an environment."""

    requirement: str
    """For pip, such as ``"spear-envs[search]"``."""
    unlocks: str
    missing: tuple[str, ...]
    """Its distributions that are not installed."""


@dataclass(frozen=True)
class EnvListing:
    """An environment in a list."""

    id: str
    """For ``gym.make`` in a fresh process, such as ``"spear_envs:spear/WebShop-v0"``."""
    short_id: str
    """As registered, and for commands."""
    summary: str
    splits: tuple[str, ...]
    """Of the tasks that do not need a download."""
    extra: ExtraState | None = None
    dataset: str | None = None
    """Name of its official data in ``spear data``, if it has any."""
    collections: tuple[Collection, ...] = ()
    """Parts of the official data, here or not."""


def list_envs() -> list[EnvListing]:
    """List the environments of this package."""
    requirements = read_requirements()
    return [_list_env(entry, requirements) for entry in ENVIRONMENTS]


def _list_env(entry: EnvEntry, requirements: Mapping[str, Iterable[Any]]) -> EnvListing:
    extra = None
    if entry.extra is not None:
        requirement = f"{DISTRIBUTION}[{entry.extra}]"
        wanted = [one.name for one in requirements.get(requirement, ())]
        missing = tuple(name for name in wanted if find_version(name) is None)
        extra = ExtraState(requirement, entry.unlocks, missing)
    splits = tuple(find_creator(entry.id).splits)  # type: ignore[attr-defined]
    dataset = _find_dataset(entry.id)
    name = None if dataset is None else dataset.name
    collections = tuple(find_collections(entry.id))
    return EnvListing(f"{PREFIX}{entry.id}", entry.id, entry.summary, splits, extra, name, collections)


def find_collections(env_id: str) -> list[Collection]:
    """List the official data of one of our environments; empty for third-party ones."""
    dataset = _find_dataset(env_id)
    return [] if dataset is None else list(dataset.load(dataset.collections)())


def _find_dataset(env_id: str) -> Dataset | None:
    """Find a data set by the name of the environment's folder."""
    folder = next((entry.entry_point.split(".")[1] for entry in ENVIRONMENTS if entry.id == env_id), None)
    return next((dataset for dataset in DATASETS if dataset.name == folder), None)


def list_unreadable(collection: Collection) -> list[str]:
    """List missing modules that reading it needs."""
    return [name for name in collection.packages if importlib.util.find_spec(name) is None]


def list_module_envs(module: str) -> list[EnvListing]:
    """List the SPEAR environments of an imported module and its submodules.

    Raises:
        SpearError: an entry point cannot be imported.
    """
    listings = []
    for short_id in list_registered(module):
        creator = find_creator(short_id)
        if not inspect.isclass(creator) or issubclass(creator, SpearEnv):
            about = (inspect.getdoc(creator) or "No docstring.").splitlines()[0].replace("``", "")
            splits = tuple(getattr(creator, "splits", SpearEnv.splits))
            listings.append(EnvListing(f"{module}:{short_id}", short_id, about, splits))
    return listings
