"""Episodes that every adapter plays in the same way, and what the bare environment shows in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spear_envs.core.env import SpearEnv, text_of
from spear_envs.core.errors import EnvFault
from spear_envs.core.making import make_env
from tests.spear_envs.corridor import CORRIDOR

SETTINGS: dict[str, dict[str, Any]] = {
    "spear/ALFWorld-v0": {"rooms": "small", "max_turns": 12},
    "spear/WebShop-v0": {"max_turns": 8},
    "spear/Sokoban-v1": {"modality": "text", "reward": "native"},
    "spear/SearchR1-v0": {},
    "spear/CodeInterpreter-v0": {},
    CORRIDOR: {},
}
FREE = {"spear/SearchR1-v0": ("<search>the</search>", "<search> </search>", "<answer>nobody knows</answer>")}
"""Actions of a wanderer where none are listed."""
DEAD = "service_down"


@dataclass(frozen=True)
class Episode:
    """A task and what is played in it."""

    task: str
    seed: int
    actions: tuple[str, ...]
    raw: bool = False
    """The actions are whole responses, most of them malformed: not for tools."""


@dataclass(frozen=True)
class Seen:
    """What a step shows and pays."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    turn: int
    won: bool
    score: float
    fault: str | None


def see(observation: str, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> Seen:
    return Seen(
        observation, float(reward), terminated, truncated, info["turn"], info["won"], info["score"], info["fault"]
    )


@contextmanager
def break_down(kind: type[SpearEnv[Any]], is_faulty: Callable[[str], bool]) -> Iterator[None]:
    """The environment's service is down at the second turn of some tasks."""
    act = kind._act

    def fail(self: SpearEnv[Any], action: str) -> Any:
        if self.turn == 2 and is_faulty(self.task.id):
            raise EnvFault(DEAD, "it is down")
        return act(self, action)

    kind._act = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind._act = act  # type: ignore[method-assign]


class Script:
    """The episodes of one environment: experts, wanderers, faults, and responses that cannot be read.

    Args:
        env_id: of the environment.
        count: of its episodes.
    """

    def __init__(self, env_id: str, count: int) -> None:
        self.env_id = env_id
        self.keywords = SETTINGS[env_id]
        env = self.make("plain")
        self.kind = type(env)
        number = min(count, len(env.tasks))
        tasks = [env.tasks[place].id for place in range(number)]
        self.faulty = frozenset(tasks[1::4])
        with self.break_down():
            self.episodes = [self._write(env, task, number) for number, task in enumerate(tasks)]
        env.close()

    def break_down(self) -> Any:
        return break_down(self.kind, self.faulty.__contains__)

    def make(self, response_format: str) -> SpearEnv[Any]:
        return make_env(self.env_id, keywords={**self.keywords, "response_format": response_format})

    def play(self, response_format: str) -> list[tuple[Episode, list[Seen]]]:
        """What the bare environment shows; tools play no raw episodes."""
        env = self.make(response_format)
        chosen = [episode for episode in self.episodes if response_format == "tags" or not episode.raw]
        found = []
        for episode in chosen:
            observation, info = env.reset(seed=episode.seed, options={"task": episode.task})
            seen = [see(text_of(observation), 0.0, False, False, info)]
            for response in self.respond(env, episode):
                observation, *rest = env.step(response)
                seen.append(see(text_of(observation), *rest))
                if env.done:
                    break
            found.append((replace(episode, actions=episode.actions[: env.turn]), seen))
        env.close()
        return found

    @staticmethod
    def respond(env: SpearEnv[Any], episode: Episode) -> list[str]:
        return list(episode.actions) if episode.raw else [env.parser.respond(one, "so") for one in episode.actions]

    def _write(self, env: SpearEnv[Any], task: str, number: int) -> Episode:
        if number % 4 == 3:
            first = "<think>so</think><action>look</action>"
            return Episode(task, number, (first, "<action>", first.replace("</think>", "")), raw=True)
        draw = random.Random(number)
        _, info = env.reset(seed=number, options={"task": task})
        actions: list[str] = []
        while not env.done:
            offered = info["admissible_actions"] or FREE.get(self.env_id, ())
            wanders = number % 4 == 2 and offered and draw.random() < 0.8
            plan = [] if wanders else env.expert_plan()[:1]
            actions.append(plan[0] if plan else draw.choice(offered))
            *_, info = env.step(actions[-1])
        return Episode(task, number, tuple(actions))
