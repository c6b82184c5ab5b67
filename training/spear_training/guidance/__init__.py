"""Advice on settings that do not fit together: from the settings before a run, and from its metrics during the run.

The rules come from the paper (``sec:discusshyper``) and from runs of tiny policies.
"""

from spear_training.guidance.advice import Advice, RunShape  # noqa: F401
from spear_training.guidance.metrics import WINDOW, review_history  # noqa: F401
from spear_training.guidance.settings import review_settings  # noqa: F401
