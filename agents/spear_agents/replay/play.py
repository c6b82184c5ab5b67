"""An environment played by a person, with undo and hints, recorded like any other episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spear_agents.engines.base import Sampling
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.engines.openai import encode_picture
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.episode import play_episode
from spear_agents.evaluation import choose_template
from spear_agents.prompting import PromptBuilder
from spear_agents.records import EPISODES, check_settings, open_log
from spear_agents.replay.bodies import describe_response, finite
from spear_agents.trajectory import Layout
from spear_envs.core.env import SpearEnv, image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env

HISTORY = 2


@dataclass(frozen=True)
class Move:
    """One response of the person, its outcome, and the state and the reward before."""

    response: str
    shown: Mapping[str, Any]
    state: Mapping[str, Any]
    reward: float


class Game:
    """Plays one environment, task after task, recorded in ``out / "episodes.jsonl"``.

    Records are made by :func:`spear_agents.episode.play_episode`, which plays the final responses again, without those
    taken back. Only finished episodes are recorded; later games of the same settings are added. ``template`` writes the
    responses around actions. ``task`` is the first one, by default the first of the split, and that the last of the
    environment's.

    Raises SpearError for an environment, split, template or task that does not exist, a folder of other games, or one
    in use by another process.
    """

    def __init__(
        self,
        env_id: str,
        out: str | Path,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        split: str | None = None,
        template: str = "default",
        task: str | None = None,
        seed: int = 0,
    ) -> None:
        self.env_id = env_id
        self.out = Path(out)
        self.seed = seed
        self._kwargs = dict(env_kwargs or {})
        self._split = split or find_splits(env_id)[-1]
        self.recorded = 0
        with ExitStack() as stack:  # closes what was opened if anything fails
            self._env = stack.enter_context(closing(make_env(env_id, self._split, self._kwargs)))
            self.core = cast(SpearEnv[Any], self._env.unwrapped)
            self._template = choose_template(self._env, template)
            wanted = {
                "env_id": env_id,
                "engine": "person",
                "env_kwargs": self._kwargs,
                "split": self._split,
                "template": template,
                "layout": Layout.PER_TURN.value,
                "history": HISTORY,
                "fingerprint": self.core.tasks.fingerprint,
            }
            check_settings(self.out, json.loads(json.dumps(wanted)))
            self._prompts = PromptBuilder(ByteTokenizer(), self._template, Layout.PER_TURN, HISTORY)
            self._log = stack.enter_context(open_log(self.out / EPISODES, env_id, self.core.tasks.fingerprint))
            self.start(task or self.core.tasks[0].id)
            self._open = stack.pop_all()

    def close(self) -> None:
        """End the game; an unfinished episode is dropped."""
        self._open.close()

    # ---------------------------------------------------------------- moves

    def start(self, task_id: str) -> None:
        """Begin the episode of a task. Raises UnknownTaskError or EnvFault."""
        self.observation, self.info = self._env.reset(seed=self.seed, options={"task": task_id})
        self.moves: list[Move] = []
        self.done = False
        self.reward = 0.0

    def start_next(self) -> None:
        """Begin the next task."""
        tasks = self.core.tasks
        self.start(tasks[(tasks.index_of(self.info["task_id"]) + 1) % len(tasks)].id)

    def restart(self) -> None:
        """Begin the present task again."""
        self.start(self.info["task_id"])

    def act(self, action: str, thought: str = "") -> None:
        """Play an action in plain form; record the episode if this ends it. Raises SpearError if it had ended."""
        if self.done:
            raise SpearError("the episode has ended: begin another")
        response = self._template.respond(action, thought)
        state, before, shown, paid = self.core.get_state(), self.info, self.observation, self.reward
        self.observation, reward, terminated, truncated, self.info = self._env.step(response)
        self.reward += float(reward)
        self.done = terminated or truncated
        info = self.info
        turn = {
            **_show(shown),
            **describe_response(response),
            "action": info["action"],
            "format_ok": info["format_ok"],
            "action_ok": info["action_ok"],
            "anchor": str(before["anchor"]),
            "reward": finite(info["reward_terms"]["native_return"] - before["reward_terms"]["native_return"]),
            "finish": "stop",
        }
        self.moves.append(Move(response, turn, state, paid))
        if self.done and info["fault"] is None:
            self._record()

    def undo(self) -> None:
        """Undo the last response. Raises SpearError if there is none or the episode is recorded."""
        if self.done or not self.moves:
            raise SpearError("the episode has ended and is recorded" if self.done else "there is nothing to take back")
        move = self.moves.pop()
        self.observation, self.info = self.core.set_state(move.state)
        self.reward = move.reward

    def hint(self) -> str | None:
        """The expert's action in the present state; None if the task can no longer be won."""
        plan = [] if self.done else self.core.expert_plan()
        return plan[0] if plan else None

    @property
    def actions(self) -> list[str]:
        """Admissible actions; empty if the environment does not list them."""
        return [] if self.done else list(self.info["admissible_actions"] or [])

    @property
    def text(self) -> str:
        """The text of the present observation."""
        return text_of(self.observation)

    def describe(self) -> dict[str, Any]:
        """The game for the page."""
        info = self.info
        return {
            "env": self.env_id,
            "task": info["task_id"],
            "subtask": info["subtask"],
            "instruction": info["instruction"],
            "turn": info["turn"],
            "max_turns": self.core.max_turns,
            **_show(self.observation),
            "actions": self.actions,
            "done": self.done,
            "won": info["won"],
            "fault": info["fault"],
            "score": finite(info["score"]),
            "reward": finite(self.reward),
            "reward_terms": {name: finite(value) for name, value in info["reward_terms"].items()},
            "turns": [move.shown for move in self.moves],
            "recorded": self.recorded,
        }

    # ---------------------------------------------------------------- records

    def _record(self) -> None:
        responses = iter([move.response for move in self.moves])
        with closing(make_env(self.env_id, self._split, self._kwargs)) as env:
            played = play_episode(
                env,
                ScriptedEngine(lambda prompt, dice: next(responses, "")),
                self._prompts,
                task_id=self.info["task_id"],
                sampling=Sampling(),
                seed=self.seed,
                env_id=self.env_id,
            )
            trajectory = asyncio.run(played)
        if (trajectory.won, len(trajectory.turns)) != (self.info["won"], len(self.moves)):
            raise SpearError("the episode went differently when played again for the record: it is not recorded")
        self._log.write(trajectory)
        self.recorded += 1


class Stage:
    """A game on its own thread, for a server with many threads."""

    def __init__(self, open_game: Callable[[], Game]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        try:
            self._game = self._thread.submit(open_game).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def perform(self, verb: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the page asks for; return the game after it. Raises LookupError for unknown verbs, or SpearError."""

        def act() -> dict[str, Any]:
            game = self._game
            hint: str | None = None
            if verb == "act":
                game.act(_read_text(content, "action"), _read_text(content, "thought"))
            elif verb == "hint":
                hint = game.hint() or ""
            elif verb != "look":  # an unknown one is a LookupError
                {"undo": game.undo, "restart": game.restart, "next": game.start_next}[verb]()
            return {**game.describe(), "hint": hint}

        return self._thread.submit(act).result()

    def close(self) -> None:
        """End the game."""
        self._thread.submit(self._game.close).result()
        self._thread.shutdown()


def _read_text(content: Mapping[str, Any], key: str) -> str:
    text = content.get(key, "")
    if not isinstance(text, str):
        raise SpearError(f"{key} must be text")
    return text


def _show(observation: Any) -> dict[str, Any]:
    picture = image_of(observation)
    return {"observation": text_of(observation), "image": None if picture is None else encode_picture(picture)}
