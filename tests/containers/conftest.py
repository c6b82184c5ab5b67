"""An engine for all tests of containers, and the images that they share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import Engine, RefusedError

NO_CONTAINERS = 69
"""With which the tests end where the machine refuses what containers need: EX_UNAVAILABLE."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """``SPEAR_CONTAINER_STORE`` names a folder whose images are kept for the next time."""
    missing = [tool for tool in ("buildah", "podman", "runc") if shutil.which(tool) is None]
    rootfs = os.environ.get("SPEAR_CONTAINER_ROOTFS", "")
    if missing or os.getuid() != 0 or not Path(rootfs, "usr/bin/python3").exists():
        pytest.skip("no tools or no base for containers: scripts/container_test.sh brings them (as root)")
    kept = os.environ.get("SPEAR_CONTAINER_STORE")
    engine = Engine(Path(kept).resolve() if kept else tmp_path_factory.mktemp("containers"))
    try:
        try:
            engine.prepare(rootfs)
        except RefusedError as error:
            pytest.exit(f"this machine runs no containers: {error}", returncode=NO_CONTAINERS)
        yield engine
    finally:
        if kept is None:
            engine.remove_all()


@pytest.fixture(scope="session")
def sandbox_image(engine: Engine) -> str:
    return engine.build("sandbox")


@pytest.fixture(scope="session")
def envs_image(engine: Engine, sandbox_image: str) -> str:
    return engine.build("envs")


@pytest.fixture(scope="session")
def train_image(engine: Engine, envs_image: str) -> str:
    return engine.build("train-cpu", timeout=1800)


@pytest.fixture(scope="session")
def test_image(engine: Engine, train_image: str) -> str:
    return engine.build("test", timeout=1800)
