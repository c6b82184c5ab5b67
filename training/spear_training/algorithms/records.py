"""Frozen records of settings: read from nested mappings, checked, and written back."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from spear_training.algorithms.errors import SettingsError

R = TypeVar("R", bound="Record")

_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def number(
    default: Any, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> Any:
    """A numeric field of a :class:`Record` with its range; ``at_least`` and ``at_most`` belong to the range."""
    return field(default=default, metadata={"at_least": at_least, "above": above, "at_most": at_most})


@dataclass(frozen=True)
class Record:
    """Base of a settings node. Fields are numbers, booleans, enums, ``None`` where optional, or further records."""

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            path = f"{self.PATH}.{item.name}"
            value = _coerce(path, getattr(self, item.name), hints[item.name])
            _check_range(path, value, item)
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Hold the fields against one another; overridden where they depend on each other."""

    @classmethod
    def from_mapping(cls: type[R], mapping: Mapping[str, Any] | None) -> R:
        """Build the record from a nested mapping; what is not mentioned keeps its default.

        Raises:
            SettingsError: a key does not exist (the message names the nearest one), or a value is of the wrong type or
                out of range.
        """
        if mapping is None:
            return cls()
        if not isinstance(mapping, Mapping):
            raise SettingsError(f"{cls.PATH} must be a mapping of settings, not {mapping!r}")
        hints = get_type_hints(cls)
        names = {item.name for item in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            if key not in names:
                raise SettingsError(f"{cls.PATH}.{key} is not a setting; {_suggest(cls, str(key))}")
            kind = hints[key]
            values[key] = kind.from_mapping(value) if _is_record(kind) else value
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The record as nested plain values (numbers, booleans, strings, ``None``): JSON-able and YAML-able."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def keys(cls) -> Iterator[str]:
        """Dotted paths of all settings below this node, in order of declaration."""
        hints = get_type_hints(cls)
        for item in fields(cls):
            if _is_record(hints[item.name]):
                yield from hints[item.name].keys()
            else:
                yield f"{cls.PATH}.{item.name}"


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Record)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_mapping()
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, Enum) else value


def _suggest(cls: type[Record], key: str) -> str:
    """The nearest valid key: a sibling, or else one anywhere below, or else all siblings."""
    siblings = [item.name for item in fields(cls)]
    near = difflib.get_close_matches(key, siblings, 1)
    if near:
        return f"did you mean {cls.PATH}.{near[0]}?"
    below = {path.rpartition(".")[2]: path for path in cls.keys()}  # noqa: SIM118 - a class method, no mapping
    near = difflib.get_close_matches(key, list(below), 1, 0.8)
    if near:
        return f"did you mean {below[near[0]]}?"
    return f"there are {', '.join(siblings)}"


def _coerce(path: str, value: Any, kind: Any) -> Any:
    """``value`` as an instance of ``kind``, where that loses nothing; else a SettingsError naming the path."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if _is_record(kind):
        if not isinstance(value, kind):
            raise SettingsError(f"{path} must be a {kind.__name__}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise SettingsError(f"{path} must be a list of names, not {value!r}")
        return tuple(value)
    if get_origin(kind) is not None:
        if not isinstance(value, Mapping):
            raise SettingsError(f"{path} must be a mapping, not {value!r}")
        return dict(value)
    if kind is str:
        return "none" if value is None else str(value)
    if issubclass(kind, Enum):
        return _coerce_choice(path, value, kind)
    if kind is bool:
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        if not isinstance(value, bool):
            raise SettingsError(f"{path} must be true or false, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(f"{path} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise SettingsError(f"{path} must be finite, not {value!r}")
    if kind is int and value != int(value):
        raise SettingsError(f"{path} must be a whole number, not {value!r}")
    return kind(value)


def _coerce_choice(path: str, value: Any, kind: type[Enum]) -> Enum:
    # YAML reads a bare `off` as false, and `null` is a natural way to say none.
    names = [member.value for member in kind]
    if value is False and "off" in names:
        value = "off"
    elif value is None and "none" in names:
        value = "none"
    try:
        return kind(value)
    except ValueError:
        near = difflib.get_close_matches(str(value), names, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(names)}"
        raise SettingsError(f"{path} cannot be {value!r}; {hint}") from None


def _check_range(path: str, value: Any, item: Field[Any]) -> None:
    limits = item.metadata
    if value is None or not limits:
        return
    low, above, high = limits.get("at_least"), limits.get("above"), limits.get("at_most")
    if low is not None and value < low:
        raise SettingsError(f"{path} must be at least {low}, not {value}")
    if above is not None and value <= above:
        raise SettingsError(f"{path} must be above {above}, not {value}")
    if high is not None and value > high:
        raise SettingsError(f"{path} must be at most {high}, not {value}")
