"""``spear algorithms`` and ``spear presets``: what ``spear train`` runs, what each choice needs, and what is missing.

Files are read without torch or verl, so that a listing starts quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import click
from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from spear_agents.comparison.tables import print_rows
from spear_agents.models import KNOWN, ModelListing, Place, describe_hub, describe_known
from spear_envs.cli import find_requirement
from spear_envs.data.files import format_bytes
from spear_envs.listing import find_collections, list_unreadable
from spear_sandbox.console import echo
from spear_sandbox.terminal import Console
from spear_training.algorithms.schema import Record
from spear_training.planning.memory import read_known
from spear_training.run.compose import DEFAULTS, list_algorithms, list_bases, list_choices, list_official, walk_choices
from spear_training.run.config import RunConfig


def list_presets() -> list[str]:
    """Return the names of the paper's presets, sorted; each exists in both flavours."""
    return [name.rpartition("/")[2] for name in list_official()]


@dataclass(frozen=True)
class Need:
    """Something a preset needs from outside."""

    kind: str
    """One of data, package, model, warm start, cold start, server."""
    name: str
    here: bool | None
    """None if only the user knows."""
    mend: str
    """Remedy if it is missing."""


@dataclass(frozen=True)
class PresetListing:
    """A choice of ``preset=``."""

    name: str
    title: str
    of_paper: bool
    """Whether it is an experiment of the paper; the others train small policies."""
    environment: str
    """A choice of ``environment=``."""
    env_id: str
    model: str | None
    """A choice of ``model=``; None if the user names a folder."""
    algorithm: str
    needs: tuple[Need, ...]

    @property
    def missing(self) -> tuple[Need, ...]:
        """Needs that are missing or unknown."""
        return tuple(need for need in self.needs if not need.here)


def survey_models() -> list[ModelListing]:
    """List the models, sorted by name."""
    found = []
    for name, title in list_choices("model").items():
        path = dict(walk_choices("model", name)).get("model.path")
        if path is None:
            found.append(ModelListing(name, title, Place.MADE))
        elif path in KNOWN:
            found.append(describe_known(path, name))
        else:
            found.append(describe_hub(path, name, title, read_known().get(path, {}).get("parameters")))
    return found


def survey_presets() -> list[PresetListing]:
    """List the presets, sorted by name: those of the paper and ours."""
    models = {model.hub_id or model.name: model for model in survey_models()}
    listings = []
    of_paper = list_presets()
    for name, title in list_choices("preset").items():
        values = DEFAULTS | dict(walk_choices("preset", name))
        environment, path = values["environment"], values.get("model.path")
        env_id = dict(walk_choices("environment", environment))["env.id"]
        kwargs = {key.removeprefix("env.kwargs."): value for key, value in values.items() if "env.kwargs." in key}
        model = models.get(str(path))
        policy = _list_model_needs(model, env_id, name, of_paper=name in of_paper)
        needs = (*_list_data_needs(env_id, kwargs), *policy)
        chosen = None if model is None else model.name
        listings.append(
            PresetListing(name, title, name in of_paper, environment, env_id, chosen, values["algorithm"], needs)
        )
    return listings


def _list_data_needs(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[Need]:
    """Return the official data and services that the environment's keywords refer to."""
    collections = {collection.name: collection for collection in find_collections(env_id)}
    for key, value in kwargs.items():
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            mend = f"spear {key} serve, or env.kwargs.{key}=URL"
            yield Need("server", value, None, mend)
        elif isinstance(value, str) and value in collections:
            found = collections[value]
            yield Need("data", f"{env_id} {value}", found.here, found.command)
            for package in found.packages:
                mend = f"pip install '{find_requirement(package)}'"
                yield Need("package", package, package not in list_unreadable(found), mend)


def _list_model_needs(model: ModelListing | None, env_id: str, preset: str, *, of_paper: bool) -> Iterator[Need]:
    """Return the policy of a preset: its model, else any for the paper's, and for ours a warm or a cold start.

    Ours with the prompts of a tiny policy (``extends: fit/...``) have the first.
    """
    if model is None and of_paper:
        yield Need("model", "any", None, "model=NAME, or model.path=DIR")
    elif model is None and not any(base.startswith("fit/") for base in list_bases("preset", preset)):
        yield Need(COLD_START, env_id, None, MENDS[COLD_START])
    elif model is None:
        mend = f"spear warmstart {env_id} --out DIR, then model.path=DIR"
        yield Need("warm start", env_id, None, mend)
    elif model.place is not Place.MADE:
        here = model.place is Place.CACHED
        size = "" if model.download_bytes is None else f" (about {format_bytes(model.download_bytes)})"
        yield Need("model", model.hub_id or model.name, here, f"downloaded when the training starts{size}")


NONE = "–"
COLD_START = "cold start"
MENDS = {
    "model": "a download when the training starts (spear models list); for –: model=NAME",
    "warm start": "spear warmstart ENV --out DIR, then model.path=DIR",
    COLD_START: "spear sft (docs/real-models.md), then model.path=DIR",
}
"""How to get common needs of presets."""
FOOTER = (
    "Named models run on GPUs: add cluster=1gpu, 8gpu or 4x8gpu. A dry run on a CPU",
    "needs none of this: model=tiny, or tiny_vl for pictures.",
    "A preset of the paper as the authors' code has it: preset=official/NAME.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


@click.command("algorithms")
@json_option
def algorithms(as_json: bool) -> None:
    """List the algorithms that `spear train algorithm=NAME` runs.

    Each is a file of training/spear_training/config/algorithm; docs/algorithms.md has the equations.

    \b
      spear algorithms
    """
    found = list_algorithms()
    if as_json:
        _print_json({"algorithms": [asdict(algorithm) for algorithm in found]})
        return
    table = Table("algorithm=", "in the paper", box=None, pad_edge=False)
    table.add_column("what it is", overflow="fold")
    for algorithm in found:
        table.add_row(algorithm.name, algorithm.title, algorithm.meaning)
    Console().print(table)


@click.command("presets")
@json_option
def presets(as_json: bool) -> None:
    """List the presets that `spear train preset=NAME` runs, and what each needs that is missing here.

    A preset of the paper names its model; ours train a tiny policy of `spear warmstart`, or a small model after its
    cold start with `spear sft`.

    \b
      spear presets
    """
    found = survey_presets()
    if as_json:
        _print_json({"presets": [asdict(preset) for preset in found]})
        return
    rows = [
        (
            (
                preset.name,
                preset.environment,
                preset.model or NONE,
                preset.algorithm,
                ", ".join(dict.fromkeys(need.kind for need in preset.missing)) or "nothing",
            ),
            preset.title,
        )
        for preset in found
    ]
    console = Console()
    print_rows(console, ("preset=", "env", "model", "algorithm", "missing"), rows)
    mends: dict[str, dict[str, None]] = {}  # as ordered sets
    for need in (need for preset in found for need in preset.missing):
        mends.setdefault(need.kind, {})[MENDS.get(need.kind, need.mend)] = None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for kind, ways in mends.items():
        table.add_row(Text(kind), Text("\n".join(ways)))
    console.print()
    console.print(table)
    for line in FOOTER:
        console.print(line, highlight=False)


def _print_json(facts: dict[str, Any]) -> None:
    echo(json.dumps(facts, indent=1, ensure_ascii=False))


# ---- settings --------------------------------------------------------------------------------------------------------
_LABELS = re.compile(r" \(``\w+:\w+``\)")
"""Labels of the paper's LaTeX in a docstring, which are cut out of what is listed."""


@dataclass(frozen=True)
class FieldFacts:
    """A setting as pages and ``--help`` show it."""

    key: str
    kind: str
    default: Any
    meaning: str


def describe_fields(cls: type[Record] = RunConfig, prefix: str = "") -> Iterator[FieldFacts]:
    """Yield every setting below a node, in order of declaration."""
    defaults = cls().to_mapping()
    for name, found in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
        kind = cls.find_kind(name)
        if isinstance(kind, type) and issubclass(kind, Record):
            yield from describe_fields(kind, f"{prefix}{name}.")
        else:
            meaning = (found.description or "").replace("``", "`")
            yield FieldFacts(f"{prefix}{name}", _name_kind(cls, name, found), defaults[name], meaning)


def describe_groups() -> Sequence[tuple[str, str]]:
    """Return the nodes of a configuration, and the settings that are not in one, with what they are about."""
    found = []
    for name, item in RunConfig.__pydantic_fields__.items():  # type: ignore[attr-defined]
        kind = RunConfig.find_kind(name)
        is_node = isinstance(kind, type) and issubclass(kind, Record)
        text = (kind.__doc__ or "") if is_node else item.description or ""
        line = _LABELS.sub("", text.partition("\n")[0]).replace("``", "`")
        found.append((f"{name}.*" if is_node else name, line))
    return found


def _name_kind(cls: type[Record], name: str, found: Any) -> str:
    """Return the type of a setting and its range, in words."""
    kind = cls.find_kind(name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        text = ", ".join(str(member.value) for member in kind)
    else:
        words = {int: "whole number", float: "number", bool: "true or false", str: "text"}
        numeric = "text or number" if "float" in str(kind) and "tuple" not in str(kind) else "list"
        text = words.get(kind, "mapping" if "Mapping" in str(kind) else numeric)
    limits = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    for rule in found.metadata:
        for attribute, word in limits.items():
            if hasattr(rule, attribute):
                bound = getattr(rule, attribute)
                text += f" {word} {bound if isinstance(bound, int) else format(bound, 'g')}"
    return text + (" or null" if "None" in str(found.annotation) else "")


def make_schema() -> dict[str, Any]:
    """Make the JSON schema of a file of YAML, for editors."""
    schema = TypeAdapter(RunConfig).json_schema()
    properties = schema["$defs"]["RunConfig"]["properties"] if "$ref" in schema else schema["properties"]
    properties["extends"] = {"type": "string", "description": "Preset that this file builds on."}
    properties["choose"] = {"type": "object", "description": "Choices of groups, as on the command line."}
    return schema
