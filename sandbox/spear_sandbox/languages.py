"""Languages besides Python: which are installed, and how their programs are run."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

from spear_sandbox.guest.root import HELPERS, SYSTEM_FOLDERS
from spear_sandbox.protocol import Executor, Limits, Outcome, RunStatus
from spear_sandbox.wire import RunRequest

_EXECUTE = "import os\nos.execv({path!r}, {arguments!r})\n"
_PYTEST = "import sys\nsys.path.append({helpers!r})\nimport pytest\nsys.exit(pytest.main({arguments!r}))\n"
_BINARY = "_program"


@dataclass(frozen=True)
class Language:
    """How programs of a language are run: by a tool, perhaps after compiling, or by a module."""

    name: str
    suffix: str
    tool: str = ""
    """Name of the interpreter or compiler; it must be in a folder that the sandbox shows."""
    module: str = ""
    compiled: bool = False
    also: tuple[str, ...] = ()
    """SandboxFusion's other names."""

    def find(self) -> str | None:
        """Path of the tool or the module; None if it is not installed."""
        if self.module:
            spec = importlib.util.find_spec(self.module)
            return spec.origin if spec is not None else None
        folders = [folder for folder in SYSTEM_FOLDERS if folder.endswith("bin")]
        paths = (os.path.join(folder, self.tool) for folder in folders)
        return next((path for path in paths if os.access(path, os.X_OK)), None)


LANGUAGES = (
    Language("bash", ".sh", tool="bash"),
    Language("pytest", ".py", module="pytest"),
    Language("cpp", ".cpp", tool="g++", compiled=True),
    Language("nodejs", ".js", tool="node", also=("js",)),
)
"""All known languages besides Python."""


def find_languages() -> dict[str, Language]:
    """Installed languages except Python, by all of their names."""
    found: dict[str, Language] = {}
    for language in LANGUAGES:
        if language.find() is not None:
            found |= dict.fromkeys((language.name, *language.also), language)
    return found


async def run_language(
    executor: Executor, language: Language | None, asked: RunRequest, limits: Limits
) -> tuple[Outcome | None, Outcome | None]:
    """Compile and run a program; return the outcome of each, None for a step not taken.

    Without a language it is Python. ``limits`` are of the run; ``asked.compile_timeout`` bounds compiling. Raises as
    the executor.
    """
    if language is None:
        return None, await executor.run(
            asked.code, stdin=asked.stdin, files=asked.files, fetch_files=asked.fetch_files, limits=limits
        )
    source = f"_program{language.suffix}"
    files = {**asked.files, source: asked.code.encode("utf-8", "surrogatepass")}
    compiled = None
    if language.module:
        code = _PYTEST.format(helpers=HELPERS, arguments=["-p", "no:cacheprovider", source, *asked.args])
    elif not language.compiled:
        code = _run_tool(language, source)
    else:
        compiled = await executor.run(
            _run_tool(language, "-std=c++17", source, "-o", _BINARY),
            files=files,
            fetch_files=(_BINARY,),
            limits=replace(limits, wall_s=max(asked.compile_timeout, 0.1)),
        )
        if compiled.status is not RunStatus.FINISHED or compiled.return_code != 0:
            return compiled, None
        if _BINARY not in compiled.files:
            # Its source decides how large it is, so this is its own failure.
            return replace(compiled, return_code=1, stderr=f"{compiled.stderr}the program has more than 16 MiB\n"), None
        files = {**asked.files, _BINARY: compiled.files[_BINARY]}
        code = f"import os\nos.chmod({_BINARY!r}, 0o755)\n" + _EXECUTE.format(path=f"./{_BINARY}", arguments=[_BINARY])
    run = await executor.run(code, stdin=asked.stdin, files=files, fetch_files=asked.fetch_files, limits=limits)
    return compiled, run


def _run_tool(language: Language, *arguments: str) -> str:
    return _EXECUTE.format(path=language.find(), arguments=[language.tool, *arguments])
