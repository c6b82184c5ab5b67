"""``spear collect``: fine-tuning data from an environment's expert or from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spear_agents.collect import FOLDER_SUFFIX, collect_episodes
from spear_agents.options import SectionedCommand, add_playing_options, make_settings
from spear_agents.watching import watch_episodes
from spear_envs.completion import ENV
from spear_sandbox.terminal import Console


@click.command(cls=SectionedCommand)
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File of JSON lines to write.")
@click.option("--tokenizer", help="Folder or name of a model: also write input_ids and loss_mask of its tokenizer.")
@click.option("--keep-lost", is_flag=True, help="Keep lost episodes too.")
@add_playing_options(engine="expert", split="the first, such as train", template="default")
def collect(
    env_id: str, out: Path, tokenizer: str | None, keep_lost: bool, concurrency: int | None, **options: Any
) -> None:
    """Write episodes of ENV as fine-tuning data: won episodes of the expert, unless options say otherwise.

    A line has the messages of a turn (layout per_turn) or of an episode (conversation). Interrupted, the same command
    resumes; the same settings give the same file.

    \b
      spear collect spear/ALFWorld-v0 --tasks 160 --thoughts --out runs/expert.jsonl
      spear collect spear/WebShop-v0 --engine openai --base-url URL --model NAME --out runs/won.jsonl
    """
    settings = make_settings(env_id, options)
    console = Console()
    with watch_episodes(settings.engine.value, Console(stderr=True)) as bar:
        found = collect_episodes(
            settings,
            out,
            tokenizer=tokenizer,
            keep_lost=keep_lost,
            concurrency=concurrency,
            observer=bar.observe,
            on_response=bar.on_response,
        )
    left_out = f", {found.unrepeatable} left out because they could not be repeated" if found.unrepeatable else ""
    told = f"{found.samples:,} samples of {found.kept:,} episodes ({found.episodes:,} played{left_out}): {out}"
    console.print(f"{told}\nepisodes: {out}{FOLDER_SUFFIX}", soft_wrap=True)
