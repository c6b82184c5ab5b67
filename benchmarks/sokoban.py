"""Sokoban beside gym-sokoban 0.0.6 in one run: speed, mismatches, and how often random play wins.

``python -m benchmarks.sokoban [--quick] [--mismatches STEPS] [--json FILE]``.  Times are CPU seconds of this process.
The peer is the original class, fed with the same levels and moves.  It reads its PNG files with imageio, as it always
does; where imageio is not installed, with Pillow, which makes it 2.7 times as fast as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.spear_envs.sokoban.peer

from spear_envs.sokoban.baselines import measure_random_play
from spear_envs.sokoban.batch import Batch
from spear_envs.sokoban.engine import Board
from spear_envs.sokoban.env import SokobanEnv
from spear_envs.sokoban.generate import Recipe, draw_held_out, make_level
from spear_envs.sokoban.levels import Level
from spear_envs.sokoban.sprites import draw_tiles, read_peer_tiles
from spear_envs.sokoban.tasks import make_task_set, read_level
from spear_envs.sokoban.vector import SokobanVectorEnv
from tests.spear_envs.sokoban.peer import MEND, find_peer, has_imageio, load_peer, open_peer

ID = "spear_envs:spear/Sokoban-v0"
TURNS = 15
RESPONSES = [f"<think></think><action>{word}</action>" for word in ("still", "up", "down", "left", "right")]


@dataclass(frozen=True)
class Figure:
    """One measurement; ``bar`` is None where there is none to hold."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    """Whether the bar is a least value instead of a greatest."""
    ratio: float | None = None
    """Times as fast as gym-sokoban."""

    @property
    def held(self) -> bool:
        """Whether the bar holds."""
        return self.bar is None or (self.value >= self.bar if self.at_least else self.value <= self.bar)


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

    def play_batch(self, size: int, turns: int, copy: bool) -> int:
        """Our engine in NumPy: pictures, texts and new levels."""
        levels = [self.levels[i % len(self.levels)] for i in range(size)]
        batch = Batch(levels, draw_tiles())
        age = np.arange(size) % TURNS
        moves = np.array(self.moves[: size * turns]).reshape(turns, size)
        for turn in range(turns):
            batch.step(moves[turn])
            age += 1
            rows = np.flatnonzero(batch.won | (age >= TURNS))
            batch.load(rows, [levels[(i + turn) % size] for i in rows.tolist()])
            age[rows] = 0
            batch.frames(copy)
            batch.texts()
        return size * turns


def play_env(env: gym.Env[Any, Any], moves: list[int]) -> int:
    """``env.step`` with resets."""
    env.reset(seed=0)
    for move in moves:
        _, _, terminated, truncated, _ = env.step(RESPONSES[move])
        if terminated or truncated:
            env.reset()
    return len(moves)


def play_vector(env: SokobanVectorEnv, moves: np.ndarray) -> int:
    """``env.step`` of the vector environment, autoresets included."""
    responses = [[RESPONSES[move] for move in row] for row in moves.tolist()]
    start = time.process_time()
    for row in responses:
        env.step(row)
    return int(moves.size / (time.process_time() - start))


def measure_steps(peer: type[Any] | None, quick: bool) -> Iterator[Figure]:
    """Steps per second."""
    games = Games(read_levels(Recipe(), "test", 256))
    rounds, scale = (1, 1) if quick else (3, 4)
    theirs = theirs_blind = None
    if peer is not None:
        theirs = measure_rate(partial(games.play_peer, peer, 400 * scale, True), rounds)
        theirs_blind = measure_rate(partial(games.play_peer, peer, 5_000 * scale, False), rounds)
        yield Figure("gym-sokoban: step with picture", theirs, "steps/s")
        yield Figure("gym-sokoban: dynamics alone", theirs_blind, "steps/s")

    def compare(name: str, rate: float, least: float | None, base: float | None, bar: float | None = None) -> Figure:
        ratio = None if base is None else rate / base
        if least is not None and base is not None:
            bar = round(least * base)
        return Figure(name, rate, "steps/s", bar, True, ratio)

    steps = 10_000 * scale
    rate = measure_rate(partial(games.play_board, steps, True), rounds)
    yield compare("board: step with fresh picture", rate, 200, theirs)
    rate = measure_rate(partial(games.play_board, steps, True, True), rounds)
    yield compare("board: step with fresh picture and text", rate, None, theirs)
    rate = measure_rate(partial(games.play_board, steps, False), rounds)
    yield compare("board: dynamics alone", rate, None, theirs_blind)
    for modality, least in (("both", 50), ("text", None)):
        env = gym.make(ID, split="test", modality=modality)
        rate = measure_rate(partial(play_env, env, games.moves[: 4_000 * scale]), rounds)
        yield compare(f"env.step through gym.make, modality {modality!r}", rate, least, theirs)
    turns = 12 * scale
    rate = measure_rate(partial(games.play_batch, 1_024, turns, True), rounds)
    yield compare("batch of 1,024: fresh pictures, text, resets", rate, None, theirs, 100_000)
    rate = measure_rate(partial(games.play_batch, 1_024, turns, False), rounds)
    yield compare("batch of 1,024: the buffer itself, text, resets", rate, None, theirs)
    moves = np.array(games.moves[: 1_024 * 24]).reshape(24, 1_024)
    for split in ("test", "train"):
        vector = SokobanVectorEnv(1_024, split=split)
        vector.reset(seed=0)
        play_vector(vector, moves[:16])
        yield compare(f"vector env of 1,024, all infos, split {split!r}", play_vector(vector, moves), None, theirs)


def measure_levels(peer: type[Any] | None, quick: bool) -> Iterator[Figure]:
    """Milliseconds a level, and a reset."""
    count = 200 if quick else 1_000
    for recipe, bar in (
        (Recipe(), 0.5),
        (Recipe(boxes=2, shortest=6, longest=15), None),
        (Recipe(7, 7, 2, 8, 20), 2.0),
    ):
        rate = measure_rate(lambda r=recipe: len([make_level(r, "bench", i) for i in range(count)]), 3)  # type: ignore[misc]
        yield Figure(f"level {recipe.name}", 1e3 / rate, "ms", bar)
        if peer is not None:
            random.seed(0)
            np.random.seed(0)
            size = (recipe.height, recipe.width)
            theirs = peer(dim_room=size, num_boxes=recipe.boxes, num_gen_steps=None, reset=False)
            theirs.render = lambda *_, **__: None
            with contextlib.redirect_stdout(io.StringIO()):  # it prints when a room fails and is drawn again
                rate = measure_rate(lambda e=theirs: len([e.reset() for _ in range(count // 10)]), 1)  # type: ignore[misc]
            yield Figure(f"gym-sokoban: room {recipe.height}x{recipe.width}-{recipe.boxes}", 1e3 / rate, "ms")
    start = time.process_time()
    draw_held_out(Recipe(), 256)
    yield Figure("both held-out lists of 256 levels", 1e3 * (time.process_time() - start), "ms", 500)
    for split, name, bar in (("test", "levels at hand", 0.1), ("train", "every level made anew", None)):
        env = gym.make(ID, split=split)
        env.reset(seed=0)
        ids = [env.unwrapped.tasks[i].id for i in range(256)] if split == "test" else []  # type: ignore[attr-defined]
        numbers = range(500_000, 500_256)
        ids = ids or [f"sokoban/6x6-1/train/{number:08d}" for number in numbers]
        rate = measure_rate(lambda e=env, k=ids: len([e.reset(options={"task": i}) for i in k]), 1)  # type: ignore[misc]
        yield Figure(f"env.reset with picture and infos, {name}", 1e3 / rate, "ms", bar)


def measure_random(quick: bool) -> Iterator[Figure]:
    """How often random play and the expert win in 15 turns."""
    for label, recipe in (("default panel", Recipe()), ("paper preset's panel", Recipe(shortest=1, longest=15))):
        levels = read_levels(recipe, "test", 256)
        exact = 100 * float(np.mean([measure_random_play(level, TURNS) for level in levels]))
        yield Figure(f"random play wins, {label} (exact)", exact, "%")
        draws = read_levels(recipe, "train", 1_000 if quick else 5_000)
        yield Figure(f"random play wins, {recipe.name} training draws (sampled)", 100 * sample_random_play(draws), "%")
        env = SokobanEnv(shortest=recipe.shortest, longest=recipe.longest, split="test", modality="text")
        won = 0
        for task in env.tasks:
            env.reset(options={"task": task.id})
            for word in env.expert_plan():
                won += env.step(f"<think></think><action>{word}</action>")[4]["won"]
        yield Figure(f"the exact expert wins, {label}", 100 * won / len(env.tasks), "%", 100.0, True)


def sample_random_play(levels: list[Level]) -> float:
    """Share of episodes that random play wins, one a level."""
    rng = np.random.default_rng(0)
    batch = Batch(levels)
    won = np.zeros(len(levels), np.bool_)
    for _ in range(TURNS):
        batch.step(np.where(won, 0, rng.integers(1, 5, len(levels))))
        won |= batch.won
    return float(won.mean())


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
    yield Figure(f"mismatches in {taken:,} random steps", wrong, "", 0)
    yield Figure(f"differing bytes in {drawn:,} pictures", wrong_bytes, "", 0)


def main() -> int:
    """Measure, print a table, and write it as JSON where asked; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--mismatches", type=int, metavar="STEPS", help="compare that many random steps with the peer")
    options = parser.parse_args()
    peer = load_peer() if find_peer() else None
    if peer is None:
        print(f"No comparison: {MEND}")
    elif not has_imageio():
        print("imageio is not installed: gym-sokoban reads its pictures with Pillow and is faster than it really is.")
    warnings.simplefilter("ignore")  # of the peer, about its deprecated calls
    sections: list[Iterator[Figure]] = [
        measure_steps(peer, options.quick),
        measure_levels(peer, options.quick),
        measure_random(options.quick),
    ]
    if options.mismatches and peer is not None:
        sections.append(count_mismatches(peer, options.mismatches, 450))
    figures = []
    for section in sections:
        for figure in section:
            sign = ">=" if figure.at_least else "<="
            bar = "" if figure.bar is None else f"  bar {sign} {figure.bar:,.10g} {figure.unit}"
            ratio = "" if figure.ratio is None else f"  {figure.ratio:,.0f}x gym-sokoban"
            verdict = "" if figure.held else "  NOT HELD"
            value = f"{figure.value:,.0f}" if figure.value >= 1_000 else f"{figure.value:.4g}"
            print(f"{figure.name:62} {value:>12} {figure.unit:8}{ratio}{bar}{verdict}", flush=True)
            figures.append(figure)
    if options.json is not None:
        rows = [{**asdict(figure), "held": figure.held} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.held for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
