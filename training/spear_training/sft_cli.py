"""``spear sft``: fine-tunes a model on what ``spear collect`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spear_sandbox.terminal import Console
from spear_sandbox.web.options import Number

_FILE = click.Path(path_type=Path)


@click.command("sft", context_settings={"ignore_unknown_options": True})
@click.option("--model", type=_FILE, required=True, help="Folder or name of a causal language model (spear models).")
@click.option("--data", type=_FILE, required=True, multiple=True, help="File of `spear collect`; may be repeated.")
@click.option("--out", type=_FILE, required=True, help="Run folder: checkpoints, metrics, log; the result in model/.")
@click.option("--epochs", type=click.IntRange(1), default=1, help="Passes over the samples.")
@click.option("--batch", type=click.IntRange(1), default=32, help="Samples of an optimiser step.")
@click.option("--learning-rate", type=Number(0, min_open=True), default=1e-5)
@click.option("--max-length", type=click.IntRange(2), default=16384, help="Longest sample in tokens.")
@click.option(
    "--overlong", type=click.Choice(["drop", "truncate"]), default="drop", help="What happens to longer ones."
)
@click.option("--keep-lost", is_flag=True, help="Learn from lost episodes too.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the order of the samples.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    help="Precision on a CPU: by default bfloat16 if it is faster and the model is not tiny, else float32.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def sft(out: Path, data: tuple[Path, ...], overlong: str, device: str, **options: Any) -> None:
    """Fine-tune a model on what `spear collect` wrote, through verl: the cold start before `spear train`.

    The loss falls on the policy's tokens alone: on the recorded ids where the data has them, else on what the model's
    chat template makes of the responses. KEY=VALUE changes any key of verl's supervised trainer:

    \b
      spear sft --model DIR --data alfworld.jsonl --out runs/sft trainer.n_gpus_per_node=8

    The same command resumes a run that was stopped.
    """
    import torch

    from spear_training.sft.launch import SftSettings, run_sft
    from spear_training.sft.samples import Overlong

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    model = run_sft(SftSettings(data=data, overlong=Overlong(overlong), device=device, **options), out, console)
    console.print(f"model: {model}", soft_wrap=True)
