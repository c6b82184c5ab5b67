"""Workloads, data and peers that a benchmark needs."""
