"""``spear algorithms`` and ``spear presets``: choices of ``spear train``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from spear_agents.listing import print_rows
from spear_sandbox.console import echo
from spear_sandbox.terminal import Console
from spear_training.overrides import CONFIG_DIR_OPTION

NONE = "–"
MENDS = {
    "model": "a download when the training starts (spear models list); for –: model=NAME",
    "warm start": "spear warmstart ENV --out DIR, then actor_rollout_ref.model.path=DIR",
}
"""How to get common needs of presets."""
FOOTER = (
    "Named models run on GPUs: add cluster=1gpu, 8gpu or 4x8gpu. A dry run on a CPU",
    "needs none of this: model=tiny, or tiny_vl for pictures.",
    "A preset of the paper as the authors' code has it: preset=official/NAME.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


@click.command("algorithms")
@json_option
@CONFIG_DIR_OPTION
def algorithms(as_json: bool, config_dir: Path | None) -> None:
    """List the algorithms that `spear train algorithm=NAME` runs.

    Each is a file of training/spear_training/config/algorithm; docs/algorithms.md has the equations. Your own:
    DIR/algorithm/NAME.yaml, starting with `# @package _global_` and `# TITLE: MEANING`.

    \b
      spear algorithms
      spear algorithms --config-dir mine
    """
    from spear_training.choices import list_algorithms

    found = list_algorithms(config_dir)
    if as_json:
        _print_json({"algorithms": [asdict(algorithm) for algorithm in found]})
        return
    table = Table("algorithm=", "in the paper", box=None, pad_edge=False)
    table.add_column("what it is", overflow="fold")
    for algorithm in found:
        table.add_row(algorithm.name, algorithm.title, algorithm.meaning)
    Console().print(table)


@click.command("presets")
@json_option
@CONFIG_DIR_OPTION
def presets(as_json: bool, config_dir: Path | None) -> None:
    """List the presets that `spear train preset=NAME` runs, and what each needs that is missing here.

    A preset of the paper names its model; ours train a tiny policy of `spear warmstart`.

    \b
      spear presets
      spear presets --config-dir mine
    """
    from spear_training.inventory import survey_presets

    found = survey_presets(config_dir)
    if as_json:
        _print_json({"presets": [asdict(preset) for preset in found]})
        return
    rows = [
        (
            (
                preset.name,
                preset.environment,
                preset.model or NONE,
                preset.algorithm,
                ", ".join(dict.fromkeys(need.kind for need in preset.missing)) or "nothing",
            ),
            preset.title,
        )
        for preset in found
    ]
    console = Console()
    print_rows(console, ("preset=", "env", "model", "algorithm", "missing"), rows)
    mends: dict[str, dict[str, None]] = {}  # as ordered sets
    for need in (need for preset in found for need in preset.missing):
        mends.setdefault(need.kind, {})[MENDS.get(need.kind, need.mend)] = None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for kind, ways in mends.items():
        table.add_row(Text(kind), Text("\n".join(ways)))
    console.print()
    console.print(table)
    for line in FOOTER:
        console.print(line, highlight=False)


def _print_json(facts: dict[str, Any]) -> None:
    echo(json.dumps(facts, indent=1, ensure_ascii=False))
