"""Where the four packages lie in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "spear_sandbox": ROOT / "sandbox" / "spear_sandbox",
    "spear_envs": ROOT / "spear_envs",
    "spear_agents": ROOT / "agents" / "spear_agents",
    "spear_training": ROOT / "training" / "spear_training",
}
"""Folder of each package, by its name."""
TIME_IMPORT = """
import time
start = time.process_time()
import gymnasium
between = time.process_time()
import spear_envs
print((time.process_time() - start) / (between - start))
"""
"""A program that prints how long the import of spear_envs takes, in times of gymnasium's own."""
IMPORT_RATIO = 1.25
"""What it may print; neighbours disturb single runs, so that the best decides."""


def find_modules(*rooms: str) -> list[Path]:
    """The modules of these packages; of all four, if none is named."""
    return sorted(path for room in rooms or ROOMS for path in ROOMS[room].rglob("*.py"))
