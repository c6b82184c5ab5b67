"""Mistakes in an environment of ones own, what an import changes, and thoughts of reasoning models."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.cli import main
from spear_envs.core import SpearError
from spear_envs.core.making import find_creator, make_env
from spear_envs.core.registration import ENVIRONMENTS

CORRIDOR = (Path(__file__).parent / "corridor.py").read_text()
Write = Callable[[str, str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a copy of the corridor with a mistake in it, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def write_module(module: str, old: str, new: str) -> str:
        assert old in CORRIDOR
        text = CORRIDOR.replace(old, new)
        text = text.replace("tests/Corridor-v0", f"{module}/Corridor-v0").replace("tests.spear_envs.corridor", module)
        (tmp_path / f"{module}.py").write_text(text)
        modules.append(module)
        return f"{module}:{module}/Corridor-v0"

    yield write_module
    for module in modules:
        gym.registry.pop(f"{module}/Corridor-v0", None)
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("module", "old", "new", "words"),
    [
        (
            "a_tuple",
            "-> ActionResult:\n",
            "-> ActionResult:\n        return True, 0.0\n",
            "._act returned a tuple",
        ),
        ("a_none", '        return "".join(cells)', '        "".join(cells)', "._observe returned a NoneType"),
        ("a_list", "ListTaskSet(tasks)", "tasks", "has a list for tasks: make it a ListTaskSet"),
        ("no_super", "super().__init__(", "dict(tasks=", r"__init__ must call super\(\).__init__\(tasks"),
        ("a_set", '"door": door}', '"door": {door}}', "content of a task of 'corridor' is not JSON .*set"),
        ("a_comma", "def _start(self", "def _start(self,,", "cannot be imported: SyntaxError: .*a_comma.py, line"),
        ("an_exit", "register_env(", "raise SystemExit(0)\nregister_env(", "it ends the program"),
    ],
)
def test_a_mistake_in_the_class(write: Write, module: str, old: str, new: str, words: str) -> None:
    name = write(module, old, new)
    with pytest.raises(SpearError, match=words):
        env = make_env(name)
        assert env.tasks.fingerprint
        env.reset(seed=0)
        env.step("<think>go</think><action>left</action>")


def test_a_registration_that_is_missing_or_has_another_name(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write("renamed", "length: int = 8", "length: int = 9")
    with pytest.raises(SpearError, match=r"renamed does not register 'mine/Other-v0'\. It has renamed/Corridor-v0"):
        find_creator("renamed:mine/Other-v0")
    name = write("silent", "register_env(", "print(")
    with pytest.raises(SpearError, match="silent registers no environment: call register_env at its end"):
        find_creator(name)
    with pytest.raises(SystemExit):
        main(["check", "silent/Corridor-v0", "--module", "silent"])
    assert "silent does not register 'silent/Corridor-v0': end it with register_env(" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "words"),
    [("broken_part:CorridorEnv", "No module named 'missing_part'"), ("{}:Corridr", "Corridr")],
)
def test_a_class_that_cannot_be_imported_is_named_with_the_cause(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, words: str
) -> None:
    (tmp_path / "broken_part.py").write_text("import missing_part\n")
    module = "whole" if "broken" not in entry else "with_a_broken_part"
    name = write(module, "tests.spear_envs.corridor:CorridorEnv", entry.format(module))
    for find in (find_creator, make_env):
        with pytest.raises(SpearError, match=words) as caught:
            find(name)
        assert "does not register" not in str(caught.value)
    with pytest.raises(SystemExit):
        main(["check", f"{module}/Corridor-v0", "--module", module])
    assert words in capsys.readouterr().err


def test_a_module_with_a_wrong_syntax_is_one_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("a_colon", "def _start(self, task: Task) -> None:", "def _start(self, task: Task) -> None")
    with pytest.raises(SystemExit):
        main(["check", "a_colon/Corridor-v0", "--module", "a_colon"])
    assert "--module a_colon cannot be imported: SyntaxError" in capsys.readouterr().err


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_changes_no_global_state() -> None:
    program = (
        "import os, random, logging, warnings, numpy\n"
        "def look(): return (dict(os.environ), random.getstate(), str(numpy.random.get_state()),"
        " list(logging.root.handlers), list(warnings.filters))\n"
        "import gymnasium; before = look(); import spear_envs; print(look() == before)"
    )
    assert run_python(program).strip() == "True"


OPENED = "I look.\n</think>\n\n"
BEFORE = "<think>\nFirst I look.\n</think>\n\n"


def play(env_id: str, native: str, asked: str | None, **keywords: Any) -> tuple[str, dict[str, Any], Any]:
    """Play the expert's first action after a native thought and the thought that the prompt asks for."""
    env = make_env(env_id, keywords=keywords)
    env.reset(seed=0)
    action = env.expert_plan()[0]
    written = env.parser.respond(action, "t") if asked else env.parser.respond(action).replace("<think></think>", "")
    *_, info = env.step(native + written)
    return action, info, env


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize(("native", "asked"), [(OPENED, None), (OPENED, "t"), (BEFORE, "t"), ("\n</think>\n\n", None)])
def test_a_response_around_a_native_thought_is_well_formed(env_id: str, native: str, asked: str | None) -> None:
    action, info, _ = play(env_id, native, asked)
    assert (info["action"], info["format_ok"], info["native_thought"]) == (action, True, True)
    assert info["reward_terms"]["format"] > 0


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize("response_format", ["tags", "plain"])
def test_a_response_as_the_prompt_asks_has_none(env_id: str, response_format: str) -> None:
    _, info, _ = play(env_id, "", "t", response_format=response_format)
    assert info["format_ok"]
    assert info["native_thought"] == (env_id == "spear/CodeInterpreter-v0" and response_format == "tags")


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
@pytest.mark.parametrize("native", [OPENED, BEFORE])
def test_a_bare_action_may_follow_a_native_thought(env_id: str, native: str) -> None:
    action, info, _ = play(env_id, native, None, response_format="plain")
    assert (info["action"], info["format_ok"], info["native_thought"]) == (action, True, True)


@pytest.mark.parametrize(
    ("env_id", "on_malformed", "played"),
    [
        ("spear/Sokoban-v1", "explain", "up"),
        ("spear/Sokoban-v1", "peer", "down"),
        ("spear/ALFWorld-v0", "explain", "up"),
        ("spear/ALFWorld-v0", "peer", "down"),
    ],
)
@pytest.mark.parametrize("behind", ["", "."])
def test_an_action_rehearsed_in_a_native_thought_is_played_by_verl_agent_alone(
    env_id: str, on_malformed: str, played: str, behind: str
) -> None:
    env = make_env(env_id, keywords={"on_malformed": on_malformed})
    env.reset(seed=0)
    *_, info = env.step(f"Is <action>down</action> right?\n</think>\n\n<action>up</action>{behind}")
    strict = behind and on_malformed == "explain" and "Sokoban" in env_id
    assert info["action"] == ("" if strict else played)
