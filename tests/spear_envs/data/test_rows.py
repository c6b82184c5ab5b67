from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.rows import MalformedRowError, parse_rows


def parse(row: Mapping[str, Any], number: int) -> tuple[int, str]:
    if "name" not in row:
        raise MalformedRowError("it has no name")
    return number, row["name"]


def read(path: Path, content: str) -> list[tuple[int, str]]:
    path.write_text(content, "utf-8")
    return list(parse_rows(path, "search", parse, noun="person", example='{"name": "Ada"}'))


def test_rows_are_parsed_in_order(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"name": "Ada"}\n\n{"name": "Zoë"}') == [(1, "Ada"), (2, "Zoë")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"name": "Ada"}\n{}',
            r"row 2: this is not a person \(it has no name\)\. A row of \.jsonl looks like {\"name\"",
        ),
        ("3", r"row 1: this is not a person \(it is not an object\)"),
        ("", "has no persons: fetch or write it again"),
        ('{"name": "Ada"}\n{', "line 2 cannot be read"),
    ],
)
def test_a_file_that_cannot_be_parsed_names_the_row(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(SpearError, match=rf"a\.jsonl.* ?{said}"):
        read(tmp_path / "a.jsonl", content)
