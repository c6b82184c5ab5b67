"""What linters do not see: no import cycles, chapters of bearable length, and quick imports.

Who may import whom is in ``pyproject.toml`` under ``tool.importlinter``; ``make lint`` checks it.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.rooms import IMPORT_RATIO, ROOMS, ROOT, TIME_IMPORT, find_modules

MAX_LINES = 600
HEAVY = ("torch", "transformers", "verl", "ray", "vllm", "matplotlib", "transfer_queue", "tensordict")
HEAVY += ("scipy", "pandas", "faiss", "sentence_transformers", "onnxruntime", "fastapi", "uvicorn", "httpx")
LIGHT = ("spear_envs", "spear_envs.cli", "spear_envs.retrieval.retriever", "spear_envs.retrieval.client")
LIGHT += ("spear_envs.adapters.conversation", "spear_envs.adapters.serving")
LIGHT += ("spear_agents", "spear_agents.play.episode", "spear_agents.cli", "spear_training")
LIGHT += ("spear_sandbox", "spear_sandbox.cli", "spear_sandbox.client", "spear_sandbox.blocking")


def name_module(path: Path) -> str:
    folder = next(folder for folder in ROOMS.values() if path.is_relative_to(folder))
    return path.relative_to(folder.parent).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Everything that a file imports, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                base = ".".join([*parts[: len(parts) - node.level + is_package], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def find_cycle(sources: dict[str, str], packages: Collection[str] = ()) -> list[str]:
    """Modules that import each other in a ring, the first again at the end; empty if there are none."""
    graph = {}
    for name, text in sources.items():
        targets = read_imports(text, name, name in packages)
        found = (target if target in sources else target.rpartition(".")[0] for target in targets)
        graph[name] = {target for target in found if target in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    paths = {name_module(path): path for path in find_modules()}
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    assert find_cycle({name: path.read_text("utf-8") for name, path in paths.items()}, packages) == []


def test_a_cycle_is_found_also_in_functions() -> None:
    cycle = {"p": "", "p.a": "def f():\n    import p.b", "p.b": "from .c import y", "p.c": "from p import a"}
    assert set(find_cycle(cycle, {"p"})) == {"p.a", "p.b", "p.c"}
    assert find_cycle({"p": "from p.a import x", "p.a": "import os"}, {"p"}) == []


def test_modules_stay_readable() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in find_modules()}
    assert not [f"{name_module(path)}: {lines}" for path, lines in lengths.items() if lines > MAX_LINES]


def test_no_path_of_one_machine_stands_in_the_tree() -> None:
    path_of_a_machine = re.compile(r"(?<![\w.}$])/(?:work|farm|root|home|Users)/|/tmp/[a-z]+/")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0") if listed.returncode == 0 else [str(p) for p in find_modules()]
    faults = []
    for name in filter(None, names):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".gif", ".npz", ".gz", ".webp"):
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if path_of_a_machine.search(line):
                faults.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not faults, "\n" + "\n".join(faults)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded == "", f"import {module} loads {loaded}"


def test_an_environment_of_texts_loads_no_pictures() -> None:
    assert run_python("import sys, spear_envs.webshop.env; print('PIL' in sys.modules)") == "False"


def test_import_of_spear_envs_is_fast() -> None:
    count = "import sys, gymnasium; before = set(sys.modules); import spear_envs; print(len(set(sys.modules) - before))"
    assert int(run_python(count)) <= 30, "modules beyond gymnasium's own"
    assert any(float(run_python(TIME_IMPORT)) < IMPORT_RATIO for _ in range(8)), "not once in eight"
