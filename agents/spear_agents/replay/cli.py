"""``spear view`` and ``spear play``."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import click

from spear_agents.replay.page import export_page
from spear_agents.replay.play import Game, Stage
from spear_agents.replay.runs import Run
from spear_agents.replay.server import PORT, PageServer
from spear_envs.cli import read_keywords
from spear_envs.completion import ENV, SPLIT
from spear_sandbox.console import echo


@click.command()
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--export", type=click.Path(path_type=Path), help="Write one HTML file that needs no server, and stop.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder of the tokenizer, if the model has moved.")
@click.option("--port", type=int, default=PORT, help="0 takes a free one.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the browser.")
def view(path: Path, export: Path | None, tokenizer: Path | None, port: int, open_browser: bool) -> None:
    """Show RUN: episodes of spear eval and spear play, curves of spear train.

    RUN is a folder, including folders below it, or one JSON-lines file of episodes.

    \b
      spear view runs/first --open
      spear view runs/first --export first.html
    """
    run = Run(path, tokenizer)
    if export is not None:
        count = len(run.rows())
        with click.progressbar(length=count, label="episodes") as bar:
            size = export_page(run, export, lambda: bar.update(1))
        echo(f"{export}: {count:,} episodes, {size / 1e6:.1f} MB")
        return
    with PageServer(run, port=port) as server:
        _serve(server, open_browser)


@click.command()
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--browser", is_flag=True, help="Play in the page of spear view.")
@click.option("--task", help="Id of the first task; by default the first of the split.")
@click.option("--split", type=SPLIT, help="Split of the tasks; by default the last of the environment's, such as test.")
@click.option("--template", default="default", help="Prompt template of the record.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the record.  [default: runs/play-<env>]")
@click.option("--port", type=int, default=PORT, help="Port of --browser; 0 takes a free one.")
@click.option("--open", "open_browser", is_flag=True, help="With --browser: open it.")
def play(
    env_id: str,
    browser: bool,
    task: str | None,
    split: str | None,
    template: str,
    env_keywords: tuple[str, ...],
    seed: int,
    out: Path | None,
    port: int,
    open_browser: bool,
) -> None:
    """Play ENV yourself, for instance spear/Sokoban-v1; finished episodes are recorded.

    \b
      spear play spear/ALFWorld-v0
      spear play spear/Sokoban-v1 --browser --open
    """
    keywords = read_keywords(env_keywords)
    name = re.sub(r"[^a-z0-9]+", "-", env_id.rpartition("/")[2].lower()).strip("-")
    folder = out or Path("runs") / f"play-{name}"

    def open_game() -> Game:
        return Game(env_id, folder, env_kwargs=keywords, split=split, template=template, task=task, seed=seed)

    if browser:
        stage = Stage(open_game)
        try:
            with PageServer(Run(folder), stage, port) as server:
                _serve(server, open_browser)
        finally:
            stage.close()
        return
    from spear_agents.replay.terminal import play_in_terminal, use_readline

    game = open_game()
    try:
        if sys.stdin.isatty():
            use_readline(game)
        with suppress(KeyboardInterrupt):
            play_in_terminal(game, click.echo, input)  # noqa: TID251  (it paints boards)
    finally:
        game.close()
    if game.recorded:
        echo(f"\n{game.recorded} recorded in {folder}: spear view {folder}")
    else:
        echo("\nNothing was recorded: only episodes that end are.")


def _serve(server: PageServer, open_browser: bool) -> None:
    echo(f"{server.address}  (Ctrl-C stops it)")
    if open_browser:
        click.launch(server.address)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
