"""Trainings in seconds: the trainer's own step over a small policy in this process, for comparisons of many seeds."""
