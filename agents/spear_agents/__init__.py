"""Policies at work: engines that generate tokens, the one loop that plays an episode, and its records."""
