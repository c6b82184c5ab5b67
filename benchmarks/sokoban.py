"""Sokoban next to gym-sokoban and GEM: speed and mismatches.

Times are CPU seconds of this process. The peer is the original class, fed with the same levels and moves. It reads its
PNG files with imageio, as it always does; where imageio is not installed, with Pillow, which makes it 2.7 times as fast
as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.parts import gem_process
from benchmarks.parts.random_play import measure_random_play
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_envs.sokoban.engine import Board
from spear_envs.sokoban.env import SokobanEnv
from spear_envs.sokoban.generate import Recipe, draw_held_out, make_level
from spear_envs.sokoban.levels import Level
from spear_envs.sokoban.sprites import draw_tiles, read_peer_tiles
from spear_envs.sokoban.tasks import make_task_set, read_level
from tests.spear_envs.sokoban.peer import MEND, find_peer, has_imageio, load_peer, open_peer

ID = "spear_envs:spear/Sokoban-v1"
TURNS = 15
RESPONSES = [f"<think></think><action>{word}</action>" for word in ("still", "up", "down", "left", "right")]


PEER = "gym-sokoban"
BARS = (
    Bar("board over gym-sokoban: step with fresh picture", "times", at_least=200.0),
    Bar("env.step over gym-sokoban's step with picture", "times", at_least=50.0),
    Bar("level 6x6-1", "ms", at_most=0.5),
    Bar("level 7x7-2", "ms", at_most=2.0),
    Bar("both held-out lists of 256 levels", "ms", at_most=500.0),
    Bar("env.reset with picture and infos, levels at hand", "ms", at_most=0.1),
    Bar("the exact expert wins, default panel", "%", at_least=100.0),
    Bar("the exact expert wins, paper preset's panel", "%", at_least=100.0),
    Bar("mismatches in random steps", at_most=0.0),
    Bar("random steps compared with gym-sokoban", at_least=50_000.0, size="standard"),
    Bar("differing bytes in pictures", at_most=0.0),
    Bar("pictures compared with gym-sokoban's", at_least=400.0, size="standard"),
)
READ_LISTS = """
import time
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.tasks import make_task_set
start = time.process_time()
assert [len(make_task_set(Recipe(), split)) for split in ("valid", "test")] == [256, 256]
print(time.process_time() - start)
"""
"""For a process of its own: in this one the lists are at hand already."""
COMPARED = {Size.QUICK: (2_000, 40), Size.STANDARD: (50_000, 450), Size.FULL: (50_000, 450)}
"""Random steps and pictures that are compared."""


def measure_rate(run: Callable[[], int], rounds: int) -> float:
    """Steps per CPU second: the median of some rounds, each of which returns how many steps it took."""
    rates = []
    for _ in range(rounds):
        start = time.process_time()
        steps = run()
        rates.append(steps / (time.process_time() - start))
    return median(rates)


def read_levels(recipe: Recipe, split: str, count: int) -> list[Level]:
    """Levels of a split."""
    tasks = make_task_set(recipe, split)
    return [read_level(tasks[i].content["level"]) for i in range(count)]


class Games:
    """The same levels and random moves for everyone: a new level after a win or 15 moves."""

    def __init__(self, levels: list[Level], seed: int = 0) -> None:
        self.levels = levels
        self.moves = np.random.default_rng(seed).integers(1, 5, 100_000).tolist()

    def play_peer(self, peer: type[Any], steps: int, pictures: bool) -> int:
        """The original class."""
        grids = [np.array(level.codes).reshape(level.height, level.width) for level in self.levels]
        game, turn = 0, TURNS
        for move in self.moves[:steps]:
            if turn >= TURNS:
                env, turn = open_peer(peer, grids[game % len(grids)], pictures), 0
                game += 1
            done = env.step(move)[2]
            turn = TURNS if done else turn + 1
        return steps

    def play_board(self, steps: int, pictures: bool, texts: bool = False) -> int:
        """Our engine, one board."""
        board = Board(self.levels[0], draw_tiles() if pictures else None)
        game, turn = 0, TURNS
        for move in self.moves[:steps]:
            if turn >= TURNS:
                board.load(self.levels[game % len(self.levels)])
                turn = 0
                game += 1
            board.step(move)
            if pictures:
                board.frame()
            if texts:
                board.text()
            turn = TURNS if board.won else turn + 1
        return steps


def play_env(env: gym.Env[Any, Any], moves: list[int]) -> int:
    """``env.step`` with resets."""
    env.reset(seed=0)
    for move in moves:
        _, _, terminated, truncated, _ = env.step(RESPONSES[move])
        if terminated or truncated:
            env.reset()
    return len(moves)


def measure_steps(peer: type[Any] | None, quick: bool) -> Iterator[Figure]:
    """Steps per second."""
    games = Games(read_levels(Recipe(), "test", 256))
    rounds, scale = 3, 1 if quick else 4
    steps = 10_000 * scale
    pictured = measure_rate(partial(games.play_board, steps, True), rounds)
    yield Figure("board: step with fresh picture", pictured, "steps/s")
    both = measure_rate(partial(games.play_board, steps, True, True), rounds)
    yield Figure("board: step with fresh picture and text", both, "steps/s")
    blind = measure_rate(partial(games.play_board, steps, False), rounds)
    yield Figure("board: dynamics alone", blind, "steps/s")
    rates = {}
    for modality in ("both", "text"):
        env = gym.make(ID, split="test", modality=modality)
        rates[modality] = measure_rate(partial(play_env, env, games.moves[: 4_000 * scale]), rounds)
        yield Figure(f"env.step through gym.make, modality {modality!r}", rates[modality], "steps/s")
    if peer is not None:
        theirs = measure_rate(partial(games.play_peer, peer, 400 * scale, True), rounds)
        theirs_blind = measure_rate(partial(games.play_peer, peer, 5_000 * scale, False), rounds)
        yield Figure("board: step with fresh picture", theirs, "steps/s", PEER)
        yield Figure("board: dynamics alone", theirs_blind, "steps/s", PEER)
        yield Figure("board over gym-sokoban: step with fresh picture", pictured / theirs, "times")
        yield Figure("env.step over gym-sokoban's step with picture", rates["both"] / theirs, "times")


def measure_levels(peer: type[Any] | None, quick: bool) -> Iterator[Figure]:
    """Milliseconds a level, and a reset."""
    count = 200 if quick else 1_000
    for recipe in (Recipe(), Recipe(boxes=2, shortest=6, longest=15), Recipe(7, 7, 2, 8, 20)):
        name = f"level {recipe.height}x{recipe.width}-{recipe.boxes}"
        rate = measure_rate(lambda r=recipe: len([make_level(r, "bench", i) for i in range(count)]), 3)  # type: ignore[misc]
        yield Figure(name, 1e3 / rate, "ms", note=recipe.name)
        if peer is not None:
            random.seed(0)
            np.random.seed(0)
            size = (recipe.height, recipe.width)
            theirs = peer(dim_room=size, num_boxes=recipe.boxes, num_gen_steps=None, reset=False)
            theirs.render = lambda *_, **__: None
            with contextlib.redirect_stdout(io.StringIO()):  # it prints when a room fails and is drawn again
                rate = measure_rate(lambda e=theirs: len([e.reset() for _ in range(count // 10)]), 1)  # type: ignore[misc]
            yield Figure(name, 1e3 / rate, "ms", PEER)
    reading = subprocess.run([sys.executable, "-c", READ_LISTS], capture_output=True, text=True, check=True)
    yield Figure("both held-out lists of 256 levels", 1e3 * float(reading.stdout), "ms", note="read")
    start = time.process_time()
    draw_held_out(Recipe(), 256)
    yield Figure("both held-out lists of 256 levels, drawn anew", 1e3 * (time.process_time() - start), "ms")
    for split, name in (("test", "levels at hand"), ("train", "every level made anew")):
        env = gym.make(ID, split=split)
        env.reset(seed=0)
        ids = [env.unwrapped.tasks[i].id for i in range(256)] if split == "test" else []  # type: ignore[attr-defined]
        numbers = range(500_000, 500_256)
        ids = ids or [f"sokoban-v1/6x6-1/train/{number:08d}" for number in numbers]
        rate = measure_rate(lambda e=env, k=ids: len([e.reset(options={"task": i}) for i in k]), 1)  # type: ignore[misc]
        yield Figure(f"env.reset with picture and infos, {name}", 1e3 / rate, "ms")


def measure_random(quick: bool) -> Iterator[Figure]:
    """How often random play and the expert win in 15 turns."""
    for label, recipe in (("default panel", Recipe()), ("paper preset's panel", Recipe(shortest=1, longest=15))):
        levels = read_levels(recipe, "test", 256)
        exact = 100 * float(np.mean([measure_random_play(level, TURNS) for level in levels]))
        yield Figure(f"random play wins, {label} (exact)", exact, "%")
        draws = read_levels(recipe, "train", 1_000 if quick else 5_000)
        sampled = 100 * sample_random_play(draws)
        yield Figure(f"random play wins, training draws like the {label}", sampled, "%", note=f"{len(draws):,} draws")
        env = SokobanEnv(shortest=recipe.shortest, longest=recipe.longest, split="test", modality="text")
        won = 0
        for task in env.tasks:
            env.reset(options={"task": task.id})
            for word in env.expert_plan():
                won += env.step(f"<think></think><action>{word}</action>")[4]["won"]
        yield Figure(f"the exact expert wins, {label}", 100 * won / len(env.tasks), "%")


def sample_random_play(levels: list[Level]) -> float:
    """Share of episodes that random play wins, one a level."""
    rng = np.random.default_rng(0)
    won = 0
    for level in levels:
        board = Board(level)
        for move in rng.integers(1, 5, TURNS).tolist():
            board.step(move)
            if board.won:
                won += 1
                break
    return won / len(levels)


def count_mismatches(peer: type[Any], steps: int, frames: int) -> Iterator[Figure]:
    """Random steps whose state, reward or win differ from the peer's, and pictures whose bytes do."""
    rng = np.random.default_rng(11)
    taken = wrong = drawn = wrong_bytes = 0
    recipes = [Recipe(6, 6, 1, 1, 15), Recipe(6, 6, 2, 1, 20), Recipe(7, 7, 2, 1, 20)]
    levels = [make_level(recipe, "mismatch", i) for i in range(200) for recipe in recipes]
    tiles = read_peer_tiles()
    while taken < steps:
        level = levels[int(rng.integers(len(levels)))]
        pictures = drawn < frames
        grid = np.array(level.codes).reshape(level.height, level.width)
        theirs, ours = open_peer(peer, grid, pictures), Board(level, tiles if pictures else None)
        for move in rng.integers(0, 5, 12 if pictures else 120).tolist():
            picture, reward, done, _ = theirs.step(move)
            same = ours.step(move) == reward and ours.won == done
            state = np.where((theirs.room_state == 5) & (theirs.room_fixed == 2), 6, theirs.room_state).ravel().tolist()
            wrong += not (same and state == ours.codes)
            taken += 1
            if pictures:
                wrong_bytes += int((picture != ours.frame()).sum())
                drawn += 1
            if done:
                break
    yield Figure("random steps compared with gym-sokoban", taken)
    yield Figure("mismatches in random steps", wrong)
    yield Figure("pictures compared with gym-sokoban's", drawn)
    yield Figure("differing bytes in pictures", wrong_bytes)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; those beside the peer where it is installed."""
    quick = options.size is Size.QUICK
    peer = load_peer() if find_peer() else None
    if peer is None:
        print(f"No comparison: {MEND}")
    elif not has_imageio():
        print("imageio is not installed: gym-sokoban reads its pictures with Pillow and is faster than it really is.")
    warnings.simplefilter("ignore")  # of the peer, about its deprecated calls
    yield from measure_steps(peer, quick)
    yield from measure_levels(peer, quick)
    yield from measure_random(quick)
    if peer is not None:
        yield from count_mismatches(peer, *COMPARED[options.size])
    python = gem_process.find_python()
    if python is None:
        print(gem_process.MEND)
    else:
        report = gem_process.play_sokoban(python, 3_000 if quick else 30_000, options.work)
        for name, value, unit in (
            ("env.step through gym.make, modality 'text'", report["steps_per_second"], "steps/s"),
            ("env.reset with picture and infos, every level made anew", report["reset_ms"], "ms"),
        ):
            yield Figure(name, value, unit, gem_process.GEM, note=f"text alone, {report['episodes']:,} episodes")


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("gym-sokoban", "imageio", "numpy"))


if __name__ == "__main__":
    sys.exit(main())
