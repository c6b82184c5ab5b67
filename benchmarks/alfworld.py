"""ALFWorld next to TextWorld: speed, memory, differences.

The same commands (the expert's and random ones) are played on both backends of the environment. Then steps of all kinds
of play are compared, in workers whose reports are continued with ``--work``. ``--games FOLDER`` (an archive of official
games, unpacked) adds these to synthetic ones. Times are CPU seconds of this process. Needs the extra ``alfworld``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.parts.alfworld_parity import compare_steps
from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, measure_cpu, run_benchmark
from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.alfworld.gamefile import GameFile, TaskType, make_game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.synthesis.games import write_synthetic_game
from spear_envs.alfworld.textworld import TextWorldPlay
from tests.spear_envs.alfworld.peer import MEND, has_textworld, name_verbs

PEER = "TextWorld"
ROUNDS = 5
TURNS = 30


BARS = (
    Bar("load a game file", "ms", at_most=5.0),
    Bar("reset", "ms", at_most=1.0),
    Bar("native over TextWorld, steps", "times", at_least=300.0),
    Bar("memory of a parsed game", "MB", at_most=0.5),
    Bar("memory of 256 environments of one game", "MB", at_most=30.0),
    Bar("reset of 256 environments in one process", "ms", at_most=256.0),
    Bar("embedded games that the expert does not win", at_most=0.0),
    Bar("steps compared with TextWorld", at_least=20_000.0, size="full"),
    Bar("differences in these steps", at_most=0.0),
    Bar("steps of the verb compared least often", at_least=50.0, size="full"),
)
GAMES = {Size.QUICK: 6, Size.STANDARD: 18, Size.FULL: 18}
STEPS = {Size.QUICK: 100, Size.STANDARD: 1_000, Size.FULL: 20_000}


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
    yield Figure("load a game file", 1000 * median(native_loads), "ms")
    yield Figure("load a game file", 1000 * (median(loads) - median(resets)), "ms", PEER)
    yield Figure("reset", 1000 * median(native_resets), "ms", note="of the environment; TextWorld's is its own")
    yield Figure("reset", 1000 * median(resets), "ms", PEER)
    yield Figure("steps of the environment", median(ours), "steps/s", note=f"{steps} commands of {len(paths)} games")
    yield Figure("steps of the environment", theirs, "steps/s", PEER, note="the same commands")
    yield Figure("native over TextWorld, steps", median(ours) / theirs, "times")


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
    yield Figure("memory of a parsed game", tracemalloc.get_traced_memory()[0] / len(plays) / 2**20, "MB")
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
    yield Figure("memory of 256 environments of one game", memory, "MB")
    task = {"task": envs[0].tasks[0].id}
    seconds = median([measure_cpu(lambda: [env.reset(options=task) for env in envs]) for _ in range(ROUNDS)])
    yield Figure("reset of 256 environments in one process", 1000 * seconds, "ms")


def measure_expert(quick: bool) -> Iterator[Figure]:
    """Games of the embedded splits, played by the expert."""
    lost = played = 0
    for rooms in ("standard", "small"):
        for split in ("train", "valid_seen", "valid_unseen"):
            env = ALFWorldEnv(response_format="plain", rooms=rooms, split=split)
            for task in list(env.tasks)[:: 20 if quick else 1]:
                env.reset(options={"task": task.id})
                won = False
                for command in env.expert_plan():
                    won = env.step(command)[4]["won"]
                lost += not won
                played += 1
    yield Figure("embedded games that the expert does not win", lost, note=f"of {played:,}")


def measure_differences(options: argparse.Namespace) -> Iterator[Figure]:
    """Steps in both backends, one beside the other."""
    steps = options.steps or STEPS[options.size]
    report = compare_steps(
        steps, games=options.games, out=options.work / "parity", processes=options.processes, seed=options.seed
    )
    counts = report.counts
    verb, least = min(((verb, counts.verbs[verb]) for verb in name_verbs()), key=lambda pair: pair[1])
    yield Figure("steps compared with TextWorld", counts.steps, note=f"{counts.games:,} episodes, {counts.won:,} won")
    yield Figure("differences in these steps", len(counts.mismatches), note="; ".join(counts.mismatches[:3]))
    yield Figure("steps of the verb compared least often", least, note=verb)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    if not has_textworld():
        raise LeftOut(MEND)
    quick = options.size is Size.QUICK
    with tempfile.TemporaryDirectory() as folder:
        paths = choose_games(Path(folder), options.games, GAMES[options.size])
        yield from measure_play(paths)
        yield from measure_memory(paths)
    yield from measure_expert(quick)
    yield from measure_differences(options)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps to compare, instead of what the size says")
    parser.add_argument("--games", help="folder of official games, unpacked")
    parser.add_argument("--processes", type=int, default=2, help="workers that compare")
    parser.add_argument("--seed", type=int, default=0, help="of what they play")
    packages = ("textworld", "alfworld", "fast-downward-textworld")
    return run_benchmark(measure, parser.parse_args(), BARS, packages)


if __name__ == "__main__":
    sys.exit(main())
