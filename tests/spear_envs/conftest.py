from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spear_envs.data.server import Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    """A web site of our own."""
    site = Site()
    server = serve(site)
    yield site
    server.shutdown()
    server.server_close()
