"""Reading the data sets that come with the package, which ``scripts/datasets`` in the repository made."""

from __future__ import annotations

import json
import lzma
from importlib import resources
from typing import Any


def read_embedded(name: str) -> Any:
    """Read the data of ``NAME.json.xz``.

    The file also has ``license``, ``counts`` and ``fingerprint``, the SHA-256 (hex) of the canonical JSON of ``data``.
    """
    packed = resources.files(__package__).joinpath(f"{name}.json.xz").read_bytes()
    return json.loads(lzma.decompress(packed))["data"]
