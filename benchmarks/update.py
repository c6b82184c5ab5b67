"""One update of the same rows by our engine, by verl's own and by plain transformers; and the demo's whole step.

The arms take turns in one process with equal threads, micro-batches of as many tokens and the same GRPO loss, and
print the norms of their gradients. verl's engine pads, as it does wherever there is no flash-attention. The plain arms
are the script that one would write without verl and Ray: padded batches, logits everywhere, ``generate`` by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from benchmarks.runner.running import run_spear
from spear_agents.evaluation.records import read_history
from spear_training.demo import FULL
from spear_training.sft.samples import SampleReader

BARS = (
    Bar("tiny policy: our update over verl's", "times", at_most=1.0),
    Bar("135M: our update over verl's", "times", at_most=1.0, size="standard"),
    Bar("135M with an adapter: plain transformers and peft over our update", "times", at_least=1.5, size="standard"),
    Bar("demo: a step over plain generation and one plain pass", "times", at_most=2.5),
)
MODEL = "smollm2-135m"
GAMES = {Size.QUICK: 16, Size.STANDARD: 64, Size.FULL: 64}
ROUNDS = {Size.QUICK: 3, Size.STANDARD: 5, Size.FULL: 9}
STEPS = 8
"""Steps of the demo, of which the rows of the last are taken."""
SETTLED = 3
"""Its first step whose time counts."""


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """A short training of the demo, then its rows and those of a language model."""
    size: Size = options.size
    work: Path = options.work
    log = work / "log.txt"
    policy, run = work / "warmstart", work / "demo"
    if not policy.exists():
        _do(log, "warmstart", "spear/Sokoban-v1", "--out", str(policy))
    if not run.exists():
        words = ("preset=demo", *FULL.training, f"model.path={policy}", f"train.steps={STEPS}", "record.every=1",
                 "record.episodes=128",
                 "validation.at_start=false", "validation.every=null", "checkpoint.every=null")  # fmt: skip
        _do(log, "train", *words, "--out", str(run))
    rows = save(work / "tiny.npz", read_demo(run))
    tiny = {"tokens": 32_768, "dtype": "fp32", "lora": False, "threads": 1, "rounds": ROUNDS[size]}
    yield from compare("tiny policy", run_arms("update", rows, policy, tiny))
    yield from measure_demo(work, run, policy, rounds=ROUNDS[size])
    if size is Size.QUICK and not options.model:
        return
    games = work / "games.jsonl"
    if not games.exists():
        _do(log, "collect", "spear/ALFWorld-v0", "--out", str(games), "--tasks", str(GAMES[size]), "--env",
            "rooms=small", "--env", "expert=searching", "--env", "max_turns=12", "--template", "unlisted", "--layout",
            "conversation")  # fmt: skip
    from spear_agents.model_files import resolve_model  # late: --help needs no transformers

    folder = Path(resolve_model(MODEL))
    rows = save(work / "games.npz", read_games(games, folder))
    cores = os.cpu_count() or 1
    large = {"tokens": 2048, "dtype": "bf16", "lora": False, "threads": cores, "rounds": max(2, ROUNDS[size] // 2)}
    yield from compare("135M", run_arms("update", rows, folder, large))
    yield from compare("135M with an adapter", run_arms("update", rows, folder, large | {"lora": True}))


def _do(log: Path, *words: str) -> None:
    if run_spear(words, log):
        raise SystemExit(f"spear {words[0]} failed: see {log}")


def read_demo(run: Path) -> dict[str, Any]:
    """Read the rows of the last step, one a turn, with the log-probs that their tokens were drawn with."""
    lines = (run / "rollouts" / "episodes.jsonl").read_text("utf-8").splitlines()
    episodes = [episode for episode in map(json.loads, lines) if episode["step"] == STEPS]
    turns = [(place, turn, episode) for episode in episodes for place, turn in enumerate(episode["turns"])]
    return {
        "prompts": [len(turn["prompt_ids"]) for _, turn, _ in turns],
        "responses": [len(turn["response_ids"]) for _, turn, _ in turns],
        "ids": [token for _, turn, _ in turns for token in (*turn["prompt_ids"], *turn["response_ids"])],
        "mask": [1 for _, turn, _ in turns for _ in turn["response_ids"]],
        "old": [value for _, turn, _ in turns for value in turn["log_probs"]],
        "advantage": [episode["reward"] + 0.1 for _, _, episode in turns],  # of the size of an advantage; never 0
        "turn": [place for place, _, _ in turns],
        "episode": [number for number, episode in enumerate(episodes) for _ in episode["turns"]],
    }


def read_games(games: Path, folder: Path) -> dict[str, Any]:
    """Read one row of each of the expert's games, a conversation; advantages alternate."""
    from spear_agents.engines.hf import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    vocabulary = int(json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"])
    reader = SampleReader(tokenizer, vocabulary, [tokenizer.eos_token_id])
    samples = [reader.read(json.loads(line))[0] for line in games.read_text("utf-8").splitlines()]
    starts = [sample.mask.index(1) for sample in samples]
    return {
        "prompts": starts,
        "responses": [len(sample.ids) - start for sample, start in zip(samples, starts, strict=True)],
        "ids": [token for sample in samples for token in sample.ids],
        "mask": [bit for sample, start in zip(samples, starts, strict=True) for bit in sample.mask[start:]],
        "advantage": [1.0 if number % 2 else -0.7 for number in range(len(samples))],
    }


def save(path: Path, columns: dict[str, Any]) -> Path:
    """Write rows for the arms."""
    np.savez(path, allow_pickle=False, **{name: np.array(values) for name, values in columns.items()})
    return path


def start_arms(task: str, rows: Path, model: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    """Start ``benchmarks.parts.update_arms`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.parts.update_arms", task, str(rows), str(model), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def run_arms(task: str, rows: Path, model: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the arms to their end; the lines that they print."""
    with start_arms(task, rows, model, options) as process:
        return read_lines(process)


def read_lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The lines of JSON of a process that must end well."""
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout if line.startswith("{")]
    if process.wait() or not lines:
        raise SystemExit(f"an arm failed: {process.args!r}")
    return lines


def compare(what: str, lines: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Seconds of each arm, and the ratio of two, round by round."""
    seconds: dict[str, list[float]] = {}
    for line in lines:
        seconds.setdefault(line["arm"], []).append(line["seconds"])
    norms = {line["arm"]: line["norm"] for line in lines}
    ours, (other, theirs) = seconds.pop("ours"), *seconds.items()
    note = ", ".join(f"{arm} {norm:.3g}" for arm, norm in norms.items())
    yield Figure(f"{what}: update", statistics.median(ours), "s", note=f"norm of the gradient: {note}")
    peer = "verl" if other == "verl" else "transformers, peft"
    yield Figure(f"{what}: update", statistics.median(theirs), "s", peer)
    pairs = list(zip(ours, theirs, strict=True))
    if other == "verl":
        ratios, name = [mine / its for mine, its in pairs], "our update over verl's"
    else:
        ratios, name = [its / mine for mine, its in pairs], "plain transformers and peft over our update"
    span = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds"
    yield Figure(f"{what}: {name}", statistics.median(ratios), "times", note=span)


def measure_demo(work: Path, run: Path, policy: Path, *, rounds: int) -> Iterator[Figure]:
    """The demo's step beside the same work in as many plain processes as it has ranks."""
    history = [
        record for record in read_history(run) if record.get("step", 0) >= SETTLED and "perf/step_seconds" in record
    ]
    step = statistics.median(record["perf/step_seconds"] for record in history)
    yield Figure("demo: step", step, "s", note=f"median of steps {SETTLED} to {STEPS}")
    ranks = min(os.cpu_count() or 1, 4)
    with np.load(work / "tiny.npz") as file:
        rows = dict(file)
    options = {"tokens": 32_768, "dtype": "fp32", "threads": 1, "rounds": rounds, "most": 6}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                start_arms(
                    "step",
                    save(work / f"tiny-{rank}.npz", take(rows, rows["episode"] % ranks == rank)),
                    policy,
                    options,
                )
            )
            for rank in range(ranks)
        ]
        parts = [read_lines(process) for process in processes]
    plain = statistics.median(
        max(line["generate"] for line in each) + max(line["learn"] for line in each)
        for each in zip(*parts, strict=True)
    )
    generate = statistics.median(max(line["generate"] for line in each) for each in zip(*parts, strict=True))
    note = f"{ranks} processes: {generate:.2f} s of it generation"
    yield Figure("demo: step", plain, "s", "transformers", note=note)
    yield Figure("demo: a step over plain generation and one plain pass", step / plain, "times")


def take(rows: dict[str, Any], chosen: np.ndarray) -> dict[str, Any]:
    """Some of the rows, with their tokens."""
    lengths = rows["prompts"] + rows["responses"]
    tokens, answers = np.repeat(chosen, lengths), np.repeat(chosen, rows["responses"])
    of = {"ids": tokens, "mask": answers, "old": answers}
    return {name: values[of.get(name, chosen)] for name, values in rows.items()}


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="store_true", help="measure the language model with --quick, too")
    return run_benchmark(measure, parser.parse_args(), BARS, ("verl", "torch", "transformers", "peft"))


if __name__ == "__main__":
    raise SystemExit(main())
