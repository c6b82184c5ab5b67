"""Our environments as other libraries want them: GEM, TRL, MCP, and OpenEnv's server.

Each module names the library it is for and knows nothing else of the project but ``spear_envs.core``, so environments
of your own work in the same way. See ``docs/adapters.md``.
"""
