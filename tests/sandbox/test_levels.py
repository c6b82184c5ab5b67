"""Which isolation is taken, what its self-test asks, and that nothing weaker is taken in silence."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.installation import Installation, find_installation
from spear_sandbox.local import IsolationRefusedError, LocalExecutor, choose_backend, examine
from spear_sandbox.protocol import Isolation, KillReason, Limits, RunStatus
from tests.commands import wait_until

ROOT = Path(__file__).resolve().parents[2]
_NAMES = (
    "start arithmetic canary_file loopback abstract_socket other_process user capabilities no_new_privileges seccomp "
    "system_calls descriptors environment process_limit memory_limit memory_of_all file_limit time_limit output_limit "
    "orphan state"
)
STRONG_PROBES = _NAMES.split()

# Denies user namespaces, as a container's default profile does, without touching the machine's settings.
REFUSING_NAMESPACES = """
import ctypes, os
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(0x10000000 | 0x00020000) == 0:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
"""
TRYING = """
import asyncio, sys
from spear_sandbox.local import IsolationRefusedError
from spear_sandbox.local import LocalExecutor
async def main():
    executor = LocalExecutor(sys.argv[1])
    try:
        print("TOOK", await executor.start())
    except IsolationRefusedError as error:
        print("REFUSED", error)
    finally:
        await executor.close()
asyncio.run(main())
"""


# Answers EACCES to mount, as Docker's and containerd's profiles of AppArmor do.
APPARMOR = """
import ctypes, os, struct
call = {"x86_64": 165, "aarch64": 40}[os.uname().machine]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (6, 0, 0, 0x5000D), (6, 0, 0, 0x7FFF0000)]
held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
given = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(held))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, given, 0, 0) == 0
"""


def refuse(isolation: str, before: str = REFUSING_NAMESPACES) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + TRYING, isolation],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("isolation", ["auto", "namespaces"])
def test_refused_where_the_kernel_refuses(isolation: str) -> None:
    said = refuse(isolation)
    assert said.startswith("REFUSED"), said
    for part in ("namespaces: probe 'start' failed", "seccomp.json", "sysctl", "--allow-weak-isolation landlock"):
        assert part in said
    assert ("bwrap: " in said) is (isolation == "auto")


def test_a_mount_that_apparmor_denies_is_refused_with_its_mend() -> None:
    said = refuse("auto", APPARMOR)
    assert said.startswith("REFUSED") and "Permission denied" in said, said
    assert "apparmor=unconfined" in said and "apparmor.profile" in said and "AppArmor's profile" in said
    assert "AppArmor's profile" not in refuse("namespaces"), "another reason has another mend"


def test_nothing_lowers_the_level_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SANDBOX_ISOLATION", "ISOLATION", "ALLOW_WEAK_ISOLATION", "SANDBOX_ALLOW_WEAK_ISOLATION"):
        monkeypatch.setenv(name, "none")
    assert refuse("auto").startswith("REFUSED")


def reach(found: Installation) -> Installation:
    """An interpreter that the user of the programs can start; root's own may lie in a folder of root's."""
    if os.getuid() != 0 or all(os.stat(parent).st_mode & 0o001 for parent in Path(found.interpreter).parents):
        return found
    system = Path("/usr/bin/python3")
    if not system.exists():
        pytest.skip("the interpreter lies in a folder that only root can enter, and the system has no other")
    return replace(found, interpreter=os.path.realpath(system), prefix="/usr", packages={})


def test_self_test_of_namespaces(pool: BlockingExecutor) -> None:
    probes = asyncio.run(examine(Isolation.NAMESPACES))
    assert [probe.name for probe in probes] == STRONG_PROBES
    assert all(probe.ok for probe in probes), probes


def test_self_test_of_bwrap(pool: BlockingExecutor) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    probes = asyncio.run(examine(Isolation.BWRAP, installation=reach(find_installation())))
    assert [probe.name for probe in probes] == STRONG_PROBES
    assert all(probe.ok for probe in probes), probes


@pytest.mark.parametrize("level", [Isolation.LANDLOCK, Isolation.NONE])
def test_self_test_of_weak_levels(level: Isolation) -> None:
    probes = asyncio.run(examine(level, installation=reach(find_installation())))
    if not probes[0].ok:
        pytest.skip(f"{level.value}: {probes[0].detail}")
    failed = [probe for probe in probes if not probe.ok]
    if level is Isolation.LANDLOCK and failed and "landlock" in failed[0].detail:
        pytest.skip("this kernel has no Landlock")
    assert not failed
    assert {"capabilities", "loopback"} - {probe.name for probe in probes}, "it does not claim what it does not do"


async def play(executor: LocalExecutor) -> None:
    await executor.start()
    try:
        assert (await executor.run("print(input())", stdin="in")).stdout == "in\n"
        outcome = await executor.run(
            "open('out', 'w').write(open('in').read())", files={"in": b"x"}, fetch_files=["out"]
        )
        assert outcome.files == {"out": b"x"}, outcome
        late = await executor.run("while True: pass", limits=Limits(wall_s=0.5))
        assert late.status is RunStatus.TIME_LIMIT
        flood = await executor.run("while True: print('x' * 9999)", limits=Limits(max_output=1 << 20))
        assert flood.reason is KillReason.OUTPUT
        assert "ZeroDivisionError" in (await executor.run("1 / 0")).stderr
        runs = [asyncio.ensure_future(executor.run("import os; os.fork()\nwhile True: pass")) for _ in range(2)]
        await asyncio.sleep(1)
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)
        assert executor.health().ok
    finally:
        await executor.close()


def find_cold_starts() -> set[str]:
    found = subprocess.run(["pgrep", "-f", "start_cold"], capture_output=True, text=True, check=False)
    return set(found.stdout.split())


@pytest.mark.parametrize("level", ["bwrap", "landlock", "none"])
def test_runs_at_other_levels(level: str, caplog: pytest.LogCaptureFixture) -> None:
    executor, before = LocalExecutor(level, installation=reach(find_installation())), find_cold_starts()
    try:
        with caplog.at_level(logging.WARNING):
            asyncio.run(play(executor))
    except IsolationRefusedError as error:
        pytest.skip(str(error))
    weak = [record for record in caplog.records if "weak isolation" in record.message]
    assert bool(weak) is Isolation(level).weak
    wait_until(lambda: find_cold_starts() <= before, 10)  # what bubblewrap leads dies a moment after it


def test_unreachable_interpreter_is_named(pool: BlockingExecutor, tmp_path: Path) -> None:
    broken = replace(find_installation(), interpreter=str(tmp_path / "python"))

    async def choose() -> None:
        await choose_backend("landlock", broken, zygotes=1)

    with pytest.raises(IsolationRefusedError, match=r"cannot start .*/python"):
        asyncio.run(choose())


AS_ANOTHER_USER = """
import asyncio, os
from spear_sandbox.local import LocalExecutor
from spear_sandbox.installation import find_installation
executor = LocalExecutor("namespaces")
os.setgroups([]); os.setgid(12345); os.setuid(12345)
async def main():
    executor._installation = find_installation(())
    await executor.start()
    print((await executor.run("import os; print(os.getuid())")).stdout, end="")
    await executor.close()
asyncio.run(main())
"""


def test_without_root(pool: BlockingExecutor, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the whole run of these tests is without root")
    found = find_installation(())
    interpreter = found.interpreter if reach(found) == found else "/usr/bin/python3"
    # A folder that the other user can enter; the checkout may not be one.
    copy = Path("/tmp") / f"sandbox-copy-{os.getpid()}"
    shutil.copytree(
        ROOT / "sandbox" / "spear_sandbox", copy / "spear_sandbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    try:
        copy.chmod(0o755)
        done = subprocess.run(
            [interpreter, "-c", AS_ANOTHER_USER], cwd=copy, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        shutil.rmtree(copy)
    assert (done.stdout, done.stderr) == ("12345\n", "")
