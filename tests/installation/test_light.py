"""The sandbox and the environments, from wheels and alone, on every Python they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation.environments import (
    PYTHONS,
    Environment,
    build_wheels,
    find_python,
    make_environment,
    say_what_is_missing,
)
from tests.rooms import IMPORT_RATIO, TIME_IMPORT

pytestmark = pytest.mark.nightly

MOST_PACKAGES = 15
"""Our two, gymnasium, numpy and so on; pip and setuptools apart."""
ENVIRONMENTS = ("Sokoban-v1", "ALFWorld-v0", "WebShop-v0", "CodeInterpreter-v0", "SearchR1-v0")
USER = '''"""What a user writes."""


from typing import Any

import gymnasium as gym

from spear_envs import SpearEnv, SpearError, image_of, register_env, text_of
from spear_sandbox.blocking import BlockingExecutor, open_executor
from spear_sandbox.protocol import Outcome


def play(env_id: str) -> float:
    env: gym.Env[Any, Any] = gym.make(env_id, response_format="plain")
    observation, info = env.reset(seed=0)
    total = 0.0
    base = env.unwrapped
    assert isinstance(base, SpearEnv)
    for action in base.expert_plan():
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
    text: str = text_of(observation)
    return total + len(text) + (0 if image_of(observation) is None else 1)


def run(code: str) -> str:
    pool: BlockingExecutor = open_executor()
    outcome: Outcome = pool.run(code)
    pool.close()
    reveal_type(outcome.stdout)
    return outcome.stdout


try:
    register_env("mine/Corridor-v0", "mine:CorridorEnv")
    play("spear_envs:spear/Sokoban-v1")
except SpearError as error:
    raise SystemExit(str(error)) from None
'''


@pytest.fixture(scope="module", params=PYTHONS)
def light(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with two of our wheels."""
    version = request.param
    if find_python(version) is None:
        pytest.skip(say_what_is_missing(version))
    folder = tmp_path_factory.mktemp(f"python{version}-")
    environment = make_environment(folder / "environment", version)
    environment.install(*build_wheels(environment, ("spear-sandbox", "spear-envs"), folder).values())
    return environment


def list_packages(environment: Environment) -> set[str]:
    listed = json.loads(environment.run("-m", "pip", "list", "--format", "json").stdout)
    return {item["name"].lower() for item in listed} - {"pip", "setuptools"}


def test_little_is_installed_and_it_is_imported_fast(light: Environment) -> None:
    packages = list_packages(light)
    assert {"spear-envs", "spear-sandbox"} < packages and "torch" not in packages
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    light.run("-c", TIME_IMPORT)  # compiles
    assert min(float(light.run("-c", TIME_IMPORT).stdout) for _ in range(5)) < IMPORT_RATIO


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_contract_is_kept(light: Environment, name: str) -> None:
    made = f"import gymnasium as gym; print(gym.make('spear_envs:spear/{name}').reset(seed=0)[1]['task_id'])"
    assert light.run("-c", made).stdout.strip()
    light.call("spear", "check", f"spear/{name}", "--resets", "200")


def test_tasks_are_the_same_on_every_python(light: Environment) -> None:
    code = "import gymnasium as gym, sys\n"
    code += "for name in sys.argv[1:]:\n"
    code += "    print(gym.make(f'spear_envs:spear/{name}').unwrapped.tasks.fingerprint)\n"
    ours = subprocess.run([sys.executable, "-c", code, *ENVIRONMENTS], capture_output=True, text=True, check=True)
    assert light.run("-c", code, *ENVIRONMENTS).stdout == ours.stdout and len(ours.stdout.split()) == len(ENVIRONMENTS)


def test_missing_rooms_are_one_line(light: Environment) -> None:
    for command, mend in (("train", "pip install ./agents ./training"), ("eval", "pip install ./agents")):
        done = light.call("spear", command, check=False)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"Error: 'spear {command}' comes with spear-") and line.endswith(mend)


def test_a_strict_type_checker_sees_our_types(light: Environment) -> None:
    light.install("mypy")
    script = light.folder / "user.py"
    script.write_text(USER)
    done = light.run("-m", "mypy", "--strict", str(script), check=False)
    assert 'Revealed type is "builtins.str"' in done.stdout or 'Revealed type is "str"' in done.stdout, done.stdout
    assert "Success: no issues found" in done.stdout and done.returncode == 0, done.stdout


def test_the_sandbox_alone_has_no_requirement(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment", "3.11" if find_python("3.11") else PYTHONS[0])
    wheels = build_wheels(environment, ("spear-sandbox",), tmp_path)
    environment.install("--no-index", *wheels.values())
    assert list_packages(environment) == {"spear-sandbox"}
    code = (
        "from spear_sandbox.blocking import open_executor as o; e = o(); print(e.run('print(6 * 7)').stdout); e.close()"
    )
    assert environment.run("-c", code).stdout.strip() == "42"
    done = environment.call("spear-sandbox", "serve", check=False)
    assert done.returncode == 1 and "pip install 'spear-sandbox[server]' brings it" in done.stderr
    environment.install(f"{wheels['spear-sandbox']}[server]")
    assert "isolation 'namespaces' holds" in environment.call("spear-sandbox", "serve", "--self-test-only").stdout
