"""ALFWorld beside TextWorld in one run: speed and memory; with ``--steps`` differences instead.

``python -m benchmarks.alfworld`` plays the same commands (the expert's and random ones) on both backends of the
environment.  ``--steps N`` compares N steps of all kinds of play, in ``--processes`` workers whose reports in ``--out``
are continued when they are there.  ``--games FOLDER`` (an archive of official games, unpacked) adds these to synthetic
ones.  Times are CPU seconds of this process.  Needs the extra ``alfworld``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._alfworld_parity import compare_steps
from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.alfworld.gamefile import GameFile, make_game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.synthesis.files import write_synthetic_game
from spear_envs.alfworld.task_types import TaskType
from spear_envs.alfworld.textworld import TextWorldPlay
from tests.spear_envs.alfworld.peer import MEND, has_textworld

ROUNDS = 5
TURNS = 30


@dataclass(frozen=True)
class Figure:
    """One measurement; ``bar`` is None where there is none to hold."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    """Whether the bar is a least value instead of a greatest."""

    @property
    def held(self) -> bool:
        """Whether the bar holds."""
        return self.bar is None or (self.value >= self.bar if self.at_least else self.value <= self.bar)


def measure_cpu(run: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def choose_games(folder: Path, official: str | None, count: int) -> list[Path]:
    """Files of synthetic games of all six types, every other one replaced by an official game if there are some."""
    types = list(TaskType)
    paths = [write_synthetic_game(types[i % 6].value, 500_000 + i, folder) for i in range(count)]
    found = sorted(Path(official).rglob("game.tw-pddl")) if official else []
    chosen = random.Random(0).sample(found, count // 2) if found else []
    paths[1::2] = chosen or paths[1::2]
    return paths


def choose_commands(path: Path, rng: random.Random) -> list[str]:
    """Commands of one episode: the expert's or, half of the time, a random admissible one."""
    env = make_env(path, "native")
    _, info = env.reset()
    commands: list[str] = []
    while not env.done:
        plan = env.expert_plan()
        commands.append(plan[0] if plan and rng.random() < 0.5 else rng.choice(info["admissible_actions"]))
        info = env.step(commands[-1])[4]
    return commands


def make_env(path: Path, backend: str) -> ALFWorldEnv:
    """The environment of one game."""
    return ALFWorldEnv(game=path, backend=backend, response_format="plain", max_turns=TURNS)


def play_all(env: ALFWorldEnv, commands: Sequence[str]) -> None:
    """Step through an episode that has begun."""
    for command in commands:
        env.step(command)


def measure_play(paths: Sequence[Path]) -> Iterator[Figure]:
    """Loads, resets and steps of both backends."""
    rng = random.Random(1)
    episodes = [(path, choose_commands(path, rng)) for path in paths]
    steps = sum(len(commands) for _, commands in episodes)
    loads, resets, plays, ours = [], [], [], []
    peer = TextWorldPlay()
    for path, commands in episodes:
        data = json.loads(path.read_bytes())
        loads.append(measure_cpu(lambda data=data: peer.reset(data)))  # type: ignore[misc]
        resets.append(measure_cpu(peer.restart))
        env = make_env(path, "textworld")
        env.reset()
        plays.append(measure_cpu(lambda env=env, commands=commands: play_all(env, commands)))  # type: ignore[misc]
    native_loads, native_resets = [], []
    for path, _ in episodes:
        source = GameFile(path)
        native_loads.append(
            median([measure_cpu(lambda source=source: make_game(source.read())) for _ in range(ROUNDS)])  # type: ignore[misc]
        )
        env = make_env(path, "native")
        env.reset()
        native_resets.append(median([measure_cpu(env.reset) for _ in range(ROUNDS)]))
    for _ in range(ROUNDS):
        spent = 0.0
        for path, commands in episodes:
            env = make_env(path, "native")
            for _ in range(10):  # one episode is too short for the clock
                env.reset()
                spent += measure_cpu(lambda env=env, commands=commands: play_all(env, commands))  # type: ignore[misc]
        ours.append(10 * steps / spent)
    theirs = steps / sum(plays)
    # The peer's first number holds a load and a reset, which its own interface does not separate further.
    yield Figure("load a game file: TextWorld", 1000 * (median(loads) - median(resets)), "ms")
    yield Figure("load a game file: native", 1000 * median(native_loads), "ms", 5)
    yield Figure("reset: TextWorld", 1000 * median(resets), "ms")
    yield Figure("reset of the environment: native", 1000 * median(native_resets), "ms", 1)
    yield Figure(f"steps of the environment, textworld ({steps} steps, {len(paths)} games)", theirs, "/s")
    yield Figure("steps of the environment, native, same commands", median(ours), "/s")
    yield Figure("native over textworld", median(ours) / theirs, "times", 300, at_least=True)


def measure_memory(paths: Sequence[Path]) -> Iterator[Figure]:
    """Memory of parsed games, and of many environments that share one."""
    make_game(GameFile(paths[0]).read())  # what all games share is read
    gc.collect()
    tracemalloc.start()
    plays = [Interpreter(make_game(GameFile(path).read())) for path in paths]
    rng = random.Random(2)
    for play in plays:
        for _ in range(100):  # what a game remembers of its commands counts too
            play.step(rng.choice(play.admissible))
    gc.collect()
    yield Figure("memory of a parsed game", tracemalloc.get_traced_memory()[0] / len(plays) / 2**20, "MB", 0.5)
    before = tracemalloc.get_traced_memory()[0]
    envs = [ALFWorldEnv(response_format="plain", rooms="standard") for _ in range(256)]
    for env in envs:
        env.reset(options={"task": envs[0].tasks[0].id})
    for env in envs:
        for _ in range(5):
            env.step("look")
    gc.collect()
    memory = (tracemalloc.get_traced_memory()[0] - before) / 2**20
    tracemalloc.stop()
    yield Figure("memory of 256 environments of one game", memory, "MB", 30)
    task = {"task": envs[0].tasks[0].id}
    seconds = median([measure_cpu(lambda: [env.reset(options=task) for env in envs]) for _ in range(ROUNDS)])
    yield Figure("reset of 256 environments in one process", 1000 * seconds, "ms", 256)


def describe_run() -> str:
    """What was measured, where and when."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("textworld", "alfworld", "fast-downward-textworld"))
    return f"{packages}; Python {platform.python_version()}; {cpu}; {date.today()}"


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="compare this many steps instead of measuring")
    parser.add_argument("--games", help="folder of official games, unpacked")
    parser.add_argument("--processes", type=int, default=2, help="workers of --steps")
    parser.add_argument("--seed", type=int, default=0, help="of --steps")
    parser.add_argument("--out", type=Path, default=Path("alfworld-parity"), help="folder of the reports of --steps")
    parser.add_argument("--quick", action="store_true", help="fewer games")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if not has_textworld():
        print(f"No comparison: {MEND}")
        return 0
    if options.steps:
        held = compare_steps(
            options.steps, games=options.games, out=options.out, processes=options.processes, seed=options.seed
        )
        return 0 if held else 1
    print(describe_run())
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        paths = choose_games(Path(folder), options.games, 6 if options.quick else 18)
        for section in (measure_play(paths), measure_memory(paths)):
            for figure in section:
                sign = ">=" if figure.at_least else "<="
                bar = "" if figure.bar is None else f"  bar {sign} {figure.bar:,.10g} {figure.unit}"
                value = f"{figure.value:,.0f}" if figure.value >= 1_000 else f"{figure.value:.4g}"
                verdict = "" if figure.held else "  NOT HELD"
                print(f"{figure.name:62} {value:>12} {figure.unit:8}{bar}{verdict}", flush=True)
                figures.append(figure)
    if options.json is not None:
        rows = [{**asdict(figure), "held": figure.held} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.held for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
