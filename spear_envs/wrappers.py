"""Between our environments and plain Gymnasium: numbered actions, pictures alone, Gymnasium environments as ours."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from spear_envs.core.env import ActionResult, SpearEnv, image_of, text_of
from spear_envs.core.errors import SpearError, require_whole
from spear_envs.core.making import require_spear_env
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate
from spear_envs.core.spaces import PermissiveText
from spear_envs.core.tasks import GeneratedTaskSet, Task, check_split

MASK = "action_mask"
"""Key of ``info``: int8 [actions], 1 where an action may be taken."""
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_CODE = re.compile(r"[34][0-7]")
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Names of gymnasium's ``colorize`` for the codes 30 to 37, and 40 to 47 behind a letter."""
_LENGTHS = {"train": 1_000_000, "valid": 256, "test": 256}
_MOST_TURNS = 1_000


def _name_colours(text: str) -> str:
    """Write the colours of a text in words, ``(red F)``: they may be all that says where the player is."""
    parts, depth = [], 0
    for number, part in enumerate(_COLOUR.split(text)):
        if number % 2 == 0:
            parts.append(part)
        elif part.strip("0;"):
            name = next((_COLOURS[int(code) % 10] for code in part.split(";") if _CODE.fullmatch(code)), "coloured")
            parts.append(f"({name} ")
            depth += 1
        else:  # ends all of them
            parts.append(")" * depth)
            depth = 0
    return "".join(parts) + ")" * depth


def _make_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__


class DiscreteActions(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Numbers as actions, for trainers without text.

    Args:
        env: an environment of ours, perhaps wrapped.
        actions: what the numbers mean, in plain form. None: number i is the i-th admissible action of the moment, and
            ``info["action_mask"]`` says which numbers there are.
        size: most admissible actions; only without ``actions``.

    Raises:
        SpearError: neither or both are given, actions are repeated, or a moment has more than ``size``.
    """

    def __init__(self, env: gym.Env[Any, str], actions: Sequence[str] | None = None, size: int | None = None) -> None:
        RecordConstructorArgs.__init__(self, actions=actions, size=size)
        gym.Wrapper.__init__(self, env)
        self._core = require_spear_env("DiscreteActions", env.unwrapped)
        if (actions is None) == (size is None):
            raise SpearError("DiscreteActions takes a list of actions, or size, the most admissible ones.")
        if actions is not None and (not actions or isinstance(actions, str) or len(set(actions)) < len(actions)):
            raise SpearError(f"actions={actions!r} is not valid: give a list of different texts.")
        self._fixed = None if actions is None else list(actions)
        self._size = len(self._fixed) if self._fixed is not None else require_whole("size", size, 1)
        self._offered: list[str] = []
        self.action_space = spaces.Discrete(self._size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._offer(info)

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play an action by its number; one that is not offered costs a turn."""
        number = int(action)
        if self._fixed is None and not self._core.done:  # set_state() of the environment inside may have changed them
            self._offered = list(self._core._admissible() or ())
        known = 0 <= number < len(self._offered)
        response = self._core.parser.respond(self._offered[number]) if known else ""
        observation, reward, terminated, truncated, info = self.env.step(response)
        return observation, reward, terminated, truncated, self._offer(info)

    def _offer(self, info: dict[str, Any]) -> dict[str, Any]:
        admissible = info["admissible_actions"]
        if self._fixed is None:
            if admissible is None:
                raise SpearError(f"{type(self._core).__name__} does not list its actions: give DiscreteActions a list.")
            if len(admissible) > self._size:
                raise SpearError(f"size={self._size}: {info['task_id']} has {len(admissible)} admissible actions here.")
        self._offered = self._fixed or list(admissible)
        mask = np.zeros(self._size, np.int8)
        mask[: len(self._offered)] = [admissible is None or action in admissible for action in self._offered]
        return {**info, MASK: mask}


class PictureObservation(gym.ObservationWrapper[Any, Any, Any], RecordConstructorArgs):
    """The picture of an observation alone, uint8 [height, width, 3].

    Raises:
        SpearError: the environment shows none.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict) or "image" not in space.spaces:
            raise SpearError(f"{type(env.unwrapped).__name__} shows no picture here: its observations are {space}.")
        self.observation_space = space["image"]

    def observation(self, observation: Any) -> Any:
        """Return the picture of an observation."""
        return image_of(observation)


def make_seeds(
    env: str, split: str, rules: str, env_keywords: Mapping[str, Any] = MappingProxyType({})
) -> GeneratedTaskSet:
    """Make the tasks of a Gymnasium environment: every third seed is of the same split."""
    place = list(_LENGTHS).index(split)
    name = f"gymnasium/{env.replace('/', '.')}"

    def make(index: int) -> Task:
        seed = len(_LENGTHS) * index + place
        instruction = rules.strip().split("\n")[0] or f"Play {env}."
        return Task(f"{name}/{split}/{index:08d}", split, env, instruction, {"seed": seed})

    parameters: dict[str, Any] = {"env": env}
    if given := {key: value for key, value in env_keywords.items() if key != "render_mode"}:  # another game
        parameters["env_keywords"] = json.loads(json.dumps(given, default=_make_plain, skipkeys=True))
    return GeneratedTaskSet(name, split, _LENGTHS[split], make, parameters)


class GymnasiumEnv(SpearEnv[Any]):
    """An environment of Gymnasium with numbered actions, in text.

    A task is a seed. A state is the seed and the actions since, which are played again. Observations are the ``ansi``
    rendering if ``env_keywords`` asks for that render mode, pictures if those inside are, else numbers.
    States with equal observations share their anchor.

    Args:
        env: id, such as ``"FrozenLake-v1"``.
        goal: sum of rewards at which an episode is won.
        actions: words for the actions, in order of their numbers; by default the numbers.
        labels: words for the numbers of an observation.
        rules: what a prompt says first.
        env_keywords: of ``gym.make``.
        split: ``"train"``, ``"valid"`` or ``"test"``, which share no seed.
        max_turns: by default the environment's own limit.
        common: ``response_format`` and the other keywords of ``SpearEnv``.

    Raises:
        SpearError: the environment is unknown, has other actions, or a keyword has an invalid value.
    """

    templates: Mapping[str, Any] = MappingProxyType({})  # type: ignore[misc]
    metadata: ClassVar[dict[str, Any]] = SpearEnv.metadata  # type: ignore[misc]

    def __init__(
        self,
        env: str,
        goal: float,
        *,
        actions: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        rules: str = "",
        env_keywords: Mapping[str, Any] = MappingProxyType({}),
        split: str = "train",
        max_turns: int | None = None,
        **common: Any,
    ) -> None:
        try:
            self._inner = gym.make(env, **env_keywords)
        except Exception as error:  # of somebody else's constructor
            problem = str(error).split(" was raised from")[0]
            raise SpearError(f"{env} cannot be made ({type(error).__name__}): {problem}") from error
        limit = self._inner.spec.max_episode_steps if self._inner.spec is not None else None
        if isinstance(self._inner, gym.wrappers.TimeLimit):  # its end would count as lost: max_turns truncates instead
            self._inner = self._inner.env
        space = self._inner.action_space
        if not isinstance(space, spaces.Discrete):
            raise SpearError(f"{env} has the actions {space}: only Discrete ones have words.")
        words = [str(space.start + number) for number in range(int(space.n))] if actions is None else list(actions)
        if len(words) != space.n or len(set(words)) < len(words):
            raise SpearError(f"{env} has {space.n} actions, and actions={words!r}: give a different word for each.")
        if not (isinstance(goal, (int, float)) and 0 < goal < math.inf):
            raise SpearError(f"goal={goal!r} is not valid: give the sum of rewards that wins, above 0.")
        self._numbers = {word: int(space.start) + number for number, word in enumerate(words)}
        self._labels, self.goal = labels, float(goal)
        seen = self._inner.observation_space
        is_picture = isinstance(seen, spaces.Box) and seen.dtype == np.uint8 and seen.shape[2:] == (3,)
        if not is_picture and self._inner.render_mode != "ansi":
            self._check_labels(env)
        super().__init__(
            make_seeds(env, check_split(split, self.splits), rules, env_keywords),
            max_turns=(limit or _MOST_TURNS) if max_turns is None else max_turns,
            observation_space=spaces.Dict(text=PermissiveText(), image=seen) if is_picture else None,
            **common,
        )
        self.templates = MappingProxyType(
            {"default": DefaultTemplate(rules, self.parser), "compact": CompactTemplate(self.parser)}
        )

    def _check_labels(self, env: str) -> None:
        seen = self._inner.observation_space
        try:
            count = np.asarray(seen.sample(), dtype=float).size
        except (TypeError, ValueError) as error:
            mend = "give env_keywords={'render_mode': 'ansi'} if it has that"
            raise SpearError(f"{env} has the observations {seen}, which are not numbers: {mend}.") from error
        if self._labels is not None and len(self._labels) != count:
            raise SpearError(f"{env} has {count} numbers, and labels={self._labels!r}: give a word for each.")

    def close(self) -> None:
        """Close the environment inside."""
        self._inner.close()

    def _start(self, task: Task) -> None:
        self._seen, _ = self._inner.reset(seed=task.content["seed"])
        self._played: list[str] = []
        self._return = 0.0

    def _act(self, action: str) -> ActionResult:
        if action not in self._numbers:
            return ActionResult(False, message=f"There is no action {action[:40]!r}. Use {', '.join(self._numbers)}.")
        self._seen, reward, terminated, truncated, _ = self._inner.step(self._numbers[action])
        self._played.append(action)
        self._return += float(reward)
        won = self._return >= self.goal
        return ActionResult(True, float(reward), won, terminated or truncated, tool_calls=1)

    def _observe(self, message: str) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {"text": message, "image": np.array(self._seen)}
        text = self._describe()
        return f"{text}\n\n{message}" if message else text

    def _describe(self) -> str:
        if self._inner.render_mode == "ansi":
            return _name_colours(str(self._inner.render())).strip("\n")
        numbers = [f"{number:.6g}" for number in np.asarray(self._seen, dtype=float).ravel()]
        if self._labels is None:
            return ", ".join(numbers)
        return "\n".join(f"{label}: {number}" for label, number in zip(self._labels, numbers, strict=True))

    def _world(self) -> list[str]:
        return list(self._played)

    def _restore_world(self, state: list[str]) -> None:
        self._start(self.task)
        for action in state:
            self._act(action)

    def _anchor(self) -> str:
        shown = self._observe("")
        if (picture := image_of(shown)) is not None:
            return f"{self.task.id}/{hashlib.sha256(picture.tobytes()).hexdigest()[:32]}"
        return f"{self.task.id}/{text_of(shown)}"

    def _admissible(self) -> list[str]:
        return list(self._numbers)

    def _score(self) -> float:
        return min(1.0, max(0.0, self._return / self.goal))

    def expert_plan(self) -> list[str]:
        """Return an empty plan: there is no expert."""
        return []
