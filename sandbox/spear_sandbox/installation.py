"""The interpreter that programs get, and the packages that they may import."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from importlib import metadata
from pathlib import Path

from spear_sandbox.guest.root import HELPERS as HELPERS_FOLDER
from spear_sandbox.guest.root import SYSTEM_FOLDERS
from spear_sandbox.protocol import Executor, Limits, Outcome, RunStatus
from spear_sandbox.service.wire import RunRequest

PACKAGES = ("numpy", "sympy", "mpmath", "scipy")
"""What programs may import besides the standard library, if installed."""
HELPERS = ("pytest",)
"""What languages other than Python need."""


@dataclass(frozen=True)
class Warmth:
    """What a kind of warm interpreter has imported, and the words that call for it."""

    words: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def fits(self, code: str) -> bool:
        """Return whether one of the words occurs in a program.

        A program that hides the name of a package can still import it, only cold.
        """
        return bool(self.words) and re.search(rf"\b(?:{'|'.join(self.words)})\b", code) is not None


# Forking costs in proportion to what has been imported, so SciPy is kept apart. SymPy's lambdify imports all of it.
_KINDS = (
    (("numpy", "sympy", "mpmath"), (), ()),
    (("scipy",), ("lambdify",), ("scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats")),
)


@dataclass(frozen=True)
class Installation:
    """What the sandbox shows of this machine, besides the system's programs and libraries."""

    interpreter: str
    prefix: str
    """Where the interpreter is installed; its ``bin`` and ``lib`` are shown, its packages are not."""
    guest: str
    """Folder of ``spear_sandbox.guest``."""
    packages: dict[str, str]
    """Name in ``site-packages`` → path."""
    helpers: dict[str, str]
    """The same for what other languages need; programs in Python do not find them."""
    kinds: tuple[Warmth, ...]
    """Kinds of warm interpreters, each with everything of the one before it."""

    def choose_kind(self, code: str) -> int:
        """Return which of ``kinds`` of warm interpreters to use: the first with all packages that the program names."""
        return max(place for place, kind in enumerate(self.kinds) if place == 0 or kind.fits(code))


def list_kinds(packages: Sequence[str]) -> tuple[Warmth, ...]:
    """Return the kinds of warm interpreters for these packages; the first has none of them."""
    kinds = [Warmth()]
    others = tuple(name for name in packages if not any(name in names for names, _, _ in _KINDS))
    for place, (names, words, submodules) in enumerate(_KINDS):
        here = tuple(name for name in names if name in packages) + (others if place == 0 else ())
        if here:
            found = (*here, *(name for name in submodules if name.partition(".")[0] in packages))
            kinds.append(Warmth((*here, *words), (*kinds[-1].modules, *found)))
    return tuple(kinds)


def find_installation(packages: Sequence[str] = PACKAGES) -> Installation:
    """Find the interpreter of this process, outside any virtual environment, and the packages of these import names.

    Dependencies of the packages are shown, too; only the packages themselves are imported in advance.
    """
    paths: dict[str, str] = {}
    names = [name for name in packages if _add(name, paths)]
    paths |= _find_needed([name for name in names if name not in PACKAGES])
    base = getattr(sys, "_base_executable", None) or sys.executable
    return Installation(
        interpreter=os.path.realpath(base),
        prefix=os.path.realpath(sys.base_prefix),
        guest=str(Path(__file__).resolve().parent / "guest"),
        packages=paths,
        helpers=_find_needed(HELPERS),
        kinds=list_kinds(names),
    )


def _add(name: str, paths: dict[str, str]) -> bool:
    """Add the paths of a module or package; return whether it is installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return False
    place = Path(spec.origin)
    if spec.submodule_search_locations:
        place = place.parent
    paths[place.name] = os.path.realpath(place)
    for pattern in (f"{name}.libs", f"{name}-*.dist-info"):
        paths |= {os.path.basename(path): os.path.realpath(path) for path in glob(f"{place.parent}/{pattern}")}
    return True


def _find_needed(names: Sequence[str]) -> dict[str, str]:
    """Return the name in ``site-packages`` → path of these and their dependencies, as far as installed."""
    names = [name for name in names if importlib.util.find_spec(name) is not None]
    todo = {owner for name in names for owner in _find_owners(name)}
    seen: set[str] = set()
    paths: dict[str, str] = {}
    while todo:
        seen.add(name := todo.pop())
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system, say
            continue
        for text in distribution.requires or ():
            if "extra ==" not in text:
                todo |= {_simplify(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])} - seen
        # Also what has another name than the package, such as its libraries.
        for part in {part for file in distribution.files or () for part in file.parts[:1]} - {"..", "__pycache__"}:
            if not part.endswith(".pth") and os.path.exists(place := str(distribution.locate_file(part))):
                paths[part] = os.path.realpath(place)
    return paths


def _find_owners(name: str) -> list[str]:
    """Return the distributions that an import name comes from."""
    try:
        return [_simplify(metadata.distribution(name).metadata["Name"])]
    except metadata.PackageNotFoundError:  # as sklearn, of scikit-learn; finding these takes seconds
        # Python 3.10's packages_distributions() knows only those with a top_level.txt.
        return [
            _simplify(one.metadata["Name"])
            for one in metadata.distributions()
            if any(part.partition(".")[0] == name for file in one.files or () for part in file.parts[:1])
        ]


def _simplify(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
        """Return the path of the tool or the module; None if it is not installed."""
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
    """Return the installed languages except Python, by all of their names."""
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
        code = _PYTEST.format(helpers=HELPERS_FOLDER, arguments=["-p", "no:cacheprovider", source, *asked.args])
    elif not language.compiled:
        code = _run_tool(language, source)
    else:
        compiled = await executor.run(
            _run_tool(language, "-std=c++17", source, "-o", _BINARY),
            files=files,
            fetch_files=(_BINARY,),
            limits=replace(limits, wall_s=min(max(asked.compile_timeout, 0.1), 86_400.0)),
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
