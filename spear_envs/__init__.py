"""SPEAR environments: language-agent tasks with one interface. Importing the package registers them with gymnasium."""

from spear_envs.core import EnvFault, SpearEnv, SpearError, UnknownTaskError, image_of, set_training_step, text_of
from spear_envs.core.registration import register_builtin, register_env

__version__: str
"""The installed release."""

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


def __getattr__(name: str) -> str:
    # Late: reading the metadata took a quarter of the import, and few programs need it.
    if name == "__version__":
        from importlib.metadata import version

        return version("spear-envs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
