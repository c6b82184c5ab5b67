"""Options that commands share."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from spear_sandbox.console import Number


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2.5", "2.5"),
        ("nan", "nan is not a finite number"),
        ("inf", "inf is not a finite number"),
        ("-1", "-1.0 is not in the range x>0"),
        ("many", "'many' is not a valid float"),
    ],
)
def test_a_number_is_finite_and_in_its_range(text: str, shown: str) -> None:
    @click.command()
    @click.option("--share", type=Number(0, min_open=True))
    def show(share: float) -> None:
        click.echo(share)

    assert shown in CliRunner().invoke(show, ["--share", text]).output
