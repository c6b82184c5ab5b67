"""``spear-sandbox``, for those who have nothing else of the project."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import spear_sandbox
from tests.sandbox.service import need_isolation

ROOM = Path(spear_sandbox.__file__).resolve().parents[1]


def run(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({without.split()!r}))"
    code = f"{hidden}; sys.argv[1:] = {list(arguments)!r}; from spear_sandbox.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_it_is_the_same_command(tmp_path: Path) -> None:
    need_isolation()
    pytest.importorskip("click")
    program = tmp_path / "program.py"
    program.write_text("print(6 * 7)")
    done = run("run", str(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
    assert run("--version").stdout == f"spear-sandbox {version('spear-sandbox')}\n"


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("serve", "click", "server"),
        ("serve", "uvicorn", "server"),
        ("serve", "fastapi", "server"),
        ("mcp", "mcp", "mcp"),
    ],
)
def test_what_is_missing_is_one_line(command: str, package: str, extra: str) -> None:
    done = run(command, without=package)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and package in line and line.endswith(f"'spear-sandbox[{extra}]' brings it.")


def test_a_pool_needs_the_standard_library_alone_and_is_gone_with_its_process(tmp_path: Path) -> None:
    need_isolation()
    code = """
from spear_sandbox.blocking import open_executor
print(open_executor().run("print(6 * 7)").stdout.strip())
names = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(name for name in names if not name.startswith("_")))
"""
    # Without site-packages an import of anything else fails.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOM)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n['spear_sandbox']\n", "")


@pytest.mark.slow
def test_the_check_up_tries_every_level() -> None:
    pytest.importorskip("click")
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert (found["version"], found["kernel"]) == (version("spear-sandbox"), platform.release())
    assert set(found["languages"]) == {"bash", "pytest", "cpp", "nodejs"} and found["control_groups"] in (True, False)
    assert set(found["levels"]) == {"namespaces", "bwrap", "landlock", "none"} and all(found["levels"].values())
    strong = any(all(probe["ok"] for probe in found["levels"][name]) for name in ("namespaces", "bwrap"))
    assert found["ok"] == strong == (done.returncode == 0) and done.returncode in (0, 78)
