"""WebShop: equality with the original, speed, memory.

The catalogue is the official one of 1,000 products and the recordings are those of the original where a folder
``shared`` with both lies beside the checkout; else the mini catalogue, and its own recordings. With ``--full`` a whole
store of 1.18 million synthetic products is built in ``--work`` from synthetic official files (5.2 GB) and played in;
search alone is measured by ``webshop_search.py``. Times are CPU seconds of this process; a mean is the median of those
of five rounds.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks import webshop_search as large
from benchmarks.parts.profile_texts import TextMaker, read_profile
from benchmarks.parts.webshop_data import write_catalogue
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from benchmarks.webshop_search import MIB, read_cpu_seconds, read_memory, watch_memory
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import open_catalogue
from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.products import find_files
from spear_envs.webshop.reward import score_purchase, token_set_ratio
from spear_envs.webshop.shop import SEARCH_ACTION
from tests.spear_envs.webshop.conftest import golden_nouns, read_packed
from tests.spear_envs.webshop.test_recordings import ROWS, test_replaying_shows_and_pays_the_same

BARS = (
    Bar("wrong steps of recorded episodes", at_most=0.0),
    Bar("wrong ordered top 50 of searches", at_most=0.0),
    Bar("wrong scores of synthetic purchases", at_most=0.0),
    Bar("wrong scores of human purchases", at_most=0.0),
    Bar("wrong ratios of pairs of texts", at_most=0.0),
    Bar("wrong episodes recorded on the mini catalogue", at_most=0.0),
    Bar("goals that the expert does not win (mini)", at_most=0.0),
    Bar("turns of its longest episode", at_most=15.0),
    Bar("import over spear_envs.core, median of 5", "s", at_most=0.3),
    Bar("step and admissible actions, mean", "ms", at_most=0.3),
    Bar("reset, mean", "ms", at_most=0.1),
    Bar("256 environments in one process: reset, median of 5", "s", at_most=1.0),
    Bar("one process, 50 episodes played: resident", "MB", at_most=60.0),
    Bar("384 environments in one process, five steps each: resident", "MB", at_most=1_000.0),
    Bar("memory grown over many episodes", "MB", at_most=2.0, size="standard"),
    Bar("episodes that memory was watched over", at_least=100_000.0, size="standard"),
    Bar("store: building, on 2 cores and for 1.18 million", "min", at_most=15.0, size="full"),
    Bar("store: building, memory of all processes at the peak", "MiB", at_most=4_096.0, size="full"),
    Bar("store: opening, wall", "s", at_most=1.0, size="full"),
    Bar("store: step with a search, mean", "ms", at_most=3.0, size="full"),
    Bar("store: unique memory of a second process", "MB", at_most=60.0, size="full"),
)
EPISODES = {Size.QUICK: 2_000, Size.STANDARD: 100_000, Size.FULL: 100_000}
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
                 for env in vector.envs])
print("ready", flush=True)
sys.stdin.readline()
"""


def make_env(catalogue: str, **kwargs: Any) -> WebShopEnv:
    """The environment over a catalogue."""
    env = gym.make(ID, catalog=catalogue, disable_env_checker=True, **kwargs).unwrapped
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
    yield Figure("wrong steps of recorded episodes", wrong, note=f"{count} steps of 40 episodes")
    catalogue = env.catalogue
    cases = read_packed(GOLDEN / "search_cases.jsonl.xz")
    wrong = sum([catalogue.product(n).asin for n in catalogue.search(case["query"])] != case["top"] for case in cases)
    yield Figure("wrong ordered top 50 of searches", wrong, note=f"of {len(cases)}")
    for name in ("", "human"):
        goals = [Goal.from_row(row) for row in read_packed(GOLDEN / name / "goals.jsonl.xz")]
        cases = read_packed(GOLDEN / name / "reward_cases.jsonl.xz")
        wrong = 0
        for case in cases:
            goal, number = goals[case["goal"]], catalogue.number_of(case["asin"])
            wanted = catalogue.number_of(goal.asin)
            assert number is not None and wanted is not None
            score = score_purchase(
                goal,
                catalogue.product(number),
                catalogue.price(number),
                case["options"],
                catalogue.nouns(number),
                catalogue.nouns(wanted),
            )
            wrong += any(case[key] != value for key, value in score._asdict().items())
        yield Figure(f"wrong scores of {name or 'synthetic'} purchases", wrong, note=f"of {len(cases):,}")
    pairs = read_packed(GOLDEN / "fuzzy_cases.jsonl.xz")
    wrong = sum(token_set_ratio(a, str(tuple(b)) if isinstance(b, list) else b) != ratio for a, b, ratio in pairs)
    yield Figure("wrong ratios of pairs of texts", wrong, note=f"of {len(pairs):,}")


def count_wrong_recordings() -> Iterator[Figure]:
    """The mini catalogue's own recordings."""
    wrong = 0
    for row in ROWS:
        try:
            test_replaying_shows_and_pays_the_same(row)
        except AssertionError:
            wrong += 1
    yield Figure("wrong episodes recorded on the mini catalogue", wrong, note=f"of {len(ROWS)}")


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
    yield Figure("goals that the expert does not win (mini)", lost, note=f"of {len(tasks)}")
    yield Figure("turns of its longest episode", longest)


def measure_start(catalogue: str) -> Iterator[Figure]:
    """Importing and opening."""
    command = [sys.executable, "-c", IMPORT]
    imports = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    yield Figure("import over spear_envs.core, median of 5", median(imports), "s")
    start = time.process_time()
    make_env(catalogue)
    yield Figure("first environment: catalogue and index made in memory", time.process_time() - start, "s")


def measure_play(catalogue: str, episodes: int) -> Iterator[Figure]:
    """Resets and steps at 1,000 products."""
    every, searches, resets = average_play(make_env(catalogue), episodes)
    yield Figure("step and admissible actions, mean", every, "ms", note=f"of about {12 * episodes:,}")
    yield Figure("step with a search", searches, "ms")
    yield Figure("reset, mean", resets, "ms", note=f"of {episodes:,}")


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


def measure_many(catalogue: str) -> Iterator[Figure]:
    """Many environments in one process."""
    make_env(catalogue)
    start = time.process_time()
    vector = gym.make_vec(ID, num_envs=256, catalog=catalogue)
    made = time.process_time() - start
    rounds = []
    for seed in range(5):
        start = time.process_time()
        vector.reset(seed=seed)
        rounds.append(time.process_time() - start)
    vector.close()
    yield Figure("256 environments in one process: made", made, "s")
    yield Figure("256 environments in one process: reset, median of 5", median(rounds), "s")


def measure_processes(catalogue: str) -> Iterator[Figure]:
    """Memory of whole processes."""
    for name, code, arguments in (
        ("one process, 50 episodes played", PLAYER, ["50"]),
        ("384 environments in one process, five steps each", MANY, []),
    ):
        with start_process(code, catalogue, *arguments) as worker:
            yield Figure(f"{name}: resident", to_mb(read_memory(worker.pid, "Rss")), "MB")
            finish(worker)


def to_mb(mebibytes: float) -> float:
    """Millions of bytes."""
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


def measure_growth(catalogue: str, episodes: int) -> Iterator[Figure]:
    """Memory of this process over many episodes."""
    env, rng = make_env(catalogue), random.Random(2)
    play(env, rng, WARM_UP_EPISODES)
    before, start = read_memory("self", "Rss"), time.process_time()
    turns = 0
    for part in range(0, episodes, 1_000):
        turns += sum(map(len, play(env, rng, min(1_000, episodes - part))[1:]))
    grown = to_mb(read_memory("self", "Rss") - before)
    yield Figure("episodes that memory was watched over", episodes)
    yield Figure("memory grown over many episodes", grown, "MB", note=f"{turns:,} steps")
    yield Figure("episodes of random play in a CPU second", episodes / (time.process_time() - start), "episodes/s")


def measure_building(folder: Path, products: int) -> Iterator[Figure]:
    """Build a store of synthetic official files, which are written first if they are not there."""
    raw = folder / "raw"
    if not raw.is_dir():
        write_catalogue(raw, products)
    started, cpu = time.perf_counter(), read_cpu_seconds()
    with watch_memory() as samples:
        build_store(find_files(folder), folder / "store")
    minutes, scale = (read_cpu_seconds() - cpu) / 60, products / large.PRODUCTS
    name = "store: building, on 2 cores and for 1.18 million"
    yield Figure(name, minutes / 2 / scale, "min", note="CPU of all processes")
    yield Figure("store: building, wall, as the machine was", (time.perf_counter() - started) / 60, "min")
    yield Figure("store: building, memory of all processes at the peak", max(samples, default=0.0), "MiB")


def measure_store(folder: Path, products: int, episodes: int) -> Iterator[Figure]:
    """Play in a store."""
    if not (folder / "store").is_dir():
        yield from measure_building(folder, products)
    store = str(folder / "store")
    start = time.perf_counter()
    catalogue = open_catalogue(store)
    yield Figure("store: opening, wall", time.perf_counter() - start, "s")
    make_env(store)
    yield Figure("store: opening and the first environment, wall", time.perf_counter() - start, "s")
    yield Figure("store: products", len(catalogue))
    yield Figure("store: goals", len(catalogue.goals()))
    size = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    yield Figure("store: files", size / MIB, "MiB")
    # Instructions of synthetic products are made of their most frequent words; these queries are like recorded ones.
    queries = TextMaker(read_profile("webshop")).make_queries(1)
    every, searches, resets = average_play(make_env(store), episodes, queries)
    yield Figure("store: step and admissible actions, mean", every, "ms")
    yield Figure("store: step with a search, mean", searches, "ms")
    yield Figure("store: reset, mean", resets, "ms")
    with start_process(PLAYER, store, "100") as first, start_process(PLAYER, store, "100") as second:
        unique = to_mb(read_memory(second.pid, "Private_Clean", "Private_Dirty"))
        yield Figure("store: unique memory of a second process", unique, "MB")
        finish(first)
        finish(second)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    quick = options.size is Size.QUICK
    catalogue = str(OFFICIAL) if OFFICIAL.is_dir() else "mini"
    print("official catalogue of 1,000 products" if OFFICIAL.is_dir() else "mini catalogue: no official one at hand")
    if GOLDEN.is_dir() and OFFICIAL.is_dir():
        yield from count_wrong_episodes()
    yield from count_wrong_recordings()
    yield from measure_oracle(quick)
    yield from measure_start(catalogue)
    yield from measure_play(catalogue, 300 if quick else 5_000)
    yield from measure_many(catalogue)
    yield from measure_processes(catalogue)
    yield from measure_growth(catalogue, EPISODES[options.size])
    if options.size is Size.FULL:
        yield from measure_store(options.work, options.products, 2_000)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--products", type=int, default=large.PRODUCTS, help="of the store (default 1,180,000)")
    return run_benchmark(measure, parser.parse_args(), BARS, ("numpy",))


if __name__ == "__main__":
    sys.exit(main())
