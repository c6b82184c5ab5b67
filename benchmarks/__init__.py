"""Costs of the project, each beside its peer and its bar: ``spear bench``. Not part of the wheel."""
