"""Sizes of a training before it starts: rows, tokens, replay and memory, each with its formula (``spear plan``)."""

from spear_training.planning.report import Plan, make_plan, print_plan
from spear_training.planning.step import Texts

__all__ = ["Plan", "Texts", "make_plan", "print_plan"]
