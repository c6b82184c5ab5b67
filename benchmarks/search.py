"""Search-R1 beside its peers: what BM25 finds and costs, how soon a first question is answered, and the embedded base.

``python -m benchmarks.search`` compares our BM25 with tantivy and bm25s in this process, on the questions and passages
of ``shared/data/qa`` beside the checkout, or on the embedded base where that folder is missing.  ``--all`` goes on with
``benchmarks.search_service`` (the service under load).  Times are CPU seconds, taken in turn: ours, the peers, ours
again.  A peer that is not installed is left out (``pip install tantivy bm25s``).
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

from benchmarks._figures import Figure, describe_run, measure_cpu, print_figures, write_figures
from spear_envs.retrieval.bm25 import BM25Retriever
from spear_envs.retrieval.corpus import Corpus
from spear_envs.search.env import SearchR1Env
from spear_envs.search.grading import normalize_answer
from spear_envs.search.mini_kb import SPLITS, BaseSize, build
from spear_envs.search.mini_kb.generate import make_base
from spear_envs.search.mini_kb.judging import SearchingJudge, choose_judge

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "qa"
ROUNDS = 5
TOPK = 3
BASELINE = {3: 121, 10: 148}
"""Of 173 questions, those with a golden answer in the top k: the README of the data, of tantivy."""
QUERY_MS = 1.0
FIRST_ANSWER_SECONDS = 1.0
PARTS = {"search_service": "fastapi"}
"""Benchmarks that ``--all`` runs, and a package that each needs."""
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
    """What is searched, and for what."""

    name: str
    texts: list[str]
    queries: list[str]
    """Whose cost is measured."""
    answers: list[tuple[str, list[str]]]
    """Questions of which a golden answer is in the corpus, and all their golden answers; may be empty."""


def read_lines(path: Path) -> list[dict[str, object]]:
    """The JSON lines of an xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_material() -> Material:
    """Real questions and passages if they are at hand, else the embedded base."""
    if not SHARED.is_dir():
        base = build()
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
    retriever = BM25Retriever(corpus)
    return lambda query, k: [row for row, _ in retriever.search([query], k)[0]]


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


PEERS: Mapping[str, Callable[[Sequence[str]], Find]] = {"tantivy": open_tantivy, "bm25s": open_bm25s}


def measure_bm25(material: Material, quick: bool) -> Iterator[Figure]:
    """Cost of building and of a query, and what is found, each beside the peers that are installed."""
    openers = {"ours": open_ours, **{name: opener for name, opener in PEERS.items() if find_spec(name) is not None}}
    finds: dict[str, Find] = {}
    for name, opener in openers.items():
        start = time.process_time()
        finds[name] = opener(material.texts)
        yield Figure(f"{name}: index {len(material.texts):,} passages in memory", time.process_time() - start, "CPU s")
    queries = material.queries[:: 4 if quick else 1]
    spent: dict[str, list[float]] = {name: [] for name in finds}
    for find in finds.values():
        search_all(find, queries[:100])
    for _ in range(2 if quick else ROUNDS):
        for name, find in finds.items():
            spent[name].append(measure_cpu(lambda find=find: search_all(find, queries)) / len(queries))  # type: ignore[misc]
    for name, seconds in spent.items():
        bar = QUERY_MS if name == "ours" else None
        yield Figure(f"{name}: a query, top {TOPK} ({len(queries):,} questions)", 1000 * median(seconds), "CPU ms", bar)
    for k, baseline in BASELINE.items() if material.answers else ():
        for name, find in finds.items():
            found = count_answered(find, material, k)
            note = f"{name}: an answer in the top {k} of {len(material.answers)} questions"
            yield Figure(note, found, "questions", baseline if name == "ours" else None, at_least=True)


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
    """From the start of Python to the answer of a three-hop question, in a process of its own."""
    cpu, wall = [], []
    for _ in range(3 if quick else ROUNDS):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_ANSWER], cwd=ROOT, check=True, env={**os.environ, **ONE_THREAD})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    load = os.getloadavg()[0]
    yield Figure("first question answered, from the start of Python", median(cpu), "CPU s", FIRST_ANSWER_SECONDS)
    yield Figure(f"the same by the clock (least of {len(wall)}, load {load:.1f})", min(wall), "s")


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure_base(quick: bool) -> Iterator[Figure]:
    """What making the base costs, and that its expert answers all questions, in at most one turn more than hops."""
    rounds = 2 if quick else ROUNDS
    for size in BaseSize:
        made = [measure_cpu(lambda size=size: make_base(0, size, choose_judge)) for _ in range(rounds)]  # type: ignore[misc]
        yield Figure(f"embedded base, {size.value}: made", median(made), "CPU s")
    judged = measure_cpu(lambda: make_base(0, BaseSize.STANDARD, lambda contents, size: SearchingJudge(contents)))
    yield Figure("embedded base, standard: made with every question searched", judged, "CPU s")
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
        name = f"{dataset}: won by the expert in at most hops + 1 turns, of {played:,}"
        yield Figure(name, won, "questions", played, at_least=True)


# ---------------------------------------------------------------- the command


def run_parts(quick: bool) -> bool:
    """Run the other benchmarks of search in processes of their own; says whether all their bars hold."""
    held = True
    for part, package in PARTS.items():
        if find_spec(package) is None:
            print(f"\n{part}: left out, as {package} is not installed (pip install -e '.[search]')")
            continue
        print(f"\n{part}:", flush=True)
        few = ["--quick"] if quick else []
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{part}", *few], cwd=ROOT, check=False)
        held &= done.returncode == 0
    return held


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="go on with the service under load")
    parser.add_argument("--quick", action="store_true", help="fewer questions and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    os.environ.update(ONE_THREAD)
    material = read_material()
    print(f"{describe_run('tantivy', 'bm25s', 'numpy')}; {material.name}")
    figures = []
    for section in (
        measure_bm25(material, options.quick),
        measure_start(options.quick),
        measure_base(options.quick),
    ):
        figures += print_figures(section)
    if options.json is not None:
        write_figures(figures, options.json)
    held = all(figure.held for figure in figures)
    return 0 if (run_parts(options.quick) if options.all else True) and held else 1


if __name__ == "__main__":
    sys.exit(main())
