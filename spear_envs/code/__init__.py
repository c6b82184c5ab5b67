"""``spear/CodeInterpreter-v0``: mathematics with a Python tool."""
