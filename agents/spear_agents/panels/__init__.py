"""Panels of tasks that anyone can play, and a ledger of results on them."""
