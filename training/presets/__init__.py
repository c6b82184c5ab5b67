"""Hyper-parameters of the paper's experiments: one YAML file for each environment, read by :func:`load_preset`."""

from training.presets.loader import list_presets, load_preset, make_settings

__all__ = ["list_presets", "load_preset", "make_settings"]
