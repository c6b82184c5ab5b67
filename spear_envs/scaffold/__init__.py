"""``spear init``: a package of one's own with a small environment that keeps the contract, to start from."""
