"""What a shell offers for the arguments of ``spear train`` and ``spear plan``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the distribution spear-training")

from spear_training.choices import GROUPS, list_choices
from spear_training.cli import OVERRIDE, train
from spear_training.launch import compose_config
from spear_training.planning.cli import plan
from tests.spear_envs.test_completion import ask, ask_line


def test_both_commands_have_them() -> None:
    for command in (train, plan):
        (argument,) = (param for param in command.params if param.name == "overrides")
        assert argument.type is OVERRIDE


def test_the_protocol() -> None:
    assert ask("spear train pre") == ["plain,preset="]
    assert ask("spear train preset=dem") == ["plain,preset=demo"]
    found = ask("spear train cluster=4", shell="zsh")
    assert found == ["plain", "cluster=4x8gpu", list_choices("cluster")["4x8gpu"]]


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_completes_its_choices(group: str) -> None:
    assert ask_line(f"spear train --out runs/x {group}=") == list(list_choices(group))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spear train preset=demo ", [f"{group}=" for group in GROUPS]),
        ("spear train preset=demo algorithm=rloo_", ["rloo_sil", "rloo_spear"]),
        ("spear plan preset=official/sok", ["official/sokoban", "official/sokoban_qwen2.5_vl_3b"]),
        ("spear train spear.sil.", []),
        ("spear train trainer.device=c", []),
        ("spear train --print", ["--print-config"]),
    ],
)
def test_bash_is_given_the_part_that_it_replaces(line: str, offered: list[str]) -> None:
    assert ask_line(line) == offered


def test_what_is_offered_can_be_composed() -> None:
    (offered,) = ask("spear plan preset=official/alfworld_qwen2.5_7")
    assert compose_config((offered.removeprefix("plain,"),), Path("x"), check=False)


def test_what_is_ones_own_is_completed(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "zeal.yaml").write_text("# @package _global_\n# Zeal: mine.\nspear: {}\n")
    assert ask_line(f"spear train --config-dir {tmp_path} algorithm=ze") == ["zeal"]
