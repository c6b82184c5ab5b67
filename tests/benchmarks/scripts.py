"""Benchmarks of a few lines, to be run as the real ones are."""

from pathlib import Path

HEAD = '''"""{summary}"""

import os, signal, sys, time

from benchmarks.runner.figures import Bar, Figure, LeftOut, make_parser, run_benchmark

BARS = (
    Bar("step", "ms", at_most=20.0),
    Bar("gain", "times", at_least=1.5),
    Bar("large", "GB", at_most=1.0, size="full"),
)


def measure(options):
{body}


if __name__ == "__main__":
    sys.exit(run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("numpy", "no-such-package")))
'''
GOOD = """
yield Figure("step", 1.0, "ms", note="of three")
yield Figure("step", 40.0, "ms", "peer")
yield Figure("gain", 2.0, "times")
"""


def write_script(folder: Path, name: str, body: str = GOOD) -> Path:
    """A benchmark whose ``measure`` has this body."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path = folder / f"{name}.py"
    path.write_text(HEAD.format(summary=f"What {name} costs.", body=lines), encoding="utf-8")
    return path
