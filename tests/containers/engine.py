"""Containers without a Docker engine: buildah, podman and runc, with a store of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/base:bookworm"
BUILD_PACKAGES = "gcc libc6-dev libpython3-dev"
"""Debian's Python has its headers in a package, the public Python image has them already."""
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIP_KEYS = ("cert", "index-url", "extra-index-url", "find-links", "trusted-host", "timeout", "default-timeout")
STORAGE = """[storage]
driver = "{driver}"
graphroot = "{store}"
runroot = "{run}"
"""
# Without limits that are named, podman asks for more than a container of a container may have; crun refuses the hybrid
# control groups of some machines; and there need be neither a journal nor systemd.
CONTAINERS = """[engine]
runtime = "runc"
events_logger = "none"
cgroup_manager = "cgroupfs"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[network]
network_config_dir = "{networks}"
"""

IMPORT = f"""tar -C "$1" -c . | podman import -q --change "ENV PATH={SEARCH}" \\
    --change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt" - "$2" """
BUILD = """name=$(buildah from "$1") && buildah run --isolation chroot "$name" true && buildah rm "$name" """
HARDENED = "--rm --network none --read-only --cap-drop ALL --memory 1g --pids-limit 64"
REFUSALS = re.compile(
    "operation not permitted|permission denied|read-only file system|not supported|not implemented|no such device",
    re.IGNORECASE,
)
"""What a kernel says that does not let this machine have containers. What fails otherwise is a fault of ours."""


class RefusedError(Exception):
    """This machine runs no containers; the message is of the tool that met it."""


@dataclass(frozen=True)
class PipSettings:
    """What pip asks on this machine, for pip in an image.

    Attributes:
        text: a configuration file.
        folders: of this machine that it names.
    """

    text: str
    folders: tuple[str, ...]

    @classmethod
    def read(cls) -> PipSettings:
        """The settings of pip for this interpreter; those of the environment win."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return cls.parse(done.stdout)

    @classmethod
    def parse(cls, listed: str) -> PipSettings:
        """What ``pip config list`` prints."""
        found: dict[str, str] = {}
        lines = re.findall(r"^(:env:|global|install)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
        for _, key, value in sorted(lines, key=lambda line: line[0] == ":env:"):
            if key in PIP_KEYS:
                found[key] = value.replace("\\n", " ")
        words = " ".join(value for key, value in found.items() if key != "cert").split()
        places = (word.removeprefix("file://") for word in words)
        folders = {place for place in places if place.startswith("/")}
        # An index of files lies beside the files that it names.
        folders = {str(Path(place).parent) if Path(place).name == "simple" else place for place in folders}
        text = "[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items())
        return cls(text, tuple(sorted(folders)))


@dataclass(frozen=True)
class Engine:
    """Images and containers in one folder.

    Attributes:
        folder: of the store, the settings and what pip is told.
        built: images that this engine has built already, by their targets.
    """

    folder: Path
    built: set[str] = field(default_factory=set)

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            # Health is asked for by the tests: podman's timers are systemd's.
            "DISABLE_HC_SYSTEMD": "true",
        }

    def prepare(self, rootfs: str) -> None:
        """Write the settings, make the base image from the Debian system in ``rootfs`` unless it is there, and try it.

        Raises:
            RefusedError: The kernel does not let this machine build or run containers, or connect them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "containers.conf").write_text(CONTAINERS.format(networks=self.folder / "networks"), "utf-8")
        for driver in ("overlay", "vfs"):
            places = {"store": self.folder / driver, "run": self.folder / "run"}
            (self.folder / "storage.conf").write_text(STORAGE.format(driver=driver, **places), "utf-8")
            if (found := self.call("podman", "image", "exists", BASE)).returncode in (0, 1):
                break
        if found.returncode:
            self._try("sh", "-c", IMPORT, "import", rootfs, BASE)
        self._try("sh", "-c", BUILD, "build", BASE)
        self._try("podman", "run", *HARDENED.split(), BASE, "true")
        self._try("podman", "run", "--rm", "--network", "podman", BASE, "true")

    def _try(self, *command: str) -> None:
        done = self.call(*command, timeout=900)
        if done.returncode and REFUSALS.search(done.stderr):
            raise RefusedError(f"{' '.join(command[:2])}: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def call(self, tool: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=ROOT,
            env=self.environment,
        )

    def do(self, tool: str, *arguments: str, timeout: float = 300) -> str:
        """As :meth:`call`, but it must succeed."""
        done = self.call(tool, *arguments, timeout=timeout)
        assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, target: str, timeout: float = 900) -> str:
        """The image of a stage of ``Dockerfile``, from the files of this checkout; its name."""
        image = f"localhost/spear-{target}"
        if target in self.built:
            return image
        pip = PipSettings.read()
        (self.folder / "pip.conf").write_text(pip.text, "utf-8")
        command = ["bud", "-q", "--layers", "--format", "docker", "--isolation", "chroot", "--target", target]
        arguments = {
            "BASE": BASE,
            "BUILD_PACKAGES": BUILD_PACKAGES,
            "TORCH_INDEX": os.environ.get("TORCH_INDEX", ""),
        }
        command += [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
        command += ["--secret", f"id=pip,src={self.folder / 'pip.conf'}"]
        command += [word for place in pip.folders for word in ("-v", f"{place}:{place}:ro")]
        self.do("buildah", *command, "-t", image, ".", timeout=timeout)
        self.built.add(target)
        return image

    def run(self, options: str, image: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A container that ends by itself."""
        return self.call("podman", "run", "--rm", *options.split(), image, *arguments, timeout=timeout)

    def remove_all(self) -> None:
        """Remove containers and images."""
        self.call("podman", "rm", "-f", "-t", "0", "-a")
        self.call("podman", "volume", "rm", "-f", "-a")
        self.call("buildah", "rm", "-a")
        self.call("buildah", "rmi", "-a", "-f")
