"""Recorded episodes in the forms of other tools: preference pairs and data sets."""
