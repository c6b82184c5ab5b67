"""Put the results of ``spear bench run`` into docs/benchmarks.md, with their pictures.

python scripts/docs/benchmarks.py runs/bench
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
MARK = "<!-- results: written by scripts/docs/benchmarks.py -->\n"


def main() -> None:
    """Replace everything below the mark."""
    out = Path(sys.argv[1])
    head, mark, _ = PAGE.read_text("utf-8").partition(MARK)
    if not mark:
        sys.exit(f"{PAGE} has no line {MARK.strip()}")
    for name in ("bars", "peers"):
        shutil.copyfile(out / f"{name}.png", PAGE.parent / "images" / f"bench-{name}.png")
    PAGE.write_text(head + mark + "\n" + (out / "bench.md").read_text("utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
