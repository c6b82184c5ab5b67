"""Advice on settings that couple badly: from the settings alone before a run, and from its metrics while it goes.

The rules are the paper's (``sec:discusshyper``) and what runs of tiny policies showed. Advice stops nothing: it says
what was found and which setting mends it.
"""

from spear_training.guidance.advice import Advice, RunShape
from spear_training.guidance.history import WINDOW
from spear_training.guidance.review import review_history
from spear_training.guidance.settings import review_settings

__all__ = ["WINDOW", "Advice", "RunShape", "review_history", "review_settings"]
