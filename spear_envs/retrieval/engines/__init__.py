"""Backends besides the embedded one, and the file that configures them."""
