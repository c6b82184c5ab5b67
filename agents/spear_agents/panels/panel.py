"""A panel: tasks as data, and the protocol that makes two numbers on them comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spear_agents.files import write_json
from spear_agents.settings import EvalSettings
from spear_agents.trajectory import Layout
from spear_envs.core import PromptContext, SpearEnv, SpearError, canonical_json
from spear_envs.core.errors import suggest_name
from spear_envs.core.making import make_env, require_harmless
from spear_envs.data.files import read_regular

FORMAT = 1
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


PROTOCOL_OPTIONS = (
    *("split", "tasks", "episodes_per_task", "temperature", "top_p", "top_k", "max_tokens", "template", "layout"),
    *("history", "seed", "env_keywords", "method", "trials", "overlong"),
)
"""Options of the command line set by a panel."""


@dataclass(frozen=True)
class Panel:
    """A list of tasks and its protocol; :func:`export_panel` writes it with the tasks."""

    name: str
    title: str
    """What a result on it means, in a line."""
    env_id: str
    split: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=Protocol)
    data: str = ""
    """Data to fetch first; empty if everything is embedded."""

    def make_settings(self, settings: EvalSettings) -> EvalSettings:
        """The settings of a player, with those of the panel."""
        how = self.protocol
        return replace(
            settings,
            env_id=self.env_id,
            split=self.split,
            env_kwargs=self.env_kwargs,
            tasks="all",
            episodes_per_task=how.samples,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            max_tokens=how.max_tokens or settings.max_tokens,
            template=how.template,
            layout=Layout(how.layout),
            history=how.history,
            seed=0,
        )

    def describe_tasks(self) -> dict[str, Any]:
        """The tasks as this code makes them, with fingerprint, turn limit and digest of prompts. Raises SpearError."""
        with closing(make_env(self.env_id, self.split, self.env_kwargs)) as env:
            tasks = [task.definition() for task in env.tasks]
            return {
                "fingerprint": env.tasks.fingerprint,
                "max_turns": env.max_turns,
                "prompt_digest": self._digest_prompts(env),
                "tasks": tasks,
            }

    def _digest_prompts(self, env: SpearEnv[Any]) -> str:
        """SHA-256 of the prompts of the first ten tasks: a changed prompt makes another panel."""
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


def digest_panel(written: Mapping[str, Any]) -> str:
    """SHA-256 of a written panel without its digest."""
    return hashlib.sha256(canonical_json({k: v for k, v in written.items() if k != "digest"}).encode()).hexdigest()


def export_panel(panel: Panel, path: Path) -> str:
    """Write a panel with its tasks as JSON; return its digest. Raises SpearError for missing data or a bad path."""
    written = write_panel(panel)
    write_json(path, written)
    return str(written["digest"])


def write_panel(panel: Panel) -> dict[str, Any]:
    """A panel with its tasks and digest as plain values."""
    # Through JSON, so that readers get the same digest.
    written = json.loads(json.dumps({"format": FORMAT, **asdict(panel), **panel.describe_tasks()}))
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
        if written["digest"] != digest_panel(written):
            raise SpearError(f"{path} was changed after it was written: its digest does not match. Fetch it again.")
        if not trust:
            require_harmless(panel.env_id, {**panel.env_kwargs, "split": panel.split}, str(path))
    except OSError as error:
        raise SpearError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise SpearError(
            f"{path} is not a panel ({type(error).__name__}: {error}): spear panel export writes one"
        ) from error
    return panel, written


def find_differences(written: Mapping[str, Any], panel: Panel) -> list[str]:
    """List the differences between a written panel and the installed code's."""
    made = json.loads(json.dumps(panel.describe_tasks()))
    told = [
        f"{name} is {made[name]!r} here and {written[name]!r} in the file"
        for name in ("fingerprint", "max_turns", "prompt_digest")
        if made[name] != written[name]
    ]
    if len(made["tasks"]) != len(written["tasks"]):
        told.append(f"{len(made['tasks'])} tasks here and {len(written['tasks'])} in the file")
    other = [a["id"] for a, b in zip(made["tasks"], written["tasks"], strict=False) if a != b]
    if other:
        told.append(f"{len(other)} tasks differ, the first {other[0]}")
    return told


_ALFWORLD, _WEBSHOP = "spear/ALFWorld-v0", "spear/WebShop-v0"
_SEARCH, _CODE = "spear/SearchR1-v0", "spear/CodeInterpreter-v0"
_TEXT, _PUBLISHED = {"modality": "text"}, {"dataset": "official"}
_GET_ALFWORLD, _GET_CODE = "spear data get alfworld", "spear data get code"

OFFICIAL: Mapping[str, Panel] = {
    panel.name: panel
    for panel in (
        Panel(
            "sokoban", "256 levels in rooms that no training level has", "spear/Sokoban-v1", "test", _TEXT, Protocol(4)
        ),
        Panel(
            "sokoban-tiny",
            "the same levels for tiny models: the compact prompt of spear demo",
            "spear/Sokoban-v1",
            "test",
            _TEXT,
            Protocol(4, template="compact", history=0),
        ),
        Panel("alfworld", "embedded games in unseen rooms", _ALFWORLD, "valid_unseen", {}, Protocol(3)),
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
        Panel(
            "search-seven",
            "the seven question sets of Search-R1",
            _SEARCH,
            "test",
            {"dataset": "seven", "preset": "search_r1"},
            Protocol(temperature=0.0, template="search_r1"),
            data="spear data get search",
        ),
        Panel("aime-2024", "30 problems", _CODE, "test", {"dataset": "aime-2024"}, Protocol(30), data=_GET_CODE),
        Panel("aime-2025", "30 problems", _CODE, "test", {"dataset": "aime-2025"}, Protocol(30), data=_GET_CODE),
    )
}
"""Panels by name: embedded tasks first, then the published splits."""


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
    if told := find_differences(written, panel):
        raise SpearError(f"{path} does not match this code ({told[0]}): install the version it was made with.")
    return panel
