"""Levels of isolation, and the files that deploy a service."""

import asyncio
import hashlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.installation import Installation, find_installation
from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor, choose_backend, examine
from spear_sandbox.protocol import Isolation, KillReason, Limits, RunStatus
from spear_sandbox.service.wire import TOKEN_VARIABLE
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
from spear_sandbox.pool.local import IsolationRefusedError
from spear_sandbox.pool.local import LocalExecutor
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
        if executor.health().level is Isolation.LANDLOCK:  # older kernels do not see it
            assert "PermissionError" in (await executor.run("import os; os.truncate('main.py', 0)")).stderr
        runs = [asyncio.ensure_future(executor.run("import os; os.fork()\nwhile True: pass")) for _ in range(2)]
        await asyncio.sleep(0.4)
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
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.installation import find_installation
os.setgroups([]); os.setgid(12345); os.setuid(12345)
async def main():
    executor = LocalExecutor("namespaces", installation=find_installation(()))
    await executor.start()
    print((await executor.run("import os; print(os.getuid())")).stdout, end="")
    await executor.close()
asyncio.run(main())
"""


@pytest.fixture
def copy() -> Iterator[Path]:
    """A folder with the sandbox that another user can enter; the checkout may not be one."""
    if os.getuid() != 0:
        pytest.skip("the whole run of these tests is without root")
    folder = Path("/tmp") / f"sandbox-copy-{os.getpid()}"
    source = ROOT / "sandbox" / "spear_sandbox"
    shutil.copytree(source, folder / "spear_sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def choose_interpreter() -> str:
    found = find_installation(())
    return found.interpreter if reach(found) == found else "/usr/bin/python3"


def test_without_root(pool: BlockingExecutor, copy: Path) -> None:
    command = [choose_interpreter(), "-c", AS_ANOTHER_USER]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("12345\n", "")


AS_A_WEAK_POOL = """
import asyncio, os, tempfile
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.installation import find_installation
os.setgroups([]); os.setgid(12346); os.setuid(12346)
tempfile.tempdir = tempfile.mkdtemp(dir="/tmp")
async def main():
    executor = LocalExecutor("landlock", installation=find_installation(()))
    await executor.start()
    await executor.run("import os; os.mkdir('a'); open('a/x', 'w').close(); os.chmod('a', 0)")
    print(tempfile.tempdir, *os.listdir(tempfile.tempdir), flush=True)
    await executor.run("import time; time.sleep(60)")
asyncio.run(main())
"""


def test_a_weak_pool_leaves_neither_folders_nor_programs(copy: Path) -> None:
    def find_programs() -> set[str]:
        command = ["pgrep", "-U", "12346", "-f", "start_cold"]
        return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())

    command = [choose_interpreter(), "-c", AS_A_WEAK_POOL]
    with subprocess.Popen(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        folder, *left = process.stdout.readline().split() or [""]
        try:
            if not folder:
                pytest.skip("no Landlock here")
            assert not left
            wait_until(lambda: bool(find_programs()), 20)
        finally:
            process.kill()
    try:
        wait_until(lambda: not find_programs(), 10)
    finally:
        shutil.rmtree(folder)


FOLDER = Path(__file__).resolve().parents[2] / "sandbox" / "spear_sandbox" / "deploy"
UPSTREAM = "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json"
DEFAULT = "9da637d2ab0a204fcbd91bd88f1be9e004a3acab61c571a9f5b8870e588a17d2"
ADDED = ["clone", "mount", "mount_setattr", "pivot_root", "sethostname", "umount2", "unshare"]


def read_manifests() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'train'")
    documents = list(yaml.safe_load_all((FOLDER / "k8s.yaml").read_text("utf-8")))
    return {document["kind"]: document for document in documents}


def digest(profile: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(profile, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class TestAppArmor:
    def test_it_can_be_read(self) -> None:
        parser = shutil.which("apparmor_parser", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
        if parser is None:
            pytest.skip("apparmor_parser is not installed")
        command = [parser, "--skip-kernel-load", "--skip-cache", str(FOLDER / "apparmor.profile")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class TestProfile:
    @pytest.fixture
    def profile(self) -> dict[str, Any]:
        profile = json.loads((FOLDER / "seccomp.json").read_text("utf-8"))
        assert isinstance(profile, dict)
        return profile

    def test_it_is_dockers_default_and_one_entry_more(self, profile: dict[str, Any]) -> None:
        *default, ours = profile["syscalls"]
        assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
        assert (ours["names"], ours["action"]) == (ADDED, "SCMP_ACT_ALLOW")
        assert ours["comment"].startswith("Added to Docker's default")
        assert not {"args", "includes", "excludes"} & set(ours)
        # Docker's default in one line, so that no other change is made to it; the nightly test below compares the two.
        assert digest({**profile, "syscalls": default}) == DEFAULT

    def test_what_it_allows(self, profile: dict[str, Any]) -> None:
        free = [rule for rule in profile["syscalls"] if not rule.get("includes") and rule["action"] == "SCMP_ACT_ALLOW"]
        always = {name for rule in free if not rule.get("args") for name in rule["names"]}
        assert not always & {"bpf", "kexec_load", "init_module", "setns", "keyctl", "userfaultfd", "socket"}
        assert not [name for name in always if name.startswith("io_uring")]
        assert {"read", "execve", "futex", "openat", "seccomp", "prctl", *ADDED} <= always

        def takes(family: int) -> bool:
            rules = [rule["args"][0] for rule in free if rule["names"] == ["socket"]]
            compare = {"SCMP_CMP_EQ": int.__eq__, "SCMP_CMP_LT": int.__lt__, "SCMP_CMP_GT": int.__gt__}
            return any(compare[rule["op"]](family, rule["value"]) for rule in rules)

        assert takes(socket.AF_UNIX) and takes(socket.AF_INET) and takes(socket.AF_INET6) and takes(socket.AF_NETLINK)
        assert not takes(socket.AF_VSOCK) and not takes(socket.AF_ALG)
        # Unknown, so that the C library falls back to clone, whose flags can be seen.
        clone3 = [
            rule["action"]
            for rule in profile["syscalls"]
            if "clone3" in rule["names"] and "SYS_ADMIN" not in str(rule.get("includes"))
        ]
        assert clone3 and set(clone3) == {"SCMP_ACT_ERRNO"}

    @pytest.mark.nightly
    def test_it_is_still_dockers_default(self) -> None:
        """Fails when moby changes it: take the new one, and its digest."""
        try:
            with urllib.request.urlopen(UPSTREAM, timeout=30) as answer:
                theirs = json.load(answer)
        except OSError as error:
            pytest.skip(f"{UPSTREAM} cannot be reached: {error}")
        assert digest(theirs) == DEFAULT


class TestKubernetes:
    def test_the_pod_has_no_privileges_and_its_token_in_a_file(self) -> None:
        pod = read_manifests()["Deployment"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"]["type"] == "Localhost"
        assert pod["securityContext"]["appArmorProfile"]["type"] != "RuntimeDefault", "it denies the mounts of runs"
        assert pod["automountServiceAccountToken"] is False
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}
        (variable,) = container["env"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert variable == {"name": f"{TOKEN_VARIABLE}_FILE", "value": f"{mounts['token']}/token"}

    def test_nothing_goes_out_and_only_named_pods_come_in(self) -> None:
        found = read_manifests()
        policy = found["NetworkPolicy"]["spec"]
        assert policy["egress"] == [] and set(policy["policyTypes"]) == {"Ingress", "Egress"}
        peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
        assert len(peers) == 3 and all(peer["podSelector"]["matchLabels"] for peer in peers)
        labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert labels == found["Service"]["spec"]["selector"] == policy["podSelector"]["matchLabels"]
        scaled = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        assert scaled == found["Deployment"]["metadata"]["name"]

    def test_its_arguments_are_the_commands(self) -> None:
        pytest.importorskip("click")
        from spear_sandbox.cli import sandbox

        (container,) = read_manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
        name, *arguments = container["args"]
        context = sandbox.commands[name].make_context(name, arguments)
        assert context.params["host"] == "0.0.0.0" and context.params["max_running"] == 8


SCRIPT = """
import json, sys, time, urllib.request
import ray
from ray import serve
from spear_sandbox.deploy.ray_serve import build

try:
    build({"replica": 2})
except ValueError as error:
    assert "unknown" in str(error)
else:
    raise AssertionError
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(build({"replicas": "2", "max_running": 2}))
url = f"http://127.0.0.1:{sys.argv[1]}"

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as reply:
        return json.load(reply)

assert ask("/v1/ping") == "pong"
outputs = [ask("/run_code", {"code": f"print({i})", "language": "python"}) for i in range(12)]
assert [reply["run_result"]["stdout"] for reply in outputs] == [f"{i}\\n" for i in range(12)], outputs
assert outputs[0]["sandbox"]["level"] in ("namespaces", "bwrap")
pools = set()
for _ in range(40):
    health = ask("/health")
    assert health["status"] == "ok" and health["max_running"] == 2
    pools.add(health["runs"])
print("RUNS", json.dumps(sorted(pools)))
serve.shutdown()
"""


@pytest.mark.slow
def test_replicas_under_ray_serve() -> None:
    pytest.importorskip(
        "ray.serve", reason="Ray Serve is not installed: pip install 'spear-sandbox[serve]'", exc_type=ImportError
    )
    pytest.importorskip("fastapi", reason="the service needs the extra 'sandbox'")
    from tests.sandbox.service import need_isolation
    from tests.scripted_server import find_free_port

    need_isolation()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(find_free_port())],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "SPEAR_SANDBOX_TOKEN": "", "PYTHONPATH": str(FOLDER.parents[1])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RUNS "))
    runs = json.loads(line.removeprefix("RUNS "))
    assert runs in ([6], [12]) or (len(runs) == 2 and sum(runs) == 12), "two pools, each of which counts its own runs"
