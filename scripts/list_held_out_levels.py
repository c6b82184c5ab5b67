"""Writes Sokoban's held-out levels of the default recipe, ``spear_envs/sokoban/held_out.json``.

Run it after a change of the generator, which changes these lists and so their fingerprints:

    python scripts/list_held_out_levels.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spear_envs.sokoban.generate import Recipe, draw_held_out
from spear_envs.sokoban.tasks import HELD_OUT_LENGTH

TARGET = Path(__file__).resolve().parents[1] / "spear_envs" / "sokoban" / "held_out.json"


def main() -> int:
    """Draws the levels and writes each with its optimal number of moves."""
    lists = draw_held_out(Recipe(), HELD_OUT_LENGTH)
    listed = {split: [[level.text, level.optimal] for level in levels] for split, levels in lists.items()}
    TARGET.write_text(json.dumps(listed, ensure_ascii=False).replace("], [", "],\n [") + "\n", "utf-8")
    print(f"{TARGET.name}: {', '.join(f'{len(levels)} of {split}' for split, levels in lists.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
