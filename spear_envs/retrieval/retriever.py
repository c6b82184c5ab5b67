"""The interface of all retrievers: queries in, rows of a corpus and scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Hit = tuple[int, float]
"""Row of the corpus and score."""


class Retriever(Protocol):
    """Finds rows of one corpus. Call it from one thread at a time; a service gives each its own."""

    @property
    def rows(self) -> int:
        """Return the number of documents."""

    @property
    def fingerprint(self) -> str:
        """Identify corpus, index, model and settings: equal for retrievers that give the same results."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the cost of each query in a batch, in tokens.

        A batch costs the number of its queries times its greatest length. Return 1 for each where a batch costs the
        sum of its queries.
        """

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find at most ``k`` hits for each query, best first, ties to the lower row, no row twice.

        Any text is a query. The first hits do not depend on ``k``.

        Raises:
            SpearError: ``k`` is below 1, or the index is damaged.
        """

    def describe(self) -> dict[str, Any]:
        """Return kind and settings as plain data, for people and ``/health``."""
