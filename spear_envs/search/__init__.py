"""Search-R1: questions that take several searches, a retriever beside them, and answers graded by exact match."""
