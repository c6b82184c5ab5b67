"""Environments for other libraries: GEM, TRL, MCP, OpenEnv's server and others.

Each module is named after its library and depends on ``spear_envs.core`` only, so your own environments work in the
same way. See ``docs/adapters.md``.
"""
