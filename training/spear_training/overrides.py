"""The arguments of ``spear train`` and ``spear plan``, and what a shell offers for them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from spear_training.choices import GROUPS, list_choices, list_official


__all__ = ["OVERRIDE", "Override"]


class Override(click.ParamType):
    """``GROUP=CHOICE`` or ``KEY=VALUE``; Hydra reads them, and only the choices are completed."""

    name = "override"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Groups up to their equals sign, then what the group offers."""
        group, equals, begun = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{name}=") for name in GROUPS if name.startswith(group)]
        if group not in GROUPS:
            return []
        choices = list_choices(group)
        if group == "preset" and begun.startswith(FLAVOURS[1][:1]):  # as many again, so only when they are asked for
            choices |= {name: choices[name.rpartition("/")[2]] for name in list_official()}
        return [
            CompletionItem(f"{group}={choice}", help=title)
            for choice, title in choices.items()
            if choice.startswith(begun)
        ]


OVERRIDE = Override()
