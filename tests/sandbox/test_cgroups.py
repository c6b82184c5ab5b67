"""Control groups: what a container may hold, whom the kernel killed for memory, and groups of runs."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.pool.cgroups import (
    Groups,
    _find_place,
    choose_places,
    find_memory_limit,
    lacks_memory,
    most_of_a_run,
)
from spear_sandbox.protocol import KillReason, Limits

MIB = 1 << 20
HOLD = "held = bytearray(int(__import__('sys').argv[1]) << 20); held[::4096] = b'x' * (len(held) // 4096); input()"
NEIGHBOURS = """
import asyncio, json, sys
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.protocol import Limits, SandboxFault

HOG = '''
import os, time
for _ in range(20):
    if os.fork() == 0:
        held = bytearray(32 << 20)
        held[::4096] = b"x" * (32 << 8)
        time.sleep(2.5)
        os._exit(0)
time.sleep(2.5)
'''
SPIN = "import time\\nend = time.monotonic() + 0.3\\nwhile time.monotonic() < end: pass\\nprint('right')"

async def main():
    executor = LocalExecutor("namespaces", zygotes=1, max_running=4, limits=Limits(wall_s=20.0))
    await executor.start()
    if sys.argv[1] == "watchdog":
        executor._backend.groups = None

    async def run(code):
        try:
            outcome = await executor.run(code)
        except SandboxFault as fault:
            return fault.kind.value
        return outcome.stdout.strip() or f"{outcome.return_code} {outcome.reason.value}"

    hogs = [asyncio.ensure_future(run(HOG)) for _ in range(3)]
    innocent = [await run(SPIN) for _ in range(5)]
    print(json.dumps([innocent, [await hog for hog in hogs], await run("print('after')")]))
    await executor.close()

asyncio.run(main())
"""
HOARDERS = """
import asyncio, json
from spear_sandbox.service.cells import SessionTable
from spear_sandbox.pool.cgroups import most_of_a_run
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.protocol import Limits

async def main():
    executor = LocalExecutor("namespaces", zygotes=1, max_running=1, limits=Limits(wall_s=20.0, memory_mb=128))
    await executor.start()
    table = SessionTable(executor, most=50, idle_s=600.0, spare=most_of_a_run(executor.limits) << 20)
    sessions = []
    for number in range(12):
        session, _ = await table.open({}, executor.limits)
        outcome = await session.run("held = b'x' * (100 << 20); 7 * 6")
        assert "42" in str(outcome), outcome
        sessions.append(session)
        await asyncio.sleep(1.5)
    print(json.dumps([session.alive for session in sessions]))
    await executor.close()

asyncio.run(main())
"""


@pytest.fixture
def container() -> Iterator[Path]:
    """A group with 400 MiB of memory below our own, as a container has."""
    place = _find_place("memory")
    if place is None:
        pytest.skip("no control group for memory here")
    folder = place.folder / f"test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if place.unified else "memory.limit_in_bytes")).write_text(str(400 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no group can be made here: {error}")
    yield folder
    for left in folder.iterdir():
        if left.is_dir():
            left.rmdir()
    folder.rmdir()


def read_kills(folder: Path) -> int:
    """Processes that the kernel killed for the memory of this group."""
    text = next(
        path for name in ("memory.events", "memory.oom_control") if (path := folder / name).exists()
    ).read_text()
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def start_inside(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    enter = f'echo 0 > {folder}/cgroup.procs && exec "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", enter, "sh", sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def hold_in_group(entrances: tuple[int, ...], mib: int) -> subprocess.Popen[bytes]:
    """A process that enters and then holds so much until it is told to end."""
    enter = "import os, sys\nfor fd in map(int, sys.argv[2:]): os.write(fd, b'0')\n"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", enter + HOLD, str(mib), *map(str, entrances)],
        pass_fds=entrances,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_a_limit_of_the_container_is_found(container: Path) -> None:
    ask = "from spear_sandbox.pool.cgroups import find_memory_limit; print(find_memory_limit())"
    assert start_inside(container, "-c", ask).communicate()[0] == f"{400 * MIB}\n"


@pytest.mark.slow
def test_idle_sessions_end_before_the_container_is_full(container: Path) -> None:
    """Twelve sessions want 1,200 of 1,024 MiB: the oldest end, and nobody is killed for memory."""
    limit = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := container / name).exists())
    limit.write_text(str(1 << 30))
    lines = start_inside(container, "-c", HOARDERS).communicate()[0].splitlines()
    alive = json.loads(lines[-1])
    assert not all(alive) and alive[-1]
    assert alive == sorted(alive), "those that have been idle longest end first"
    assert read_kills(container) == 0


def test_the_least_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    top = tmp_path / "fs"
    leaf = top / "pod" / "box"
    leaf.mkdir(parents=True)
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/kube/pod/box\n")
    (proc / "mountinfo").write_text(f"29 23 0:26 /kube {top} rw - cgroup2 cgroup2 rw\n")
    for folder, bound in ((top, None), (top / "pod", str(3 << 30)), (leaf, "max")):
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
        if bound:
            (folder / "memory.max").write_text(f"{bound}\n")
    assert find_memory_limit(tmp_path / "proc") == 3 << 30
    stat = top / "pod" / "memory.stat"
    stat.write_text(f"anon {2 << 30}\nfile {3 << 30}\nshmem {1 << 29}\n")
    assert lacks_memory((1 << 29) + 1, tmp_path / "proc") and not lacks_memory(1 << 29, tmp_path / "proc")
    stat.write_text(f"anon {1 << 30}\nfile {3 << 30}\nshmem 0\n")
    assert not lacks_memory(1 << 40, tmp_path / "proc"), "half is enough for any"
    (top / "pod" / "memory.max").write_text("max\n")
    assert find_memory_limit(tmp_path / "proc") is None
    assert not lacks_memory(1 << 60, tmp_path / "proc")


def test_places_fit_into_the_memory() -> None:
    limits = Limits()
    assert choose_places(8, limits, None) == 16
    assert choose_places(2, limits, 4 << 30) == 2, "as many as cannot exceed 4 GiB, whatever they do"
    assert choose_places(2, limits, 64 << 30) == 4
    assert choose_places(2, limits, (2 * most_of_a_run(limits) + 511) << 20) == 1, "the service needs some itself"
    assert choose_places(64, limits, 512 * MIB) == 1
    assert choose_places(64, Limits(memory_mb=256), 8 << 30) * most_of_a_run(Limits(memory_mb=256)) < 8 << 10


def test_the_kernel_tells_whose_memory_a_process_was_killed_for(container: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.sandbox.test_cgroups import play_in_groups
play_in_groups()
"""
    process = start_inside(container, "-c", script)
    assert json.loads(process.communicate()[0]) == [["none", 0], ["own", -9], ["others", -9]]


def play_in_groups() -> None:
    """Three processes in a run's group: one within its limit, one beyond, and one beyond the container's."""
    groups = Groups.find()
    assert groups is not None
    found = []
    limits = Limits(memory_mb=32, disk_mb=1)
    for mib, bounds in ((16, limits), (128, limits), (600, Limits(memory_mb=4096))):
        with groups.acquire(bounds) as group:
            process = hold_in_group(group.entrances, mib)
            process.communicate(b"\n")
            found.append([group.judge().value, process.returncode])
    groups.close()
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["kernel", "watchdog"])
def test_runs_that_take_all_memory_end_neither_the_pool_nor_others(container: Path, counts: str) -> None:
    """The programs are killed before the pool's process, and it says that it was not their own fault."""
    process = start_inside(container, "-c", NEIGHBOURS, counts)
    innocent, hogs, after = json.loads(process.communicate(timeout=100)[0])
    assert process.returncode == 0
    assert set(innocent) <= {"right", "sandbox_memory"} and innocent.count("right") >= 3, innocent
    assert set(hogs) <= {"sandbox_memory", "0 "}, "never a failure of the program"
    assert after == "after"


def test_runs_are_the_first_to_be_killed(pool: BlockingExecutor) -> None:
    code = "print(open('/proc/self/oom_score_adj').read(), open('/proc/1/oom_score_adj').read())"
    assert pool.run(code).stdout.split() == ["1000", "1000"]
    code = "open('/proc/self/oom_score_adj', 'w').write('0')"
    assert "Read-only file system" in pool.run(code).stderr


def test_a_program_that_kills_itself_has_failed(pool: BlockingExecutor) -> None:
    outcome = pool.run(f"import os; os.kill(os.getpid(), {signal.SIGKILL.value})")
    assert (outcome.return_code, outcome.reason) == (-9, KillReason.SIGKILL)


def test_a_group_is_not_used_while_an_abandoned_run_dies() -> None:
    groups = Groups.find()
    if groups is None:
        pytest.skip("no control groups can be made here")
    with pytest.raises(KeyboardInterrupt), groups.acquire(Limits()) as group:
        entrances = group.entrances

        def enter() -> None:
            for fd in entrances:
                os.write(fd, b"0")

        dying = subprocess.Popen(["sleep", "30"], pass_fds=entrances, preexec_fn=enter)
        raise KeyboardInterrupt
    with groups.acquire(Limits()) as other:
        assert other is not group
    dying.kill()
    dying.wait()
    with groups.acquire(Limits()) as again:
        assert again is group
    groups.close()


def test_groups_that_a_dead_pool_left_are_removed() -> None:
    groups = Groups.find()
    if groups is None:
        pytest.skip("no control groups can be made here")
    (folder, *_) = groups._free[0].folders
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    left = folder.parent / f"spear-{done.pid}-1-abc"
    left.mkdir()
    groups.close()
    assert left.exists() and not folder.exists()
    again = Groups.find()
    assert again is not None
    again.close()
    assert not left.exists()
