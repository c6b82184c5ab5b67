"""The warm start: a tiny language model that knows the form of a response and a little of the task."""

from spear_training.warmstart.policy import PolicyShape, WarmStartReport, WarmStartSettings, train_policy  # noqa: F401
from spear_training.warmstart.recipes import RECIPES, choose_recipe  # noqa: F401
from spear_training.warmstart.rows import Answers, ExpertRow, collect_expert_rows  # noqa: F401
from spear_training.warmstart.tokenizer import make_tokenizer  # noqa: F401
