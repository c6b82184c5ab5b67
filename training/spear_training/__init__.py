"""Training: the SPEAR mathematics, the presets of the paper's experiments, and the plugin that puts both into verl."""
