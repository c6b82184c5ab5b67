"""Composition of a :class:`RunConfig` from a command line: presets, other choices, files of YAML and ``key=value``."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from spear_envs.core.errors import SpearError, first_line
from spear_envs.core.parsing import mend_text
from spear_envs.data.files import YAML_MISREAD, UniqueKeys, read_yaml_text, require_few_values
from spear_training.algorithms.schema import Record, suggest_key
from spear_training.run.config import RunConfig, flatten

GROUPS = ("preset", "algorithm", "model", "cluster", "environment")
DEFAULTS = {"algorithm": "drbot_spear", "cluster": "cpu", "environment": "sokoban"}
"""Choices of the groups for which neither a file nor the command line has one."""
AFTER = ("algorithm", "model", "cluster")
"""Groups whose choices a file of the user's may change, and that change a file where they come after it."""
CONFIG = Path(__file__).parents[1] / "config"
"""A folder for each group, with a file for each choice."""
DRY_RUNS = ("tiny", "tiny_vl")
"""Models that reduce a training to two steps, whatever a file says."""
OFFICIAL = "official"
"""Folder of presets as the authors' published code has them."""
ORDER = ("grpo", "rloo", "ppo", "gigpo", "gigpo_nostd", "drbot", "drbot_gigpo")
"""First in a list of algorithms: the base algorithms in the order of the paper's table (``tab:ALFWorldwebshop``)."""
DEEPEST = 20
"""Deepest nesting of mappings in a file of settings; a deeper file is refused."""
EXTENDS, CHOOSE, BY_ALGORITHM = "extends", "choose", "by_algorithm"
"""Keys of a file besides those of a :class:`RunConfig`: files that it builds on, choices of other groups, and in a
preset values for algorithms, by a pattern of their names (``*_spear``).
"""
_LABELS = re.compile(r" \((?:tab|ablation):\w+\)")
"""Labels of the paper's LaTeX in a comment of a file, which are cut out of its description."""
Values = dict[str, Any]


class _Loader(UniqueKeys, yaml.SafeLoader):
    """YAML with the scalars of version 1.2: 1e-6 is a number, and ``off``, ``1_000`` and ``1:30`` are texts.

    So is ``010``, which is eight in version 1.1 and ten in 1.2.
    """

    yaml_implicit_resolvers: ClassVar[Any] = {}  # type: ignore[misc]


for _tag, _form, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        None,
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_form})$"), _first or list("-+.0123456789")
    )


def _read_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@dataclass(frozen=True)
class Request:
    """Request of a command line.

    Attributes:
        config: the configuration.
        choices: the choice of each group, if there is one.
        given: dotted keys that the command line or a file of the user sets, which nothing else may change.
    """

    config: RunConfig
    choices: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()


def compose(words: Sequence[str]) -> Request:
    """Read ``GROUP=CHOICE``, ``FILE.yaml`` and ``KEY=VALUE``; later ones win over earlier ones of the same kind.

    Environment, preset, algorithm, what the preset has for that algorithm, model and cluster are laid over one another
    in this order, then files, with an algorithm, model or cluster that comes after one laid over it, then what a dry
    run reduces (``model=tiny``), then keys. A choice on the command line wins over one in a file. Where another
    environment is named, the keywords of the one before are dropped. Raises SpearError for an unknown choice or key,
    which names the nearest one, or a wrong value.
    """
    choices: dict[str, str] = {}
    wanted: dict[str, str] = {}
    files: list[Values] = []
    over: list[Values | tuple[str, str]] = []  # files, and choices of groups that come after one
    keys: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and word.endswith((".yaml", ".yml")):
            files.append(_read_own(Path(os.path.expanduser(word)), wanted))
            over.append(files[-1])
        elif not equals or word.startswith("-"):
            raise SpearError(f"{word!r} is neither an option, a file of YAML nor KEY=VALUE (see `spear train --help`)")
        elif word.startswith(("+", "~")):
            raise SpearError(f"{word!r}: write KEY=VALUE, without {word[0]}")
        elif name in GROUPS:
            choices[name] = value
            if files and name in AFTER and value != "null":
                check_choice(name, value)
                over.append((name, value))
        else:
            keys.append(word)
    chosen, layers, of_preset = _list_layers(wanted | choices)
    given = [_parse_key(word) for word in keys]
    above: list[Values] = []
    for one in over:
        above += _read_choice(*one, of_preset) if isinstance(one, tuple) else [one]
    merged = _lay(_merge(*layers), _merge(*above))
    merged = _lay(_lay(merged, _reduce(chosen, merged)), _merge(*given))
    check_plain(merged)
    own = frozenset(key for one in (*files, *given) for key, _ in flatten(one))
    return Request(RunConfig.from_mapping(merged), chosen, own)


def check_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """Raise SpearError for values and keys that a configuration cannot hold: deep ones, dates, bytes, references, NaN.

    A run with NaN could not be resumed: it differs from itself. Larger integers do not fit into a float.
    """
    if depth > DEEPEST:
        raise SpearError(f"{key[:60]}... is nested more than {DEEPEST} times")
    if isinstance(value, str) and "${" in value:
        raise SpearError(f"{key}={value!r}: a reference ${{...}} is not resolved, write the value")
    if isinstance(value, str) and ("\0" in value or value != mend_text(value)):
        raise SpearError(f"{key}={value!r} must be a text of UTF-8 without the character 0")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            place = f"{key}.{name}" if key else str(name)
            check_plain(name, f"the key {place!r}", depth + 1)
            check_plain(inner, place, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            check_plain(inner, key, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise SpearError(f"{key}={value!r} must be a number, a text, true, false, null, a list or a mapping")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpearError(f"{key}={value!r} must be a finite number")
    elif isinstance(value, int) and abs(value) >= 2**64:
        raise SpearError(f"{key}={value!r:.40} must be a whole number of at most 64 bits")


def _lay(below: Values, above: Values) -> Values:
    """Return ``above`` merged over ``below``; keywords of one environment are not passed on to another."""
    env, other = below.get("env"), above.get("env")
    if isinstance(env, Mapping) and isinstance(other, Mapping) and other.get("id", env.get("id")) != env.get("id"):
        below = {**below, "env": {key: value for key, value in env.items() if key != "kwargs"}}
    return _merge(below, above)


def _reduce(chosen: Mapping[str, str], values: Values) -> Values:
    """Return the settings that a dry run reduces: its model's, and what a tiny policy is shown of the environment."""
    if chosen.get("model") not in DRY_RUNS:
        return {}
    layers, _ = read_layers("model", chosen["model"])
    fit, environment = f"{chosen['model']}_{chosen.get('environment')}", chosen.get("environment")
    if environment is not None and (CONFIG / "fit" / f"{fit}.yaml").is_file():
        own = _merge(*read_layers("environment", environment)[0])
        if own["env"]["id"] == values["env"]["id"]:  # not an environment of the user's
            layers += read_layers("fit", fit)[0]
    return _merge(*layers)


def _list_layers(choices: Mapping[str, str]) -> tuple[dict[str, str], list[Values], list[Values]]:
    """Return the choice of each group, the values of these choices in order, and those of the preset by algorithm."""
    preset = choices.get("preset", "null")
    layers: list[Values] = []
    wanted: dict[str, str] = {}
    if preset != "null":
        check_choice("preset", preset)
        layers, wanted = read_layers("preset", preset)
    chosen = DEFAULTS | wanted | dict(choices)
    chosen = {group: name for group, name in chosen.items() if name != "null"}
    of_preset = [layer.pop(BY_ALGORITHM) for layer in layers if BY_ALGORITHM in layer]
    before: list[Values] = []
    after: list[Values] = []
    for group in ("environment", "algorithm", "model", "cluster"):
        if group in chosen:
            check_choice(group, chosen[group])
            (before if group == "environment" else after).extend(_read_choice(group, chosen[group], of_preset))
    return chosen, [*before, *layers, *after], of_preset


def _read_choice(group: str, name: str, of_preset: Sequence[Values]) -> list[Values]:
    """Return the values of a choice; those of an algorithm are followed by what the preset has for it."""
    layers = read_layers(group, name)[0]
    if group == "algorithm":
        layers += [values for by in of_preset for pattern, values in by.items() if fnmatch.fnmatch(name, pattern)]
    return layers


def read_layers(group: str, name: str) -> tuple[list[Values], dict[str, str]]:
    """Return the values of a choice after those of the files that it extends, and what these choose of other groups."""
    values = dict(read_config(CONFIG / group / f"{name}.yaml"))
    values.pop(EXTENDS, None)
    choices = values.pop(CHOOSE, {})
    layers: list[Values] = []
    wanted: dict[str, str] = {}
    for base in list_bases(group, name):
        place, _, rest = base.partition("/")
        inside = rest and (CONFIG / place).is_dir()  # `model/tiny`, or a file of the same group, as `base/agent`
        more, found = read_layers(place, rest) if inside else read_layers(group, base)
        layers += more
        wanted |= found
    return [*layers, values], wanted | choices


def list_bases(group: str, name: str) -> list[str]:
    """Return the files that a choice extends, as it names them."""
    extends = read_config(CONFIG / group / f"{name}.yaml").get(EXTENDS, [])
    return [extends] if isinstance(extends, str) else list(extends)


def _read_own(file: Path, choices: dict[str, str]) -> Values:
    """Return the values of a file of the user, whose preset and choices are added to ``choices``."""
    values = dict(read_config(file))
    extends, wanted = values.pop(EXTENDS, None), values.pop(CHOOSE, {})
    if BY_ALGORITHM in values:
        raise SpearError(f"{file}: only presets have {BY_ALGORITHM}; write the values for your algorithm themselves")
    try:  # so that an error names this file
        for key in (key for key, value in flatten(values) if value not in ({}, None)):
            _check_key(key)
        RunConfig.from_mapping(_merge(values))
    except SpearError as error:
        raise SpearError(f"{file}: {error}") from error
    if extends is not None:
        if not isinstance(extends, str):
            raise SpearError(f"{file}: {EXTENDS} names one preset, not {extends!r}")
        choices["preset"] = extends.removeprefix("preset/")
    if not isinstance(wanted, Mapping) or wanted.keys() - set(GROUPS):
        raise SpearError(f"{file}: {CHOOSE} takes {', '.join(GROUPS)}, not {wanted!r}")
    choices.update({group: "null" if name is None else str(name) for group, name in wanted.items()})
    return values


def _merge(*layers: Mapping[str, Any]) -> Values:
    """Return the nested mappings merged, later ones over earlier ones."""
    merged: Values = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            if isinstance(value, Mapping):
                value = _merge(below, value) if isinstance(below, Mapping) else _merge(value)
            merged[key] = value
    return merged


def _parse_key(word: str) -> Values:
    """Return the nested value of ``a.b=VALUE``, which is read as YAML."""
    key = word.partition("=")[0]
    _check_key(key)
    value = read_value(word)
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def read_value(word: str) -> Any:
    """Return the value of ``KEY=VALUE``, read as YAML. Raises SpearError if it is not."""
    text = word.partition("=")[2]
    if text.startswith("~/"):
        text = f"{Path.home()}{text[1:]}"
    try:
        require_few_values(text)
        return _read_yaml(text)
    except (yaml.YAMLError, *YAML_MISREAD) as error:
        raise SpearError(f"{word!r} cannot be read as YAML: {first_line(error)}") from error


def quote_value(text: str) -> str:
    """Quote ``text``, such as a path, as the value of ``KEY=VALUE``."""
    return "'" + text.replace("'", "''") + "'"


def _check_key(key: str) -> None:
    """Raise SpearError, with the nearest key, unless ``key`` is a setting or below a node of free keywords."""
    node: Any = RunConfig
    parts = key.split(".")
    for position, name in enumerate(parts):
        if name not in node.__pydantic_fields__:
            break
        node = node.find_kind(name)
        if not (isinstance(node, type) and issubclass(node, Record)):
            if position == len(parts) - 1 or "Mapping" in str(node):
                return
            break
    else:
        raise SpearError(f"{key} is a group of settings: {', '.join(node.__pydantic_fields__)}")
    from spear_training.run.to_verl import find_refusal, name_ours  # late: listings are made without OmegaConf

    known = list(RunConfig.keys())
    verl = name_ours(key)  # who comes from verl's command lines
    if verl == f"verl.{key}" and (reason := find_refusal(key)):
        raise SpearError(f"{key!r} is not a setting: {reason}")
    near = [verl] if verl else [one for one in known if one.endswith(f".{key}")][:1]
    tail = parts[-1]
    near = near or difflib.get_close_matches(key, [*GROUPS, *known], 1, cutoff=0.6)
    near = near or [one for one in known if one.rpartition(".")[2] == tail][:1]
    hint = f"did you mean {near[0]}?" if near else suggest_key(RunConfig, tail)
    raise SpearError(f"{key!r} is not a setting; {hint}")


# ---- choices ---------------------------------------------------------------------------------------------------------
def find_files(group: str) -> dict[str, Path]:
    """Return the files of the choices of one of :data:`GROUPS`, sorted by name."""
    return dict(sorted((path.stem, path) for path in (CONFIG / group).glob("*.yaml")))


def list_official() -> list[str]:
    """Return the presets as the authors' published code has them."""
    return sorted(f"{OFFICIAL}/{path.stem}" for path in (CONFIG / "preset" / OFFICIAL).glob("*.yaml"))


def list_choices(group: str) -> dict[str, str]:
    """Return the choices of one of :data:`GROUPS` with the comments of their files, sorted by name."""
    return {
        name: _LABELS.sub("", " ".join(read_comment(file)).partition(". ")[0].rstrip(".:"))
        for name, file in find_files(group).items()
    }


def check_choice(group: str, choice: str) -> None:
    """Raise SpearError, with the valid choices, unless ``group`` offers ``choice``."""
    known = [*find_files(group), *(list_official() if group == "preset" else ())]
    if choice not in known:
        near = difflib.get_close_matches(choice, known, 1)
        hint = f"did you mean {near[0]}? There are" if near else "choose"
        raise SpearError(f"there is no {group} {choice!r}; {hint} {', '.join(known)}")


def read_comment(file: Path) -> list[str]:
    """Return the lines of the comment at the start of a file, up to an empty one."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.strip() == "#":
            break
        lines.append(line.lstrip("# "))
    return lines


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its name on the command line, its name in the paper, and its meaning."""

    name: str
    title: str
    meaning: str


def list_algorithms() -> list[Algorithm]:
    """List the algorithms, each base one followed by its extensions: files start with ``# TITLE: MEANING``."""
    files, found = find_files("algorithm"), []
    for name in sorted(files, key=_rank):
        title, _, meaning = next(iter(read_comment(files[name])), name).partition(": ")
        found.append(Algorithm(name, title, meaning))
    return found


def _rank(name: str) -> tuple[int, str]:
    bases = [base for base in ORDER if f"{name}_".startswith(f"{base}_")]
    return (ORDER.index(max(bases, key=len)) if bases else len(ORDER), name)


def read_config(file: Path) -> Mapping[str, Any]:
    """Read a file without what it extends. Raises SpearError if it is not a mapping in YAML."""
    return _read_ours(file) if file.is_relative_to(CONFIG) else _read_file(file)


@lru_cache(maxsize=256)
def _read_ours(file: Path) -> Mapping[str, Any]:
    return _read_file(file)


def _read_file(file: Path) -> Mapping[str, Any]:
    return parse_config(file, lambda: read_yaml_text(file))


def parse_config(place: Path | str, read: Callable[[], str]) -> Mapping[str, Any]:
    """Parse what ``read`` returns of ``place``, with the errors of :func:`~spear_envs.data.files.read_yaml_text`.

    Raises SpearError if it is not a mapping in YAML.
    """
    try:
        plain = _read_yaml(read())
    except (OSError, UnicodeError) as error:
        raise SpearError(f"{place} cannot be read: {error}") from None
    except (yaml.YAMLError, *YAML_MISREAD) as error:
        raise SpearError(f"{place} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise SpearError(f"{place} is not a mapping of settings")
    return plain


def walk_choices(group: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a choice, what it extends included, and the choices of other groups."""
    layers, wanted = read_layers(group, name)
    yield from wanted.items()
    yield from flatten(_merge(*layers))
