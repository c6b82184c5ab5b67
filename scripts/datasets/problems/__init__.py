"""The embedded problems: integer answers, where a few lines of code help."""
