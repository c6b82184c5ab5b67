"""``spear export``: the policy of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click

from spear_sandbox.console import echo


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New Hugging Face folder.")
@click.option("--step", type=click.IntRange(1), help="Step of the checkpoint; the latest by default.")
@click.option("--best", is_flag=True, help="The checkpoint that was best on the validation panel.")
def export(run: Path, out: Path, step: int | None, best: bool) -> None:
    """Write the policy of RUN as a folder that transformers, vLLM and `spear eval --model` load.

    Weights are in safetensors; shards of several ranks are joined.

    \b
      spear export runs/alfworld --out runs/alfworld/model
    """
    if best and step is not None:
        raise click.UsageError("give --step or --best, not both")
    from spear_training.export import export_policy

    made = export_policy(run, out, step=step, best=best)
    echo(f"policy of step {made.step}: {made.folder} ({made.parameters:,} parameters, {', '.join(made.dtypes)})")
