"""The command ``spear-sandbox``: also ``python -m spear_sandbox`` and (with spear-envs) ``spear sandbox``."""

from __future__ import annotations

import sys

SERVER = "spear-sandbox[server]"
MCP = "spear-sandbox[mcp]"


def main() -> None:
    """Run the command; without click, say how to install it."""
    try:
        from spear_sandbox.cli import sandbox
        from spear_sandbox.console import explain_missing, run_command
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit(f"Error: the command needs the package click: pip install '{SERVER}' brings it.")

    def explain(error: ModuleNotFoundError) -> str | None:
        package = (error.name or "").partition(".")[0]
        if package == "spear_sandbox":
            return None
        return explain_missing(error, MCP if package == "mcp" else SERVER)

    run_command(sandbox, "spear-sandbox", explain=explain)


if __name__ == "__main__":
    main()
