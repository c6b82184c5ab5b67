"""Keeps verl 0.9.1 from asking TRL for its value head, which TRL 1.x has dropped.

Wherever TRL is installed verl changes that class while it builds a model, and ends if there is none. The critic here is
a token classifier of transformers and needs nothing of TRL.
"""

from verl.models.transformers import monkey_patch


def _is_trl_available() -> bool:
    return False


monkey_patch.is_trl_available = _is_trl_available
