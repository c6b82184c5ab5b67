"""The environments that can be made here, and which extra or official data each of them lacks."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium as gym

from spear_envs.core.env import SpearEnv
from spear_envs.core.making import find_creator
from spear_envs.core.registration import ENVIRONMENTS, PREFIX, EnvEntry
from spear_envs.data.cli import DATASETS, Dataset
from spear_envs.data.listing import Collection
from spear_envs.doctor.packages import find_version, read_requirements

DISTRIBUTION = "spear-envs"


@dataclass(frozen=True)
class ExtraState:
    """An extra that unlocks more of an environment."""

    requirement: str
    """For pip, such as ``"spear-envs[search]"``."""
    unlocks: str
    missing: tuple[str, ...]
    """Distributions of it that are not installed."""


@dataclass(frozen=True)
class EnvListing:
    """An environment, with all that a list says of it."""

    id: str
    """As ``gym.make`` takes it in a fresh process, such as ``"spear_envs:spear/WebShop-v0"``."""
    short_id: str
    """As it is registered, and as commands take it."""
    summary: str
    splits: tuple[str, ...]
    """Of the tasks that are there without a download."""
    extra: ExtraState | None = None
    dataset: str | None = None
    """What ``spear data`` calls its official data; None if there is none."""
    collections: tuple[Collection, ...] = ()
    """Parts of the official data, here or not."""

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def list_envs() -> list[EnvListing]:
    """The environments of this package."""
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
    """The official data that one of our environments can play on; none for third-party ones."""
    dataset = _find_dataset(env_id)
    return [] if dataset is None else list(dataset.load(dataset.collections)())


def _find_dataset(env_id: str) -> Dataset | None:
    """A data set has the name of its environment's folder."""
    folder = next((entry.entry_point.split(".")[1] for entry in ENVIRONMENTS if entry.id == env_id), None)
    return next((dataset for dataset in DATASETS if dataset.name == folder), None)


def list_unreadable(collection: Collection) -> list[str]:
    """Modules that reading it takes and that are not installed."""
    return [name for name in collection.packages if importlib.util.find_spec(name) is None]


def list_module_envs(module: str) -> list[EnvListing]:
    """The SPEAR environments of a module that has been imported, and of those below it.

    Raises:
        SpearError: the entry point of one of them leads nowhere.
    """
    listings = []
    for short_id, spec in sorted(gym.registry.items()):
        point = spec.entry_point
        home = point.partition(":")[0] if isinstance(point, str) else getattr(point, "__module__", "")
        if home != module and not home.startswith(f"{module}."):
            continue
        creator = find_creator(short_id)
        if not inspect.isclass(creator) or issubclass(creator, SpearEnv):
            about = (inspect.getdoc(creator) or "No docstring.").splitlines()[0].replace("``", "")
            splits = tuple(getattr(creator, "splits", SpearEnv.splits))
            listings.append(EnvListing(f"{module}:{short_id}", short_id, about, splits))
    return listings
