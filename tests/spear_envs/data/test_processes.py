from __future__ import annotations

import errno
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.processes import explain_build, replace_folder


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "index"
    for content in ("first", "second", "third"):
        fresh = work / "fresh"
        fresh.mkdir(parents=True)
        (fresh / content).touch()
        replace_folder(fresh, folder, work)
        assert [path.name for path in folder.iterdir()] == [content]
        assert not fresh.exists()
    assert [path.name for path in (work / "replaced").iterdir()] == ["second"]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (BrokenProcessPool("gone"), "a process that built the store X ended .killed for want of memory"),
        (OSError(errno.ENOSPC, "No space left"), "the store X could not be built .*No space left"),
        (KeyError("k"), "the store X could not be built .'k'"),
    ],
)
def test_a_build_that_fails_says_that_it_can_go_on(raised: Exception, said: str) -> None:
    with (
        pytest.raises(SpearError, match=f"^{said}.*: fix that and run the same command again, which resumes.$"),
        explain_build("the store X", (OSError, KeyError)),
    ):
        raise raised


def test_what_is_no_fault_of_a_build_passes() -> None:
    with pytest.raises(ZeroDivisionError), explain_build("the store X"):
        raise ZeroDivisionError
