"""The services of ``compose.yaml`` on a network of their own, by podman-compose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.containers.engine import Engine
from tests.scripted_server import find_free_port

pytestmark = [pytest.mark.slow, pytest.mark.container]

TOKEN = "token-of-the-tests"
EPISODES = """
import gymnasium as gym

for env_id, keywords in (
    ("spear/CodeInterpreter-v0", {"sandbox": "http://sandbox:8080"}),
    ("spear/SearchR1-v0", {"retriever": "http://retriever:8000"}),
):
    env = gym.make(f"spear_envs:{env_id}", split="test", response_format="plain", **keywords)
    observation, info = env.reset(seed=1)
    done = False
    while not done:
        observation, reward, terminated, truncated, info = env.step(env.unwrapped.expert_plan()[0])
        done = terminated or truncated
    assert info["won"] and not info.get("fault"), (env_id, info)
    print(env_id, info["tool_calls"] if "tool_calls" in info else "")
"""


@dataclass(frozen=True)
class Project:
    """What runs by ``compose.yaml``."""

    engine: Engine
    name: str
    ports: dict[str, int]

    def call(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        tool = os.environ.get("PODMAN_COMPOSE", "podman-compose")
        return self.engine.call(tool, "-p", self.name, *arguments, timeout=timeout)

    def do(self, *arguments: str, timeout: float = 300) -> str:
        done = self.call(*arguments, timeout=timeout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def wait_until_healthy(self, service: str) -> None:
        end = time.monotonic() + 180
        while not self.is_healthy(service):
            assert time.monotonic() < end, self.engine.call("podman", "logs", "--tail", "40", self.container(service))
            time.sleep(0.5)

    def is_healthy(self, service: str) -> bool:
        try:
            return not self.engine.call("podman", "healthcheck", "run", self.container(service), timeout=30).returncode
        except subprocess.TimeoutExpired:  # podman waits without end on a container that starts again and again
            return False

    def inspect(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(self.engine.do("podman", "container", "inspect", self.container(service)))
        assert isinstance(found, dict)
        return found

    def ask(self, service: str, path: str, body: object = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[service]}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            content: bytes = reply.read()
        return content.decode()

    def count_requests(self, service: str) -> int:
        """Runs of the sandbox, queries of the retriever."""
        if service == "sandbox":
            return int(json.loads(self.ask(service, "/health"))["runs"])
        (line,) = re.findall(r"^spear_retriever_queries_total ([\d.e+]+)$", self.ask(service, "/metrics"), re.MULTILINE)
        return int(float(line))


@pytest.fixture(scope="module")
def project(engine: Engine, sandbox_image: str, envs_image: str) -> Iterator[Project]:
    """The two services, healthy; both ask for a token."""
    ports = {"sandbox": find_free_port(), "retriever": find_free_port()}
    settings = {f"SPEAR_{service.upper()}_PORT": str(port) for service, port in ports.items()}
    settings |= {f"SPEAR_{service.upper()}_TOKEN": TOKEN for service in ports}
    project = Project(engine, f"spear-test-{os.getpid()}", ports)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        try:
            project.do("up", "-d", "--no-build", *ports)
            for service in ports:
                project.wait_until_healthy(service)
            yield project
        finally:
            project.call("down", "-v", "-t", "5")


def test_the_services_answer_on_loopback_to_who_has_the_token(project: Project) -> None:
    reply = json.loads(project.ask("sandbox", "/run_code", {"code": "print(6 * 7)", "language": "python"}))
    assert reply["run_result"]["stdout"] == "42\n" and reply["sandbox"]["level"] == "namespaces"
    reply = json.loads(project.ask("retriever", "/retrieve", {"queries": ["the historian who was born"], "topk": 2}))
    assert len(reply["result"]) == 1 and len(reply["result"][0]) == 2
    for service, path in (("sandbox", "/run_code"), ("retriever", "/retrieve")):
        address = f"http://127.0.0.1:{project.ports[service]}{path}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(address, b"{}"), timeout=60)


def test_nothing_is_published_beyond_loopback_and_nobody_has_rights(project: Project) -> None:
    for service in project.ports:
        found = project.inspect(service)
        published = [place for places in found["NetworkSettings"]["Ports"].values() for place in places or ()]
        assert published == [{"HostIp": "127.0.0.1", "HostPort": str(project.ports[service])}]
        assert found["HostConfig"]["ReadonlyRootfs"] is True and not found["EffectiveCaps"]
        status = project.engine.do("podman", "exec", project.container(service), "cat", "/proc/self/status")
        assert "NoNewPrivs:\t1" in status and "Uid:\t10001\t" in status and "Seccomp:\t2" in status


def test_environments_beside_them_use_them_by_their_names(project: Project, envs_image: str) -> None:
    options = f"--network {project.name}_default --entrypoint python3"
    options += " -e SPEAR_SANDBOX_TOKEN -e SPEAR_RETRIEVER_TOKEN"
    done = project.engine.run(options, envs_image, "-c", EPISODES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.large
@pytest.mark.parametrize(
    ("preset", "service", "address"),
    [
        ("code_tiny", "sandbox", "http://sandbox:8080"),
        ("search_tiny", "retriever", "http://retriever:8000"),
    ],
)
def test_the_trainer_uses_them(project: Project, train_image: str, preset: str, service: str, address: str) -> None:
    """Two steps through verl; the first preset is what the file itself says."""
    before = project.count_requests(service)
    project.do(
        *("run", "--rm", "--no-deps", "-T", "trainer", "train", f"preset={preset}", "model=tiny"),
        *(f"env.kwargs.{service}={address}", "--out", f"/runs/{service}"),
        timeout=1200,
    )
    # 2 steps of 6 tasks and 4 episodes each, though not every episode calls its tool.
    assert project.count_requests(service) > before + 8
