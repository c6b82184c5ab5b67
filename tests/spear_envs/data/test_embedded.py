"""The data sets that come with the package."""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from spear_envs.core.tasks import canonical_json
from spear_envs.data.embedded import read_embedded
from tests.commands import ROOT

FOLDER = ROOT / "spear_envs" / "data" / "embedded"


@pytest.mark.parametrize("name", ["code", "search", "webshop"])
def test_a_data_set_is_the_one_that_its_fingerprint_names(name: str) -> None:
    content = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    assert content["license"] == "Apache-2.0" and all(content["counts"].values())
    assert hashlib.sha256(canonical_json(read_embedded(name)).encode()).hexdigest() == content["fingerprint"]


@pytest.mark.nightly
def test_the_generators_still_make_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/datasets/make.py", str(tmp_path)], cwd=ROOT, check=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in FOLDER.glob("*.xz")
    }
