"""Search-R1: questions that take several searches, a retriever, and answers graded by exact match."""
