"""Making environments by id, for commands, adapters and trainers."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError, describe_error, require_whole
from spear_envs.core.machine import import_module
from spear_envs.core.registration import REGISTERED_BY

_CONSENT = "give --trust if you know who wrote it"
_SHOWN = 100


def make_env(
    env_id: str, split: str | None = None, keywords: Mapping[str, Any] = MappingProxyType({})
) -> SpearEnv[Any]:
    """Make an environment by its id, without gymnasium's wrappers.

    Args:
        env_id: such as ``spear/Sokoban-v1``, or ``my_package.module:mine/Corridor-v0``.

    Raises:
        SpearError: it is unknown, does not take these keywords, or is not a ``SpearEnv``.
    """
    if split is not None and "split" in keywords:
        raise SpearError("split is not a keyword here: it is chosen apart, in spear eval by --split")
    if "max_episode_steps" in keywords:
        require_whole("max_episode_steps", keywords["max_episode_steps"], 1)
    if not isinstance(keywords.get("render_mode"), str | None):  # of which gymnasium reads the end
        raise SpearError(f"render_mode={keywords['render_mode']!r} is not valid: give a text")
    chosen: dict[str, Any] = {} if split is None else {"split": split}
    try:
        find_creator(env_id)
        made = gym.make(env_id, disable_env_checker=True, **chosen, **keywords)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise explain_unknown(env_id, error) from error
    except SyntaxError as error:
        raise SpearError(f"{env_id} cannot be imported: {describe_error(error)}") from error
    except SystemExit as error:
        raise SpearError(f"{env_id} cannot be made: it ends the program ({error!r})") from error
    except TypeError as error:
        # gymnasium appends all keywords to the message of a constructor that refuses one.
        problem = str(error).split(" was raised from")[0]
        raise SpearError(f"{env_id} cannot be made: {problem}") from error
    env = require_spear_env(env_id, made.unwrapped)
    if made.spec is not None and made.spec.max_episode_steps is not None:
        env.made_limit = made.spec.max_episode_steps
    return env


def require_harmless(env_id: str, keywords: Mapping[str, Any], source: str) -> None:
    """Let only environments be made from a file of somebody else's that neither run, reach nor read what it names.

    Making an environment imports the module before a colon of its id, and may start commands, open files, and send the
    tokens in this process's variables to an address. Allowed are registered ids, of modules that are loaded, with plain
    words and numbers.

    Args:
        source: the file, for the message.

    Raises:
        SpearError: it names something else.
    """
    module, _, name = env_id.rpartition(":")
    if (module and module not in sys.modules) or name not in gym.registry:
        raise SpearError(
            f"{source} wants the environment {env_id[:_SHOWN]!a}, which is not registered here; {_CONSENT}"
        )
    reaching = getattr(find_creator(env_id), "reaching", SpearEnv.reaching)
    for key, value in keywords.items():
        if value is not None and (key in reaching or not _is_plain(value)):
            shown = ascii(value)
            raise SpearError(
                f"{source} wants {ascii(key)[1:-1]}={shown[:_SHOWN]}, which may run, reach or read things; {_CONSENT}"
            )


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or a word, or holds only such; a path, an address or a command is none."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value, *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return re.fullmatch(r"[\w.+-]{0,64}", value, re.ASCII) is not None and not os.path.lexists(value or "-")
    return value is None or isinstance(value, (bool, int, float))


def require_spear_env(env_id: str, env: gym.Env[Any, Any]) -> SpearEnv[Any]:
    """Return ``env`` if it is one of ours. Raises SpearError if it is not, or if its constructor leaves ours out."""
    name = type(env).__name__
    if not isinstance(env, SpearEnv):
        raise _explain_stranger(env_id, name)
    if not hasattr(env, "tasks"):
        raise SpearError(f"{name}.__init__ must call super().__init__(tasks, max_turns=..., **keywords).")
    return env


def find_splits(env_id: str) -> tuple[str, ...]:
    """Find the splits of an environment without making it.

    Raises:
        SpearError: the environment is unknown, or not a ``SpearEnv``.
    """
    creator = find_creator(env_id)
    if isinstance(creator, type) and issubclass(creator, gym.Env) and not issubclass(creator, (SpearEnv, gym.Wrapper)):
        raise _explain_stranger(env_id, creator.__name__)
    return tuple(getattr(creator, "splits", SpearEnv.splits))


def _explain_stranger(env_id: str, name: str) -> SpearError:
    return SpearError(f"{env_id} is a {name}, which is not a SpearEnv: derive it from that class.")


def find_creator(env_id: str) -> Callable[..., Any]:
    """Find the class, or other callable, that makes an environment.

    Raises:
        SpearError: the environment is unknown, or its entry point cannot be imported.
    """
    module, colon, name = env_id.rpartition(":")
    try:
        if colon:
            import_module(module)
        entry_point = gym.spec(name).entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (gym.error.Error, ImportError, AttributeError, TypeError, ValueError) as error:
        raise explain_unknown(env_id, error) from error
    except SyntaxError as error:
        raise SpearError(f"{env_id} cannot be imported: {describe_error(error)}") from error
    if creator is None:
        raise SpearError(f"{env_id} is registered without an entry point: name its class in register_env.")
    return creator


def explain_unknown(env_id: str, error: Exception) -> SpearError:
    """Return the error for an environment that cannot be found, with the nearest name."""
    module, colon, name = env_id.rpartition(":")
    if name in gym.registry and (not colon or module in sys.modules):
        return SpearError(f"{env_id} cannot be made: {describe_error(error)}")
    if colon and module in sys.modules:  # it was imported, so the name is wrong, or the registration is missing
        if own := list_registered(module):
            return SpearError(f"{module} does not register {name!r}. It has {', '.join(own)}.")
        if not module.startswith("spear_envs"):
            return SpearError(f"{module} registers no environment: call register_env at its end.")
    known = {_strip(name): name for name in gym.registry if name.startswith("spear/")}
    near = difflib.get_close_matches(_strip(env_id), known, n=1, cutoff=0.6)
    # Gymnasium's own words only repeat an unregistered id, but they name a module that cannot be imported.
    first = str(error).strip().split("\n")[0].rstrip(".")
    cause = "" if isinstance(error, gym.error.UnregisteredEnv) else f" ({first})"
    hint = f" Did you mean {known[near[0]]!r}?" if near else ""
    return SpearError(
        f"there is no environment {env_id!r}{cause}.{hint} Choose one of {', '.join(known.values())}, or name yours "
        "with its module, as in my_package.corridor:mine/Corridor-v0."
    )


def list_registered(module: str) -> list[str]:
    """Return the ids that an imported module or one below it registers, or has the class of, sorted."""
    found = []
    for env_id, spec in sorted(gym.registry.items()):
        point = spec.entry_point
        home = point.partition(":")[0] if isinstance(point, str) else getattr(point, "__module__", "")
        places = (home, REGISTERED_BY.get(env_id, ""))
        if any(place == module or place.startswith(f"{module}.") for place in places):
            found.append(env_id)
    return found


def _strip(env_id: str) -> str:
    """Return the name in lower case, without namespace and version."""
    return re.sub(r"^.*[/:]|-v\d+$", "", env_id).lower()
