"""What all tests have in common: fixtures, hypothesis profiles, and an environment that reaches no network."""

import gc
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Set before any library reads them. Ray 2.60 would write a token into the home directory; Hugging Face and wandb
# would ask the network; two thread pools on two cores make timings and sums depend on the machine.
for name, value in {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)

# A shell starts what it puts into the background with Ctrl-C switched off, and children inherit that: tests of Ctrl-C
# would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: two busy cores make single examples slow. In CI the same examples every time, so a red run is a change.
# The fast tests draw few examples of each property; `make nightly` draws many more, other ones every night.
settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local"))


# Seconds until a test that hangs fails; the fast ones have theirs in pyproject.toml.
_PATIENCE_S = {"slow": 1500, "nightly": 7200, "container": 3600}


# With `make slow` the longest files come first: one that began last would keep a single core busy for minutes.
_LONGEST = (
    "training/test_end_to_end_presets.py",
    "docs/test_blocks.py",
    "training/test_end_to_end.py",
    "training/test_end_to_end_vllm.py",
    "resilience/test_conditions.py",
    "agents/engines/test_vllm_running.py",
    "training/sft/test_end_to_end.py",
    "training/verl_plugin/test_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    for item in items:
        seconds = [_PATIENCE_S[mark.name] for mark in item.iter_markers() if mark.name in _PATIENCE_S]
        if seconds:
            item.add_marker(pytest.mark.timeout(max(seconds)))


def pytest_collection_finish() -> None:
    # Torch, verl and Ray have made a million objects that stay; a collection need not walk them every time.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``shared`` beside the checkout, with recorded golden data; tests that need it skip without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder 'shared' with golden data beside the checkout")
    return folder


# The last verl with tools for the sandbox and for search. The wheel is fetched and not installed: the project pins
# another, which kept the sandbox's client and dropped the tools.
VERL = "0.7.1"
VERL_SHA256 = "0f7fb1dd6a37d20f7d8795c65ed0d1b9797ffb9947f283bbefd758dced08e216"


@pytest.fixture(scope="session")
def old_verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, unpacked."""
    folder = tmp_path_factory.mktemp("verl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"verl=={VERL}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"verl {VERL} cannot be fetched from the package index")
    (wheel,) = folder.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == VERL_SHA256
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"
