"""``spear init``: a new package with a small environment that keeps the contract, to start from."""
