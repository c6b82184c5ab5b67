"""What a shell offers for the arguments of ``spear train`` and ``spear plan``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the distribution spear-training")

from spear_training.choices import GROUPS, list_choices
from spear_training.launch import compose_config
from tests.spear_envs.test_completion import ask, ask_line


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_completes_its_choices(group: str) -> None:
    assert ask_line(f"spear train --out runs/x {group}=") == list(list_choices(group))


def test_what_is_offered_can_be_composed() -> None:
    (offered,) = ask("spear plan preset=official/alfworld_qwen2.5_7")
    assert compose_config((offered.removeprefix("plain,"),), Path("x"), check=False)


def test_what_is_ones_own_is_completed(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "zeal.yaml").write_text("# @package _global_\n# Zeal: mine.\nspear: {}\n")
    assert ask_line(f"spear train --config-dir {tmp_path} algorithm=ze") == ["zeal"]
