"""Pretrained models: known names, downloads and folders (``spear models``)."""
