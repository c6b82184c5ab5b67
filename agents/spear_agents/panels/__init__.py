"""Panels that strangers can play, and a ledger of what was played on them."""
