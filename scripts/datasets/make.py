"""``python scripts/datasets/make.py [FOLDER]``: write the embedded data sets, the same bytes on any machine."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.generate import make_base
from problems.generate import SIZES, build
from shop.generate import make_records

from spear_envs.core.tasks import canonical_json
from spear_envs.search.embedded import BaseSize

FOLDER = Path(__file__).resolve().parents[2] / "spear_envs" / "data" / "embedded"


def make_search() -> tuple[Any, dict[str, int]]:
    """Both knowledge bases, and what each counts."""
    data, counts = {}, {}
    for size in BaseSize:
        base = make_base(size)
        questions = {split: [asdict(question) for question in asked] for split, asked in base.questions.items()}
        data[size.value] = {"corpus": [document["contents"] for document in base.corpus], "questions": questions}
        counts[f"{size.value} passages"] = len(base.corpus)
        counts[f"{size.value} questions"] = sum(map(len, questions.values()))
    return data, counts


def make_code() -> tuple[Any, dict[str, int]]:
    """The problems of each set and split."""
    data = {
        name: {split: [asdict(one) for one in problems] for split, problems in build(name).items()} for name in SIZES
    }
    return data, {f"{name} problems": sum(map(len, splits.values())) for name, splits in data.items()}


def make_webshop() -> tuple[Any, dict[str, int]]:
    """The catalogue in the form of the official files."""
    items, attributes, human = make_records()
    data = {"items": items, "attributes": attributes, "human": human}
    return data, {"products": len(items), "attributes": len(attributes), "human": len(human)}


SETS = {"search": make_search, "code": make_code, "webshop": make_webshop}


def main(folder: Path) -> int:
    """Write each set as one compressed file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SETS.items():
        data, counts = make()
        fingerprint = hashlib.sha256(canonical_json(data).encode()).hexdigest()
        content = {"license": "Apache-2.0", "counts": counts, "fingerprint": fingerprint, "data": data}
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
        sys.stdout.write(f"{name}: {counts} {fingerprint}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
