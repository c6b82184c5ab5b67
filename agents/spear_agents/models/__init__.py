"""Pretrained models: which are known by name, how they come here, and where they lie (``spear models``)."""
