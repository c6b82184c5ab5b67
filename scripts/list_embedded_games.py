"""Writes the list of ALFWorld's embedded games, ``spear_envs/alfworld/embedded.json``.

Run it after a change of the synthesizer, which changes the games and so the fingerprints of all embedded splits:

    python scripts/list_embedded_games.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spear_envs.alfworld.gamefile import TaskType
from spear_envs.alfworld.synthesis.games import make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize

TARGET = Path(__file__).resolve().parents[1] / "spear_envs" / "alfworld" / "embedded.json"
GAMES = {
    RoomSize.STANDARD: {"train": 100, "valid_seen": 20, "valid_unseen": 20},
    RoomSize.SMALL: {"train": 400, "valid_seen": 40, "valid_unseen": 40},
}
"""Games of each task type."""


def main() -> int:
    """Makes all games and writes their digests; the seeds are 0, 1, 2, …"""
    listed = {
        size.value: {
            split: {
                kind.subtask: [make_game(kind, split, seed, size).digest for seed in range(number)] for kind in TaskType
            }
            for split, number in splits.items()
        }
        for size, splits in GAMES.items()
    }
    digests = [
        one for splits in listed.values() for kinds in splits.values() for games in kinds.values() for one in games
    ]
    if len(set(digests)) < len(digests):
        sys.exit("two games are the same: choose other seeds")
    TARGET.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(digests):,} games in {TARGET}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
