"""Environment variables passed to every node of a training, including secret ones.

A running Ray cluster does not have the environment of the shell that starts a training. Plain variables go into Ray's
runtime environment, which verl and Ray log. Secrets go into a file of the run folder, which all nodes share and only
its owner can read, for the duration of the training.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from spear_envs.core.errors import SpearError

PREFIXES = (
    "SPEAR_",
    "HF_",
    "HUGGING_FACE_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "VERL_",
    "VLLM_",
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "FSSPEC_",
)
NAMES = ("TENSORBOARD_DIR", "HYDRA_FULL_ERROR", "OMP_NUM_THREADS", "RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM")
MARK = "SPEAR_RUN_MARK"
"""Variables of a training's processes on this machine only."""
CODE_FOLDER = "SPEAR_CODE_FOLDER"
"""Folder whose modules settings may name, where the training was started."""
SECRETS_FILE = ".secrets.json"
SECRETS_VARIABLE = "SPEAR_SECRETS_FILE"
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_ADDRESS = re.compile(r"://[^/\s]*@")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable must not be logged: by its name, or as an address with a password."""
    return bool(_SECRET.search(name) or _ADDRESS.search(value))


def divide_variables(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the variables for every node into plain and secret ones."""
    passed = {
        name: value
        for name, value in environment.items()
        if (name.startswith(PREFIXES) or name in NAMES) and name not in (MARK, SECRETS_VARIABLE)
    }
    secret = {name: value for name, value in passed.items() if is_secret(name, value)}
    return {name: value for name, value in passed.items() if name not in secret}, secret


def write_secrets(out: Path, secrets: Mapping[str, str]) -> Path:
    """Write ``secrets`` to a file of the run folder readable only by its owner; return the file."""
    path = out / SECRETS_FILE
    path.unlink(missing_ok=True)  # that of a killed run may have another owner or mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(dict(secrets), file)
    return path


def add_code_folder() -> None:
    """Let this process import from the training's folder what it finds nowhere else."""
    folder = os.environ.get(CODE_FOLDER)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def read_secrets() -> None:
    """Add the secrets of this training to the environment, without replacing variables.

    Raises SpearError if the file cannot be read on this node.
    """
    name = os.environ.get(SECRETS_VARIABLE)
    if name is None:
        return
    try:
        content: dict[str, str] = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{name} cannot be read on this node: every node must see the folder of --out") from error
    for key, value in content.items():
        os.environ.setdefault(key, value)
