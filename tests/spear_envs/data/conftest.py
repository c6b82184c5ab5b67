from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spear_envs.data.server import Site, serve


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without settings: neither forbidden to download, nor sent through a proxy."""
    for name in ("SPEAR_DATA", "SPEAR_MIRROR", "SPEAR_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site() -> Iterator[Site]:
    """A web site of our own."""
    site = Site()
    server = serve(site)
    yield site
    server.shutdown()
    server.server_close()
