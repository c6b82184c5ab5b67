"""A resources server of environments for NVIDIA's NeMo Gym (the package ``nemo-gym``) and its ``gymnasium_agent``.

A server's ``app.py`` only calls ``SpearServer.run_webserver()``: see ``docs/adapters.md``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import HTTPException
from gymnasium.error import ResetNeeded
from nemo_gym.openai_utils import NeMoGymResponse
from resources_servers.gymnasium import GymnasiumServer, extract_text

from spear_envs.adapters.texts import TextEpisode, join_thought, open_row, write_rows
from spear_envs.core.errors import EnvFault, SpearError

MOST_SESSIONS = 4096
"""Episodes under way; agents may leave one without notice, so the oldest is dropped."""


class SpearServer(GymnasiumServer):
    """Plays an episode for each session, as its row of the data set says.

    NeMo Gym cannot leave an episode out: one with a fault is truncated with reward 0, and ``info["fault"]`` names it.
    """

    async def reset(self, metadata: dict[str, Any], session_id: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Begin the episode of the row: ``spear`` has ``env_id``, ``task``, and optionally ``keywords``.

        Raises:
            HTTPException: 422 for a malformed row, 503 if a service of the environment is down.
        """
        await self.close_session(session_id)
        while len(self.session_state) >= MOST_SESSIONS:
            await self.close_session(next(iter(self.session_state)))

        def begin() -> tuple[TextEpisode, str]:
            episode, task = open_row(metadata)
            try:
                return episode, episode.begin(task)
            except BaseException:
                episode.close()
                raise

        try:
            episode, first = await asyncio.to_thread(begin)
        except EnvFault as fault:
            raise HTTPException(503, str(fault)) from fault
        except SpearError as error:
            raise HTTPException(422, str(error)) from error
        await self.close_session(session_id)  # of a reset that came meanwhile
        self.session_state[session_id] = episode
        return first, episode.describe()

    async def step(
        self, action: NeMoGymResponse, metadata: dict[str, Any], session_id: str | None = None
    ) -> tuple[str | None, float, bool, bool, dict[str, Any]]:
        """Play a response.

        Raises:
            HTTPException: 409 if no episode is under way.
        """
        episode: TextEpisode | None = self.session_state.get(session_id)
        if episode is None:
            raise HTTPException(409, "no episode is under way in this session: send /reset first.")
        try:
            message = await asyncio.to_thread(episode.respond, write_response(action))
        except ResetNeeded as error:  # the previous step ended the episode
            raise HTTPException(409, str(error)) from error
        said = None if message.done else message.text
        return said, message.reward, message.terminated, message.truncated, episode.describe()

    async def close_session(self, session_id: str | None) -> None:
        """Close the environment of a session."""
        episode = self.session_state.pop(session_id, None)
        if episode is not None:
            episode.close()


def write_response(action: NeMoGymResponse) -> str:
    """Write a response as the model did: NeMo Gym's model server puts thoughts into items of their own."""
    thoughts = [part.text for item in action.output if item.type == "reasoning" for part in item.summary]
    written = extract_text(action)
    for thought in reversed(thoughts):  # all that the response had, the one that the prompt asked for among them
        written = join_thought(thought, written) if thought else f"<think></think>{written}"
    return written


def make_rows(env_id: str, count: int, *, agent: str, seed: int = 0, **keywords: Any) -> list[dict[str, Any]]:
    """Make rows of a data set for NeMo Gym, one JSON object per line, of tasks drawn by ``seed``.

    Args:
        agent: name of the ``gymnasium_agent`` that plays, from the configuration.
    """
    rest = {"responses_create_params": {"input": []}, "agent_ref": {"type": "responses_api_agents", "name": agent}}
    return [rest | row for row in write_rows(env_id, count, seed=seed, **keywords)]
