"""What HTTP services and their clients do alike, the sandbox's own and those of the distributions above it."""
