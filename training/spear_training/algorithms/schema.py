"""Frozen records of settings, checked by pydantic, with one-line errors that name the dotted path."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from spear_envs.core.errors import SpearError, explain_invalid

R = TypeVar("R", bound="Record")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
"""Configuration of every record's dataclass."""
SCHEDULES = ("gamma", "mu")
"""Texts for which YAML's ``null`` means the schedule ``none``; of any other text it is a mistake."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def number(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a numeric field of a :class:`Record` with its range; ``at_least`` and ``at_most`` belong to the range."""
    return Field(default=default, ge=at_least, gt=above, le=at_most, lt=below)


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, config=STRICT)
class Record:
    """Base of a settings node. Fields are numbers, booleans, enums, ``None`` where optional, or further records.

    Invalid values raise a SettingsError.
    """

    PATH: ClassVar[str] = ""

    def __init_subclass__(cls, path: str = "", **keywords: Any) -> None:
        """Set the dotted ``path`` of the node, for messages."""
        super().__init_subclass__(**keywords)
        cls.PATH = path or cls.PATH

    def check(self) -> None:
        """Check fields that depend on each other."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, values: Any, handler: Any) -> Any:
        try:
            made = handler(values)
        except ValidationError as error:
            raise SettingsError(_explain(cls, error)) from None
        made.check()
        return made

    @field_validator("*", mode="before")
    @classmethod
    def _read_word(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would convert to numbers or booleans, and accept YAML's words for choices."""
        kind = cls.find_kind(str(info.field_name))
        is_word = isinstance(value, (bool, str))
        if (kind is bool and not is_word) or (kind in (int, float) and is_word):
            raise ValueError(f"must be {_KINDS[kind]}")
        if get_origin(kind) is tuple:
            if not isinstance(value, (list, tuple)):
                raise ValueError("must be a list")
            inner = get_args(kind)[0]
            if inner in (int, float) and any(isinstance(one, bool) for one in value):  # YAML 1.1 reads 1e-3 as a text
                raise ValueError(f"must be a list, each {_KINDS[inner]}")
        if isinstance(value, bool) and float in get_args(kind):
            raise ValueError("must be a number or a text")
        if kind is str and value is None and info.field_name in SCHEDULES:
            return "none"
        if isinstance(kind, type) and issubclass(kind, Enum):
            # YAML reads a bare `off` as false, and `null` may mean none.
            word = "off" if value is False else "none" if value is None else value
            return word if word in [member.value for member in kind] else value
        return value

    @classmethod
    def from_mapping(cls: type[R], mapping: Mapping[str, Any] | None) -> R:
        """Build the record from a nested mapping and defaults.

        Raises:
            SettingsError: an unknown key (with the nearest one), or a value of the wrong type or out of range.
        """
        return TypeAdapter(cls).validate_python({} if mapping is None else mapping)

    def to_mapping(self) -> dict[str, Any]:
        """Return the record as nested plain values (numbers, booleans, strings, ``None``): JSON-able and YAML-able."""
        return TypeAdapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def keys(cls) -> Iterator[str]:
        """Return the dotted paths of all settings below this node, in order of declaration."""
        for name in _list_names(cls):
            kind = cls.find_kind(name)
            if isinstance(kind, type) and issubclass(kind, Record):
                yield from kind.keys()
            else:
                yield _join(cls.PATH, name)

    @classmethod
    def find_kind(cls, name: str) -> Any:
        """Return the type of a field, without the None of an optional one; other unions stay unchanged."""
        kind = cls.__pydantic_fields__[name].annotation  # type: ignore[attr-defined]
        options = [option for option in get_args(kind) if option is not type(None)]
        return options[0] if len(options) == 1 and type(None) in get_args(kind) else kind


def _join(node: str, name: Any) -> str:
    return f"{node}.{name}" if node and name != "" else f"{node}{name}"


def _list_names(cls: type[Record]) -> list[str]:
    return list(cls.__pydantic_fields__)  # type: ignore[attr-defined]


def _explain(cls: type[Record], error: ValidationError) -> str:
    """Describe the first error in one line."""
    first = error.errors(include_url=False)[0]
    name = first["loc"][0] if first["loc"] else ""
    if first["type"] in ("unexpected_keyword_argument", "invalid_key"):
        return f"{_join(cls.PATH, name)} is not a setting; {suggest_key(cls, str(name))}"
    return f"{cls.PATH}{'.' if first['loc'] and cls.PATH else ''}{explain_invalid(error, '')}"


def suggest_key(cls: type[Record], key: str) -> str:
    """Suggest the nearest valid key: a sibling, else one below, else all siblings."""
    siblings = {name: _join(cls.PATH, name) for name in _list_names(cls)}
    below = {path.rpartition(".")[2]: path for path in cls.keys()}  # noqa: SIM118 - a class method
    for names, cutoff in ((siblings, 0.6), (below, 0.8)):
        if near := difflib.get_close_matches(key, list(names), 1, cutoff):
            return f"did you mean {names[near[0]]}?"
    return f"there are {', '.join(siblings)}"


class SettingsError(SpearError):  # not a ValueError, which pydantic would wrap
    """A setting is unknown, has the wrong type or is out of range; the message names the key and the fix."""


class StateMismatchError(SpearError, ValueError):
    """A saved buffer has other settings than the one it is loaded into; the message names both values."""
