from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without settings: neither forbidden to download, nor sent through a proxy."""
    for name in ("SPEAR_DATA", "SPEAR_MIRROR", "SPEAR_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
