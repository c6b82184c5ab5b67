"""The embedded knowledge base: invented worlds, passages about them, and questions of one, two and three hops."""

from spear_envs.search.mini_kb.generate import KnowledgeBase, Question, build
from spear_envs.search.mini_kb.sizes import SPLITS, BaseSize

__all__ = ["SPLITS", "BaseSize", "KnowledgeBase", "Question", "build"]
