"""What ALFWorld's tests share: the official games, where they are at hand."""

from pathlib import Path

import pytest

from spear_envs.data import unpack_archive


@pytest.fixture(autouse=True)
def own_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither the user's data nor the user's cache is touched."""
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path_factory.getbasetemp() / "spear-data"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


@pytest.fixture(scope="session")
def official_games(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """340 official games: a folder with ``valid_seen`` (140, the whole split) and ``valid_train`` (200)."""
    archives = sorted((shared / "data" / "alfworld").glob("games_*.tar.xz"))
    if not archives:
        pytest.skip("the official games of ALFWorld are not beside the checkout")
    folder = tmp_path_factory.mktemp("official")
    unpack_archive(archives[0], folder)
    return next(folder.glob("*/valid_seen")).parent
