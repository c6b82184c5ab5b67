"""What all HTTP services and clients share, the sandbox's and those of the distributions above it."""
