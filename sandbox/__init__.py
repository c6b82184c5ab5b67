"""Isolated execution of model-written Python: server, client and isolation.

This room stands alone: it imports nothing of ``spear_envs``, ``agents`` or ``training``, and reaches the code
environment only through the small Protocol that environment defines. It holds nothing but this docstring until the
sandbox itself is built.
"""
