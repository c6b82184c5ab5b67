"""Shell completion of environments and splits, and words with ``=`` and ``:`` in bash.

``eval "$(_SPEAR_COMPLETE=bash_source spear)"`` switches it on; likewise ``zsh_source`` and ``fish_source``.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from spear_envs.core.env import SpearEnv
from spear_envs.core.making import find_splits
from spear_envs.core.registration import ENVIRONMENTS, PREFIX


class EnvId(click.ParamType):
    """An environment id, ours with or without ``spear_envs:``, converted to the registered one."""

    name = "env"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the registered id, which may be unknown."""
        return value.removeprefix(PREFIX) if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete our ids, else names without their namespace, ignoring case: ``sok`` gives Sokoban."""
        begun = incomplete.lower()
        long = [f"{PREFIX}{entry.id}" for entry in ENVIRONMENTS]
        short = [entry.id for entry in ENVIRONMENTS]
        for ids, chosen in (
            (short, [id.lower().startswith(begun) for id in short]),
            (long, [id.lower().startswith(begun) for id in long]),
            (short, [id.partition("/")[2].lower().startswith(begun) for id in short]),
        ):
            if any(chosen):
                return [
                    CompletionItem(id, help=entry.summary)
                    for id, entry, fits in zip(ids, ENVIRONMENTS, chosen, strict=True)
                    if fits
                ]
        return []


class SplitName(click.ParamType):
    """A split of the environment earlier on the line."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the split, which may be unknown; an empty text would take the default."""
        return value or self.fail("an empty text is not a split: is a variable of the shell not set?", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete splits of our environments; for others, which would have to be imported, the usual names."""
        # An option without its value ends click's parsing early, which leaves arguments over.
        given = [str(word).removeprefix(PREFIX) for word in (ctx.params.get("env_id"), *ctx.args) if word]
        env_id = next((word for word in given if any(word == entry.id for entry in ENVIRONMENTS)), None)
        splits = SpearEnv.splits if env_id is None else find_splits(env_id)
        return [CompletionItem(split) for split in splits if split.startswith(incomplete)]


ENV = EnvId()
"""Type of environment arguments, such as ``spear/Sokoban-v1``."""
SPLIT = SplitName()
"""Type of split options; the environment's argument must be called ``env_id``."""


class _Quiet:
    """Offers nothing on errors: a traceback would land in the line being typed."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        try:
            found: list[CompletionItem[str]] = super().get_completions(args, incomplete)  # type: ignore[misc]
        except Exception:
            return []
        return found


class _Bash(_Quiet, BashComplete):
    """Bash splits ``preset=demo`` into three words and replaces the last, so we read the line and return the rest."""

    source_template = """\
%(complete_func)s() {
    local kind word
    COMPREPLY=()
    while IFS=, read -r kind word; do
        case $kind in
            plain) COMPREPLY+=("$word") ;;
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
        esac
    done < <(
        export COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS %(complete_var)s=bash_complete
        "$1" 2>/dev/null
    )
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE")
        if line is None:  # called with split words
            return super().get_completion_args()
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        return words[1:], incomplete

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        breaks = {*os.environ.get("COMP_WORDBREAKS", "")} & {*"=:"}
        kept = max((incomplete.rfind(mark) for mark in breaks), default=-1) + 1  # bash keeps this
        is_option = incomplete.startswith("-") and "=" in incomplete
        option = incomplete.partition("=")[0] + "=" if is_option else ""  # click completes only its value
        lines = []
        for item in self.get_completions(args, incomplete):
            item.value = option + item.value
            if item.value.startswith(incomplete[:kept]):
                item.value = item.value[kept:]
            lines.append(self.format_completion(item))
        return "\n".join(lines)


class _Zsh(_Quiet, ZshComplete):
    pass


class _Fish(_Quiet, FishComplete):
    pass


def register_shells() -> None:
    """Register our completion for bash, zsh and fish with click."""
    for shell in (_Bash, _Zsh, _Fish):
        add_completion_class(shell)
