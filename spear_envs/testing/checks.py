"""The checks. Each returns a summary, or raises ``ContractError`` with the problem."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # comes with gymnasium
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from spear_envs.core.env import SpearEnv, image_of, text_of
from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.making import require_spear_env
from spear_envs.core.prompts import IMAGE, PromptContext
from spear_envs.core.rewards import REWARD_TERM_KEYS
from spear_envs.core.spaces import INFO_KEYS
from spear_envs.core.tasks import Task, TaskSet, check_disjoint
from spear_envs.testing.trace import (
    MALFORMED,
    choose_response,
    describe_step,
    find_difference,
    freeze,
    replay,
    trace_elsewhere,
)

TRACE_EPISODES = 4
GROUP_SIZE = 4
VECTOR_SIZE = 3
VECTOR_STEPS = 30
"""Enough for episodes that end in different ways; gymnasium batches the infos of a step by the type of the first."""
WARM_UP_RESETS = 256
MEMORY_TOLERANCE = 128 * 1024
"""Bytes by which Python's memory may grow after many resets: noise of caches and the interpreter."""


class ContractError(SpearError):
    """An environment that breaks the contract."""


@dataclass
class Subject:
    """The environment under test, and the extent of the checks."""

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_tasks: int = 64
    resets: int = 1000

    def make(self, **more: Any) -> gym.Env[Any, str]:
        """Make an environment without gymnasium's passive checker."""
        return gym.make(self.id, disable_env_checker=True, **{**self.kwargs, **more})

    @contextmanager
    def opened(self, **more: Any) -> Iterator[SpearEnv[Any]]:
        """Yield a new bare environment, closed at the end."""
        env = self.make(**more)
        try:
            yield require_spear_env(self.id, env.unwrapped)
        finally:
            env.close()

    def splits(self) -> tuple[str, ...]:
        """Return the splits to try: the requested one, or all."""
        if "split" in self.kwargs:
            return (self.kwargs["split"],)
        with self.opened() as env:
            return env.splits


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ContractError(complaint)


def _sample(tasks: TaskSet, limit: int) -> Iterator[Task]:
    """Yield all tasks of a bounded set, else ``limit`` of them, always the same."""
    if tasks.bounded or len(tasks) <= limit:
        yield from tasks
    else:
        rng = np.random.default_rng(0)
        for index in sorted(rng.choice(len(tasks), size=limit, replace=False).tolist()):
            yield tasks[index]


def _record(env: SpearEnv[Any], seed: int) -> dict[str, Any]:
    """Play an episode of mixed responses; return it as :func:`replay` takes it."""
    rng = random.Random(seed)
    env.reset(seed=seed)
    responses = []
    while not env.done:
        responses.append(choose_response(env, rng))
        env.step(responses[-1])
    return {"seed": seed, "options": None, "responses": responses}


def check_gymnasium(subject: Subject) -> str:
    """gymnasium's checker passes without warnings, and every render mode works."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = gym.make(subject.id, **subject.kwargs)
        base = env.unwrapped
        check_env(base, skip_render_check=True)
        env.reset(seed=0)
        while not base.done:  # type: ignore[attr-defined]  # through the passive checker
            env.step("")
        env.close()
        modes = [mode for mode in base.metadata["render_modes"] if mode != "human"]
        for mode in modes:
            with subject.opened(render_mode=mode) as rendered:
                rendered.reset(seed=0)
                kind = str if mode == "ansi" else np.ndarray
                _require(isinstance(rendered.render(), kind), f"render_mode={mode!r} does not give a {kind.__name__}")
    complaints = [str(warning.message) for warning in caught if "gymnasium" in warning.filename]
    complaints = [text for text in complaints if "is different from the unwrapped version" not in text]
    _require(not complaints, f"gymnasium warns: {'; '.join(complaints)}")
    _require("ansi" in modes, "metadata['render_modes'] lacks 'ansi', which every environment has")
    return f"check_env passes, render modes {', '.join(modes)}"


def check_tasks(subject: Subject) -> str:
    """Task ids lead to their tasks; unknown ids and options are refused with a clear error."""
    with subject.opened() as env:
        task = env.tasks[len(env.tasks) // 2]
        _require(env.tasks.get(task.id).definition() == task.definition(), f"tasks.get({task.id!r}) is another task")
        _, info = env.reset(options={"task": task.id})
        _require(info["task_id"] == task.id, f"options={{'task': {task.id!r}}} started {info['task_id']!r}")
        for options, kind in (({"task": "no/such/task"}, UnknownTaskError), ({"no_such_option": 1}, SpearError)):
            try:
                env.reset(options=options)
            except kind as error:
                _require("\n" not in str(error).strip(), f"the error for options={options} is more than one line")
            else:
                raise ContractError(f"reset(options={options}) passes: it must raise {kind.__name__}")
        return f"{len(env.tasks):,} tasks in {env.tasks.split!r}, fingerprint {env.tasks.fingerprint[:12]}"


def check_info(subject: Subject) -> str:
    """info has all keys with the right types throughout an episode, and rewards follow the reward mode."""
    turns = 0
    with subject.opened() as env:
        for seed in range(TRACE_EPISODES):
            rng = random.Random(seed)
            observation, info = env.reset(seed=seed)
            keys = set(info)
            _look_at(env, observation, info)
            _look_at_picture(env, observation, info)
            while not env.done:
                observation, reward, terminated, truncated, info = env.step(choose_response(env, rng))
                turns += 1
                _look_at(env, observation, info)
                _require(set(info) == keys, f"the keys of info change in an episode: {sorted(set(info) ^ keys)}")
                ended = terminated or truncated
                _require(ended == env.done, "terminated or truncated does not agree with env.done")
                spear = env.reward_mode.value == "spear"
                _require(ended or not spear or reward == 0.0, f"reward='spear' pays {reward} before the end")
    return f"{len(keys)} keys over {turns} turns"


def _look_at(env: SpearEnv[Any], observation: Any, info: dict[str, Any]) -> None:
    """Check one observation and its info."""
    missing = (INFO_KEYS - info.keys()) | (REWARD_TERM_KEYS - info.get("reward_terms", {}).keys())
    _require(not missing, f"info lacks {sorted(missing)} at turn {env.turn}")
    _require(observation in env.observation_space, f"the observation of turn {env.turn} is not in its space")
    _require(isinstance(info["anchor"], Hashable), "info['anchor'] is not hashable")
    for key in ("format_ok", "action_ok", "won"):
        _require(isinstance(info[key], bool), f"info[{key!r}] is {info[key]!r}: it must be a bool")
    _require(0.0 <= info["score"] <= 1.0, f"info['score'] is {info['score']}: it must be in [0, 1]")
    _require(info["turn"] == env.turn, f"info['turn'] is {info['turn']} at turn {env.turn}")


def _look_at_picture(env: SpearEnv[Any], observation: Any, info: dict[str, Any]) -> None:
    """Check that a picture has the right form, and that the prompt has a place for it."""
    picture = image_of(observation)
    if picture is None:
        return
    is_picture = isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,)
    _require(is_picture, "the picture of an observation must be a uint8 array [height, width, 3]")
    if (template := env.templates.get("default")) is not None:
        text, actions = text_of(observation), info["admissible_actions"]
        prompt = template.render(PromptContext(info["instruction"], text, actions, (), 1, env.max_turns, picture=True))
        _require(IMAGE in prompt, f"observations have a picture, but the template 'default' has no {IMAGE} for it")


def check_malformed(subject: Subject) -> str:
    """No response raises; a malformed one costs a turn and, without a peer, plays nothing and is explained."""
    counted = 0
    with subject.opened() as env:
        for response in MALFORMED:
            _, before = env.reset(seed=2)
            shown = repr(response[:40])
            try:
                observation, _, _, _, info = env.step(response)
            except Exception as error:
                raise ContractError(f"the response {shown} raises {type(error).__name__}: {error}") from error
            _require(info["turn"] == 1, f"the response {shown} does not count as a turn")
            explains = env.on_malformed.value == "explain"
            if env.parsed.format_ok or (explains and env.parsed.action is not None):
                continue  # this grammar makes something of it
            counted += 1
            _require(not info["format_ok"], f"format_ok is True for {shown}")
            _require(bool(env.parsed.problem), f"the parser gives no reason for refusing {shown}")
            _require(info["reward_terms"]["format"] == 0.0, f"the format term survives {shown}")
            if explains:
                _require(
                    env.parsed.problem in text_of(observation), f"the observation does not say what is wrong: {shown}"
                )
                _require(info["anchor"] == before["anchor"], f"the response {shown} changes the state")
    _require(counted > 0, "no response is malformed: an empty one must be")
    return f"{len(MALFORMED)} responses, {counted} of them malformed here"


def check_end(subject: Subject) -> str:
    """The turn limit truncates; before the first reset and after the end ``step`` raises ``ResetNeeded``."""
    with subject.opened() as env:
        for moment in ("before reset()", "after the end"):
            try:
                env.step("")
            except ResetNeeded:
                pass
            else:
                raise ContractError(f"step() {moment} passes: it must raise gymnasium.error.ResetNeeded")
            if moment == "before reset()":
                env.reset(seed=3)
                while not env.done:
                    _require(env.turn < env.max_turns, f"the episode continues after max_turns={env.max_turns}")
                    _, _, terminated, truncated, _ = env.step("")
                _require(terminated != truncated, "an episode ends either terminated or truncated")
        return f"ends after {env.turn} empty responses (max_turns {env.max_turns})"


def check_group(subject: Subject) -> str:
    """Environments reset to one task id show the same thing, whatever their seeds."""
    with subject.opened() as env:
        task_ids = [env.tasks.draw(np.random.default_rng(i)).id for i in range(5)]
    members = [subject.make() for _ in range(GROUP_SIZE)]
    try:
        for task_id in task_ids:
            seen = [
                describe_step(*_spread(member.reset(seed=100 + i, options={"task": task_id})))
                for i, member in enumerate(members)
            ]
            for other in seen[1:]:
                difference = find_difference(seen[0], other)
                _require(
                    not difference,
                    f"two members of a group on {task_id} differ at {difference}: derive what _start draws from the"
                    " task, as in np.random.default_rng(task.content['seed']), not from self.np_random",
                )
    finally:
        for member in members:
            member.close()
    return f"{len(task_ids)} tasks, groups of {GROUP_SIZE}"


def _spread(first: tuple[Any, dict[str, Any]]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    return first[0], 0.0, False, False, first[1]


def check_determinism(subject: Subject) -> str:
    """Same seed and responses, same trace: here, and in two processes with different PYTHONHASHSEED."""
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    with subject.opened() as env:
        episodes = [_record(env, seed) for seed in range(TRACE_EPISODES)]
        here = replay(env, episodes)
    _require(random.getstate() == python_state, "an episode uses the global generator of random: use self.np_random")
    same = freeze(np.random.get_state(legacy=False)) == freeze(numpy_state)
    _require(same, "an episode uses the global generator of numpy.random: use self.np_random")
    here = [freeze(step) for step in here]
    for hash_seed in (1, 2):
        there = trace_elsewhere(gym.spec(subject.id), subject.kwargs, episodes, hash_seed)
        difference = find_difference(here, there)
        _require(not difference, f"with PYTHONHASHSEED={hash_seed} the trace differs at {difference}")
    return f"{len(episodes)} episodes, {len(here)} observations, 3 processes"


def check_state(subject: Subject) -> str:
    """``set_state(get_state())`` is the identity, from every turn, in the same environment and in another."""
    branches = 0
    with subject.opened() as env, subject.opened() as other:
        other.reset(seed=99)
        for seed in range(3):
            responses = _record(env, seed)["responses"]
            env.reset(seed=seed)
            states = [env.get_state()]
            for response in responses:
                env.step(response)
                states.append(env.get_state())
            kept = [freeze(state) for state in states]
            states = [pickle.loads(pickle.dumps(state)) for state in states]
            env.reset(seed=seed)
            trace = [describe_step(*_spread(env.reset(seed=seed)))]
            trace += [describe_step(*env.step(response)) for response in responses]
            for turn, state in enumerate(states):
                for target in (env, other):
                    observation, info = target.set_state(state)
                    again = [describe_step(observation, 0.0, False, False, info)["observation"], freeze(info)]
                    difference = find_difference([trace[turn]["observation"], trace[turn]["info"]], again)
                    _require(not difference, f"set_state() at turn {turn} shows another state at {difference}")
                    difference = find_difference(kept[turn], freeze(target.get_state()))
                    _require(not difference, f"get_state() after set_state() differs at turn {turn}: {difference}")
                    rest = [describe_step(*target.step(response)) for response in responses[turn:]]
                    difference = find_difference(trace[turn + 1 :], rest)
                    _require(not difference, f"the branch from turn {turn} diverges at {difference}")
                    branches += 1
                _require(freeze(state) == kept[turn], f"playing on changes the state that was got at turn {turn}")
    return f"{branches} branches"


def check_oracle(subject: Subject) -> str:
    """The expert wins every task of every split with score 1."""
    found = []
    for split in subject.splits():
        with subject.opened(split=split) as env:
            played = longest = 0
            for task in _sample(env.tasks, subject.train_tasks):
                env.reset(options={"task": task.id})
                plan: list[str] = []
                info: dict[str, Any] = {}
                while not env.done:
                    plan = plan or list(env.expert_plan())
                    _require(bool(plan), f"expert_plan() is empty at turn {env.turn} of {task.id}")
                    _, _, terminated, _, info = env.step(env.parser.respond(plan.pop(0), "as planned"))
                won = terminated and info["won"] and info["score"] == 1.0
                _require(won, f"the expert does not win {task.id}: score {info['score']} after {env.turn} turns")
                played += 1
                longest = max(longest, env.turn)
            found.append(f"{split} {played} (≤ {longest} turns)")
    return "wins " + ", ".join(found)


def check_splits(subject: Subject) -> str:
    """The splits share no task by content."""
    splits = subject.splits()
    if len(splits) < 2:
        return "only one split asked for"
    sets = []
    for split in splits:
        with subject.opened(split=split) as env:
            _require(env.tasks.split == split, f"split={split!r} gives tasks of {env.tasks.split!r}")
            sets.append(env.tasks)
    compared = check_disjoint(*sets, sample=max(1000, subject.train_tasks))
    return f"{compared:,} tasks of {', '.join(splits)} compared"


def check_vector(subject: Subject) -> str:
    """gymnasium's vector environments play as single ones with seeds s, s + 1, …, autoresets included.

    They refuse infos whose values change their type.
    """
    makers = [subject.make] * VECTOR_SIZE
    for kind in (SyncVectorEnv, partial(AsyncVectorEnv, shared_memory=False)):
        try:
            _compare_vector(subject, kind(makers))
        except (TypeError, ValueError, AttributeError) as error:
            raise ContractError(
                f"in gymnasium's own vector environments a step fails ({type(error).__name__}: {error}): each value of"
                " info must keep its type, and may be None only if it is otherwise a text or a list"
            ) from error
    return f"SyncVectorEnv and AsyncVectorEnv, {VECTOR_SIZE} environments, {VECTOR_STEPS} steps"


def _compare_vector(subject: Subject, vector: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    """Compare a vector environment with single ones, the second played by the expert; close it."""
    envs = [subject.make() for _ in range(VECTOR_SIZE)]
    try:
        observations, infos = vector.reset(seed=7)
        results = [_spread(env.reset(seed=7 + i)) for i, env in enumerate(envs)]
        flags: tuple[Any, ...] = ([0.0] * VECTOR_SIZE, [False] * VECTOR_SIZE, [False] * VECTOR_SIZE)
        rng = random.Random(7)
        for step in range(VECTOR_STEPS + 1):
            for i, result in enumerate(results):
                batched = (_pick(observations, i), *(column[i] for column in flags), _pick_info(infos, i))
                difference = find_difference(describe_step(*result), describe_step(*batched))
                _require(not difference, f"environment {i} and the single one differ at step {step}: {difference}")
            bases: list[Any] = [env.unwrapped for env in envs]
            responses = ["" if base.done else choose_response(base, rng) for base in bases]
            if not bases[1].done and (plan := bases[1].expert_plan()):
                responses[1] = bases[1].parser.respond(plan[0])  # so that episodes end in different ways
            observations, *flags, infos = vector.step(responses)  # type: ignore[assignment]
            results = [
                _spread(env.reset()) if base.done else env.step(response)  # type: ignore[misc]
                for env, base, response in zip(envs, bases, responses, strict=True)
            ]
    except KeyboardInterrupt:
        # An orderly close waits for answers that the interrupted step has already taken.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            vector.close(terminate=True)
        raise
    finally:
        vector.close()
        for env in envs:
            env.close()


def _pick(batch: Any, i: int) -> Any:
    return {key: _pick(value, i) for key, value in batch.items()} if isinstance(batch, dict) else batch[i]


def _pick_info(infos: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the info of one environment of a batch."""
    picked = {}
    for key, value in infos.items():
        if f"_{key}" in infos and infos[f"_{key}"][i]:
            if isinstance(value, Mapping):
                picked[key] = _pick_info(value, i)
            else:
                picked[key] = value[i].item() if isinstance(value[i], np.generic) else value[i]
    return picked


def check_portable(subject: Subject) -> str:
    """Environments can be pickled and their specification written as JSON; wrappers record episodes."""
    with subject.opened() as env:
        try:
            spec = EnvSpec.from_json(env.spec.to_json())  # type: ignore[union-attr]
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"its EnvSpec cannot be written as JSON ({error}): register names, not functions"
            ) from error
        env.reset(seed=4)
        env.step(env.parser.respond("nothing of the kind"))
        for library in (pickle, cloudpickle):
            try:
                copied = library.loads(library.dumps(env))
            except Exception as error:
                raise ContractError(f"{library.__name__} does not copy it ({type(error).__name__}: {error})") from error
            difference = find_difference(freeze(env.get_state()), freeze(copied.get_state()))
            _require(not difference, f"a copy by {library.__name__} is in another state: {difference}")
            copied.close()
    recorded = RecordEpisodeStatistics(gym.make(spec, disable_env_checker=True, **subject.kwargs))
    try:
        recorded.reset(seed=4)
        base: SpearEnv[Any] = recorded.unwrapped  # type: ignore[assignment]
        paid, rng = 0.0, random.Random(4)
        info: dict[str, Any] = {}
        while not base.done:
            _, reward, _, _, info = recorded.step(choose_response(base, rng))
            paid += float(reward)
        found = float(info["episode"]["r"])
        _require(abs(found - paid) < 1e-6, f"RecordEpisodeStatistics counts {found} of {paid}")
    finally:
        recorded.close()
    return "pickle, cloudpickle, EnvSpec.to_json, RecordEpisodeStatistics"


def check_memory(subject: Subject) -> str:
    """Many resets, each with a step, do not use more memory."""
    with subject.opened() as env:

        def play(resets: int) -> None:
            for i in range(resets):
                env.reset(seed=i % WARM_UP_RESETS)
                env.step("")

        play(WARM_UP_RESETS)  # caches may fill
        started = not tracemalloc.is_tracing()
        if started:
            tracemalloc.start()
        try:
            play(WARM_UP_RESETS)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            play(subject.resets)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            if started:
                tracemalloc.stop()
    _require(grown <= MEMORY_TOLERANCE, f"{subject.resets} resets leave {grown / 1024:.0f} KiB behind")
    return f"{subject.resets} resets, {grown / 1024:+.1f} KiB"


CHECKS: Mapping[str, Callable[[Subject], str]] = {
    "gymnasium": check_gymnasium,
    "tasks": check_tasks,
    "info": check_info,
    "malformed": check_malformed,
    "end": check_end,
    "group": check_group,
    "determinism": check_determinism,
    "state": check_state,
    "splits": check_splits,
    "oracle": check_oracle,
    "vector": check_vector,
    "portable": check_portable,
    "memory": check_memory,
}
"""All checks by name, in the order they run."""
