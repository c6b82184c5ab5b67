"""Sizes of a training before it starts: rows, tokens, replay and memory, each with its formula (``spear plan``).

Nothing is imported here: plans need torch, and commands that only ask :mod:`~spear_training.planning.architecture` for
the size of a model must start quickly.
"""
