"""Many Sokoban environments at once, batched in NumPy; each behaves exactly as a single one with its seed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from spear_envs.core.env import OnMalformed, RewardMode, ToolReward
from spear_envs.core.episode import Episode
from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import FORMAT_BONUS, compose_reward, tool_call_reward
from spear_envs.core.tasks import Task
from spear_envs.core.vector import batch_infos, read_autoreset_mode, read_indices, read_reset_mask, read_seeds
from spear_envs.sokoban.batch import Batch
from spear_envs.sokoban.engine import MOVE_REWARD
from spear_envs.sokoban.env import SokobanEnv, digest_board
from spear_envs.sokoban.levels import WORDS, Level, format_spaced
from spear_envs.sokoban.prompts import Modality
from spear_envs.sokoban.search import find_solution
from spear_envs.sokoban.tasks import read_level

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
_CACHED_LENGTH = 256  # longest response worth remembering, in characters


class Reading(NamedTuple):
    """What a response says, whatever the board."""

    codes: tuple[int, ...]
    words: str
    message: str
    format_ok: bool


class SokobanVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """N Sokoban environments with the interface of ``SpearVectorEnv``, stepped in NumPy.

    ``step_subset`` steps some environments only; ``reset`` takes ``options={"task": id}``, ``{"tasks": [id, ...]}``
    and ``{"reset_mask": bool [N]}``.  ``call`` runs any method of ``SokobanEnv`` on every environment in turn.

    Args:
        num_envs: N.
        autoreset_mode: ``AutoresetMode``, or its name: ``"next_step"``, ``"same_step"``, ``"disabled"``.
        workers: must be 0: one process is faster than several here.
        max_episode_steps: must be None; ``max_turns`` ends episodes.
        keywords: those of ``SokobanEnv``, the same for all.

    Raises:
        SpearError: a bad argument.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        workers: int = 0,
        max_episode_steps: int | None = None,
        **keywords: Any,
    ) -> None:
        if num_envs < 1:
            raise SpearError(f"num_envs={num_envs} is not valid: give at least 1.")
        if workers:
            raise SpearError("Sokoban's vector environment is batched in one process: leave workers at 0.")
        if max_episode_steps is not None:
            raise SpearError("max_episode_steps is not used here: give max_turns.")
        self.num_envs = num_envs
        self.autoreset_mode = read_autoreset_mode(autoreset_mode)
        self._env = env = SokobanEnv(**keywords)  # settings, tasks, and the place where `call` runs
        self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = env.render_mode
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._read_short = lru_cache(maxsize=4_096)(self._read)
        self._batch: Batch | None = None
        self._counts_distinct = env.tool_reward is ToolReward.DISTINCT
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._tasks: list[Task | None] = [None] * num_envs
        self._begun = np.zeros(num_envs, np.bool_)
        self._ended = np.zeros(num_envs, np.bool_)
        self._turn = np.zeros(num_envs, np.int64)
        self._tool_calls = np.zeros(num_envs, np.int64)
        self._distinct_calls = np.zeros(num_envs, np.int64)
        self._met: list[dict[Hashable, None]] = [{} for _ in range(num_envs)]
        self._optimal = np.zeros(num_envs, np.int64)
        self._native_return = np.zeros(num_envs)
        self._won = np.zeros(num_envs, np.bool_)
        self._well_formed = np.ones(num_envs, np.bool_)
        self._format_ok = np.ones(num_envs, np.bool_)
        self._moved = np.zeros(num_envs, np.bool_)
        self._pushed = np.zeros(num_envs, np.bool_)
        self._action_ok = np.ones(num_envs, np.bool_)
        self._action = np.full(num_envs, "", object)
        self._message = np.full(num_envs, "", object)
        self._names = np.full((3, num_envs), None, object)  # task ids, subtasks, instructions

    # ---------------------------------------------------------------- gymnasium's interface

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; see ``SpearVectorEnv.reset``."""
        self._check_open()
        seeds = read_seeds(seed, self.num_envs)
        rest = dict(options or {})
        mask = read_reset_mask(rest.pop("reset_mask", None), self.num_envs)
        ids = rest.pop("tasks", None)
        if ids is not None and len(ids) != self.num_envs:
            raise SpearError(f"options['tasks'] has {len(ids)} ids: give one for each of {self.num_envs} environments.")
        if not np.all(self._begun | mask):
            missing = np.flatnonzero(~(self._begun | mask)).tolist()
            raise SpearError(f"Environments {missing} were never reset: the first reset must take in all of them.")
        rows = np.flatnonzero(mask)
        tasks = []
        for row in rows.tolist():
            # As a single environment does: the generator is seeded first, then the task is drawn or looked up.
            if seeds[row] is not None:
                self._generators[row] = seeding.np_random(seeds[row])[0]
            own = {**rest, "task": ids[row]} if ids is not None else rest
            task_id = self._env._read_options(own)
            tasks.append(self._draw(row) if task_id is None else self._env.tasks.get(task_id))
        self._begin(rows, tasks)
        infos: list[dict[str, Any] | None] = [None] * self.num_envs
        for row in rows.tolist():
            infos[row] = self._describe(row)
        return self._show(None), batch_infos(infos)

    def step(self, actions: Sequence[str]) -> StepReturn:
        """Step all environments: observations, rewards float64 [N], terminations, truncations, infos."""
        if len(actions) != self.num_envs:
            raise SpearError(f"step() got {len(actions)} responses for {self.num_envs} environments: give one each.")
        return self._step(None, actions)

    def step_subset(self, indices: Sequence[int], actions: Sequence[str]) -> StepReturn:
        """Step some environments and leave the others as they are; see ``SpearVectorEnv.step_subset``."""
        chosen = read_indices(indices, actions, self.num_envs)
        return self._step(np.array(chosen, np.int64), actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute of it; N results in order.

        Each environment's state is moved into a single environment and back, so this is for looking in from time to
        time, not for every step; ``set_training_step`` alone is done at once.
        """
        self._check_open()
        if name == "set_training_step":
            self._env.set_training_step(*args, **kwargs)
            return (None,) * self.num_envs
        if name in ("reset", "step"):
            raise SpearError(f"call({name!r}) is not possible here: use {name}() of the vector environment.")
        results = []
        for row in range(self.num_envs):
            if self._begun[row]:
                self._env.set_state(self._export(row))
            result = getattr(self._env, name)
            results.append(result(*args, **kwargs) if callable(result) else result)
            if self._begun[row]:
                self._import(row, self._env.get_state())
        return tuple(results)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: one value for all, or N equal ones.

        Raises:
            SpearError: the values differ; the environments of a batch share their settings.
        """
        self._check_open()
        if isinstance(values, (list, tuple)):
            if len(values) != self.num_envs:
                raise SpearError(
                    f"set_attr() got {len(values)} values for {self.num_envs} environments: give one each."
                )
            if any(value != values[0] for value in values):
                raise SpearError(f"The environments of a Sokoban batch share {name!r}: give one value for all.")
            values = values[0]
        setattr(self._env, name, values)

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Nothing is held but memory."""

    # ---------------------------------------------------------------- one step

    def _step(self, rows: np.ndarray | None, actions: Sequence[str]) -> StepReturn:
        self._check_open()
        every = np.arange(self.num_envs) if rows is None else rows
        if not self._begun[every].all():
            raise ResetNeeded("Call reset() before step().")
        ended = self._ended[every]
        if ended.any() and self.autoreset_mode is AutoresetMode.DISABLED:
            raise ResetNeeded(
                f"Environments {every[ended].tolist()} have ended: reset them with options={{'reset_mask': ...}} or "
                "step the others with step_subset()."
            )
        readings: list[Reading | None] = []
        for action, over in zip(actions, ended.tolist(), strict=True):
            if over:
                readings.append(None)
            elif not isinstance(action, str):
                raise TypeError(f"step() takes the text of a response (str), not {type(action).__name__}.")
            else:
                readings.append(self._read_short(action) if len(action) <= _CACHED_LENGTH else self._read(action))
        again = every[ended]
        rewards = np.zeros(len(every))
        terminated, truncated = np.zeros(len(every), np.bool_), np.zeros(len(every), np.bool_)
        played = np.flatnonzero(~ended) if len(again) else np.arange(len(every))
        if len(played):
            some = every if len(played) == len(every) else every[played]
            rewards[played] = self._play(some, [reading for reading in readings if reading is not None])
            terminated[played] = self._won[some]
            truncated[played] = self._ended[some] & ~self._won[some]
        if len(again):
            self._begin(again, [self._draw(row) for row in again.tolist()])
        over = terminated | truncated
        finals: list[tuple[int, dict[str, Any]]] = []
        if self.autoreset_mode is AutoresetMode.SAME_STEP and over.any():
            done = np.flatnonzero(over)
            shown = self._split(self._show(every[done]), len(done))
            finals = [
                (place, {"final_obs": obs, "final_info": self._describe(int(every[place]))})
                for place, obs in zip(done.tolist(), shown, strict=True)
            ]
            self._begin(every[done], [self._draw(row) for row in every[done].tolist()])
        infos = self._describe_all(every) if len(every) else {}
        if finals:
            extra: list[dict[str, Any] | None] = [None] * len(every)
            for place, final in finals:
                extra[place] = final
            infos.update(batch_infos(extra))
        return self._show(rows), rewards, terminated, truncated, infos

    def _play(self, rows: np.ndarray, readings: list[Reading]) -> np.ndarray:
        """Play one turn on boards that have not ended; returns the rewards."""
        batch = self._batch
        assert batch is not None
        counts = np.array([len(reading.codes) for reading in readings])
        native = np.where(counts == 0, MOVE_REWARD, 0.0)
        moves, pushes = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for place in range(int(counts.max())):
            live = np.flatnonzero((counts > place) & ~batch.won[rows])
            codes = np.array([readings[i].codes[place] for i in live.tolist()], np.int64)
            whole = len(live) == self.num_envs and rows[0] == 0 and bool((np.diff(rows) == 1).all())
            gained, moved, pushed = batch.step(codes, None if whole else rows[live])
            native[live] += gained
            moves[live] += moved
            pushes[live] += pushed
        self._turn[rows] += 1
        self._tool_calls[rows] += moves
        self._native_return[rows] += native
        if self._counts_distinct:
            self._count_distinct(rows[moves > 0], moves[moves > 0])
        self._moved[rows] = self._action_ok[rows] = moves > 0
        self._pushed[rows] = pushes > 0
        self._format_ok[rows] = format_ok = np.array([reading.format_ok for reading in readings])
        self._well_formed[rows] &= format_ok
        self._action[rows] = [reading.words for reading in readings]
        self._message[rows] = [reading.message for reading in readings]
        self._won[rows] = batch.won[rows]
        self._ended[rows] = self._won[rows] | (self._turn[rows] >= self._env.max_turns)
        if self._env.reward_mode is RewardMode.NATIVE:
            return native
        rewards = np.zeros(len(rows))
        mu = self._env.mu(self._env.training_step)
        for place in np.flatnonzero(self._ended[rows]).tolist():
            rewards[place] = compose_reward(self._reward_terms(int(rows[place])), mu)
        return rewards

    def _count_distinct(self, rows: np.ndarray, moves: np.ndarray) -> None:
        """Count the moves of turns that led to a board which the episode had not met."""
        assert self._batch is not None
        for row, made in zip(rows.tolist(), moves.tolist(), strict=True):
            board = digest_board(self._batch.read_board(row))
            if board not in self._met[row]:
                self._met[row][board] = None
                self._distinct_calls[row] += made

    def _read(self, response: str) -> Reading:
        env = self._env
        parsed = env.parser.parse(response)
        action = parsed.action
        if action is None and env.on_malformed is OnMalformed.PEER:
            action = env.peer_action(response)
        if action is None:
            return Reading((), "", env.explain_problem(parsed.problem), parsed.format_ok)
        moves = env.read_moves(action)
        return Reading(moves.codes, moves.words, moves.problem, parsed.format_ok)

    def _draw(self, row: int) -> Task:
        generator = self._generators[row]
        if generator is None:
            generator = self._generators[row] = seeding.np_random(None)[0]
        return self._env.tasks.draw(generator)

    def _begin(self, rows: np.ndarray, tasks: Sequence[Task]) -> None:
        """Start ``tasks`` on the environments ``rows``."""
        levels = [read_level(task.content["level"]) for task in tasks]
        if self._batch is None:  # the first reset takes in all environments
            self._batch = Batch(levels, self._env.tiles)
        else:
            self._batch.load(rows, levels)
        for row, task in zip(rows.tolist(), tasks, strict=True):
            self._tasks[row] = task
            self._names[:, row] = task.id, task.subtask, task.instruction
            self._optimal[row] = task.content["optimal"]
        for row in rows.tolist() if self._counts_distinct else ():
            self._met[row] = {digest_board(self._batch.read_board(row)): None}
        for numbers in (self._turn, self._tool_calls, self._distinct_calls, self._native_return):
            numbers[rows] = 0
        for flags in (self._ended, self._won, self._moved, self._pushed):
            flags[rows] = False
        for flags in (self._begun, self._well_formed, self._format_ok, self._action_ok):
            flags[rows] = True
        self._action[rows] = ""
        self._message[rows] = ""

    # ---------------------------------------------------------------- what is shown

    def _show(self, rows: np.ndarray | None) -> Any:
        """Observations of the environments ``rows``, in their order, or of all."""
        batch, env = self._batch, self._env
        assert batch is not None
        order: Iterable[int] = range(self.num_envs) if rows is None else rows.tolist()
        if env.modality is Modality.IMAGE:
            texts = [self._message[row] for row in order]
        else:
            boards = batch.texts() if rows is None else batch.texts(rows)
            if env.text_format == "spaced":
                boards = [format_spaced(board) for board in boards]
            texts = [
                f"{board}\n\n{message}" if (message := self._message[row]) else board
                for board, row in zip(boards, order, strict=True)
            ]
        if env.modality is Modality.TEXT:
            return tuple(texts)
        frames = batch.frames() if rows is None else batch.frames(copy=False)[rows]
        return {"image": frames, "text": tuple(texts)}

    def _split(self, observations: Any, count: int) -> list[Any]:
        if self._env.modality is Modality.TEXT:
            return list(observations)
        return [{"image": observations["image"][i], "text": observations["text"][i]} for i in range(count)]

    def _describe_all(self, rows: np.ndarray) -> dict[str, Any]:
        """The infos of some environments as ``batch_infos`` would give them, without a dictionary for each."""
        batch, env, size = self._batch, self._env, len(rows)
        assert batch is not None
        ids, subtasks, instructions = self._names[:, rows]
        calls = self._tool_calls[rows]
        paid = self._paid_calls[rows]
        won = self._won[rows]
        terms = {
            "outcome": np.where(won, 1.0, -1.0),
            "tool_call": self._tool_call_table(int(paid.max(initial=0)))[paid],
            "format": np.where(self._well_formed[rows] & (self._turn[rows] > 0), FORMAT_BONUS, 0.0),
            "native_return": self._native_return[rows],
        }
        infos: dict[str, Any] = {
            "task_id": ids,
            "task_fingerprint": _fill(env.tasks.fingerprint for _ in range(size)),
            "subtask": subtasks,
            "instruction": instructions,
            "turn": self._turn[rows],
            "admissible_actions": _fill(list(WORDS) for _ in range(size)),
            "anchor": _fill(map(digest_board, batch.texts(rows))),
            "action": self._action[rows],
            "format_ok": self._format_ok[rows],
            "action_ok": self._action_ok[rows],
            "tool_calls": calls,
            "won": won,
            "score": won.astype(np.float64),
            "reward_terms": _mark(terms, size),
            "fault": np.full(size, None, object),
            "moved": self._moved[rows],
            "pushed": self._pushed[rows],
            "optimal": self._optimal[rows],
        }
        if env.diagnostics:
            infos["solvable"] = np.array([self._is_solvable(row) for row in rows.tolist()], np.bool_)
        return _mark(infos, size)

    def _describe(self, row: int) -> dict[str, Any]:
        """The info of one environment, as a single one gives it."""
        task = self._tasks[row]
        batch = self._batch
        assert task is not None and batch is not None
        info = {
            "task_id": task.id,
            "task_fingerprint": self._env.tasks.fingerprint,
            "subtask": task.subtask,
            "instruction": task.instruction,
            "turn": int(self._turn[row]),
            "admissible_actions": list(WORDS),
            "anchor": digest_board(batch.read_board(row)),
            "action": self._action[row],
            "format_ok": bool(self._format_ok[row]),
            "action_ok": bool(self._action_ok[row]),
            "tool_calls": int(self._tool_calls[row]),
            "won": bool(self._won[row]),
            "score": float(self._won[row]),
            "reward_terms": self._reward_terms(row),
            "fault": None,
        }
        return {**info, **self._details(row)}

    def _details(self, row: int) -> dict[str, Any]:
        details: dict[str, Any] = {
            "moved": bool(self._moved[row]),
            "pushed": bool(self._pushed[row]),
            "optimal": int(self._optimal[row]),
        }
        if self._env.diagnostics:
            details["solvable"] = self._is_solvable(row)
        return details

    def _is_solvable(self, row: int) -> bool:
        batch = self._batch
        assert batch is not None
        codes = tuple(batch.codes[row].tolist())
        return find_solution(Level("", batch.height, batch.width, codes)) is not None

    def _reward_terms(self, row: int) -> dict[str, float]:
        return {
            "outcome": 1.0 if self._won[row] else -1.0,
            "tool_call": tool_call_reward(int(self._paid_calls[row])),
            "format": FORMAT_BONUS if self._well_formed[row] and self._turn[row] else 0.0,
            "native_return": float(self._native_return[row]),
        }

    @property
    def _paid_calls(self) -> np.ndarray:
        return self._distinct_calls if self._counts_distinct else self._tool_calls

    def _tool_call_table(self, most: int) -> np.ndarray:
        return np.array([tool_call_reward(n) for n in range(most + 1)])

    # ---------------------------------------------------------------- states of single environments

    def _export(self, row: int) -> dict[str, Any]:
        """The state of one environment, as ``SokobanEnv.get_state`` gives it."""
        task, batch = self._tasks[row], self._batch
        assert task is not None and batch is not None
        generator = self._generators[row]
        if generator is None:
            generator = self._generators[row] = seeding.np_random(None)[0]
        episode = Episode(
            turn=int(self._turn[row]),
            done=bool(self._ended[row]),
            won=bool(self._won[row]),
            well_formed=bool(self._well_formed[row]),
            tool_calls=int(self._tool_calls[row]),
            native_return=float(self._native_return[row]),
            action=self._action[row],
            format_ok=bool(self._format_ok[row]),
            distinct_calls=int(self._distinct_calls[row]),
            met=self._met[row],
        )
        result = {"ok": bool(self._action_ok[row]), "message": self._message[row], "details": self._details(row)}
        return {
            "task_id": task.id,
            "episode": episode.save(),
            "result": result,
            "np_random": generator.bit_generator.state,
            "world": {"board": batch.read_board(row)},
        }

    def _import(self, row: int, state: Mapping[str, Any]) -> None:
        """Put the state of a single environment into the batch."""
        batch = self._batch
        assert batch is not None
        self._begin(np.array([row]), [self._env.tasks.get(state["task_id"])])
        batch.load(np.array([row]), [read_level(state["world"]["board"])])
        episode = Episode.load(state["episode"])
        self._turn[row] = episode.turn
        self._ended[row] = episode.done
        self._won[row] = episode.won
        self._well_formed[row] = episode.well_formed
        self._tool_calls[row] = episode.tool_calls
        self._native_return[row] = episode.native_return
        self._action[row] = episode.action
        self._format_ok[row] = episode.format_ok
        self._distinct_calls[row] = episode.distinct_calls
        self._met[row] = episode.met
        self._action_ok[row] = state["result"]["ok"]
        self._message[row] = state["result"]["message"]
        self._moved[row] = state["result"]["details"]["moved"]
        self._pushed[row] = state["result"]["details"]["pushed"]
        generator = self._generators[row]
        assert generator is not None
        generator.bit_generator.state = state["np_random"]

    def _check_open(self) -> None:
        if self.closed:
            raise SpearError("This vector environment is closed: make a new one.")


def _fill(values: Iterable[Any]) -> np.ndarray:
    """An array of objects, whatever they are."""
    return np.fromiter(values, object)


def _mark(values: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Values of all environments, with the masks that say so."""
    marked: dict[str, Any] = {}
    for key, value in values.items():
        marked[key] = value
        marked[f"_{key}"] = np.ones(size, np.bool_)
    return marked
