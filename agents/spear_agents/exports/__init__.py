"""Recorded episodes in the forms of other tools: preference pairs, data sets, spans."""
