"""Backends beside the embedded one, and the file that names them."""
