"""Compares the interpreter with TextWorld step for step, for ``alfworld.py``."""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_envs.alfworld.gamefile import TaskType
from spear_envs.alfworld.synthesis.games import make_game, read_game_logic
from spear_envs.alfworld.textworld import TextWorldPlay
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.odd_games import make_odd, make_release_2_1_1, patch_release_2_1_1
from tests.spear_envs.alfworld.peer import (
    Counts,
    compare_play,
    follow_oracle,
    play_randomly,
    run_errands,
)

MOST_STEPS = 60


@dataclass
class Report:
    """Comparisons of one worker so far."""

    episodes: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Steps by where the game came from."""
    unloadable: int = 0
    """Odd games that TextWorld itself could not load."""
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file, or an empty one."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text("utf-8"))
        counts = Counts(**{**data["tally"], "verbs": Counter(data["tally"]["verbs"])})
        return cls(data["episodes"], Counter(data["sources"]), data["unloadable"], counts)

    def write(self, path: Path) -> None:
        """Put the report into a file, at once or not at all."""
        temporary = path.with_suffix(".tmp")
        data = {**vars(self), "tally": vars(self.counts)}
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(path)


def draw_game(number: int, official: list[Path], rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """Source, name and contents of the game of episode ``number``."""
    kind = ("official", "synthetic", "official", "synthetic", "official", "odd", "synthetic", "release 2.1.1")[
        number % 8
    ]
    if official and (kind == "official" or (kind != "synthetic" and rng.random() < 0.5)):
        path = rng.choice(official)
        name, data = str(path.parent), json.loads(path.read_bytes())
    else:
        kind = "synthetic" if kind == "official" else kind
        task, split = rng.choice(list(TaskType)), rng.choice(("train", "valid_seen", "valid_unseen"))
        seed = 1_000_000 + rng.randrange(1_000_000)  # far from the seeds of the embedded games
        game = make_game(task, split, seed)
        name = f"{task.value}/{split}/{seed}"
        domain, grammar = read_game_logic(game.sentence)
        data = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": game.problem}
    if kind == "odd":
        data = make_odd(data, rng)
        if rng.random() < 0.5:
            data = patch_release_2_1_1(data)
    elif kind == "release 2.1.1":
        data = make_release_2_1_1(data)
    return kind, name, data


def compare_episodes(first: int, stride: int, steps: int, seed: int, games: str | None, out: str) -> None:
    """Compare episodes ``first``, ``first + stride``, … until this worker has done ``steps`` steps."""
    official = sorted(Path(games).rglob("game.tw-pddl")) if games else []
    path = Path(out)
    report = Report.read(path)
    peer = TextWorldPlay()
    while report.counts.steps < steps:
        number = first + report.episodes * stride
        rng = random.Random(f"{seed}/{number}")
        kind, name, data = draw_game(number, official, rng)
        policy = rng.choice([run_errands, run_errands, follow_oracle, play_randomly])
        try:
            counts = compare_play(peer, data, policy, rng, MOST_STEPS, f"{name} (episode {number}, {kind})")
        except SpearError:
            if kind != "odd":
                raise
            report.unloadable += 1  # its goal cannot be reached
        else:
            report.counts.add(counts)
            report.sources[kind] += counts.steps
        report.episodes += 1
        report.write(path)


def compare_steps(steps: int, *, games: str | None, out: Path, processes: int, seed: int) -> Report:
    """Compare that many steps in worker processes, go on where their reports in ``out`` end, and give all they found.

    Raises:
        SystemExit: a worker failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"worker-{i}-of-{processes}.json" for i in range(processes)]
    share = -(-steps // processes)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compare_episodes, args=(i, processes, share, seed, games, str(paths[i])))
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total = Report()
    for path in paths:
        report = Report.read(path)
        total.episodes += report.episodes
        total.sources.update(report.sources)
        total.unloadable += report.unloadable
        total.counts.add(report.counts)
    sys.stdout.write("\n".join(describe(total)) + "\n")
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker that compares failed")
    return total


def describe(report: Report) -> Iterator[str]:
    """The report in lines."""
    counts = report.counts
    yield f"{counts.steps:,} steps of {counts.games:,} episodes compared, {counts.won:,} of them won"
    yield f"{len(counts.mismatches)} differences; {report.unloadable} odd games that TextWorld could not load"
    yield "steps by source: " + ", ".join(f"{kind} {count:,}" for kind, count in report.sources.most_common())
    yield "steps by verb:   " + ", ".join(f"{verb} {count:,}" for verb, count in counts.verbs.most_common())
    yield from counts.mismatches
