"""What the project costs, each thing beside its peer and its bar: ``spear bench``. Not part of the wheel."""
