"""SPEAR environments: language-agent tasks with one interface. Importing the package registers them with gymnasium."""

from importlib.metadata import version

from spear_envs.core import EnvFault, SpearEnv, SpearError, UnknownTaskError, image_of, set_training_step, text_of
from spear_envs.core.registration import register_builtin, register_env

__version__ = version("spear-envs")

__all__ = [
    "EnvFault",
    "SpearEnv",
    "SpearError",
    "UnknownTaskError",
    "__version__",
    "image_of",
    "register_env",
    "set_training_step",
    "text_of",
]

register_builtin()
