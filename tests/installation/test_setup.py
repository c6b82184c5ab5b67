"""What ``scripts/setup.sh`` installs and from where, with a Python, pip and uv that only log their arguments."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
FILES = (
    *("VERSION", "pyproject.toml", "setup.py", "constraints/cpu.txt", "scripts/setup.sh", "scripts/uv.sh"),
    *("sandbox/pyproject.toml", "agents/pyproject.toml", "training/pyproject.toml"),
)
# Stands for the interpreter, the one in the environment, and uv.
PYTHON = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$LOG"
echo "index $UV_DEFAULT_INDEX, path ${PYTHONPATH-none}, target ${PIP_TARGET-none}, user $PIP_USER" >>"$LOG.env"
case "$*" in
    *urllib*) sleep "$SLOW"; exit "$NO_ANSWER" ;;
    *_base_executable*) echo "$0" ;;
    *python_version*) if [ -f "$0.version" ]; then cat "$0.version"; else echo 3.11.0; fi ;;
    "-m venv"*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" && cp "$0" "${!#}/bin/uv" ;;
    "-m pip config list") printf '%s' "$SETTINGS" ;;
    "-c "*shlex*) exec "$REAL" "$@" ;;
    *"install"*" uv") exit "$NO_UV" ;;
    *--report*) echo "$REPORT" ;;
    "pip install"*) exit "$UV_FAILS" ;;
esac
"""
CUDA_REPORT = '{"install": [{"metadata": {"requires_dist": ["nvidia-cublas==13; platform_system == \\"Linux\\""]}}]}'

pytestmark = pytest.mark.skipif(
    bool(shutil.which("nvidia-smi") or [*Path("/dev").glob("nvidia[0-9]*")]), reason="this machine has a GPU"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "spear_envs" / "bm25").mkdir(parents=True)
    (folder / "spear_envs" / "bm25" / "search.c").write_text("int x;\n")
    for name in ("tools/python3.11", "gpu/nvidia-smi"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(PYTHON if "python" in name else "#!/bin/sh\necho GPU 0\n")
        (tmp_path / name).chmod(0o755)
    return folder


def start(checkout: Path, *, gpu: bool = False, **variables: str) -> subprocess.Popen[str]:
    """Run the script."""
    path = [str(checkout.parent / "tools"), *([str(checkout.parent / "gpu")] if gpu else []), os.environ["PATH"]]
    defaults = {"LOG": str(checkout / "log"), "NO_ANSWER": "0", "NO_UV": "0", "UV_FAILS": "0", "REPORT": "{}"}
    defaults |= {"PYTHON": "", "UV_DEFAULT_INDEX": "", "SETTINGS": "", "REAL": sys.executable, "SLOW": "0"}
    environment = os.environ | {"PATH": os.pathsep.join(path), "EXTRAS": "", "TORCH_INDEX": "", "VENV": "venv"}
    command = ["bash", str(checkout / "scripts" / "setup.sh")]
    return subprocess.Popen(
        command, env=environment | defaults | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def set_up(checkout: Path, *, gpu: bool = False, **variables: str) -> tuple[str, list[str]]:
    """Run the script; return what it printed, and the installations of uv and pip, in their order."""
    log = checkout / "log"
    log.write_text("")
    process = start(checkout, gpu=gpu, **variables)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    return printed, [line for line in log.read_text().splitlines() if " install " in line and "--report" not in line]


def refuse(checkout: Path, **variables: str) -> str:
    """Run the script, which must fail; return what it printed."""
    process = start(checkout, **variables)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    return printed


def find_torch(installed: list[str]) -> str:
    (found,) = [line for line in installed if "--no-deps torch" in line]
    return found


def test_without_a_gpu_torch_comes_from_the_index_of_cpu_wheels(checkout: Path) -> None:
    printed, installed = set_up(checkout)
    assert f"--index-url {CPU_WHEELS}" in find_torch(installed) and find_torch(installed).startswith("uv ")
    assert "200 MB" in printed and "no GPU" in printed
    assert set_up(checkout) == ("", []), "nothing to do"
    _, installed = set_up(checkout, EXTRAS="api", NO_ANSWER="1")
    assert CPU_WHEELS in find_torch(installed), "the index is remembered, and not asked for again"


@pytest.mark.parametrize(("report", "size"), [("{}", "200 MB"), (CUDA_REPORT, "3 GB")])
def test_where_that_index_does_not_answer_the_default_one_is_taken(checkout: Path, report: str, size: str) -> None:
    printed, installed = set_up(checkout, NO_ANSWER="1", REPORT=report)
    assert "--index-url" not in find_torch(installed)
    assert size in printed and "does not answer" in printed


def test_a_gpu_or_a_choice_decides(checkout: Path) -> None:
    printed, installed = set_up(checkout, gpu=True, REPORT=CUDA_REPORT)
    assert "--index-url" not in find_torch(installed) and "3 GB" in printed and "has a GPU" in printed
    _, installed = set_up(checkout, TORCH_INDEX="https://mirror.example/torch")
    assert "--index-url https://mirror.example/torch" in find_torch(installed)
    printed, installed = set_up(checkout, TORCH_INDEX="default")
    assert "--index-url" not in find_torch(installed) and "starting afresh" in printed


def test_pip_takes_over_where_there_is_no_uv_or_it_fails(checkout: Path) -> None:
    _, installed = set_up(checkout, NO_UV="1")
    assert not [line for line in installed if line.startswith("uv ")]
    ours = [line for line in installed if "-e ./sandbox" in line]
    assert len(ours) == 1 and "-m pip install" in ours[0] and "--group dev" in ours[0]
    printed, installed = set_up(checkout, EXTRAS="api", UV_FAILS="1")
    assert "uv failed" in printed
    assert [line.split()[0] for line in installed if "--no-deps torch" in line] == ["uv", "python"]


@pytest.mark.parametrize("place", [shutil.move, shutil.copytree])
def test_an_environment_that_was_moved_or_copied_is_made_anew(
    checkout: Path, place: Callable[[Path, Path], object]
) -> None:
    set_up(checkout)
    place(checkout, other := checkout.with_name("other"))
    printed, installed = set_up(other)
    assert str(checkout) in printed and "starting afresh" in printed and len(installed) == 5
    assert set_up(other) == ("", []), "nothing to do"


def test_a_header_of_the_extension_modules_counts(checkout: Path) -> None:
    set_up(checkout)
    (checkout / "spear_envs" / "bm25" / "search.h").write_text("int y;\n")
    assert "making venv" in set_up(checkout)[0]


def test_a_folder_with_other_files_is_left_alone(checkout: Path) -> None:
    (checkout / "venv").mkdir()
    (checkout / "venv" / "thesis.txt").write_text("mine")
    assert "other files" in refuse(checkout)
    assert [path.name for path in (checkout / "venv").iterdir()] == ["thesis.txt"]
    (checkout / "venv" / "thesis.txt").unlink()
    assert "making venv" in set_up(checkout)[0], "an empty one is taken"


@pytest.mark.parametrize(("script", "variable"), [("test_light.sh", "LIGHT"), ("setup_peers.sh", "PEERS")])
def test_environments_for_tests_leave_a_folder_with_other_files_alone(
    tmp_path: Path, script: str, variable: str
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    variables = os.environ | {variable: str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(ROOT / "scripts" / script)], env=variables, capture_output=True, text=True)
    assert done.returncode == 1 and "other files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_environment_of_another_python_is_left_alone(checkout: Path) -> None:
    programs = checkout / "venv" / "bin"
    programs.mkdir(parents=True)
    (checkout / "venv" / "pyvenv.cfg").touch()
    shutil.copy(checkout.parent / "tools" / "python3.11", programs / "python")
    (programs / "python.version").write_text("3.13.1")
    assert "3.13.1" in refuse(checkout)
    assert not (checkout / "venv.unfinished").exists()


def test_settings_for_other_places_are_not_taken(checkout: Path) -> None:
    set_up(checkout, PYTHONPATH="/opt/ros", PIP_TARGET="/elsewhere", PIP_USER="1")
    assert set((checkout / "log.env").read_text().splitlines()) == {"index , path none, target none, user 0"}


def test_an_empty_variable_of_pip_hides_no_setting(checkout: Path) -> None:
    mirror = "https://mirror.example/simple"
    set_up(checkout, SETTINGS=f"global.index-url={mirror!r}\n:env:.index-url=''\n")
    assert f"index {mirror}," in (checkout / "log.env").read_text()


def test_two_at_a_time_keep_the_choice_of_the_first(checkout: Path) -> None:
    first = start(checkout, EXTRAS="api", SLOW="3")
    deadline = time.monotonic() + 30
    while not ((checkout / "log").exists() and "urllib" in (checkout / "log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = start(checkout)
    assert "with [api]" in first.communicate(timeout=60)[0]
    printed, _ = second.communicate(timeout=60)
    assert second.returncode == 0 and "waiting" in printed and "making" not in printed


def test_make_hides_packages_of_another_python_from_its_own() -> None:
    command = ["make", "-s", "--eval=show: ; @echo $${PYTHONPATH-none}", "show"]
    environment = os.environ | {"PYTHONPATH": "/opt/ros"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"
