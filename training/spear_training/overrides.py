"""The arguments of ``spear train`` and ``spear plan``, with shell completion."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from spear_training.choices import CONFIG_DIR, GROUPS, OFFICIAL, list_choices, list_official


class Override(click.ParamType):
    """``GROUP=CHOICE`` or ``KEY=VALUE``, parsed by Hydra; only the choices are completed."""

    name = "override"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete groups up to the equals sign, then their choices."""
        group, equals, begun = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{name}=") for name in GROUPS if name.startswith(group)]
        if group not in GROUPS:
            return []
        choices = list_choices(group, ctx.params.get("config_dir"))
        if group == "preset" and begun.startswith(OFFICIAL[:1]):  # twice as many, so only on request
            choices |= {name: choices[name.rpartition("/")[2]] for name in list_official()}
        return [
            CompletionItem(f"{group}={choice}", help=title)
            for choice, title in choices.items()
            if choice.startswith(begun)
        ]


OVERRIDE = Override()
CONFIG_DIR_OPTION = click.option(
    "--config-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    envvar=CONFIG_DIR,
    help="Folder with choices of your own: algorithm/NAME.yaml, preset/NAME.yaml, ...",
)
