"""The machine: room on disks, shared memory, graphics cards, and whether code can be isolated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from spear_envs.core.modules import make_command
from spear_envs.data.files import data_folder, is_offline
from spear_envs.data.space import format_bytes
from spear_envs.doctor.findings import Finding, Verdict

DISK_BYTES = 10 * 10**9
LEAST_DISK_BYTES = 200 * 10**6
"""Too little even for an embedded set."""
SHARED_BYTES = 2 * 10**9
"""For Ray's objects, by default 30 % of the memory; with less it uses the slow disk."""
MEMORY_BYTES = 6 * 10**9
"""For a training with Ray on one machine."""
PATIENCE_S = 120
CARDS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def check_disk(folder: Path | None = None, needed: int = DISK_BYTES) -> Iterator[Finding]:
    """Room for data, checkpoints and runs."""
    folder = data_folder() if folder is None else folder
    here = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(here).free
    found = f"{format_bytes(free)} left for {folder}"
    if not os.access(here, os.W_OK):
        yield Finding("disk", Verdict.PROBLEM, f"{here} cannot be written", "Name another folder with SPEAR_DATA.")
    elif free < needed:
        mend = f"Free the disk, or name a folder on another one with SPEAR_DATA: {format_bytes(needed)} are advised."
        yield Finding("disk", Verdict.PROBLEM if free < LEAST_DISK_BYTES else Verdict.NOTE, found, mend)
    else:
        yield Finding("disk", Verdict.OK, found)


def check_memory(shared: Path = Path("/dev/shm"), meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """Memory, and the part of it that Ray's processes share."""
    if not shared.is_dir():
        mend = "Ray keeps its objects there: mount it, in a container with --shm-size 2g."
        yield Finding("shared memory", Verdict.PROBLEM, f"{shared} does not exist", mend)
    else:
        total = shutil.disk_usage(shared).total
        found = f"{format_bytes(total)} in {shared}"
        mend = "Ray needs 2 GB or more: in a container, start it with --shm-size 2g."
        little = total < SHARED_BYTES
        yield Finding("shared memory", Verdict.NOTE if little else Verdict.OK, found, mend if little else "")
    lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    little = free < MEMORY_BYTES
    mend = f"A training with Ray takes about {format_bytes(MEMORY_BYTES)}: end other programs." if little else ""
    yield Finding("memory", Verdict.NOTE if little else Verdict.OK, f"{format_bytes(free)} available", mend)


def check_graphics(command: tuple[str, ...] = CARDS) -> Iterator[Finding]:
    """NVIDIA's graphics cards, as listed by their driver."""
    if shutil.which(command[0]) is None:
        yield Finding("GPUs", Verdict.OK, "none (no NVIDIA driver): training runs on the CPU")
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    cards = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not cards:
        said = (done.stderr or done.stdout).strip().splitlines()
        mend = "Fix the driver, or pass the cards into the container; until then training runs on the CPU."
        yield Finding("GPUs", Verdict.PROBLEM, said[0] if said else f"{command[0]} lists none", mend)
    else:
        yield Finding("GPUs", Verdict.OK, "; ".join(cards))


def check_isolation(command: Sequence[str] = ()) -> Iterator[Finding]:
    """Whether model-written code can be isolated, according to ``spear sandbox doctor``."""
    asked = [*(command or make_command("spear_envs.cli")), "sandbox", "doctor", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    try:
        levels = json.loads(done.stdout)["levels"]
    except (ValueError, RecursionError, KeyError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield Finding("isolation", Verdict.PROBLEM, said, "Run 'spear sandbox doctor' and do what it says.")
        return
    holding = [name for name, probes in levels.items() if all(probe["ok"] for probe in probes)]
    if done.returncode == 0:
        yield Finding("isolation", Verdict.OK, f"these levels hold: {', '.join(holding)}")
    else:
        mend = "'spear sandbox doctor' says what each level lacks, docs/sandbox.md how a container must be started."
        yield Finding("isolation", Verdict.PROBLEM, "no strong level of the sandbox holds", mend)


def check_data() -> Iterator[Finding]:
    """Downloaded data, which is optional: every environment has embedded tasks."""
    folder = data_folder()
    offline = ", downloads are forbidden (SPEAR_OFFLINE)" if is_offline() else ""
    # An interrupted download may have left empty folders.
    items = folder.iterdir() if folder.is_dir() else ()
    names = sorted(item.name for item in items if any(path.is_file() for path in item.glob("**/*")))
    if names:
        yield Finding("data", Verdict.OK, f"{', '.join(names)} in {folder}{offline}")
    else:
        mend = "Embedded tasks do not need any; 'spear data list' lists what can be fetched."
        yield Finding("data", Verdict.NOTE, f"nothing in {folder}{offline}", mend)
