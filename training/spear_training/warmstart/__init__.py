"""The warm start: a tiny language model that knows the form of a response and a little of the task."""

from spear_training.warmstart.policy import PolicyShape, WarmStartReport, WarmStartSettings, train_policy
from spear_training.warmstart.recipes import RECIPES, choose_recipe
from spear_training.warmstart.rows import Answers, ExpertRow, collect_expert_rows
from spear_training.warmstart.tokenizer import make_tokenizer

__all__ = [
    "RECIPES",
    "Answers",
    "ExpertRow",
    "PolicyShape",
    "WarmStartReport",
    "WarmStartSettings",
    "choose_recipe",
    "collect_expert_rows",
    "make_tokenizer",
    "train_policy",
]
