"""Checkpoints of a run, and checks before one is resumed.

verl writes weights, optimiser, random states and the position in the data. We add our own state (JSON, and safetensors
for arrays) and a manifest, written last: a folder without it is unfinished. verl's files are pickles, which could run
code when loaded, so their opcodes are scanned first and only the names that verl's own files use are allowed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import reprlib
import shutil
import threading
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import (
    MANIFEST,
    check_manifest,
    draft_file,
    explain_unwritable,
    put_folder,
    read_manifest,
    write_json,
    write_manifest,
    write_text,
)

if TYPE_CHECKING:  # importing torch takes over a second, and wrong settings are answered before
    import torch

FORMAT = 6
STATE, TENSORS = "spear.json", "spear.safetensors"
BEST = "best"
BEST_LOCK = threading.Lock()
"""Held while the best checkpoint is replaced or uploaded, which different threads of a training do."""
TRACKER = "latest_checkpointed_iteration.txt"
HASHED_BYTES = 2**26
"""Files up to this size are compared by content at each resume, larger ones (weights) by size only."""
ROOMS = ("spear_agents", "spear_envs", "spear_sandbox", "spear_training")
OVERRIDE = "checkpoint.resume=changed"

# Exact names: a prefix would allow everything else that a module has imported.
_PLACEMENTS = tuple(f"torch.distributed.tensor.placement_types.{name}" for name in ("Shard", "Replicate", "Partial"))
_KNOWN_NAMES = {
    *_PLACEMENTS,
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct",
    "_codecs.encode",
}


# ---- our own state ---------------------------------------------------------------------------------------------------
def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write nested plain data with tensors and arrays in it, as JSON and safetensors.

    An earlier file stays unchanged if this raises SpearError, as for a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    plain = _take_tensors(state, tensors)
    with draft_file(folder / TENSORS) as draft:
        write_tensors(draft, tensors)
    write_text(folder / STATE, json.dumps(plain))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in safetensors. Raises SpearError if they cannot be written, as for a full disk."""
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:  # also for those of the operating system
        raise SpearError(f"{path.parent} cannot be written ({first_line(error)}): free the disk") from error


def read_state(folder: Path) -> dict[str, Any]:
    """Read :func:`write_state`. Raises SpearError if a file is missing, torn or of another format."""
    from safetensors.torch import load_file

    if not (folder / STATE).is_file():
        raise SpearError(f"{folder} lacks {STATE}: it is not a checkpoint of this trainer; name another run folder")
    try:
        plain = json.loads((folder / STATE).read_text("utf-8"))
        found = plain["format"] if isinstance(plain, dict) else None
        if found != FORMAT:
            raise SpearError(f"{folder / STATE} has format {reprlib.repr(found)}, this code reads {FORMAT}: {_ADVICE}")
        return _put_tensors(plain, load_file(folder / TENSORS))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, SafetensorError) as error:
        raise SpearError(f"the state in {folder} cannot be read ({type(error).__name__}): {_ADVICE}") from error


_REFERENCE = "$tensor"


def _take_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Replace tensors and arrays in ``value`` by references, and put them into ``tensors``."""
    import torch

    if isinstance(value, (torch.Tensor, np.ndarray)):
        name = f"{len(tensors):06d}"
        # A copy: safetensors does not accept two names for the same memory.
        copied = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach().cpu().clone()
        tensors[name] = copied.contiguous()
        return {_REFERENCE: name, "numpy": isinstance(value, np.ndarray)}
    if isinstance(value, Mapping):
        return {str(key): _take_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take_tensors(item, tensors) for item in value]
    return value


def _put_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if _REFERENCE in value:
            tensor = tensors[value[_REFERENCE]]
            return tensor.numpy() if value["numpy"] else tensor
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    return [_put_tensors(item, tensors) for item in value] if isinstance(value, list) else value


# ---- origin ----------------------------------------------------------------------------------------------------------
@lru_cache
def describe_code() -> dict[str, str]:
    """Return the version of this distribution and a digest of all four distributions' sources, to detect a changed
    checkout.
    """
    digest = hashlib.sha256()
    for room in ROOMS:
        spec = find_spec(room)
        assert spec is not None and spec.origin is not None, f"{room} is a package that this one needs"
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(root).as_posix()}".encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        version = metadata.version("spear-training")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {"version": version, "source": digest.hexdigest()[:16]}


def compare_configs(
    run: Path | str, before: Mapping[str, Any], after: Mapping[str, Any], *, changeable: Collection[str], advice: str
) -> None:
    """Raise SpearError with the first difference, by flat key, between the settings of a run and those to go on with.

    Keys and nodes in ``changeable`` may differ. The message begins with ``run`` and ends with ``advice``.
    """
    # A node of free keywords that is empty on one side only: the other side's keys name the difference.
    filled = {
        key
        for one, other in ((before, after), (after, before))
        for key, value in one.items()
        if value == {} and any(name.startswith(f"{key}.") for name in other)
    }
    changed = [
        key
        for key in sorted((before.keys() | after.keys()) - filled)
        if before.get(key) != after.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in changeable)
    ]
    if changed:
        first = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise SpearError(
            f"{run} is a run of another configuration: "
            f"{first} was {before.get(first)!r}, is now {after.get(first)!r}{more}. {advice}"
        )


def check_origin(folder: Path, config: Mapping[str, Any], *, exact: bool, changeable: Collection[str]) -> None:
    """Raise SpearError if the checkpoint cannot be read, or is of other settings or code and ``exact`` forbids that.

    ``config`` has the settings of the resuming run by flat key; keys and nodes in ``changeable`` may always differ.
    """
    state = read_state(folder)
    if not exact:
        return
    old, new = state.get("code"), describe_code()
    if not isinstance(state.get("config"), dict) or not isinstance(old, dict):
        raise SpearError(f"{folder / STATE} does not record its origin: {_ADVICE}")
    after = json.loads(json.dumps(dict(config)))
    advice = f"Name another --out, give the old settings to resume, or add {OVERRIDE} to continue with the new ones"
    compare_configs(folder.parent.parent, state["config"], after, changeable=changeable, advice=advice)
    if old != new:
        version, source = (reprlib.repr(old.get(key)).strip("'") for key in ("version", "source"))
        raise SpearError(
            f"{folder} was written by other code (version {version}, sources {source}) than this "
            f"(version {new['version']}, sources {new['source']}), so the run would not continue exactly. Resume with "
            f"that code, or add {OVERRIDE} to continue with this"
        )


# ---- files -----------------------------------------------------------------------------------------------------------
def finish_checkpoint(folder: Path) -> None:
    """Write the sizes of a checkpoint's files and, except for large ones, their SHA-256, which makes it complete."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    names = [path.relative_to(folder).as_posix() for path in paths]
    write_manifest(folder, {"format": FORMAT}, names, HASHED_BYTES)


def clear_unfinished(folder: Path) -> None:
    """Remove what a killed save left of a checkpoint: shards of other ranks would belong to the next one."""
    if not is_finished(folder):
        shutil.rmtree(folder, ignore_errors=True)


def is_finished(folder: Path) -> bool:
    """Return whether the checkpoint is complete."""
    return (folder / MANIFEST).is_file()


def is_step(text: str) -> bool:
    """Return whether a text is a number as our folders have it; ``007`` or a user's copy ``7_old`` is another name."""
    return text.isdecimal() and text == str(int(text))


def list_steps(checkpoints: Path) -> list[int]:
    """Return steps that have a folder, whole or not, in ascending order."""
    names = (folder.name.removeprefix("global_step_") for folder in checkpoints.glob("global_step_*"))
    return sorted(int(name) for name in names if is_step(name))


def list_whole(checkpoints: Path) -> list[int]:
    """Return steps that a run can be resumed from, in ascending order."""
    folders = {step: checkpoints / f"global_step_{step}" for step in list_steps(checkpoints)}
    # verl removes the weights of old checkpoints and leaves the rest.
    return [step for step, folder in folders.items() if is_finished(folder) and any(folder.glob("**/model*"))]


def remove_old(checkpoints: Path, keep: int | None) -> None:
    """Remove all but the last ``keep`` whole checkpoints: verl knows only those of its own launch."""
    for step in list_whole(checkpoints)[:-keep] if keep else ():
        shutil.rmtree(checkpoints / f"global_step_{step}", ignore_errors=True)


def write_tracker(checkpoints: Path, step: int) -> None:
    """Make verl resume after ``step``."""
    write_text(checkpoints / TRACKER, str(step))


def repair_tracker(checkpoints: Path) -> int | None:
    """Return the step of the newest complete checkpoint, or None. Repairs the tracker file if a kill or a full disk
    tore it.

    verl writes the tracker before the manifest, which is the last file of a complete checkpoint.
    """
    tracker, whole = checkpoints / TRACKER, list_whole(checkpoints)
    try:
        tracked = int(tracker.read_text().strip())
    except (OSError, ValueError):
        tracked = -1
    if tracked in whole:
        return tracked
    if not whole:
        tracker.unlink(missing_ok=True)
        return None
    write_tracker(checkpoints, whole[-1])
    return whole[-1]


def check_files(folder: Path) -> None:
    """Check a finished checkpoint against its manifest, and its pickles for unexpected names, without loading them.

    Raises SpearError if a file is missing, torn, changed, or would run other code.
    """
    try:
        manifest = read_manifest(folder, "a checkpoint", _ADVICE, format=FORMAT)
    except FileNotFoundError as error:
        raise SpearError(f"{error} is missing: {_ADVICE}") from None
    check_manifest(folder, manifest["files"], _ADVICE)
    if link := next((path for path in folder.rglob("*") if path.is_symlink() and path.is_dir()), None):
        raise SpearError(f"{link} is a link to a folder, whose files cannot be checked: {_ADVICE}")
    import torch.distributed.tensor

    for path in sorted(folder.rglob("*.pt")):
        try:
            names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - _KNOWN_NAMES
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise SpearError(f"{path} cannot be read: {_ADVICE}") from error
        if names:
            raise SpearError(f"{path} would run {', '.join(sorted(names)[:3])} when loaded: it is not ours")


_ADVICE = "remove this checkpoint to resume from the previous one, or name another --out"


def keep_best(folder: Path, metric: str, value: float) -> bool:
    """Keep the checkpoint ``folder`` as the best one if its ``value`` is above the present best's.

    Files are linked, not copied, if the file system supports it. Raises SpearError if they cannot be.
    """
    best, aside, draft = (folder.parent / name for name in (BEST, f".{BEST}.old", f".{BEST}.tmp"))
    try:
        if aside.exists() and not best.exists():  # killed before the new one had its name
            put_folder(aside, best)
        if not is_better(folder.parent, metric, value):
            return False
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(folder, draft, copy_function=link_file)
        write_json(draft / "best.json", {"step": int(folder.name.rpartition("_")[2]), "metric": metric, "value": value})
        shutil.rmtree(aside, ignore_errors=True)
        with BEST_LOCK:
            if best.is_dir():
                put_folder(best, aside)
            put_folder(draft, best)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise explain_unwritable(best, error) from error
    shutil.rmtree(aside, ignore_errors=True)
    return True


def is_better(checkpoints: Path, metric: str, value: float) -> bool:
    """Return whether ``value`` is above the present best's, or there is none of this ``metric``."""
    known = read_best(checkpoints)
    return known is None or known["metric"] != metric or value > known["value"]


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """Return the step, metric and value of the best checkpoint; None without one."""
    try:
        return parse_best((checkpoints / BEST / "best.json").read_bytes())
    except OSError:
        return None


def parse_best(content: bytes) -> dict[str, Any] | None:
    """Return the step, metric and value in a file; None if it is damaged."""
    with suppress(ValueError, RecursionError, KeyError, TypeError, OverflowError):
        found = json.loads(content)
        best: dict[str, Any] = {
            "step": int(found["step"]),
            "metric": str(found["metric"]),
            "value": float(found["value"]),
        }
        return best if math.isfinite(best["value"]) else None  # nothing is above NaN
    return None


def link_file(source: str, target: str) -> None:
    """Link a file, or copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
