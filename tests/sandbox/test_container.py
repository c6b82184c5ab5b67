"""The image, built and run for real; ``scripts/container_test.sh`` brings what that needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.container]

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "sandbox" / "deploy" / "seccomp.json"
ADDED = "Added to Docker's default"
BASE = "localhost/base:bookworm"
IMAGE = "localhost/spear-sandbox"
RUNTIME = "/usr/sbin/runc"
REFUSED = 78
# Without limits that are named, podman asks for more than a container of a container may have.
HARDENED = "--read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges --network none"
HARDENED += " --memory 6g --pids-limit 2048 --ulimit nofile=4096:4096 --ulimit nproc=4096:4096"
OPEN_PROC = "--security-opt unmask=ALL"
"""Docker's ``systempaths=unconfined``: the kernel grants a new /proc only where the old one is not masked."""


@dataclass(frozen=True)
class Engine:
    """buildah and podman with a store of their own."""

    store: Path

    def call(self, tool: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        driver = "overlay" if self.store.name == "overlay" else "vfs"
        options = ["--root", str(self.store), "--runroot", str(self.store.parent / "run"), "--storage-driver", driver]
        options += ["--runtime", RUNTIME] if tool == "podman" else []
        return subprocess.run(
            [tool, *options, *arguments], capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT
        )

    def do(self, tool: str, *arguments: str, timeout: float = 300) -> str:
        """As :meth:`call`, but it must succeed."""
        done = self.call(tool, *arguments, timeout=timeout)
        assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def run(self, options: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A hardened container that ends by itself."""
        return self.call("podman", "run", "--rm", *HARDENED.split(), *options.split(), IMAGE, *arguments)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    missing = [tool for tool in ("buildah", "podman", "runc") if shutil.which(tool) is None]
    rootfs = os.environ.get("SPEAR_CONTAINER_ROOTFS", "")
    if missing or os.getuid() != 0 or not Path(rootfs, "usr/bin/python3").exists():
        pytest.skip("no tools or no base for containers: scripts/container_test.sh brings them (as root)")
    folder = tmp_path_factory.mktemp("containers")
    engine = Engine(folder / "overlay")
    if engine.call("buildah", "from", "scratch").returncode:
        engine = Engine(folder / "vfs")
    try:
        container = engine.do("buildah", "from", "scratch")
        engine.do("buildah", "add", "-q", container, rootfs, "/")
        search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        certificates = "PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
        engine.do("buildah", "config", "--env", f"PATH={search}", "--env", certificates, container)
        engine.do("buildah", "commit", "-q", "--rm", container, BASE)
        yield engine
    finally:
        engine.call("podman", "rm", "-f", "-a")
        engine.call("buildah", "rm", "-a")
        engine.call("buildah", "rmi", "-a", "-f")


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    """The image of ``sandbox/deploy/Dockerfile``, from the files of this checkout."""
    command = ["bud", "-q", "--isolation", "chroot", "--build-arg", f"BASE={BASE}", "-f", "sandbox/deploy/Dockerfile"]
    engine.do("buildah", *command, "-t", IMAGE, ".", timeout=600)
    return IMAGE


@pytest.fixture(scope="module")
def dockers_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Docker's default: ours without the one entry that we added."""
    profile = json.loads(PROFILE.read_text("utf-8"))
    profile["syscalls"] = [rule for rule in profile["syscalls"] if not rule.get("comment", "").startswith(ADDED)]
    path = tmp_path_factory.mktemp("profile") / "default.json"
    path.write_text(json.dumps(profile), "utf-8")
    return path


@dataclass(frozen=True)
class Box:
    """A container that serves; everything is asked from inside, since it has no network."""

    engine: Engine
    name: str

    def python(self, code: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return self.engine.call(
            "podman", "exec", self.name, "python3", *arguments, *(("-c", code) if code else ()), timeout=timeout
        )

    def ask(self, path: str, body: object = None) -> dict[str, object]:
        code = f"""
import json, urllib.request
body = {json.dumps(body)!r}
request = urllib.request.Request("http://127.0.0.1:8080{path}", None if body == "null" else body.encode())
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
        done = self.python(code)
        assert done.returncode == 0, done.stderr
        reply = json.loads(done.stdout)
        assert isinstance(reply, dict)
        return reply


@pytest.fixture(scope="module")
def box(engine: Engine, image: str, request: pytest.FixtureRequest) -> Iterator[Box]:
    folder = ROOT.parent / "shared" / "golden" / "sandbox"
    volume = f"-v {folder}:/attacks:ro" if folder.is_dir() else ""
    options = f"{HARDENED} {OPEN_PROC} --security-opt seccomp={PROFILE} {volume}"
    name = f"sandbox-{os.getpid()}"
    engine.do("podman", "run", "-d", "--name", name, *options.split(), image, "serve", "--host", "127.0.0.1")
    try:
        end = time.monotonic() + 180
        while "ready: isolation namespaces" not in (logs := engine.do("podman", "logs", name)):
            assert time.monotonic() < end, logs
            time.sleep(0.3)
        yield Box(engine, name)
    finally:
        engine.call("podman", "rm", "-f", name)


def test_the_server_has_no_privileges(box: Box) -> None:
    lines = dict(
        line.split(":\t", 1)
        for line in box.python("print(open('/proc/1/status').read())").stdout.splitlines()
        if ":\t" in line
    )
    assert lines["Uid"].split() == ["10001"] * 4 and lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2"
    assert {lines[name].strip("0") for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {""}
    written = box.python("open('/opt/spear/x', 'w')")
    assert written.returncode == 1 and "Read-only file system" in written.stderr


def test_it_runs_programs_in_namespaces(box: Box) -> None:
    health = box.ask("/health")
    isolation = health["isolation"]
    assert isinstance(isolation, dict) and (isolation["level"], isolation["weak"]) == ("namespaces", False)
    code = "import numpy, scipy, sympy; print(sympy.factorint(2**67 - 1), numpy.arange(3).sum())"
    reply = box.ask("/run_code", {"code": code, "language": "python"})
    result = reply["run_result"]
    assert isinstance(result, dict) and result["stdout"] == "{193707721: 1, 761838257287: 1} 3\n", reply


def test_every_attack_is_contained_in_the_container(box: Box) -> None:
    """From inside, with the server's own uid, processes and network: the victim is as near as can be."""
    if not (ROOT.parent / "shared" / "golden" / "sandbox").is_dir():
        pytest.skip("no list of attacks in 'shared'")
    done = box.python("", "/attacks/check.py", "http://127.0.0.1:8080/run_code")
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0 and last and last[0].endswith(" contained"), done.stdout + done.stderr
    assert box.ask("/health")["status"] == "ok"


def test_dockers_default_profile_is_refused_with_the_mend(engine: Engine, image: str, dockers_profile: Path) -> None:
    done = engine.run(f"{OPEN_PROC} --security-opt seccomp={dockers_profile}", "serve")
    assert done.returncode == REFUSED and "ready" not in done.stdout
    assert done.stderr.startswith("Error: ") and "seccomp" in done.stderr and "--allow-weak-isolation" in done.stderr


def test_a_weak_level_needs_its_flag_and_is_warned_of(engine: Engine, image: str, dockers_profile: Path) -> None:
    options = f"{OPEN_PROC} --security-opt seccomp={dockers_profile}"
    done = engine.run(options, "serve", "--self-test-only", "--allow-weak-isolation", "landlock")
    assert done.returncode == 0 and "'landlock' holds" in done.stdout, done.stderr
    assert "Warning: no strong isolation holds here" in done.stderr and "'landlock' only" in done.stderr


def test_a_masked_proc_is_refused_with_the_mend(engine: Engine, image: str) -> None:
    done = engine.run(f"--security-opt seccomp={PROFILE}", "serve")
    assert done.returncode == REFUSED and "ready" not in done.stdout
    assert done.stderr.startswith("Error: ") and "systempaths=unconfined" in done.stderr


def test_the_self_test_alone_tells_a_pipeline(engine: Engine, image: str) -> None:
    done = engine.run(f"{OPEN_PROC} --security-opt seccomp={PROFILE}", "serve", "--self-test-only")
    assert (done.returncode, done.stderr) == (0, "") and "'namespaces' holds" in done.stdout
