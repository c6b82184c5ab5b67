"""Run benchmarks, keep their figures, and judge them by their bars."""
