"""Goals files, ``goals.jsonl`` or ``goals.jsonl.xz``: one JSON goal per line; and their prices."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path

from spear_envs.core.errors import SpearError
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.products import read_number
from spear_envs.webshop.sources import read_json


def read_goals(path: Path) -> list[Goal]:
    """Read the goals of a file; the index of a goal is its row, from 0.

    Raises:
        SpearError: the file is missing, broken or empty, or a row is not a goal; the message names the row.
    """
    goals: list[Goal] = []
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, Mapping):
                    raise SpearError("a goal must be an object")
                if row.get("index", len(goals)) != len(goals):
                    raise SpearError(f"its index is {row['index']!r}: rows must be in order and complete")
                goals.append(Goal.from_row(row))
    except FileNotFoundError:
        raise SpearError(f"{path} does not exist: check the name of the goals file.") from None
    except OSError as error:
        raise SpearError(f"{path} cannot be read ({error.strerror}): name a goals file.") from None
    except (SpearError, ValueError, RecursionError, EOFError, lzma.LZMAError) as error:
        problem = str(error) if isinstance(error, SpearError) else f"broken JSON ({error})"
        raise SpearError(f"{path}, row {len(goals)}: {problem}. Repair the file or make it again.") from None
    if not goals:
        raise SpearError(f"{path} is empty: name a file with goals.")
    return goals


def write_goals(goals: Iterable[Goal], path: Path) -> None:
    """Write goals for :func:`read_goals`; packed if the name ends in ``.xz``."""
    with lzma.open(path, "wt", encoding="utf-8") if path.suffix == ".xz" else path.open("w", encoding="utf-8") as file:
        for index, goal in enumerate(goals):
            file.write(json.dumps({"index": index, **goal.to_row()}) + "\n")


def read_prices(goals_file: Path) -> dict[str, float]:
    """Read prices by ASIN from ``prices.json[.xz]`` next to a goals file; none without that file.

    Raises:
        SpearError: the file is not an object of numbers.
    """
    path = next(
        (path for suffix in ("", ".xz") if (path := goals_file.parent / f"prices.json{suffix}").is_file()), None
    )
    if path is None:
        return {}
    prices = read_json(path)
    if not isinstance(prices, Mapping):
        raise SpearError(f"{path} must be an object of prices in dollars by ASIN.")
    return {asin: read_number(price, f"{path}: the price of {asin}") for asin, price in prices.items()}
