"""BM25 next to its peers: what it finds and costs.

Our BM25 and the peers answer in this process, on the questions and passages of ``shared/data/qa`` beside the checkout,
or on the embedded base where that folder is missing. Times are CPU seconds, taken in turn: ours, the peers, ours again.
A peer that is not installed is left out (``pip install tantivy bm25s``). The service has ``search_service.py``.

``--full`` builds and searches an index of as many passages as wiki-18 has (``parts/search_wiki.py``; 10 GB of disk).
With ``--work`` the index is kept, and another run only searches it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.parts.search_wiki import measure_wiki
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, measure_cpu, run_benchmark
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.indexes import BM25Index
from spear_envs.retrieval.vectors import WIKI18_ROWS
from spear_envs.search.embedded import SPLITS, open_base
from spear_envs.search.env import SearchR1Env
from spear_envs.search.grading import normalize_answer

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "qa"
ROUNDS = 5
TOPK = 3
BARS = (
    Bar("a query, top 3", "CPU ms", at_most=1.0),
    # Tantivy's, by the README of the data.
    Bar("an answer in the top 3", "questions", at_least=121.0),
    Bar("an answer in the top 10", "questions", at_least=148.0),
    Bar("first question answered, from the start of Python", "CPU s", at_most=1.0),
    Bar("mini: questions that the expert does not win in hops + 1 turns", at_most=0.0),
    Bar("mini-small: questions that the expert does not win in hops + 1 turns", at_most=0.0),
    Bar("21 million passages: built", "CPU min", at_most=30.0, size="full"),
    Bar("21 million passages: memory of the build at its peak", "GB", at_most=4.0, size="full"),
    Bar("21 million passages: index", "GB", at_most=3.0, size="full"),
    Bar("21 million passages: a query, top 3", "CPU ms", at_most=5.0, size="full"),
    Bar("21 million passages: a query, percentile 99", "CPU ms", at_most=15.0, size="full"),
)
ANSWERED = (3, 10)
"""In so many passages an answer is looked for."""
FIRST_ANSWER = """
import gymnasium as gym
env = gym.make("spear_envs:spear/SearchR1-v0", response_format="plain", split="test")
observation, info = env.reset(options={"task": "search/mini/test/00002"})
done = False
while not done:
    observation, reward, terminated, truncated, info = env.step(env.unwrapped.expert_plan()[0])
    done = terminated or truncated
assert info["won"] and info["tool_calls"] == 3
"""
Find = Callable[[str, int], Sequence[int]]


@dataclass(frozen=True)
class Material:
    """Texts to search, and queries."""

    name: str
    texts: list[str]
    queries: list[str]
    """Queries whose cost is measured."""
    answers: list[tuple[str, list[str]]]
    """Questions of which a golden answer is in the corpus, and all their golden answers; may be empty."""


def read_lines(path: Path) -> list[dict[str, object]]:
    """The JSON lines of an xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_material() -> Material:
    """Real questions and passages if they are at hand, else the embedded base."""
    if not SHARED.is_dir():
        base = open_base()
        queries = [query for split in SPLITS for question in base.questions[split] for query in question.oracle_queries]
        return Material("the embedded base", [document["contents"] for document in base.corpus], queries, [])
    texts = [str(row["contents"]) for row in read_lines(SHARED / "kilt_passages.jsonl.xz")]
    answers = []
    for row in read_lines(SHARED / "hotpotqa_kilt.jsonl.xz"):
        metadata, golds = row["metadata"], row["golden_answers"]
        assert isinstance(metadata, dict) and isinstance(golds, list)
        if metadata["answer_in_corpus"] and not metadata["yes_no"]:
            answers.append((str(row["question"]), golds))
    queries = [str(row["question"]) for row in read_lines(SHARED / "seven_benchmarks.jsonl.xz")]
    return Material("data/qa", texts, queries, answers)


# ---------------------------------------------------------------- BM25 and its peers


def open_ours(texts: Sequence[str]) -> Find:
    """Our BM25 as the retriever that the environment and the service use."""
    corpus = Corpus.in_memory([{"id": str(row), "contents": text} for row, text in enumerate(texts)])
    retriever = BM25Index(corpus)
    return lambda query, k: [row for row, _ in retriever.rank([query], k)[0]]


def open_tantivy(texts: Sequence[str]) -> Find:
    """tantivy with its English stemmer; its k1 = 1.2 and b = 0.75 cannot be set."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("contents", tokenizer_name="en_stem")
    builder.add_unsigned_field("row", stored=True)
    index = tantivy.Index(builder.build())
    writer = index.writer(num_threads=1)
    for row, text in enumerate(texts):
        document = tantivy.Document()
        document.add_text("contents", text)
        document.add_unsigned("row", row)
        writer.add_document(document)
    writer.commit()
    index.reload()
    searcher = index.searcher()
    words = re.compile(r"\w+")

    def find(query: str, k: int) -> list[int]:
        # Reduced to words, as text is a query language for tantivy.
        parsed = index.parse_query(" ".join(words.findall(query)).lower(), ["contents"])
        return [searcher.doc(address)["row"][0] for _, address in searcher.search(parsed, k).hits]

    return find


def open_bm25s(texts: Sequence[str]) -> Find:
    """bm25s with our k1 and b, English stop words, and a stemmer if there is one."""
    import bm25s

    stemmer = None
    if find_spec("Stemmer") is not None:
        from Stemmer import Stemmer  # type: ignore[import-not-found]

        stemmer = Stemmer("english")

    def cut(lines: list[str]) -> object:
        return bm25s.tokenize(lines, stopwords="en", stemmer=stemmer, show_progress=False)

    retriever = bm25s.BM25(k1=0.9, b=0.4)
    retriever.index(cut(list(texts)), show_progress=False)

    def find(query: str, k: int) -> list[int]:
        rows, _ = retriever.retrieve(cut([query]), k=k, show_progress=False)
        return [int(row) for row in rows[0]]

    return find


OURS = "ours"
PEERS: Mapping[str, Callable[[Sequence[str]], Find]] = {"tantivy": open_tantivy, "bm25s": open_bm25s}


def measure_bm25(material: Material, quick: bool) -> Iterator[Figure]:
    """Cost of building and of a query, and what is found, each beside the peers that are installed."""
    openers = {OURS: open_ours, **{name: opener for name, opener in PEERS.items() if find_spec(name) is not None}}
    finds: dict[str, Find] = {}
    for name, opener in openers.items():
        start = time.process_time()
        finds[name] = opener(material.texts)
        seconds, count = time.process_time() - start, f"{len(material.texts):,} passages"
        yield Figure("index the passages in memory", seconds, "CPU s", "" if name == OURS else name, note=count)
    queries = material.queries[:: 4 if quick else 1]
    spent: dict[str, list[float]] = {name: [] for name in finds}
    for find in finds.values():
        search_all(find, queries[:100])
    for _ in range(2 if quick else ROUNDS):
        for name, find in finds.items():
            spent[name].append(measure_cpu(lambda find=find: search_all(find, queries)) / len(queries))  # type: ignore[misc]
    for name, taken in spent.items():
        whose = "" if name == OURS else name
        yield Figure(f"a query, top {TOPK}", 1000 * median(taken), "CPU ms", whose, note=f"{len(queries):,} questions")
    for k in ANSWERED if material.answers else ():
        for name, find in finds.items():
            found, count = count_answered(find, material, k), f"of {len(material.answers)}"
            yield Figure(f"an answer in the top {k}", found, "questions", "" if name == OURS else name, note=count)


def search_all(find: Find, queries: Sequence[str]) -> None:
    """One search for each query."""
    for query in queries:
        find(query, TOPK)


def count_answered(find: Find, material: Material, k: int) -> int:
    """Questions of which a golden answer stands in one of the k best passages, both normalised."""
    texts: dict[int, str] = {}
    count = 0
    for question, golds in material.answers:
        rows = find(question, k)
        for row in rows:
            if row not in texts:
                texts[row] = normalize_answer(material.texts[row])
        count += any(normalize_answer(gold) in texts[row] for row in rows for gold in golds)
    return count


# ---------------------------------------------------------------- the embedded base


def measure_start(quick: bool) -> Iterator[Figure]:
    """Time a process from the start of Python to the answer of a three-hop question."""
    cpu, wall = [], []
    for _ in range(3 if quick else ROUNDS):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_ANSWER], cwd=ROOT, check=True, env={**os.environ, **ONE_THREAD})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    yield Figure("first question answered, from the start of Python", median(cpu), "CPU s")
    yield Figure("first question answered, by the clock", min(wall), "s", note=f"least of {len(wall)}")


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure_base(quick: bool) -> Iterator[Figure]:
    """Whether the expert answers all questions of the embedded bases, in at most one turn more than hops."""
    for dataset in ("mini", "mini-small"):
        won = played = 0
        for split in SPLITS:
            env = SearchR1Env(dataset, split=split, response_format="plain")
            for task in list(env.tasks)[:: 5 if quick else 1]:
                _, info = env.reset(options={"task": task.id})
                turns = 0
                while not env.done:
                    info = env.step(env.expert_plan()[0])[4]
                    turns += 1
                won += bool(info["won"]) and turns <= len(task.content["gold_passages"]) + 1
                played += 1
        name = f"{dataset}: questions that the expert does not win in hops + 1 turns"
        yield Figure(name, played - won, note=f"of {played:,}")


# ---------------------------------------------------------------- the command


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    quick = options.size is Size.QUICK
    os.environ.update(ONE_THREAD)
    material = read_material()
    print(material.name)
    yield from measure_bm25(material, quick)
    yield from measure_start(quick)
    yield from measure_base(quick)
    if options.size is Size.FULL:
        yield from measure_wiki(options.work, options.passages)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--passages", type=int, default=WIKI18_ROWS, help="of --full, instead of wiki-18's")
    return run_benchmark(measure, parser.parse_args(), BARS, ("tantivy", "bm25s", "numpy"))


if __name__ == "__main__":
    sys.exit(main())
