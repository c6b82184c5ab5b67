"""Supervised fine-tuning on what ``spear collect`` wrote: the cold start before SPEAR."""
