"""Settings of a command, declared once: a field of a dataclass is an option, with its range, default and meaning."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import Field, field, fields
from enum import Enum
from typing import Any, get_args, get_type_hints

OPTION = "option"
"""Key of a field's metadata."""


def option(
    default: Any,
    meaning: str,
    *,
    flag: str | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Iterable[Any] = (),
    unit: int = 1,
    section: str = "Options",
    metavar: str | None = None,
) -> Any:
    """Make a field of a settings dataclass that :func:`~spear_sandbox.console.take_options` turns into an option.

    Args:
        default: of field and option; None leaves the choice to the program.
        meaning: one line for ``--help``.
        flag: the option's name, if it is not that of the field.
        at_least: least value; ``above`` is a bound that it must exceed, ``at_most`` the largest.
        above: see ``at_least``.
        at_most: see ``at_least``.
        choices: allowed values.
        unit: what one of the option is in the field, such as 2**20 for an option in MiB.
        section: heading in the help of a command with sections.
        metavar: name of the value in the help.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    known = {"meaning": meaning, "flag": flag, "choices": tuple(choices), "unit": unit, "section": section}
    return field(default=default, metadata={OPTION: {**known, **bounds, "metavar": metavar}})


def take_values(kind: type, options: MutableMapping[str, Any]) -> dict[str, Any]:
    """Take the values of a dataclass's fields out of a command's ``options``."""
    hints = get_type_hints(kind)
    return {
        item.name: _convert(options.pop(name_parameter(item)), item, hints[item.name])
        for item in list_fields(kind)
        if name_parameter(item) in options
    }


def name_option(kind: type, name: str) -> str:
    """Return the option of a field, as it is typed."""
    return next(name_flag(item) for item in list_fields(kind) if item.name == name)


def list_fields(kind: type) -> list[Field[Any]]:
    """Return the fields that are options."""
    return [item for item in fields(kind) if OPTION in item.metadata]


def name_flag(item: Field[Any]) -> str:
    """Return the option as it is typed."""
    return f"--{item.metadata[OPTION]['flag'] or item.name.replace('_', '-')}"


def name_parameter(item: Field[Any]) -> str:
    """Return the parameter of the command."""
    return name_flag(item)[2:].replace("-", "_")


def strip_none(hint: Any) -> Any:
    """Return a type without the None of an optional one."""
    return next((part for part in get_args(hint) if part is not type(None)), hint)


def _convert(value: Any, item: Field[Any], hint: Any) -> Any:
    """Return an option's value as the field's."""
    about, kind = item.metadata[OPTION], strip_none(hint)
    if value is None:
        return None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if about["choices"]:
        return next(choice for choice in about["choices"] if str(choice) == value)
    return value * about["unit"] if about["unit"] != 1 else value
