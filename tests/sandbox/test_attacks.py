"""Hostile programs of our own: each is contained, and each succeeds where there is no sandbox.

A program in ``attacks/`` says ``ESCAPED`` when it got what it must not get, and ``DONE`` at its end. Its control is the
same program as a plain process, with smaller numbers. All of it is bounded, and nothing leaves this machine.
"""

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.protocol import KillReason, Limits, Outcome, RunStatus
from tests.sandbox.service import find_processes

FOLDER = Path(__file__).parent / "attacks"
CONTROL_S = 60
LIMITS = Limits(wall_s=10.0)
EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""Number of the system call that ends one thread."""


@dataclass(frozen=True)
class Attack:
    """One program, what it is given inside and without a sandbox, and how it may end."""

    name: str
    inside: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    limits: Limits = LIMITS
    reason: KillReason = KillReason.NONE
    """KillReason.NONE: it must reach its end."""
    left: bool = False
    """Whether it succeeds by what it leaves running."""


ATTACKS = [
    Attack("threads", {"THREADS": 200}, {"THREADS": 60}),
    Attack("zombies", {"CHILDREN": 200}, {"CHILDREN": 60}),
    Attack("shared_anonymous_memory"),
    Attack("anonymous_file"),
    Attack("shared_memory_segments"),
    Attack("many_full_files"),
    Attack("sparse_file"),
    Attack("raised_limits"),
    Attack("supervisors_limits", {"SUPERVISOR": 1, "GENTLY": False}, {"SUPERVISOR": os.getpid(), "GENTLY": True}),
    Attack("supervisors_files", {"SUPERVISOR": 1}, {"SUPERVISOR": os.getpid()}),
    Attack(
        "hidden_by_name",
        {"CHILDREN": 4, "MB": 100, "SECONDS": 3},
        {"CHILDREN": 2, "MB": 16, "SECONDS": 0.2},
        limits=Limits(memory_mb=128, wall_s=10.0),
        reason=KillReason.MEMORY,
    ),
    Attack(
        "ended_first_thread",
        {"CHILDREN": 4, "MB": 50, "SECONDS": 3, "EXIT": EXIT},
        {"CHILDREN": 2, "MB": 16, "SECONDS": 0.2, "EXIT": EXIT},
        limits=Limits(memory_mb=128, wall_s=10.0),
        reason=KillReason.MEMORY,
    ),
    Attack(
        "full_sockets",
        {"CHILDREN": 6, "PAIRS": 110, "SECONDS": 5, "LEAST": 1},
        {"CHILDREN": 1, "PAIRS": 20, "SECONDS": 0, "LEAST": 5},
        limits=Limits(memory_mb=64, wall_s=10.0),
        reason=KillReason.MEMORY,
    ),
    Attack("sleepers", {"SECONDS": 60}, {"SECONDS": 1}, left=True),
    Attack("secrets_in_environments"),
    Attack("command_lines"),
    Attack("trace_child"),
    Attack("read_child_memory"),
    Attack("signal_outside"),
    Attack("other_architecture", {"CONTROL": False}, {"CONTROL": True}),
    Attack("datagram_to_a_name"),
    Attack("internet_sockets"),
    Attack("kernel_interfaces"),
    Attack("lock_on_shared_file"),
    Attack("between_pipes"),
    Attack("pipes_by_reference"),
    Attack("set_user_id_programs"),
    Attack("system_folders"),
    Attack("write_to_the_system"),
    Attack("modules_of_the_server"),
    Attack("devices"),
]

# Docker's profile of system calls lets only who has CAP_SYS_PTRACE read another process's memory.
REFUSED_BY_SOME = ("other_architecture", "kernel_interfaces", "read_child_memory")


@dataclass(frozen=True)
class Surroundings:
    """Things outside that the programs go for."""

    values: dict[str, Any]
    datagrams: socket.socket

    def was_reached(self) -> bool:
        """Whether a datagram has come."""
        try:
            self.datagrams.recv(100)
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    """A listener with an abstract name, and a process of the user of the programs that has secrets."""
    secret, command, abstract = (secrets.token_hex(8) for _ in range(3))
    drop: dict[str, Any] = {"user": 10001, "group": 10001} if os.getuid() == 0 else {}
    victims = [
        subprocess.Popen(
            ["/bin/sh", "-c", f"read x; : {command}"], stdin=subprocess.PIPE, env={"S": secret}, cwd="/", **who
        )
        for who in ({}, drop)
    ]
    scratch = tmp_path_factory.mktemp("attacked") / "file"
    scratch.touch()
    values = {
        # Turned round, so that the program does not find itself.
        "SECRET": secret[::-1],
        "COMMAND": command[::-1],
        "ABSTRACT": abstract,
        "SERVER": os.getpid(),
        "VICTIM": victims[-1].pid,
        "SCRATCH": str(scratch),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind("\0" + abstract)
        datagrams.setblocking(False)
        yield Surroundings(values, datagrams)
    for victim in victims:
        victim.kill()
        victim.communicate()


def write_program(attack: Attack, values: dict[str, Any], token: str) -> str:
    """The program with all of its blanks filled."""
    code = (FOLDER / f"{attack.name}.py").read_text("utf-8")
    for name, value in {**values, "TOKEN": token}.items():
        code = code.replace("{{" + name + "}}", str(value))
    assert "{{" not in code, code
    return code


def wait_until_gone(token: str, seconds: float) -> int:
    """Return how many processes of this name are left after so long."""
    end = time.monotonic() + seconds
    while (left := len(find_processes(token))) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_contained(attack: Attack, pool: BlockingExecutor, surroundings: Surroundings) -> None:
    token = f"in{secrets.token_hex(4)}"
    paths = "[os.__file__, sys.executable, '/usr/bin/env', '/etc/passwd', '/proc/sys/kernel/hostname', '/escaped']"
    code = write_program(attack, {**surroundings.values, **attack.inside, "PATHS": paths}, token)
    outcome = pool.run(code, limits=attack.limits)
    assert not re.search("^ESCAPED", outcome.stdout, re.M), outcome.stdout
    assert outcome.reason is attack.reason, outcome
    if attack.reason is KillReason.NONE:
        assert outcome.status is RunStatus.FINISHED and re.search(r"\bDONE\b", outcome.stdout), outcome
    assert wait_until_gone(token, 3) == 0
    assert not surroundings.was_reached()
    assert pool.run("print(1 + 1)").stdout == "2\n", "the pool is well afterwards"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_control(attack: Attack, surroundings: Surroundings, tmp_path: Path) -> None:
    token = f"out{secrets.token_hex(4)}"
    paths = repr([surroundings.values["SCRATCH"]])
    code = write_program(attack, {**surroundings.values, **attack.control, "PATHS": paths}, token)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=CONTROL_S, check=False
    )
    if attack.left:
        assert find_processes(token), done
        assert wait_until_gone(token, 20) == 0
    else:
        if "ESCAPED" not in done.stdout and attack.name in REFUSED_BY_SOME:
            pytest.skip("this kernel, or this container, does not offer it to anybody")
        assert re.search("^ESCAPED", done.stdout, re.M), done
    surroundings.was_reached()


def test_every_program_of_the_folder_is_played() -> None:
    assert {attack.name for attack in ATTACKS} == {path.stem for path in FOLDER.glob("*.py")}


SPY = """
import glob, os, socket, time
mine, other = {mine!r}, {other!r}
open("/tmp/" + mine, "w").write(mine)
open("/dev/shm/" + mine + "s", "w").write(mine)
environment = os.environ
environ_before = sorted(environment)
os.environ["SPY"] = mine
ends = socket.socketpair()
end = time.monotonic() + 1.0
seen = set()
processes = set()
while time.monotonic() < end:
    for folder in ("/tmp", "/dev/shm", "/opt", "/home", "/"):
        seen |= {{name for name in os.listdir(folder) if other in name}}
    for name in os.listdir("/proc"):
        if name.isdigit():
            processes.add(int(name))
            for part in ("cmdline", "environ", "comm"):
                try:
                    if other.encode() in open("/proc/" + name + "/" + part, "rb").read():
                        seen.add(part)
                except OSError:
                    pass
    for number in range(3, 300):
        try:
            os.kill(number, 0)
            seen.add("signal to %d" % number)
        except OSError:
            pass
    time.sleep(0.05)
spaces = {{os.readlink("/proc/self/ns/" + name) for name in ("pid", "mnt", "net", "ipc", "uts", "user")}}
print("SAW", sorted(seen), sorted(processes), sorted(spaces))
"""


def test_two_hostile_runs_do_not_see_each_other(pool: BlockingExecutor) -> None:
    names = [f"spy{secrets.token_hex(4)}" for _ in range(2)]
    codes = [SPY.format(mine=names[i], other=names[1 - i]) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        outcomes: list[Outcome] = list(threads.map(lambda code: pool.run(code), codes))
    spaces = []
    for outcome in outcomes:
        assert outcome.stdout.startswith("SAW [] [1, 2] "), outcome
        spaces.append(set(eval(outcome.stdout.removeprefix("SAW [] [1, 2] "))))
    assert len(spaces[0]) == len(spaces[1]) == 6
    assert not spaces[0] & spaces[1], "no namespace in common"


def test_control_two_plain_processes_see_each_other(tmp_path: Path) -> None:
    names = [f"spy{secrets.token_hex(4)}" for _ in range(2)]
    processes = []
    for i in range(2):
        code = SPY.format(mine=names[i], other=names[1 - i])
        command = [sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=CONTROL_S)[0] for process in processes]
    for name in names:
        for folder, suffix in (("/tmp", ""), ("/dev/shm", "s")):
            Path(folder, name + suffix).unlink(missing_ok=True)
    assert all(names[1 - i] in printed[i] for i in range(2)), printed


def test_all_that_is_shown_of_the_machine_is_mounted_read_only(pool: BlockingExecutor) -> None:
    code = "for line in open('/proc/self/mountinfo'): print(*line.split()[4:6])"
    mounts = dict(line.split() for line in pool.run(code).stdout.splitlines())
    writable = {place for place, flags in mounts.items() if not flags.startswith("ro,")}
    assert len(mounts) > 10 and writable == {"/tmp"}
    assert all("nosuid" in flags for flags in mounts.values())


def test_devices_can_be_written_and_keep_their_times(pool: BlockingExecutor) -> None:
    before = os.stat("/dev/null").st_mtime_ns
    outcome = pool.run("import os; open('/dev/null', 'w').write('x'); os.utime('/dev/null')")
    assert "Read-only file system" in outcome.stderr and os.stat("/dev/null").st_mtime_ns == before


def test_runs_share_no_open_file(pool: BlockingExecutor) -> None:
    look = "import fcntl; print(fcntl.fcntl(0, fcntl.F_GETFL), fcntl.fcntl(0, 11))"
    before = pool.run(look).stdout
    pool.run("import fcntl, os; fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND); fcntl.fcntl(0, 10, 42)")
    assert pool.run(look).stdout == before


KILLERS = {
    "to_the_group": "import os, signal\nos.kill(0, signal.SIGKILL)\n",
    "ignored_by_itself": "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0, 15)\nprint('DONE')\n",
}
VICTIM = "import time\nprint('READY', flush=True)\ntime.sleep(1.5)\nprint('ALIVE')\n"


@pytest.mark.parametrize("killer", KILLERS)
def test_signals_to_the_own_process_group_reach_no_other_run(pool: BlockingExecutor, killer: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        victim = thread.submit(pool.run, VICTIM)
        time.sleep(0.5)
        outcome = pool.run(KILLERS[killer])
        assert outcome.return_code == (-9 if killer == "to_the_group" else 0), outcome
        assert victim.result().stdout == "READY\nALIVE\n", victim.result()


@pytest.mark.parametrize("killer", KILLERS)
def test_control_signals_to_a_shared_process_group(killer: str) -> None:
    # The shell's group is new, so that this process is not in it. It waits for a line before it starts the killer.
    script = '"$1" -c "$2" & read line; trap "" KILL TERM; "$1" -c "$3"; wait'
    command = ["/bin/sh", "-c", script, "sh", sys.executable, VICTIM.replace("1.5", "20"), KILLERS[killer]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            printed = process.communicate("\n", timeout=CONTROL_S)[0]
        finally:
            process.kill()
    assert ready == "READY\n" and "ALIVE" not in printed
