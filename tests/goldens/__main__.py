"""``python -m tests.goldens make|compare [NAME...]``: write the goldens, or print every difference from them."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.goldens.subjects import SUBJECTS, Values

DATA = Path(__file__).parent / "data"


def read_golden(name: str) -> Values:
    """What was observed when the goldens were made."""
    values: Values = json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))
    return values


def make_plain(values: Values) -> Values:
    """The same after a round through JSON, which has no tuples."""
    plain: Values = json.loads(json.dumps(values, sort_keys=True, default=str))
    return plain


def find_differences(golden: Any, now: Any, path: str = "") -> Iterator[str]:
    """A line for each leaf that differs."""
    if isinstance(golden, dict) and isinstance(now, dict):
        for key in sorted(golden.keys() | now.keys()):
            if key not in now:
                yield f"{path}{key}: gone, was {str(golden[key])[:200]}"
            elif key not in golden:
                yield f"{path}{key}: new, {str(now[key])[:200]}"
            else:
                yield from find_differences(golden[key], now[key], f"{path}{key} / ")
    elif isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        for place, (before, after) in enumerate(zip(golden, now, strict=True)):
            yield from find_differences(before, after, f"{path}{place} / ")
    elif golden != now:
        yield f"{path[:-3]}: {str(golden)[:400]} -> {str(now)[:400]}"


def main(words: list[str]) -> int:
    """Make or compare the goldens that are named, or all; exit code 1 if one differs."""
    verb, names = (words or [""])[0], words[1:] or list(SUBJECTS)
    if verb not in ("make", "compare") or not set(names) <= set(SUBJECTS):
        sys.stdout.write(f"{__doc__} NAME is one of {', '.join(SUBJECTS)}.\n")
        return 2
    different = False
    for name in names:
        values = make_plain(SUBJECTS[name]())
        if verb == "make":
            text = json.dumps(values, sort_keys=True, ensure_ascii=False)
            (DATA / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
            continue
        for line in find_differences(read_golden(name), values):
            different = True
            sys.stdout.write(f"{name}: {line}\n")
    return int(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
