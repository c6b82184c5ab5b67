"""What the plugin uses of verl without a public promise, and the process that starts Ray."""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")


import verl
from omegaconf import OmegaConf

import spear_training.verl_plugin  # registers everything  # noqa: F401
from spear_envs.core.errors import SpearError
from spear_training.run.config import RunConfig
from spear_training.run.launch import resolve_workers
from spear_training.run.supervise import SECRETS_FILE, divide_variables, is_secret, read_secrets
from spear_training.run.to_verl import to_verl
from spear_training.verl_plugin import process
from tests.rooms import ROOMS
from tests.training.trainings import write_run
from tests.training.verl_plugin.promises import METHODS, NAMES, TEXTS, find_fault


def test_the_version_is_the_one_the_plugin_was_written_for() -> None:
    assert verl.__version__ == "0.9.1", "run all tests here, the slow ones too, before allowing another version"


@pytest.mark.parametrize("path", sorted({*METHODS, *NAMES, *TEXTS}))
def test_what_the_plugin_relies_on_is_there(path: str) -> None:
    assert find_fault(path) is None


def test_vllm_servers_of_verl_call_truncated_responses_completed() -> None:
    # If this fails, ServerEngine may trust the stop reason again.
    spec = find_spec("verl.workers.rollout.vllm_rollout")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "vllm_async_server.py").read_text(encoding="utf-8")
    assert re.search(r'finish_reason in \("stop", "length"\):\s*stop_reason = "completed"', source)


# ---- the plugin's side -----------------------------------------------------------------------------------------------
def test_the_configuration_names_classes_that_exist() -> None:
    config = to_verl(resolve_workers(RunConfig()), Path("x"))
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute).__name__ == "RolloutManager"
    asked = config.data.custom_cls
    assert asked.path.startswith("pkg://") and hasattr(import_module(asked.path.removeprefix("pkg://")), asked.name)
    texts = [path.read_text("utf-8") for path in ROOMS["spear_training"].rglob("*.yaml")]
    modules = {module for text in texts for module in re.findall(r"pkg://([\w.]+)", text)}
    assert modules and all(map(find_spec, modules)), modules


@pytest.mark.slow
def test_verl_loads_the_plugin_by_its_variable_in_a_fresh_process(tmp_path: Path) -> None:
    # As a Ray actor does: it unpickles a class of ours, which enters a submodule of the plugin before verl is imported.
    # The last call is the one that verl's own worker makes.
    code = (
        "import spear_training.verl_plugin.workers as w; from verl.plugin.platform import get_platform; "
        "from verl.workers import engine_workers; engine_workers.initialize_global_process_group_ray(); "
        "from torch import distributed; "
        "print(get_platform().communication_backend_name(), w.SpearTrainingWorker.__name__, distributed.get_backend())"
    )
    variables = {"VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin", "VERL_PLATFORM": "cpu"}
    environment = {**os.environ, **variables, "DIST_INIT_METHOD": f"file://{tmp_path / 'group'}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["gloo", "SpearTrainingWorker", "gloo"]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A run with variables of its own for Ray's workers."""
    own = "verl.ray_kwargs.ray_init.runtime_env.env_vars={NCCL_DEBUG: INFO, OMP_NUM_THREADS: '4'}"
    write_run(tmp_path, "preset=demo", f"model.path={model_folder}", "seed=7", own)
    return tmp_path


def test_workers_on_other_nodes_get_the_variables_too(folder: Path) -> None:
    plugin = "spear_training.verl_plugin"
    given = {"VERL_USE_EXTERNAL_MODULES": plugin, "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    config = process.configure(folder, given)
    assert OmegaConf.is_struct(config) and config.spear.seed == 7
    # What the user asked for stays, and wins.
    assert OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars) == {
        "VERL_USE_EXTERNAL_MODULES": plugin,
        "OMP_NUM_THREADS": "4",
        "NCCL_DEBUG": "INFO",
    }


@pytest.mark.parametrize(("address", "joins"), [(None, False), (process.OWN_RAY, False), ("127.0.0.1:6379", True)])
def test_only_a_new_node_of_ray_gets_its_resources(folder: Path, address: str | None, joins: bool) -> None:
    variables = {} if address is None else {"RAY_ADDRESS": address}
    options = set(process.configure(folder, variables).ray_kwargs.ray_init)
    assert options.isdisjoint(process.OF_A_NODE) if joins else options >= set(process.OF_A_NODE)


def test_secrets_lie_in_a_file_that_the_training_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"SPEAR_SANDBOX_TOKEN": "abc"}
    process.configure(folder, secret | {"RAY_ADDRESS": process.OWN_RAY})
    assert not (folder / SECRETS_FILE).exists(), "its own Ray inherits them"
    config = process.configure(folder, secret)
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert "abc" not in str(config) and str(folder / SECRETS_FILE) == variables.SPEAR_SECRETS_FILE
    monkeypatch.setenv("SPEAR_SECRETS_FILE", variables.SPEAR_SECRETS_FILE)
    monkeypatch.setenv("SPEAR_SANDBOX_TOKEN", "mine")
    read_secrets()
    assert os.environ["SPEAR_SANDBOX_TOKEN"] == "mine"
    monkeypatch.delenv("SPEAR_SANDBOX_TOKEN")
    read_secrets()
    assert os.environ["SPEAR_SANDBOX_TOKEN"] == "abc"
    monkeypatch.setenv("SPEAR_SECRETS_FILE", str(folder / "elsewhere"))
    with pytest.raises(SpearError, match="--out"):
        read_secrets()


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=x", True),
        ("FSSPEC_S3", '{"key": "a", "secret": "x"}', True),
        ("FSSPEC_s3_secret", "x", True),
        ("SPEAR_MIRROR", "https://me:x@host/a", True),
        ("SPEAR_MIRROR", "https://host/a?v=1&Signature=x", True),
        ("SPEAR_MIRROR", "https://host/a@b", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("NCCL_SOCKET_IFNAME", "eth0", False),
    ],
)
def test_what_is_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret
    plain, hidden = divide_variables({name: value, "PATH": "/bin", "SPEAR_RUN_MARK": "m"})
    assert (hidden if secret else plain) == {name: value} and not (plain if secret else hidden)
