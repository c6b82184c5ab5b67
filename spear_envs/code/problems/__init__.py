"""The embedded problems: generated, with integer answers, where a few lines of code help."""

from spear_envs.code.problems.generate import SIZES, SPLITS, build

__all__ = ["SIZES", "SPLITS", "build"]
