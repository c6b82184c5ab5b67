"""Panels, fixed tasks with a protocol: ``spear panel``."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import click

from spear_agents.comparison.tables import print_rows
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.options import TRUST
from spear_agents.evaluation.settings import EngineKind, EvalSettings, PlayedPanel
from spear_agents.play.prompting import Overlong
from spear_agents.play.trajectory import Layout
from spear_envs.core import PromptContext, SpearEnv, SpearError, Task, canonical_json
from spear_envs.core.errors import name_error, suggest_name
from spear_envs.core.making import make_env, require_harmless
from spear_envs.data.files import read_regular, write_json
from spear_sandbox.console import FilePath, echo
from spear_sandbox.errors import show_entry
from spear_sandbox.terminal import Console

FORMAT = 2
_SOURCES = ("path", "asin", "row")
"""Keys of a task's content that name it in the data set of its publisher: a game's folder, a product, a row."""
SCORING = (
    "success: share of episodes won, the samples of a task averaged first, the mean over tasks; episodes that a fault"
    " of the machinery cut short count as missing and are played again"
)


@dataclass(frozen=True)
class Protocol:
    """How the tasks of a panel are played."""

    samples: int = 1
    """Episodes of each task."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    """Longest response; None for the model's own limit."""
    template: str = "default"
    """Prompt template of the environment."""
    layout: str = Layout.PER_TURN.value
    history: int = 2
    """Earlier turns shown in a prompt."""
    scoring: str = SCORING
    tasks: str = "all"
    """Tasks of the split: all, or some as in ``spear eval --tasks``."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens of a local model; None for what its context has room for."""
    max_row_tokens: int | None = None
    """Longest conversation after its first prompt, which ``max_prompt_tokens`` then limits alone."""
    overlong: str = Overlong.END.value
    method: str = Method.PLAIN.value
    trials: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise SpearError for a value of another type or out of range: a panel may come from anybody."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and (value is not None or getattr(Protocol, name) is not None):
                raise SpearError(f"{name}={value!r} must be a whole number from {least}")
        for name, low, high, allowed in (
            ("temperature", 0.0, math.inf, "from 0"),
            ("top_p", 1e-9, 1.0, "above 0, at most 1"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise SpearError(f"{name}={value!r} must be a number {allowed}")
        for name in ("template", "layout", "tasks", "overlong", "method", "scoring"):
            if not isinstance(getattr(self, name), str):
                raise SpearError(f"{name}={getattr(self, name)!r} must be a text")


_LEAST = {"samples": 1, "top_k": 0, "history": 0, "seed": 0, "trials": 1}
_LEAST |= dict.fromkeys(("max_tokens", "max_prompt_tokens", "max_row_tokens"), 1)
"""Whole numbers of a protocol, and the least of each."""

_ADDED = ("tasks", "max_prompt_tokens", "max_row_tokens", "overlong", "method", "trials", "seed")
"""Fields that are written only if they are not the default, so that the digests of earlier panels hold."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "template", "layout", "history")
_SETTINGS = {name: name for name in (*_SAMPLING, *_ADDED)} | {"episodes_per_task": "samples"}
"""Fields of the settings of a run, and those of a protocol that decide them."""
_KINDS: Mapping[str, type[Enum]] = {"layout": Layout, "overlong": Overlong, "method": Method}
_LIMITS = ("max_prompt_tokens", "max_row_tokens")
"""Settings in tokens of a local model."""
_SHOWN = 40
"""Characters of an override's value in the name of a panel; a longer one is followed by its digest."""


@dataclass(frozen=True)
class Panel:
    """A list of tasks and its protocol; :func:`export_panel` writes it with a checksum of each task."""

    name: str
    title: str
    """What a result on it means, in a line."""
    env_id: str
    split: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=Protocol)
    data: str = ""
    """Data to fetch first; empty if everything is embedded."""

    def __post_init__(self) -> None:
        """Raise SpearError for a value of another type."""
        for name in ("name", "title", "env_id", "split", "data"):
            if not isinstance(getattr(self, name), str):
                raise SpearError(f"{name}={getattr(self, name)!r} must be a text")
        if not isinstance(self.env_kwargs, Mapping):
            raise SpearError(f"env_kwargs={self.env_kwargs!r} must be a mapping")

    def make_settings(self, settings: EvalSettings) -> EvalSettings:
        """Return the settings of a player, with those of the panel.

        Limits of prompts and conversations are in tokens of a model, and stay the player's if its tokens are bytes: a
        script reads no tokens, and a server has a context of its own.
        """
        decided = {name: getattr(self.protocol, field_name) for name, field_name in _SETTINGS.items()}
        decided |= {name: kind(decided[name]) for name, kind in _KINDS.items()}
        decided["max_tokens"] = decided["max_tokens"] or settings.max_tokens
        if not settings.engine.has_folder:
            for name in _LIMITS:
                del decided[name]
        return replace(settings, env_id=self.env_id, split=self.split, env_kwargs=self.env_kwargs, **decided)

    def override(self, settings: EvalSettings, given: Collection[str]) -> tuple[Panel, dict[str, Any]]:
        """Return the panel that the ``given`` fields of ``settings`` make of this one, and the values that differ.

        Keywords of the environment in ``settings`` are laid over the panel's. A method that needs a conversation brings
        that layout, and reflexion its trials. An agent program, which prompts in its own way, and a server's native
        tools, which have their own template, always make another panel. Without a difference it is the same one.
        """
        wanted = {name for name in _SETTINGS if name in given} | ({"trials"} if "method" in given else set())
        values = {name: _plain(getattr(settings, name)) for name in _SETTINGS if name in wanted}
        if settings.in_conversation and "layout" not in wanted:
            values["layout"] = Layout.CONVERSATION.value
        # A player of bytes does not take limits from the panel: one of its own is an override whatever its number.
        own_limits = () if settings.engine.has_folder else _LIMITS
        values = {
            name: value
            for name, value in values.items()
            if value != (None if name in own_limits else getattr(self.protocol, _SETTINGS[name]))
        }
        split = settings.split if "split" in given and settings.split else self.split
        own, given_kwargs = self.env_kwargs, sorted(settings.env_kwargs.items())  # the order must not change the name
        kwargs = {key: value for key, value in given_kwargs if key not in own or own[key] != value}
        changes = ({"split": split} if split != self.split else {}) | values
        changes |= {f"env_kwargs.{key}": value for key, value in kwargs.items()}
        changes |= {"agent": settings.agent} if settings.agent else {}
        changes |= {"native_tools": True} if settings.server is not None and settings.server.tools else {}
        if not changes:
            return self, {}
        protocol = replace(self.protocol, **{_SETTINGS[name]: value for name, value in values.items()})
        name = f"{self.name} with {describe_overrides(changes)}"
        env_kwargs = {**self.env_kwargs, **kwargs}
        return replace(self, name=name, split=split, env_kwargs=env_kwargs, protocol=protocol), changes

    def settle(self, settings: EvalSettings, given: Collection[str]) -> EvalSettings:
        """Return the settings of a player on this panel, or on the one that the ``given`` fields make of it.

        They name the panel and its digest. Raises SpearError for missing data.
        """
        chosen, changes = self.override(settings, given)
        played = PlayedPanel(chosen.name, str(write_panel(chosen)["digest"]), changes)
        return replace(chosen.make_settings(settings), panel=played)

    def describe_tasks(self) -> dict[str, Any]:
        """Describe the tasks as this code makes them: fingerprint, turn limit, digest of prompts, and each instance.

        Raises:
            SpearError: the data is missing, or the tasks are made on demand.
        """
        with closing(make_env(self.env_id, self.split, self.env_kwargs)) as env:
            if not env.tasks.bounded:
                raise SpearError(
                    f"the split {self.split} of {self.env_id} has {len(env.tasks):,} generated tasks, too many for the "
                    "list of a panel: take another split"
                )
            return {
                "fingerprint": env.tasks.fingerprint,
                "max_turns": env.max_turns,
                "prompt_digest": self._digest_prompts(env),
                "tasks": [_describe_instance(task) for task in env.tasks],
            }

    def _digest_prompts(self, env: SpearEnv[Any]) -> str:
        """Return the SHA-256 of the prompts of the first ten tasks: a changed prompt makes another panel."""
        if self.protocol.template not in env.templates:
            raise SpearError(f"panel {self.name} needs the prompt template {self.protocol.template!r} of {self.env_id}")
        template = env.templates[self.protocol.template]
        digest = hashlib.sha256((template.system() or "").encode())
        for task in list(env.tasks)[:10]:
            observation, info = env.reset(seed=0, options={"task": task.id})
            text = observation if isinstance(observation, str) else observation["text"]
            context = PromptContext(info["instruction"], text, info["admissible_actions"], (), 1, env.max_turns)
            digest.update(template.render(context).encode("utf-8", "replace"))
        return digest.hexdigest()


def _describe_instance(task: Task) -> dict[str, str]:
    """Return a task's id, subtask, name in the publisher's data, and the SHA-256 of its content as canonical JSON.

    The content itself may be under another licence, so that it is not part of a panel's file.
    """
    names = [str(task.content[key]) for key in _SOURCES if key in task.content]
    digest = hashlib.sha256(canonical_json(dict(task.content)).encode()).hexdigest()
    return {"id": task.id, "subtask": task.subtask, **({"source": names[0]} if names else {}), "sha256": digest}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def describe_overrides(overrides: Mapping[str, Any]) -> str:
    """Format the overrides of a panel, such as ``temperature=1.0, max_turns=3``."""
    lines = []
    for name, value in overrides.items():
        text = str(value)
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({digest})"
        lines.append(f"{name.removeprefix('env_kwargs.')}={shown}")
    return ", ".join(lines)


def digest_panel(written: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a written panel without its digest."""
    return hashlib.sha256(canonical_json({k: v for k, v in written.items() if k != "digest"}).encode()).hexdigest()


def export_panel(panel: Panel, path: Path) -> str:
    """Write a panel with its tasks as JSON; return its digest. Raises SpearError for missing data or a bad path."""
    written = write_panel(panel)
    write_json(path, written)
    return str(written["digest"])


def write_panel(panel: Panel) -> dict[str, Any]:
    """Return a panel with its tasks and digest as plain values."""
    named = asdict(panel)
    named["protocol"] = {
        name: value
        for name, value in named["protocol"].items()
        if name not in _ADDED or value != getattr(Protocol, name)
    }
    # Through JSON, so that readers get the same digest.
    written = json.loads(json.dumps({"format": FORMAT, **named, **panel.describe_tasks()}))
    return written | {"digest": digest_panel(written)}


def read_panel(path: Path, *, trust: bool = False) -> tuple[Panel, dict[str, Any]]:
    """Read a panel, and the content of its file.

    ``trust``: its environment may run, reach and read what the file names, see
    :func:`~spear_envs.core.making.require_harmless`.

    Raises SpearError if it is not a panel, was changed afterwards, or names such things.
    """
    try:
        written = json.loads(read_regular(path))
        if written["format"] != FORMAT:
            raise SpearError(f"{path} has format {written['format']!r}, this code reads {FORMAT}: export it again.")
        known = {each.name for each in fields(Panel)} - {"protocol"}
        panel = Panel(**{name: written[name] for name in known}, protocol=Protocol(**written["protocol"]))
        panel.make_settings(EvalSettings(panel.env_id, EngineKind.HF, model="any"))
        if not {"fingerprint", "max_turns", "prompt_digest"} <= written.keys():
            raise ValueError("it lacks fingerprint, max_turns or prompt_digest")
        if not isinstance(written["tasks"], list) or not all(
            isinstance(task.get("id"), str) and isinstance(task.get("sha256"), str) for task in written["tasks"]
        ):
            raise ValueError("its tasks must be a list of objects with id and sha256")
        ids = Counter(task["id"] for task in written["tasks"])
        if twice := next((name for name, count in ids.items() if count > 1), None):
            raise ValueError(f"the id {twice!r} stands twice")
        if written["digest"] != digest_panel(written):
            raise SpearError(f"{path} was changed after it was written: its digest does not match. Fetch it again.")
        if not trust and panel != OFFICIAL.get(panel.name):  # what this code names itself is known
            require_harmless(panel.env_id, {**panel.env_kwargs, "split": panel.split}, str(path))
        if (own := OFFICIAL.get(panel.name, panel)) != panel:
            facts, wanted = ({**asdict(one), **asdict(one.protocol)} for one in (panel, own))
            key = next(key for key, value in facts.items() if value != wanted[key] and key != "protocol")
            raise SpearError(
                f"{path} bears the name of the official panel {panel.name}, whose {key} is {wanted[key]!r}, not"
                f" {facts[key]!r}: give it another name"
            )
    except OSError as error:
        raise SpearError(f"{path} cannot be read: {error.strerror}") from error
    except SpearError as error:
        raise error if str(path) in str(error) else SpearError(f"{path}: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise SpearError(f"{path} is not a panel ({name_error(error)}): spear panel export writes one") from error
    return panel, written


def find_differences(written: Mapping[str, Any], panel: Panel) -> list[str]:
    """List the differences between a written panel and the installed code's."""
    made = json.loads(json.dumps(panel.describe_tasks()))
    lines = [
        f"{name} is {made[name]!r} here and {written[name]!r} in the file"
        for name in ("fingerprint", "max_turns", "prompt_digest")
        if made[name] != written[name]
    ]
    return [*lines, *_compare_instances(made["tasks"], written["tasks"])]


Instances = Sequence[Mapping[str, Any]]


def _compare_instances(here: Instances, there: Instances) -> list[str]:
    """List the instances of a file that are missing ``here`` or differ, and those that only this code has.

    They are matched by content, since an id is a place in the task set: without one game, all after it have other ids.
    """
    lines: list[str] = []
    named: dict[str, list[str]] = {}
    for task in _subtract(here, there):
        named.setdefault(str(task.get("source", task["id"])), []).append(_name_instance(task))
    for task in _subtract(there, here):
        same = named.get(str(task.get("source", task["id"])))
        lines.append(f"{_name_instance(task)} {'has other content' if same else 'is missing'} here")
        if same:
            same.pop(0)
    lines += [f"{name} is not in the file" for names in named.values() for name in names]
    if not lines:
        pairs = zip(here, there, strict=True)
        lines = [f"{_name_instance(task)} has another place or id here" for other, task in pairs if task != other]
    return lines


def _subtract(tasks: Instances, others: Instances) -> Iterator[Mapping[str, Any]]:
    """Yield the instances without their like among the others; of several alike, the last."""

    def describe(task: Mapping[str, Any]) -> str:
        return canonical_json({name: value for name, value in task.items() if name != "id"})

    left = Counter(map(describe, others))
    for task in tasks:
        left[describe(task)] -= 1
        if left[describe(task)] < 0:
            yield task


def _name_instance(task: Mapping[str, Any]) -> str:
    return f"{task['id']} ({task['source']})" if "source" in task else str(task["id"])


_ALFWORLD, _WEBSHOP, _SOKOBAN = "spear/ALFWorld-v0", "spear/WebShop-v0", "spear/Sokoban-v1"
_SEARCH, _CODE = "spear/SearchR1-v0", "spear/CodeInterpreter-v0"
_TEXT, _PUBLISHED = {"modality": "text"}, {"dataset": "official"}
_GET_ALFWORLD, _GET_CODE = "spear data get alfworld", "spear data get code"
_CONVERSATION = Layout.CONVERSATION.value
_SERVICE = "http://127.0.0.1:8000"
"""Where a retrieval service over wiki-18 is expected."""


def _play_as_paper(max_tokens: int, max_prompt_tokens: int) -> Protocol:
    """Return the protocol of the paper's agents, with verl-agent's prompts."""
    return Protocol(temperature=0.4, max_tokens=max_tokens, max_prompt_tokens=max_prompt_tokens, template="verl_agent")


def _make_household(name: str, split: str, title: str) -> Panel:
    keywords = {**_PUBLISHED, "max_turns": 50, "on_malformed": "peer"}
    return Panel(name, title, _ALFWORLD, split, keywords, _play_as_paper(512, 2_048), _GET_ALFWORLD)


def _make_questions(dataset: str, title: str, data: str) -> Panel:
    """Return a panel played as Search-R1 validates: one text, which goes on, and at most 500 tokens a turn."""
    how = Protocol(temperature=0.0, max_tokens=500, template="search_r1", layout=_CONVERSATION)
    keywords = {"dataset": dataset, "preset": "search_r1", "retriever": _SERVICE}
    title = f"{title}, a local service over wiki-18"
    return Panel(f"search-{dataset}", title, _SEARCH, "test", keywords, how, data)


def _make_mathematics(year: int, context: str, turns: int, tokens: int) -> Panel:
    how = Protocol(30, 1.0, 0.6, 0, tokens, layout=_CONVERSATION, max_prompt_tokens=2_048, max_row_tokens=tokens)
    title = f"30 problems with a code interpreter in {context.upper()} tokens, as in the paper"
    keywords = {"dataset": f"aime-{year}", "max_turns": turns}
    return Panel(f"aime-{year}-paper-{context}", title, _CODE, "test", keywords, how, f"{_GET_CODE} aime-{year}")


# Protocols of the paper's tab:hyperparams_value, as in the presets of training, whose validation plays 128 tasks; these
# play the whole split. The paper's agents ran on verl-agent: its prompts, and what it plays of a response.
_PAPER = (
    _make_household("alfworld-paper", "valid_seen", "the 140 games of valid_seen, as in the paper"),
    _make_household("alfworld-unseen-paper", "valid_unseen", "the 134 games of valid_unseen, played the same way"),
    Panel(
        "webshop-1k-paper",
        "verl-agent's 500 test goals, 1,000 products, as in the authors' scripts",
        _WEBSHOP,
        "test",
        {"catalog": "small", "split_scheme": "verl-agent", "max_turns": 15, "on_malformed": "peer"},
        _play_as_paper(1_024, 4_096),
        "spear data get webshop --size small",
    ),
    Panel(
        "search-seven-paper",
        "the seven question sets, a local service over wiki-18, as in the paper",
        _SEARCH,
        "test",
        {"dataset": "seven", "retriever": _SERVICE, "max_turns": 32},
        Protocol(top_p=0.6, max_tokens=30_000, layout=_CONVERSATION, max_prompt_tokens=2_048, max_row_tokens=30_000),
        "spear data get search",
    ),
    Panel(
        "sokoban-paper",
        "pictures of 256 levels in rooms that no training level has, played as in the paper",
        _SOKOBAN,
        "test",
        {"preset": "paper", "max_turns": 15, "on_malformed": "peer"},
        _play_as_paper(1_024, 1_024),
    ),
    *(_make_mathematics(year, *how) for year in (2024, 2025) for how in (("16k", 8, 16_384), ("32k", 15, 30_000))),
)

OFFICIAL: Mapping[str, Panel] = {
    panel.name: panel
    for panel in (
        Panel("sokoban", "256 levels in rooms that no training level has", _SOKOBAN, "test", _TEXT, Protocol(4)),
        Panel(
            "sokoban-tiny",
            "the same levels for tiny models: the compact prompt of spear demo",
            _SOKOBAN,
            "test",
            _TEXT,
            Protocol(4, template="compact", history=0),
        ),
        Panel("alfworld", "embedded games in unseen rooms", _ALFWORLD, "valid_unseen", {}, Protocol(3)),
        Panel(
            "alfworld-small",
            "240 embedded games in small unseen rooms, one conversation each, for small language models",
            _ALFWORLD,
            "valid_unseen",
            {"rooms": "small", "max_turns": 12},
            Protocol(max_tokens=48, template="unlisted", layout=_CONVERSATION),
        ),
        Panel("webshop", "goals for products that no training goal asks for", _WEBSHOP, "test", {}, Protocol(4)),
        Panel("search", "multi-hop questions over the embedded base", _SEARCH, "test", {}, Protocol(4)),
        Panel("code", "embedded problems, graded as integers", _CODE, "test", {}, Protocol(4)),
        Panel(
            "alfworld-unseen",
            "the 134 games of valid_unseen",
            _ALFWORLD,
            "valid_unseen",
            _PUBLISHED,
            data=_GET_ALFWORLD,
        ),
        Panel("alfworld-seen", "the 140 games of valid_seen", _ALFWORLD, "valid_seen", _PUBLISHED, data=_GET_ALFWORLD),
        Panel(
            "webshop-500",
            "the authors' 500 test goals, 1.18 million products",
            _WEBSHOP,
            "test",
            {"catalog": "full", "goal_kind": "human", "split_scheme": "original"},
            data="spear data get webshop --size full --human",
        ),
        _make_questions("seven", "the seven question sets of Search-R1", "spear data get search"),
        _make_questions(
            "deepresearcher",
            "DeepResearcher's 3,197 questions of the seven sets",
            "spear data get search deepresearcher",
        ),
        *(
            Panel(
                f"aime-{year}",
                "30 problems",
                _CODE,
                "test",
                {"dataset": f"aime-{year}"},
                Protocol(30),
                data=f"{_GET_CODE} aime-{year}",
            )
            for year in (2024, 2025)
        ),
        *_PAPER,
    )
}
"""Panels by name: embedded tasks first, then the published splits, then those with the paper's protocol."""


def open_panel(name: str, *, trust: bool = False) -> Panel:
    """Open the official panel of this name, or one in a file, as :func:`read_panel` does.

    Raises SpearError if there is none, or it differs here.
    """
    if name in OFFICIAL:
        return OFFICIAL[name]
    path = Path(name)
    if not path.exists():
        known = ", ".join(OFFICIAL)
        raise SpearError(f"there is no panel {name!r}.{suggest_name(name, OFFICIAL)} Give a file, or one of {known}.")
    panel, written = read_panel(path, trust=trust)
    if text := find_differences(written, panel):
        raise SpearError(f"{path} does not match this code ({text[0]}): install the version it was made with.")
    return panel


@click.group()
def panel() -> None:
    """Fixed tasks with a protocol: list, export, verify."""


@panel.command("list")
def list_panels() -> None:
    """List the official panels; spear eval --panel NAME plays one.

    \b
      spear panel list
    """
    rows = []
    for each in OFFICIAL.values():
        title = f"{each.title}{f' ({each.data})' if each.data else ''}"
        rows.append(((each.name, f"{each.env_id} {each.split}", str(each.protocol.samples)), title))
    print_rows(Console(), ("panel", "tasks of", "samples"), rows)


@panel.command("export")
@click.argument("name")
@click.option("--out", type=FilePath(dir_okay=False), help="Default: NAME.json.")
def export(name: str, out: Path | None) -> None:
    """Write panel NAME as one JSON file.

    It holds the protocol, and the id and checksum of each task.

    \b
      spear panel export sokoban-tiny --out sokoban-tiny.json
    """
    path = out or Path(f"{name}.json")
    digest = export_panel(open_panel(name), path)
    echo(f"{path}: panel {digest}")


@panel.command("verify")
@click.argument("file", type=FilePath(dir_okay=False))
@TRUST
def verify_panel(file: Path, trust: bool) -> None:
    """Check whether the installed code reproduces a panel's FILE.

    Tasks and prompts are compared. Exit code 1 if one differs.

    \b
      spear panel verify sokoban-tiny.json
    """
    found, written = read_panel(file, trust=trust)
    text = find_differences(written, found)
    for line in text:
        echo(show_entry(line))
    if text:
        raise SystemExit(1)
    echo(f"{file}: {len(written['tasks'])} tasks, prompts and turn limit match this code.")
