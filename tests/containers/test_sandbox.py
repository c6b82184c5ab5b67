"""The sandbox's image, run for real and attacked from inside."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.containers.engine import ROOT, Engine

pytestmark = [pytest.mark.slow, pytest.mark.container]

PROFILE = ROOT / "sandbox" / "spear_sandbox" / "deploy" / "seccomp.json"
ADDED = "Added to Docker's default"
REFUSED = 78
HARDENED = "--read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges --network none"
HARDENED += " --memory 6g --pids-limit 2048"
OPEN_PROC = "--security-opt unmask=ALL"
"""Docker's ``systempaths=unconfined``: the kernel grants a new /proc only where the old one is not masked."""


def run(engine: Engine, options: str, image: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A hardened container that ends by itself."""
    return engine.run(f"{HARDENED} {options}", image, *arguments)


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
def box(engine: Engine, sandbox_image: str) -> Iterator[Box]:
    folder = ROOT.parent / "shared" / "golden" / "sandbox"
    volume = f"-v {folder}:/attacks:ro" if folder.is_dir() else ""
    options = f"{HARDENED} {OPEN_PROC} --security-opt seccomp={PROFILE} {volume}"
    name = f"sandbox-{os.getpid()}"
    engine.do("podman", "run", "-d", "--name", name, *options.split(), sandbox_image, "serve", "--host", "127.0.0.1")
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


def test_dockers_default_profile_is_refused_with_the_mend(
    engine: Engine, sandbox_image: str, dockers_profile: Path
) -> None:
    done = run(engine, f"{OPEN_PROC} --security-opt seccomp={dockers_profile}", sandbox_image, "serve")
    assert done.returncode == REFUSED and "ready" not in done.stdout
    assert done.stderr.startswith("Error: ") and "seccomp" in done.stderr and "--allow-weak-isolation" in done.stderr


def test_a_weak_level_needs_its_flag_and_is_warned_of(
    engine: Engine, sandbox_image: str, dockers_profile: Path
) -> None:
    """On a third of a core, too: a slow machine must not be taken for an open one."""
    options = f"{OPEN_PROC} --security-opt seccomp={dockers_profile} --cpus 0.3"
    done = run(engine, options, sandbox_image, "serve", "--self-test-only", "--allow-weak-isolation", "landlock")
    assert done.returncode == 0 and "'landlock' holds" in done.stdout, done.stderr
    assert "Warning: no strong isolation holds here" in done.stderr and "'landlock' only" in done.stderr


def test_a_masked_proc_is_refused_with_the_mend(engine: Engine, sandbox_image: str) -> None:
    done = run(engine, f"--security-opt seccomp={PROFILE}", sandbox_image, "serve")
    assert done.returncode == REFUSED and "ready" not in done.stdout
    assert done.stderr.startswith("Error: ") and "systempaths=unconfined" in done.stderr


def test_the_self_test_alone_tells_a_pipeline(engine: Engine, sandbox_image: str) -> None:
    done = run(engine, f"{OPEN_PROC} --security-opt seccomp={PROFILE}", sandbox_image, "serve", "--self-test-only")
    assert (done.returncode, done.stderr) == (0, "") and "'namespaces' holds" in done.stdout
