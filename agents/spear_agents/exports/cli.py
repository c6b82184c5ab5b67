"""``spear export-data``: recorded episodes for other tools."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import click

from spear_agents.collect import write_lines
from spear_agents.exports.dataset import write_dataset
from spear_agents.exports.pairs import make_pairs
from spear_agents.exports.recorded import open_recorded
from spear_agents.options import TRUST
from spear_agents.records import EPISODES
from spear_envs.core.errors import SpearError
from spear_sandbox.console import echo


class Form(str, Enum):
    """What is written."""

    PAIRS = "pairs"
    """JSON lines of preferences."""
    DATASET = "dataset"
    """A folder of Hugging Face datasets."""


@click.command("export-data")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--form", type=click.Choice([form.value for form in Form]), required=True, help="What to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File, or folder of a dataset.")
@click.option("--per-task", type=click.IntRange(1), default=4, help="Maximum pairs of one task (pairs only).")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Tokenizer's folder if RUN's model has moved.")
@TRUST
def export_data(run: Path, form: str, out: Path, per_task: int, tokenizer: Path | None, trust: bool) -> None:
    """Write the episodes of RUN, a folder of spear eval --out, for other tools.

    \b
    pairs    {prompt, chosen, rejected} of won and lost episodes, for DPO: JSON lines
    dataset  an episode a row: a folder that datasets.load_dataset opens

    \b
      spear export-data runs/first --form pairs --out pairs.jsonl
    """
    if out.resolve() == (run / EPISODES).resolve():
        raise SpearError(f"{out} is the record itself: name another file")
    with open_recorded(run, tokenizer, trust=trust) as recorded:
        if form == Form.DATASET:
            told = f"{write_dataset(recorded, out):,} episodes"
        else:
            pairs = list(make_pairs(recorded, per_task))
            if not pairs:
                raise SpearError(
                    f"no task of {run} has a won and a lost episode that differ after one prompt: play several samples"
                    " of each task (--episodes-per-task)."
                )
            told = f"{write_lines(out, iter(pairs)):,} pairs of {len({p['task_id'] for p in pairs}):,} tasks"
    left_out = [f"{recorded.faults:,} that a fault cut short"] if recorded.faults else []
    if recorded.unrepeatable:
        left_out.append(f"{recorded.unrepeatable:,} that could not be repeated")
    echo(f"{told}: {out}" + (f" (left out: {', '.join(left_out)})" if left_out else ""))
