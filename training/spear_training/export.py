"""A run's policy as a Hugging Face folder: weights in safetensors, tokenizer, settings."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import click
from safetensors import SafetensorError, safe_open

from spear_envs.core.errors import SpearError
from spear_envs.core.machine import make_command
from spear_envs.data.files import draft_folder, write_json
from spear_sandbox.console import echo
from spear_training.checkpoints import BEST, check_files, list_whole, read_best, repair_tracker

WEIGHTS = "*.safetensors"
_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Export:
    """An exported policy: its step, parameters and types."""

    folder: Path
    step: int
    parameters: int
    dtypes: tuple[str, ...]


def export_policy(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> Export:
    """Write the policy of a checkpoint of ``run`` to the new folder ``out`` for transformers and vLLM, atomically.

    The checkpoint is the latest, that of ``step``, or the ``best`` on the validation panel. Raises SpearError if it is
    missing or torn, ``out`` exists or cannot be written, or verl cannot join the shards.
    """
    source, number = _find_checkpoint(run / "checkpoints", step, best)
    if out.exists():
        raise SpearError(f"{out} exists: choose another folder")
    check_files(source)  # joining shards loads pickles
    with draft_folder(out) as draft:
        whole = source / "actor" / "huggingface"
        if any(whole.glob(WEIGHTS)):
            shutil.copytree(whole, draft, dirs_exist_ok=True)
        else:
            _join_shards(source / "actor", draft)
        parameters, dtypes = _measure_weights(draft)
        if len(dtypes) == 1 and dtypes[0] in _TYPES:  # verl always writes bfloat16, and vLLM trusts it
            settings = json.loads((draft / "config.json").read_text("utf-8"))
            settings.pop("torch_dtype", None)
            write_json(draft / "config.json", {**settings, "dtype": _TYPES[dtypes[0]]})
    return Export(out, number, parameters, dtypes)


def _find_checkpoint(checkpoints: Path, step: int | None, best: bool) -> tuple[Path, int]:
    if best:
        kept = read_best(checkpoints)
        if kept is None:
            raise SpearError(f"{checkpoints} does not contain a best checkpoint: leave --best out, or name a --step")
        return checkpoints / BEST, int(kept["step"])
    number = step if step is not None else repair_tracker(checkpoints)
    if number is None:
        raise SpearError(f"{checkpoints} does not contain a complete checkpoint yet: name the folder of a training")
    whole = list_whole(checkpoints)
    if number not in whole:
        steps = ", ".join(map(str, whole))
        raise SpearError(f"{checkpoints} has no complete checkpoint of step {number}, only of {steps}")
    return checkpoints / f"global_step_{number}", number


def _join_shards(actor: Path, out: Path) -> None:
    """Let verl join the shards of all ranks, in a separate process: it takes the memory of the full model."""
    command = make_command("verl.model_merger", "merge", "--backend", "fsdp")
    command += ["--local_dir", str(actor), "--target_dir", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[-1]
        raise SpearError(f"the shards in {actor} could not be joined: {said}")
    # verl writes the model's settings next to the shards, and joins only weights and tokenizer.
    for file in (actor / "huggingface").glob("*"):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def _measure_weights(folder: Path) -> tuple[int, tuple[str, ...]]:
    """Parameters and types of weights, from the headers of the files."""
    files = sorted(folder.glob(WEIGHTS))
    if not files or not (folder / "config.json").is_file():
        raise SpearError(f"{folder} lacks weights in safetensors or config.json: the checkpoint is not a policy")
    count, dtypes = 0, set()
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    part = weights.get_slice(name)
                    count += math.prod(part.get_shape())
                    dtypes.add(str(part.get_dtype()))
        json.loads((folder / "config.json").read_text("utf-8"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpearError(f"the weights in {folder} cannot be read: {error}") from error
    return count, tuple(sorted(dtypes))


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
    made = export_policy(run, out, step=step, best=best)
    echo(f"policy of step {made.step}: {made.folder} ({made.parameters:,} parameters, {', '.join(made.dtypes)})")
