"""Tasks that are solved with the tools of a server of the Model Context Protocol: ``spear/McpTools-v0``."""

from spear_envs.core.errors import SpearError

try:
    import jsonschema  # noqa: F401
    import mcp  # noqa: F401
except ModuleNotFoundError as error:
    raise SpearError("spear/McpTools-v0 needs: pip install 'spear-envs[mcp]'") from error
