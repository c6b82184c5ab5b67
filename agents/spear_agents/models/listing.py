"""What ``spear models list`` tells: models by name, their sizes, and whether they are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from spear_agents.models.catalogue import KNOWN, find_snapshot, is_begun, models_folder

MODEL_GROUP = "spear.models"
"""Listings of other distributions: functions of a folder of the user's own choices (or None) that give listings."""
BYTES_PER_PARAMETER = 2
"""Published weights are in bfloat16."""


class Place(str, Enum):
    """Where a model comes from."""

    MADE = "made on the spot"
    """By a warm start, before the training."""
    CACHED = "in the cache"
    """All of it is here."""
    PARTIAL = "partly in the cache"
    """A download was cut off; the next one resumes."""
    DOWNLOAD = "download"
    """It is fetched when it is first used."""


@dataclass(frozen=True)
class ModelListing:
    """A model by one of its names."""

    name: str
    title: str
    place: Place
    hub_id: str | None = None
    """None for one that is not of the hub."""
    parameters: int | None = None
    download_bytes: int | None = None
    """Approximate for a model that is not here."""

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "place": self.place.value}


def describe_known(known: str, name: str) -> ModelListing:
    """A model of the catalogue, under the name that it has where it is listed."""
    model = KNOWN[known]
    here = (models_folder() / known / "config.json").is_file()
    place, missing = (Place.CACHED, None) if here else (Place.DOWNLOAD, model.wheel.size)
    return ModelListing(name, model.title, place, None, model.parameters, missing)


def describe_hub(hub_id: str, name: str, title: str, parameters: int | None) -> ModelListing:
    """A model of the hub."""
    if find_snapshot(hub_id) is not None:
        return ModelListing(name, title, Place.CACHED, hub_id, parameters)
    place = Place.PARTIAL if is_begun(hub_id) else Place.DOWNLOAD
    missing = None if parameters is None else parameters * BYTES_PER_PARAMETER
    return ModelListing(name, title, place, hub_id, parameters, missing)


def list_models(config_dir: Path | None = None) -> list[ModelListing]:
    """Models of the catalogue, and what other distributions list."""
    found = [describe_known(name, name) for name in KNOWN]
    for point in sorted(entry_points(group=MODEL_GROUP)):
        survey: Callable[[Path | None], list[ModelListing]] = point.load()
        found += [model for model in survey(config_dir) if model.name not in KNOWN]
    return sorted(found, key=lambda model: model.name)
