"""Trainings of the arms of an ablation: planned, run, compared and drawn."""
