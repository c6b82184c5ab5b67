"""Recorded episodes and trainings as a page to look at, and episodes played by a person."""
