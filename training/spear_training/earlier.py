"""The configuration that an earlier run left in a folder."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import read_yaml_text


def load_earlier(path: Path, key: str | None = None) -> DictConfig:
    """Load the configuration in ``path``, which must have ``key`` if given, a setting that only its kind of run has.

    Raises SpearError if it cannot be read or is of another kind of run: a training and a fine-tuning would replace each
    other's checkpoints.
    """
    try:
        read_yaml_text(path)
        config = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise SpearError(f"{path} cannot be read ({first_line(error)}): name another folder") from error
    if not isinstance(config, DictConfig):
        raise SpearError(f"{path} is not a configuration: name another folder")
    if key is not None and OmegaConf.select(config, key) is None:
        raise SpearError(f"{path} lacks {key}, so the folder is not of this kind of run: name another")
    return config
