"""The SPEAR paper as functions."""

from spear_envs.core.rewards import compose_reward, cosine_decay, cosine_warmup, tool_call_reward
from training.algorithms.settings import SpearSettings

__all__ = ["SpearSettings", "compose_reward", "cosine_decay", "cosine_warmup", "tool_call_reward"]
