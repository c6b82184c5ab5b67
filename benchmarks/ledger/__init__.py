"""The ledger of published results, and the tables that are made of it."""
