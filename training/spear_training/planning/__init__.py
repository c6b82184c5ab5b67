"""Sizes of a training before it starts (``spear plan``). Nothing is imported here: a model's size is found quickly."""
