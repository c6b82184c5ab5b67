"""The warm start: a tiny language model that knows the form of a response and a little of the task."""

from spear_training.warmstart.policy import (  # noqa: F401  # noqa: F401
    RECIPES,
    PolicyShape,
    WarmStartReport,
    WarmStartSettings,
    choose_recipe,
    train_policy,
)
from spear_training.warmstart.rows import (  # noqa: F401
    Answers,
    ExpertRow,
    collect_expert_rows,
    make_tokenizer,
)
