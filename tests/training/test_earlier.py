from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("omegaconf", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.computing import load_earlier


@pytest.mark.parametrize("text", ["", "null", "a: 1", "actor: {}"])
def test_a_folder_of_another_kind_of_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("actor: {tokens: 5}")
    assert load_earlier(path, "actor.tokens").actor.tokens == 5
    path.write_text(text)
    with pytest.raises(SpearError, match=r"lacks actor\.tokens, so .* not of this kind of run: name another"):
        load_earlier(path, "actor.tokens")


@pytest.mark.parametrize("content", [b"[", b"\xff\xfe", b"a: b: c", b"[1]"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(SpearError, match=r"config\.yaml (cannot be read|is not) .*: name another folder") as found:
        load_earlier(tmp_path / "config.yaml", "actor")
    assert "\n" not in str(found.value)
