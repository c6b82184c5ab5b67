"""Presets and models of ``spear train``: what each uses, what it needs, and what of that is here.

Files are read as they stand, without Hydra: a listing is to start at once, and imports neither torch nor verl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from spear_envs.catalogue import find_collections, list_unreadable
from spear_envs.cli import find_requirement
from spear_envs.data.space import format_bytes
from spear_training.choices import list_choices
from spear_training.planning.architecture import find_architecture
from spear_training.presets.loader import list_presets, load_preset

__all__ = ["ModelListing", "Need", "Place", "PresetListing", "find_cache", "survey_models", "survey_presets"]

ROOT = "spear.yaml"
"""The configuration whose defaults hold where a preset chooses nothing."""
BYTES_PER_PARAMETER = 2
"""Published weights are in bfloat16."""


class Place(str, Enum):
    """Where a model comes from."""

    MADE = "made on the spot"
    """By a warm start, before the training."""
    CACHED = "in the cache"
    """All of it lies in the cache of Hugging Face."""
    PARTIAL = "partly in the cache"
    """A download was cut off; the next one goes on."""
    DOWNLOAD = "download"
    """It is fetched when a training starts."""


@dataclass(frozen=True)
class ModelListing:
    """A choice of ``model=``."""

    name: str
    title: str
    place: Place
    hub_id: str | None = None
    """None for one that is made on the spot."""
    parameters: int | None = None
    download_bytes: int | None = None
    """About, of what is not here."""

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "place": self.place.value}


@dataclass(frozen=True)
class Need:
    """Something that a preset does not bring along."""

    kind: str
    """In a word: data, package, model, warm start, server."""
    name: str
    here: bool | None
    """None where only the user knows."""
    mend: str
    """What to do where it is missing."""


@dataclass(frozen=True)
class PresetListing:
    """A choice of ``preset=``."""

    name: str
    title: str
    of_paper: bool
    """Whether it is an experiment of the paper; ours train tiny policies."""
    environment: str
    """A choice of ``environment=``."""
    env_id: str
    model: str | None
    """A choice of ``model=``; None where the user names a folder."""
    algorithm: str
    needs: tuple[Need, ...]

    @property
    def missing(self) -> tuple[Need, ...]:
        """What is not here, or not known to be."""
        return tuple(need for need in self.needs if not need.here)

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class _Chosen:
    """What the file of a preset chooses."""

    environment: str
    model: str | None
    algorithm: str
    env_kwargs: Mapping[str, Any]


def survey_models() -> list[ModelListing]:
    """All models, sorted by name."""
    return [_describe_model(name, title) for name, title in list_choices("model").items()]


def _describe_model(name: str, title: str) -> ModelListing:
    hub_id = _dig(_read_config(f"model/{name}"), "actor_rollout_ref", "model", "path")
    if hub_id is None:
        return ModelListing(name, title, Place.MADE)
    parameters = find_architecture(hub_id).parameters
    place = _look_up(find_cache() / f"models--{hub_id.replace('/', '--')}")
    missing = None if place is Place.CACHED else parameters * BYTES_PER_PARAMETER
    return ModelListing(name, title, place, hub_id, parameters, missing)


def find_cache() -> Path:
    """Where libraries of Hugging Face keep models, by the variables that they read."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def _look_up(folder: Path) -> Place:
    """How much of a model is in its folder of the cache."""
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    if any(_is_whole(snapshot) for snapshot in snapshots):
        return Place.CACHED
    begun = any(folder.glob("blobs/*"))
    return Place.PARTIAL if snapshots or begun else Place.DOWNLOAD


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


def survey_presets() -> list[PresetListing]:
    """All presets, sorted by name: those of the paper, and ours."""
    models = {model.name: model for model in survey_models()}
    listings = []
    of_paper = list_presets()
    for name, title in list_choices("preset").items():
        chosen = _read_paper(name) if name in of_paper else _read_ours(name)
        env_id = _dig(_read_config(f"environment/{chosen.environment}"), "spear", "env", "id")
        needs = (
            *_list_data_needs(env_id, chosen.env_kwargs),
            *_list_model_needs(None if chosen.model is None else models[chosen.model], env_id, name in of_paper),
        )
        listings.append(
            PresetListing(
                name, title, name in of_paper, chosen.environment, env_id, chosen.model, chosen.algorithm, needs
            )
        )
    return listings


def _read_paper(name: str) -> _Chosen:
    preset = load_preset(name)
    return _Chosen(preset["environment"], preset["model"], _read_defaults(ROOT)["algorithm"], preset["env_kwargs"])


def _read_ours(name: str) -> _Chosen:
    chosen = {**_read_defaults(ROOT), **_read_defaults(f"preset/{name}.yaml")}
    kwargs: dict[str, Any] = {}
    for path in (f"fit/{chosen['fit']}" if "fit" in chosen else None, f"preset/{name}"):
        if path is not None:
            kwargs |= _dig(_read_config(path), "spear", "env", "kwargs") or {}
    return _Chosen(chosen["environment"], chosen["model"], chosen["algorithm"], kwargs)


def _read_defaults(path: str) -> dict[str, Any]:
    """The choices of a file's defaults list: ``override /environment: code`` and ``/fit/tiny_code`` alike."""
    chosen: dict[str, Any] = {}
    for entry in _read_config(path.removesuffix(".yaml")).get("defaults", ()):
        if isinstance(entry, Mapping):
            chosen |= {group.rpartition(" ")[2].lstrip("/"): choice for group, choice in entry.items()}
        elif entry.startswith("/"):
            group, _, choice = entry.lstrip("/").rpartition("/")
            chosen[group] = choice
    return {group: choice for group, choice in chosen.items() if "${" not in str(choice)}


@lru_cache(maxsize=64)
def _read_config(path: str) -> dict[str, Any]:
    file = resources.files("spear_training") / "config" / f"{path}.yaml"
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def _dig(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _list_data_needs(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[Need]:
    """Official data by the names among the environment's keywords, and services by their addresses."""
    collections = {collection.name: collection for collection in find_collections(env_id)}
    for key, value in kwargs.items():
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            mend = f"spear {key} serve, or spear.env.kwargs.{key}=URL"
            yield Need("server", value, None, mend)
        elif isinstance(value, str) and value in collections:
            found = collections[value]
            yield Need("data", f"{env_id} {value}", found.here, found.command)
            for package in found.packages:
                mend = f"pip install '{find_requirement(package)}'"
                yield Need("package", package, package not in list_unreadable(found), mend)


def _list_model_needs(model: ModelListing | None, env_id: str, of_paper: bool) -> Iterator[Need]:
    """The policy of a preset: its model, else any one for the paper's, and a warm start for ours."""
    if model is None and of_paper:
        yield Need("model", "any", None, "model=NAME, or actor_rollout_ref.model.path=DIR")
    elif model is None:
        mend = f"spear warmstart {env_id} --out DIR, then actor_rollout_ref.model.path=DIR"
        yield Need("warm start", env_id, None, mend)
    elif model.place is not Place.MADE:
        here = model.place is Place.CACHED
        size = "" if model.download_bytes is None else f" (about {format_bytes(model.download_bytes)})"
        yield Need("model", model.hub_id or model.name, here, f"downloaded when the training starts{size}")
