"""The warm start: a tiny language model that knows the form of a response and a little of the task.

``tokenizer`` makes a word-level tokenizer from a prompt template, ``rows`` collects what a noisy expert says,
``policy`` trains a small model on it.  The result is an ordinary Hugging Face folder.
"""

from training.warmstart.policy import PolicyShape, WarmStartReport, WarmStartSettings, train_policy
from training.warmstart.rows import ExpertRow, collect_expert_rows
from training.warmstart.tokenizer import make_tokenizer

__all__ = [
    "ExpertRow",
    "PolicyShape",
    "WarmStartReport",
    "WarmStartSettings",
    "collect_expert_rows",
    "make_tokenizer",
    "train_policy",
]
