"""Fill the tables of ``docs/configuration.md``: every setting of ``spear train``, and what verl's keys are called here.

``python scripts/write_configuration.py`` writes the page; ``tests/docs/test_configuration.py`` compares it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from spear_training.catalogue import FieldFacts, describe_fields, describe_groups
from spear_training.run.to_verl import REFUSED, list_names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
CORRECTION = "algorithm.rollout_correction."
"""Keys below have the same names here, and take one row."""


def fill(page: str) -> str:
    """The page with its tables, each between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, lines in (("settings", list_settings()), ("names", list_keys()), ("refused", list_refused())):
        mark = f"<!-- {name} -->\n"
        before, found, rest = page.partition(mark)
        _, end, after = rest.partition("<!-- end -->")
        if not (found and end):
            raise ValueError(f"{PAGE} has no place for {name}")
        page = "\n".join([before + mark + next(lines), *lines, end + after])
    return page


def list_settings() -> Iterator[str]:
    """A heading and a table for each node, and one for the settings that are in none."""
    facts = list(describe_fields())
    for group, meaning in describe_groups():
        node, dot, _ = group.partition(".")
        if dot:
            yield from (
                f"## {node}",
                "",
                meaning,
                "",
                *draw(fact for fact in facts if fact.key.startswith(f"{node}.")),
                "",
            )
    yield from ("## Without a node", "", *draw(fact for fact in facts if "." not in fact.key))


def draw(facts: Iterable[FieldFacts]) -> Iterator[str]:
    """The table of these settings."""
    yield from ("| setting | default | value | meaning |", "|---|---|---|---|")
    for fact in facts:
        yield f"| `{fact.key}` | `{json.dumps(fact.default)}` | {fact.kind} | {fact.meaning} |"


def list_keys() -> Iterator[str]:
    """verl's keys with ours, sorted by verl's."""
    ours: dict[str, list[str]] = {f"{CORRECTION}KEY": ["rollout.correction.KEY"]}
    for setting, keys in list_names().items():
        for key in keys:
            if not key.startswith(CORRECTION):
                ours.setdefault(key.removesuffix(".other"), []).append(setting)  # of a node of free keywords
    yield from ("| verl | here |", "|---|---|")
    for key, settings in sorted(ours.items()):
        yield f"| `{key}` | {', '.join(f'`{setting}`' for setting in settings)} |"


def list_refused() -> Iterator[str]:
    """Keys that are refused, with the reason."""
    yield from ("| verl | why |", "|---|---|")
    for keys, reason in REFUSED.items():
        yield f"| {', '.join(f'`{key}`' for key in keys.split())} | {reason} |"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text("utf-8")), "utf-8")
