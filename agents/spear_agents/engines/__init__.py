"""Engines, which turn prompt token ids into response token ids; only ``hf`` and ``vision`` import transformers."""
