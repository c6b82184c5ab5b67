"""Equality and containment, by the tests that prove them.

A claim is proved if at least one of its tests passed and none failed. Where the material of a claim is not at hand, its
tests are skipped and the claim is not measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_envs.testing import check_spear_env

BARS = (
    Bar("spear check of the five environments", "failed", at_most=0.0, size="standard"),
    Bar("Sokoban: recordings of gym-sokoban", "failed", at_most=0.0),
    Bar("ALFWorld: recordings of TextWorld", "failed", at_most=0.0),
    Bar("WebShop: recordings of the original", "failed", at_most=0.0),
    Bar("Search-R1: recorded answers of the service", "failed", at_most=0.0),
    Bar("SPEAR's algorithms: golden rows", "failed", at_most=0.0),
    Bar("sandbox: recorded attacks", "failed", at_most=0.0),
    Bar("sandbox: attacks of our own, each with a control", "failed", at_most=0.0, size="standard"),
    Bar("no generation for an ended episode", "failed", at_most=0.0),
    Bar("no token is made from text a second time", "failed", at_most=0.0),
    Bar("replay page: a script in an observation does not run", "failed", at_most=0.0),
    Bar("strangers' files: nothing in them runs", "failed", at_most=0.0),
)
PROOFS: Mapping[str, tuple[str, ...]] = {
    "Sokoban: recordings of gym-sokoban": ("tests/spear_envs/sokoban/test_engine.py",),
    "ALFWorld: recordings of TextWorld": ("tests/spear_envs/alfworld/test_interpreter.py",),
    "WebShop: recordings of the original": (
        "tests/spear_envs/webshop/test_golden.py",
        "tests/spear_envs/webshop/test_golden.py",
    ),
    "Search-R1: recorded answers of the service": ("tests/spear_envs/retrieval/test_golden_http.py",),
    "SPEAR's algorithms: golden rows": ("tests/training/algorithms/test_objective.py",),
    "sandbox: recorded attacks": ("tests/sandbox/test_golden.py",),
    "sandbox: attacks of our own, each with a control": ("tests/sandbox/test_attacks.py",),
    "no generation for an ended episode": ("tests/agents/test_episode.py::test_nothing_is_generated_after_the_end",),
    "no token is made from text a second time": ("tests/agents/test_prompting.py",),
    "replay page: a script in an observation does not run": (
        "tests/agents/replay/test_page.py",
        "tests/agents/replay/test_rich.py",
        "tests/agents/replay/test_server.py",
    ),
    "strangers' files: nothing in them runs": ("tests/resilience/test_untrusted.py",),
}
"""The tests of each claim."""
SLOW = ("sandbox: attacks of our own, each with a control",)
"""Claims whose tests take minutes: not with ``--quick``."""
IDS = tuple(f"spear/{name}-v0" for name in ("ALFWorld", "WebShop", "Sokoban", "CodeInterpreter", "SearchR1"))
ROOT = Path(__file__).resolve().parents[1]


def run_tests(tests: tuple[str, ...], folder: Path) -> dict[str, int]:
    """Run tests; how many ``passed``, ``failed`` and were ``skipped``."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not report.exists():
        raise SystemExit(f"pytest did not run {', '.join(tests)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    if counts["failures"] or counts["errors"]:
        print(done.stdout[-2000:], flush=True)
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"]}


def check_environments() -> Iterator[Figure]:
    """The contract, by the checker that everyone has."""
    results = [result for env_id in IDS for result in check_spear_env(env_id, raise_on_failure=False).results]
    failed = [result.name for result in results if not result.passed]
    yield Figure("spear check of the five environments", len(failed), "failed", note=f"of {len(results)} checks")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Each claim whose material is here."""
    if options.size is not Size.QUICK:
        yield from check_environments()
    for claim, tests in PROOFS.items():
        if options.size is Size.QUICK and claim in SLOW:
            continue
        counts = run_tests(tests, options.work)
        if counts["passed"] or counts["failed"]:
            note = f"{counts['passed']} passed, {counts['skipped']} skipped"
            yield Figure(claim, counts["failed"], "failed", note=note)
        else:
            print(f"{claim}: not proved here, all {counts['skipped']} tests are skipped", flush=True)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("pytest", "hypothesis"))


if __name__ == "__main__":
    sys.exit(main())
