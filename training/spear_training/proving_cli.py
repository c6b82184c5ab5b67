"""``spear prove-gpu``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from spear_envs.core.errors import SpearError
from spear_sandbox.terminal import Console


@click.command("prove-gpu")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/prove-gpu"))
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda",
    help="cpu runs the same steps at small sizes."
)  # fmt: skip
@click.option("--only", multiple=True, metavar="STEP", help="Run only this step; may be given more than once.")
def prove_gpu(out: Path, device: str, only: tuple[str, ...]) -> None:
    """Prove that a training works on this machine's GPU, in ten minutes and without a network.

    Attention and log-probabilities are compared with those of the CPU, memory with the formulas of `spear plan`; then
    the demo trains for two steps, is killed and resumed. Prints a table and writes prove-gpu.json.

    \b
      spear prove-gpu
      spear prove-gpu --device cpu --only attention
    """
    from spear_training.proving import REPORT, Prover

    prover, console = Prover(out.resolve(), device), Console()
    unknown = set(only) - prover.list_steps().keys()
    if unknown:
        raise SpearError(f"there is no step {min(unknown)!r}: choose {', '.join(prover.list_steps())}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpearError(
                "torch sees no GPU (`spear doctor` says why): --device cpu takes the same steps without one"
            )
    table = Table(box=None, title=f"{prover.describe()['name']}", title_justify="left")
    for column in ("step", "", "s", "figures"):
        table.add_column(column)
    failed = False
    for proof in prover.prove(only):
        console.print(f"{proof.name}: {proof.verdict}", highlight=False)
        failed |= proof.verdict == "failed"
        figures = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                   for name, value in proof.figures.items()]  # fmt: skip
        table.add_row(proof.name, proof.verdict, f"{proof.seconds:.0f}", proof.why or ", ".join(figures))
    console.print(table)
    console.print(f"written to {out / REPORT}", soft_wrap=True)
    if failed:
        raise click.exceptions.Exit(1)
