"""Environments for SkyRL-Gym (the package ``skyrl-gym``): ``skyrl_gym.make("spear", extras=row)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import registry

from spear_envs.adapters.texts import open_row, write_rows
from spear_envs.core.env import RewardMode

ENV_CLASS = "spear"
"""The value of ``env_class`` in a row of the data set."""


class SkyRLEnv(BaseTextEnv):
    """One rollout's environment; environment and task are in its row of the data set.

    SkyRL cannot leave an episode out: one with a fault ends with reward 0, ``metadata["fault"]`` names it, and the
    metric ``fault`` counts it.

    Args:
        env_config: of SkyRL; not read.
        extras: the row's columns: ``spear`` with ``env_id``, ``task``, and optionally ``keywords``; and ``max_turns``,
            which SkyRL adds, after which the episode counts as lost.

    Raises:
        SpearError: the row lacks the column, or the environment is unknown.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        self._episode, self._task = open_row(row)
        self.max_turns = row.get("max_turns") or self._episode.conversation.env.max_turns

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Begin the episode; the first observation is appended to the row's last message.

        Raises:
            EnvFault: a service that the task needs is down.
        """
        first = self._episode.begin(self._task)
        self.turns = 0
        *before, last = prompt
        return [*before, last | {"content": last["content"] + first}], self._episode.describe()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Play a response; after SkyRL's last turn the episode ends and counts as lost."""
        message = self._episode.respond(action)
        self.turns += 1
        reward = message.reward
        done = message.done
        if not done and self.turns >= self.max_turns:
            done, conversation = True, self._episode.conversation
            if conversation.env.reward_mode is RewardMode.SPEAR:  # the native one is paid turn by turn
                reward = conversation.pay(message) or 0.0
        said = [] if done else [{"role": "user", "content": message.text}]
        return BaseTextEnvStepOutput(
            observations=said, reward=reward, done=done, metadata=self._episode.describe(), postprocessed_action=None
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the metrics of the episode, which SkyRL averages."""
        about = self._episode.describe()
        return {"won": float(about["won"]), "score": about["score"], "fault": float(about["fault"] is not None)}

    def close(self) -> None:
        """Close the environment."""
        self._episode.close()


def register() -> None:
    """Register environments as ``skyrl_gym.make("spear", …)``; call it in each process, any number of times."""
    if ENV_CLASS not in registry:
        skyrl_gym.register(id=ENV_CLASS, entry_point=f"{SkyRLEnv.__module__}:{SkyRLEnv.__qualname__}")


def make_rows(env_id: str, count: int, *, seed: int = 0, **keywords: Any) -> list[dict[str, Any]]:
    """Make rows of a data set for SkyRL, for tasks from :func:`~spear_envs.adapters.texts.draw_tasks`."""
    rest = {"prompt": [{"role": "user", "content": ""}], "env_class": ENV_CLASS}
    return [rest | row for row in write_rows(env_id, count, seed=seed, **keywords)]
