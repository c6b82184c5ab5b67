"""Hyper-parameters of the paper's experiments: one YAML file a row, read by :func:`load_preset`."""

from spear_training.presets.configuration import build_configuration
from spear_training.presets.loader import FLAVOURS, list_presets, load_preset

__all__ = ["FLAVOURS", "build_configuration", "list_presets", "load_preset"]
