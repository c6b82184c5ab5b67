"""What ``scripts/setup.sh`` installs and from where, with a Python, pip and uv that only log their arguments."""

import os
import shutil
import subprocess
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
case "$*" in
    *urllib*) exit "$NO_ANSWER" ;;
    *_base_executable*) echo "$0" ;;
    *python_version*) echo 3.11.0 ;;
    "-m venv"*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" && cp "$0" "${!#}/bin/uv" ;;
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


def set_up(checkout: Path, *, gpu: bool = False, **variables: str) -> tuple[str, list[str]]:
    """Run the script; return what it printed, and the installations of uv and pip, in their order."""
    log = checkout / "log"
    log.write_text("")
    path = [str(checkout.parent / "tools"), *([str(checkout.parent / "gpu")] if gpu else []), os.environ["PATH"]]
    defaults = {"LOG": str(log), "NO_ANSWER": "0", "NO_UV": "0", "UV_FAILS": "0", "REPORT": "{}", "PYTHON": ""}
    environment = os.environ | {"PATH": os.pathsep.join(path), "EXTRAS": "", "TORCH_INDEX": "", "VENV": "venv"}
    command = ["bash", str(checkout / "scripts" / "setup.sh")]
    done = subprocess.run(
        command, env=environment | defaults | variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [
        line for line in log.read_text().splitlines() if " install " in line and "--report" not in line
    ]


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
