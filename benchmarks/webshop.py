"""WebShop's bars: equality with recordings of the original, speed, memory, and what a million products cost.

    python -m benchmarks.webshop [--quick] [--episodes N] [--large] [--folder DIR] [--store DIR] [--products N]

The catalogue is the official one of 1,000 products and the recordings are those of the original where a folder
``shared`` with both lies beside the checkout; else the mini catalogue, and its own recordings. ``--large`` adds search
over 1.18 million synthetic products (see ``benchmarks/webshop_search.py``; minutes). ``--store DIR`` adds a whole store
of as many: DIR gets synthetic official files (5.2 GB) and the store, unless it has them, and the store is played in.
Times are CPU seconds of this process; a mean is the median of those of five rounds. The original cannot run here: its
figures, in brackets, were measured elsewhere on one x86 core.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks import webshop_search as large
from benchmarks._webshop_data import write_catalog
from benchmarks._webshop_texts import TextMaker, read_profile
from benchmarks.webshop_search import MIB, Figure, read_cpu_seconds, read_memory, watch_memory
from spear_envs.webshop.build import build_store
from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.matching import token_set_ratio
from spear_envs.webshop.opening import open_catalog
from spear_envs.webshop.reward import score_purchase
from spear_envs.webshop.shop import SEARCH_ACTION
from spear_envs.webshop.sources import find_files
from tests.spear_envs.webshop.conftest import golden_nouns, read_packed
from tests.spear_envs.webshop.test_recordings import ROWS, test_replaying_shows_and_pays_the_same

ID = "spear_envs:spear/WebShop-v0"
SHARED = Path(__file__).resolve().parents[2] / "shared"
OFFICIAL, GOLDEN = SHARED / "data" / "webshop", SHARED / "golden" / "webshop"
WARM_UP_EPISODES = 2_000
ROUNDS = 5
IMPORT = (
    "import time, spear_envs.core.env; start = time.process_time(); import spear_envs.webshop.env;"
    "print(time.process_time() - start)"
)
PLAYER = """
import random, sys, gymnasium as gym, spear_envs
env = gym.make("spear/WebShop-v0", catalog=sys.argv[1], response_format="plain", disable_env_checker=True).unwrapped
for episode in range(int(sys.argv[2])):
    _, info = env.reset(seed=episode)
    query = "search[" + info["instruction"][8:40].replace("[", " ").replace("]", " ") + "]"
    while not env.done:
        info = env.step(random.Random(env.turn + episode).choice(info["admissible_actions"] + [query]))[4]
print("ready", flush=True)
sys.stdin.readline()
"""
MANY = """
import sys, gymnasium as gym, spear_envs
vector = gym.make_vec("spear/WebShop-v0", num_envs=384, catalog=sys.argv[1])
vector.reset(seed=0)
for _ in range(5):
    vector.step(["<think></think><action>search[%s]</action>" % env.unwrapped.task.instruction[8:40].replace("[", "")
                 for env in vector._groups[0].envs])
print("ready", flush=True)
sys.stdin.readline()
"""


def make_env(catalog: str, **kwargs: Any) -> WebShopEnv:
    """The environment over a catalogue."""
    env = gym.make(ID, catalog=catalog, disable_env_checker=True, **kwargs).unwrapped
    assert isinstance(env, WebShopEnv)
    return env


def play(
    env: WebShopEnv, rng: random.Random, episodes: int, queries: Sequence[str] = ()
) -> tuple[list[int], list[int], list[int]]:
    """Random valid play through responses with tags; nanoseconds of CPU of each reset, step and step with a search.

    An action is drawn evenly from the admissible ones; a search is for one of the queries, or a piece of the
    instruction where there are none.
    """
    resets: list[int] = []
    steps: list[int] = []
    searches: list[int] = []
    for episode in range(episodes):
        start = time.process_time_ns()
        _, info = env.reset(seed=episode)
        resets.append(time.process_time_ns() - start)
        words = info["instruction"].replace("[", " ").replace("]", " ").split()
        while not env.done:
            action = rng.choice(info["admissible_actions"])
            if action == SEARCH_ACTION:
                first = rng.randrange(len(words))
                action = f"search[{rng.choice(queries) if queries else ' '.join(words[first : first + 5])}]"
            response = env.parser.respond(action, "so it is")
            start = time.process_time_ns()
            info = env.step(response)[4]
            taken = time.process_time_ns() - start
            (searches if action.startswith("search") else steps).append(taken)
    return resets, steps, searches


def count_wrong_episodes() -> Iterator[Figure]:
    """Everything recorded of the original, row by row."""
    kwargs = {"goals": GOLDEN / "goals.jsonl.xz", "title_nouns": golden_nouns}
    env = make_env(str(OFFICIAL), response_format="plain", reward="native", **kwargs)
    wrong = count = 0
    for episode in read_packed(GOLDEN / "episodes.jsonl.xz"):
        observation, info = env.reset(options={"task": episode["task"]})
        wrong += {"observation": observation, "available": info["admissible_actions"]} != episode["reset"]
        for step in episode["steps"]:
            observation, reward, done, _, info = env.step(step["action"])
            found = (observation, reward, done, info["admissible_actions"])
            wrong += found != (step["observation"], step["reward"], step["done"], step["available"])
            count += 1
    yield Figure(f"wrong steps of {count} in 40 recorded episodes", wrong, "", 0)
    catalog = env.catalog
    cases = read_packed(GOLDEN / "search_cases.jsonl.xz")
    wrong = sum([catalog.product(n).asin for n in catalog.search(case["query"])] != case["top"] for case in cases)
    yield Figure(f"wrong ordered top 50 of {len(cases)} searches", wrong, "", 0)
    for name in ("", "human"):
        goals = [Goal.from_row(row) for row in read_packed(GOLDEN / name / "goals.jsonl.xz")]
        cases = read_packed(GOLDEN / name / "reward_cases.jsonl.xz")
        wrong = 0
        for case in cases:
            goal, number = goals[case["goal"]], catalog.number_of(case["asin"])
            wanted = catalog.number_of(goal.asin)
            assert number is not None and wanted is not None
            score = score_purchase(
                goal,
                catalog.product(number),
                catalog.price(number),
                case["options"],
                catalog.nouns(number),
                catalog.nouns(wanted),
            )
            wrong += any(case[key] != value for key, value in score._asdict().items())
        yield Figure(f"wrong scores of {len(cases)} {name or 'synthetic'} purchases", wrong, "", 0)
    pairs = read_packed(GOLDEN / "fuzzy_cases.jsonl.xz")
    wrong = sum(token_set_ratio(a, str(tuple(b)) if isinstance(b, list) else b) != ratio for a, b, ratio in pairs)
    yield Figure(f"wrong ratios of {len(pairs)} pairs of texts", wrong, "", 0)


def count_wrong_recordings() -> Iterator[Figure]:
    """The mini catalogue's own recordings."""
    wrong = 0
    for row in ROWS:
        try:
            test_replaying_shows_and_pays_the_same(row)
        except AssertionError:
            wrong += 1
    yield Figure(f"wrong episodes of {len(ROWS)} recorded on the mini catalogue", wrong, "", 0)


def measure_oracle(quick: bool) -> Iterator[Figure]:
    """Goals of the mini catalogue that the expert wins."""
    env = make_env("mini", split="all")
    tasks = env.tasks[:: 10 if quick else 1]
    lost = longest = 0
    for task in tasks:
        env.reset(options={"task": task.id})
        for action in env.expert_plan():
            env.step(env.parser.respond(action))
        lost += not env.done or env.shop.score is None or env.shop.score.reward != 1.0
        longest = max(longest, env.turn)
    yield Figure(f"goals of {len(tasks)} that the expert does not win (mini)", lost, "", 0)
    yield Figure("turns of its longest episode", longest, "", 15)


def measure_start(catalog: str) -> Iterator[Figure]:
    """Importing and opening."""
    command = [sys.executable, "-c", IMPORT]
    imports = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    yield Figure("import over spear_envs.core, median of 5", median(imports), "s", 0.3, "7 s")
    start = time.process_time()
    make_env(catalog)
    yield Figure("first environment: catalogue and index made in memory", time.process_time() - start, "s")


def measure_play(catalog: str, episodes: int) -> Iterator[Figure]:
    """Resets and steps at 1,000 products."""
    every, searches, resets = average_play(make_env(catalog), episodes)
    name = f"step and admissible actions, mean of about {12 * episodes:,}"
    yield Figure(name, every, "ms", 0.3, "18-26 ms")
    yield Figure("step with a search", searches, "ms")
    yield Figure(f"reset, mean of {episodes:,}", resets, "ms", 0.1, "4-12 ms wall")


def average_play(env: WebShopEnv, episodes: int, queries: Sequence[str] = ()) -> tuple[float, float, float]:
    """Milliseconds of CPU of a step, a step with a search, and a reset.

    Each is the median of the means of five rounds, which a busy machine disturbs less than the mean of all.
    """
    rng = random.Random(1)
    play(env, rng, 200, queries)
    rounds = [play(env, rng, episodes // ROUNDS, queries) for _ in range(ROUNDS)]

    def average(*kinds: int) -> float:
        return median(float(np.concatenate([times[kind] for kind in kinds]).mean()) / 1e6 for times in rounds)

    return average(1, 2), average(2), average(0)


def measure_many(catalog: str) -> Iterator[Figure]:
    """Many environments in one process."""
    make_env(catalog)
    start = time.process_time()
    vector = gym.make_vec(ID, num_envs=256, catalog=catalog)
    made = time.process_time() - start
    rounds = []
    for seed in range(5):
        start = time.process_time()
        vector.reset(seed=seed)
        rounds.append(time.process_time() - start)
    vector.close()
    yield Figure("256 environments in one process: made", made, "s")
    yield Figure("256 environments in one process: reset, median of 5", median(rounds), "s", 1.0)


def measure_processes(catalog: str) -> Iterator[Figure]:
    """Memory of whole processes."""
    for name, code, arguments, bar, original in (
        ("one process, 50 episodes played", PLAYER, ["50"], 60.0, "742 MB"),
        ("384 environments in one process, five steps each", MANY, [], 1_000.0, "~280 GB"),
    ):
        with start_process(code, catalog, *arguments) as worker:
            yield Figure(f"{name}: resident", to_mb(read_memory(worker.pid, "Rss")), "MB", bar, original)
            finish(worker)


def to_mb(mebibytes: float) -> float:
    """Millions of bytes, in which the original's figures are given."""
    return mebibytes * 1024**2 / 1e6


def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that has said it is ready and waits for a line."""
    command = [sys.executable, "-c", code, *arguments]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        raise SystemExit("a measured process failed")
    return worker


def finish(worker: subprocess.Popen[str]) -> None:
    """Let a waiting process end."""
    worker.communicate("\n")


def measure_growth(catalog: str, episodes: int) -> Iterator[Figure]:
    """Memory of this process over many episodes."""
    env, rng = make_env(catalog), random.Random(2)
    play(env, rng, WARM_UP_EPISODES)
    before, start = read_memory("self", "Rss"), time.process_time()
    turns = 0
    for part in range(0, episodes, 1_000):
        turns += sum(map(len, play(env, rng, min(1_000, episodes - part))[1:]))
    grown = to_mb(read_memory("self", "Rss") - before)
    original = f"{turns * 110e3 / 1e9:,.0f} GB at 110 KB a step"
    yield Figure(f"memory grown over {episodes:,} episodes ({turns:,} steps)", grown, "MB", 2.0, original)
    yield Figure("episodes of random play in a CPU second", episodes / (time.process_time() - start), "")


def measure_large(products: int, folder: Path, rounds: int) -> Iterator[Figure]:
    """Search over synthetic products."""
    maker = TextMaker(read_profile())
    queries = maker.make_queries(rounds)
    if not folder.is_dir():
        yield from large.measure_building(maker, products, folder)
    yield from large.measure_opening(folder)
    yield from large.measure_memory(folder, queries[:300])
    yield from large.measure_searches(folder, queries)


def measure_building(folder: Path, products: int) -> Iterator[Figure]:
    """Build a store of synthetic official files, which are written first if they are not there."""
    raw = folder / "raw"
    if not raw.is_dir():
        write_catalog(raw, products)
    started, cpu = time.perf_counter(), read_cpu_seconds()
    with watch_memory() as samples:
        build_store(find_files(folder), folder / "store")
    minutes, scale = (read_cpu_seconds() - cpu) / 60, products / large.PRODUCTS
    original = f"index alone: {52 * products / 100_000 / 60:.2g} min wall"
    yield Figure("store: building, CPU of all processes, on 2 cores", minutes / 2, "min", 15 * scale, original)
    yield Figure("store: building, wall, as the machine was", (time.perf_counter() - started) / 60, "min")
    yield Figure("store: building, memory of all processes at the peak", max(samples, default=0.0), "MiB", 4_096)


def measure_store(folder: Path, products: int, episodes: int) -> Iterator[Figure]:
    """Play in a store."""
    if not (folder / "store").is_dir():
        yield from measure_building(folder, products)
    store = str(folder / "store")
    start = time.perf_counter()
    catalog = open_catalog(store)
    yield Figure("store: opening, wall", time.perf_counter() - start, "s", 1.0, "30-90 s")
    make_env(store)
    yield Figure("store: opening and the first environment, wall", time.perf_counter() - start, "s")
    yield Figure("store: products", len(catalog), "")
    yield Figure("store: goals", len(catalog.goals()), "")
    size = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    yield Figure("store: files", size / MIB, "MiB")
    # Instructions of synthetic products are made of their most frequent words; these queries are like recorded ones.
    queries = TextMaker(read_profile()).make_queries(1)
    every, searches, resets = average_play(make_env(store), episodes, queries)
    yield Figure("store: step and admissible actions, mean", every, "ms", None, "22-26 ms at 100,000")
    yield Figure("store: step with a search, mean", searches, "ms", 3.0, "not run")
    yield Figure("store: reset, mean", resets, "ms", None, "4-12 ms wall")
    with start_process(PLAYER, store, "100") as first, start_process(PLAYER, store, "100") as second:
        unique = to_mb(read_memory(second.pid, "Private_Clean", "Private_Dirty"))
        yield Figure("store: unique memory of a second process", unique, "MB", 60.0, "12-15 GB")
        finish(first)
        finish(second)


def list_sections(options: argparse.Namespace, catalog: str, stack: ExitStack) -> list[Callable[[], Iterator[Figure]]]:
    """What is to be measured, in order."""
    quick = options.quick
    sections: list[Callable[[], Iterator[Figure]]] = [
        count_wrong_episodes if GOLDEN.is_dir() and OFFICIAL.is_dir() else count_wrong_recordings,
        lambda: measure_oracle(quick),
        lambda: measure_start(catalog),
        lambda: measure_play(catalog, 300 if quick else 5_000),
        lambda: measure_many(catalog),
        lambda: measure_processes(catalog),
        lambda: measure_growth(catalog, 2_000 if quick else options.episodes),
    ]
    if options.large:
        folder = options.folder or Path(stack.enter_context(TemporaryDirectory())) / "index"
        sections.append(lambda: measure_large(options.products, folder, 1 if quick else 10))
    if options.store is not None:
        sections.append(lambda: measure_store(options.store, options.products, 100 if quick else 2_000))
    return sections


def format_figure(figure: Figure) -> str:
    """One line, with the bar and whether it holds."""
    value = f"{figure.value:,.0f}" if figure.value >= 1_000 else f"{figure.value:.4g}"
    verdict = "" if figure.bar is None else f"  bar <= {figure.bar:,.4g}  {'held' if figure.held else 'NOT HELD'}"
    original = f"  [original: {figure.original}]" if figure.original else ""
    return f"{figure.name:62} {value:>10} {figure.unit:4}{verdict}{original}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it as JSON where asked; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--episodes", type=int, default=100_000, help="episodes that memory is watched over")
    parser.add_argument("--large", action="store_true", help="also search over synthetic products (minutes)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where their index is kept (default: thrown away)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="also a whole store of synthetic products, kept there"
    )
    parser.add_argument("--products", type=int, default=large.PRODUCTS, help="how many there are (default 1,180,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    catalog = str(OFFICIAL) if OFFICIAL.is_dir() else "mini"
    what = "official catalogue of 1,000 products" if OFFICIAL.is_dir() else "mini catalogue: no official one at hand"
    print(f"Python {platform.python_version()}, NumPy {np.__version__}; {what}")
    figures = []
    with ExitStack() as stack:
        for section in list_sections(options, catalog, stack):
            for figure in section():
                print(format_figure(figure), flush=True)
                figures.append(figure)
    if options.json is not None:
        rows = [{**asdict(figure), "held": figure.held} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.held for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
