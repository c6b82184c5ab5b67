"""The seam of all retrievers: queries in, rows of a corpus and scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Hit = tuple[int, float]
"""Row of the corpus and score."""


class Retriever(Protocol):
    """Finds rows of one corpus. One call at a time: a service gives it one thread of its own."""

    @property
    def rows(self) -> int:
        """Number of documents."""

    @property
    def fingerprint(self) -> str:
        """Equal for retrievers that give the same results: of corpus, index, model and settings."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """What each query costs in a batch, in tokens: a batch costs as many times its greatest as it has queries.

        1 for each where a batch costs what its queries cost one by one.
        """

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most ``k`` hits for each query, best first, ties to the lower row, no row twice.

        Any text is a query. The first hits do not depend on ``k``.

        Raises:
            SpearError: ``k`` is below 1, or the index is damaged.
        """

    def describe(self) -> dict[str, Any]:
        """Kind and settings as plain data, for people and ``/health``."""
