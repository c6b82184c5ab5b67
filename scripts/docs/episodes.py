"""What the page of an environment says that the code knows better: its docstring, its tasks, a whole episode."""

from __future__ import annotations

import base64
import inspect
import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from spear_envs.adapters.conversation import Message, make_conversation
from spear_envs.core.env import CommonKeywords, SpearEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.registration import ENVIRONMENTS
from spear_envs.core.tasks import GeneratedTaskSet

__all__ = ["PAGES", "PageSource", "describe_environment"]

_LONGEST = 900


@dataclass(frozen=True)
class PageSource:
    """What stands on the page of an environment."""

    id: str
    task: str
    """Whose episode is shown."""


PAGES: dict[str, PageSource] = {
    "alfworld.md": PageSource("spear/ALFWorld-v0", "alfworld/embedded/train/00003"),
    "code.md": PageSource("spear/CodeInterpreter-v0", "code/mini/train/00018"),
    "search.md": PageSource("spear/SearchR1-v0", "search/mini/train/00017"),
    "sokoban.md": PageSource("spear/Sokoban-v1", "sokoban-v1/6x6-1/train/00000017"),
    "webshop.md": PageSource("spear/WebShop-v0", "webshop/train/00003"),
}
"""The five environments, by their page in ``docs/``."""


def describe_environment(source: PageSource) -> str:
    """The generated end of an environment's page, as Markdown: facts, docstring, an episode of its expert."""
    return f"\n\n{_describe_facts(source)}\n\n{_describe_class(source)}\n\n{_play(source)}\n"


def _find_class(env_id: str) -> type[Any]:
    entry = next(entry for entry in ENVIRONMENTS if entry.id == env_id)
    module, _, name = entry.entry_point.partition(":")
    found: type[Any] = getattr(__import__(module, fromlist=[name]), name)
    return found


def _describe_facts(source: PageSource) -> str:
    kind = _find_class(source.id)
    rows = []
    for split in kind.splits:
        try:
            env = make_env(source.id, keywords={"split": split})
        except SpearError:  # a split that only fetched data has
            continue
        tasks = env.tasks
        number = "made on demand" if isinstance(tasks, GeneratedTaskSet) else f"{len(tasks):,}"
        rows.append(f"| `{split}` | {number} | `{tasks.fingerprint[:16]}` |")
        last = env
    lines = [
        "## Facts",
        "",
        "Read off the code when this site was built.",
        "",
        "| split | tasks | fingerprint |",
        "|---|---|---|",
        *rows,
        "",
        f"An episode ends after {last.max_turns} responses at the latest. Prompt templates: "
        + ", ".join(f"`{name}`" for name in last.templates)
        + ".",
    ]
    return "\n".join(lines)


def _describe_class(source: PageSource) -> str:
    kind = _find_class(source.id)
    text = inspect.getdoc(kind) or ""
    text = re.sub(r":(?:class|func|meth|data|mod):`~?([^`]*)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    text = text.replace("``", "`")
    body, _, rest = text.partition("\nArgs:\n")
    arguments, _, errors = rest.partition("\nRaises:\n")
    defaults = {
        name: parameter.default
        for constructor in (SpearEnv.__init__, kind.__init__)
        for name, parameter in inspect.signature(constructor).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    lines = ["## Keywords of `gym.make`", "", body.strip(), "", "| keyword | default | |", "|---|---|---|"]
    for listed, meaning in _read_items(arguments):
        names = [name.strip() for name in listed.split(",")]
        if names == ["common"]:
            names = list(CommonKeywords.__annotations__)
        default = ", ".join(dict.fromkeys(f"`{_quote(defaults[name])}`" for name in names if name in defaults))
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {default} | {meaning} |")
    if errors.strip():
        lines += [
            "",
            "Errors: " + "; ".join(f"`{name}`: {meaning.rstrip('.')}" for name, meaning in _read_items(errors)),
        ]
    return "\n".join(lines)


def _quote(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _read_items(text: str) -> list[tuple[str, str]]:
    """The entries of a section of a docstring: name and meaning in one line each."""
    items: list[tuple[str, str]] = []
    for line in inspect.cleandoc(text).splitlines():
        if line.startswith(" ") and items:
            name, meaning = items[-1]
            items[-1] = (name, f"{meaning} {line.strip()}")
        elif line.strip():
            name, _, meaning = line.partition(":")
            items.append((name.strip(), meaning.strip().replace("|", "\\|")))
    return items


def _play(source: PageSource) -> str:
    conversation = make_conversation(source.id, split=source.task.split("/")[-2], response_format="plain")
    message = conversation.reset(task=source.task)
    lines = [
        "## An episode",
        "",
        f"Task `{source.task}`, played by the environment's expert when this site was built. "
        "A model would write its thought before each action.",
        "",
        '??? note "The first message to the model"',
        "",
        _indent(_fence(message.text)),
        "",
    ]
    lines += [_show("Observation", message)]
    turn, total = 0, 0.0
    while not message.done:
        turn += 1
        action = conversation.env.expert_plan()[0]
        message = conversation.respond(action)
        total += message.reward
        lines += ["", f"**Turn {turn}**", "", _fence(action, "python" if "```" in action else "text"), ""]
        lines += [_show("Observation", message)]
    terms = message.info["reward_terms"]
    won = "won" if message.info["won"] else "lost"
    lines += [
        "",
        f"The episode is {won} after {turn} turns: score {message.info['score']:g}, reward {total:.2f}",
        "(" + ", ".join(f"{name} {value:g}" for name, value in terms.items()) + ").",
        "",
    ]
    return "\n".join(lines)


def _show(title: str, message: Message) -> str:
    picture = f"\n\n![the board]({_encode(message.image)}){{ .board }}" if message.image is not None else ""
    text = message.observation
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}\n… ({len(text) - _LONGEST:,} more characters)"
    return f'!!! quote "{title}"\n\n{_indent(_fence(text) + picture)}'


def _encode(image: np.ndarray) -> str:
    """A small picture as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(image).resize((image.shape[1] * 2, image.shape[0] * 2), Image.Resampling.NEAREST).save(
        buffer, "PNG", optimize=True
    )
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _fence(text: str, language: str = "text") -> str:
    ticks = max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1
    return f"{'`' * ticks}{language}\n{text}\n{'`' * ticks}"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
