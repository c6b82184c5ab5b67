"""Commands where descriptors, the network, a home or the rights of root are missing, and in awkward folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
CONDITIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "few descriptors": (["prlimit", "--nofile=256:256"], {}),
    "no network": (["unshare", "-n"], {}),
    "dead proxies": ([], PROXIES),
    "no home": ([], {"HOME": "/nonexistent"}),
    "a home that is read only": ([], {"HOME": "/proc/1"}),
    "another user": (USER, {}),
    "spaces": ([], {}),
    "250 characters": ([], {}),
}
PLAYED = {"spear/Sokoban-v1": ["--env", "modality=text"], "spear/ALFWorld-v0": [], "spear/WebShop-v0": []}


def list_commands(folder: Path) -> list[list[str]]:
    index = ["--index", str(folder / "index"), "--corpus", str(folder / "corpus.jsonl")]
    return [
        *(
            ["eval", env, "--engine", "expert", "--tasks", "2", "--out", str(folder / env[6:9]), *more]
            for env, more in PLAYED.items()
        ),
        ["view", str(folder / "Sok"), "--port", "0"],
        ["rescore", str(folder / "Sok")],
        ["index", "build", "--corpus", str(folder / "corpus.jsonl"), "--out", str(folder / "index")],
        ["retriever", "serve", *index, "--port", "0"],
        ["data", "list"],
        ["models", "list"],
        ["sandbox", "run", str(folder / "program.py")],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_commands_work_or_say_why_not(name: str, tmp_path: Path) -> None:
    prefix, variables = CONDITIONS[name]
    folder = tmp_path
    if name == "spaces":
        folder = tmp_path / "a folder with spaces é"
    while name == "250 characters" and len(str(folder)) < 250:
        folder /= "d" * min(100, max(1, 249 - len(str(folder))))
    folder.mkdir(parents=True, exist_ok=True)
    rows = ({"id": str(number), "contents": f"text {number}"} for number in range(50))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "program.py").write_text("print(6 * 7)\n")
    if name == "another user":
        for place in (folder, *folder.iterdir(), *list(folder.parents)[:2]):
            place.chmod(0o777)
    able = [*prefix, sys.executable, "-c", f"import os; assert os.access({str(folder)!r}, os.W_OK)"]
    if prefix and (
        shutil.which(prefix[0]) is None or subprocess.run(able, capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{prefix[0]} is not allowed here")
    bare = {key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "SPEAR_DATA")}
    for command in list_commands(folder):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "spear_envs.cli", *command],
            env={**bare, "HOME": str(folder), **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        told = ""
        if "--port" in command:
            while "http://" not in told:
                line = process.stdout.readline()
                assert line, told
                told += line
            process.send_signal(signal.SIGTERM)
        told += process.communicate(timeout=120)[0]
        weak = command[:2] == ["sandbox", "run"] and process.returncode == 78 and "isolation" in told
        ended = process.returncode == 0 or (process.returncode == -signal.SIGTERM and "--port" in command)
        assert (ended or weak) and "Traceback" not in told, (command, told)
