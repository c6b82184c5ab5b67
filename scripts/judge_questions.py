"""Writes which drafts the embedded knowledge bases of seed 0 drop, ``spear_envs/search/mini_kb/dropped.json``.

Run it after a change of the bases, which changes their questions and so the fingerprints of all embedded splits:

    python scripts/judge_questions.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from spear_envs.search.mini_kb.generate import make_base
from spear_envs.search.mini_kb.judging import RECORD, SearchingJudge, digest_corpus
from spear_envs.search.mini_kb.questions import Draft, Judge
from spear_envs.search.mini_kb.sizes import BaseSize

TARGET = Path(__file__).resolve().parents[1] / "spear_envs" / "search" / "mini_kb" / RECORD


class RecordingJudge:
    """Says what another judge says, and keeps the numbers of the drafts that it dropped."""

    def __init__(self, judge: Judge) -> None:
        self.dropped: list[int] = []
        self._judge = judge
        self._numbers = count()

    def __call__(self, draft: Draft) -> bool:
        """Return whether the draft is kept."""
        number, kept = next(self._numbers), self._judge(draft)
        if not kept:
            self.dropped.append(number)
        return kept


def judge_size(size: BaseSize) -> dict[str, object]:
    """The corpus of seed 0 by its digest, and the numbers of the drafts that searches rule out."""
    judges = []

    def find_judge(contents: Sequence[str], size: BaseSize) -> RecordingJudge:
        judges.append(RecordingJudge(SearchingJudge(contents)))
        return judges[0]

    base = make_base(0, size, find_judge)
    digest = digest_corpus([document["contents"] for document in base.corpus])
    return {"corpus": digest, "dropped": judges[0].dropped}


def main() -> int:
    """Judges both sizes."""
    record = {size.value: judge_size(size) for size in BaseSize}
    TARGET.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    sys.stdout.write(f"{TARGET}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
