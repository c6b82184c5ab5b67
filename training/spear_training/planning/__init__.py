"""Sizes of a training before it starts: rows, tokens, replay and memory, each with its formula (``spear plan``).

Nothing is imported here: plans bring torch, and commands that only ask :mod:`~spear_training.planning.architecture` how
large a model is must start at once.
"""
