"""Training: the SPEAR algorithms, the presets of the paper's experiments, and the plugin for verl."""
