"""Lucene's ranking without a JVM: text analysis, a BM25 index in mapped arrays, and its build."""
