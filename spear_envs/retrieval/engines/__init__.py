"""Retrievers that ask engines of others, one file each."""
