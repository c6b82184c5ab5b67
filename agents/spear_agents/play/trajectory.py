"""Records of episodes, their JSON-lines file, and the training rows made from them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from html import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from spear_agents.engines.base import BYTES_END, Ending, Finish, Served
from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import Criterion
from spear_envs.data.files import explain_unwritable, find_last_line, open_regular, sync

if TYPE_CHECKING:
    from spear_agents.play.snapshots import Snapshot

MOST_LINE = 256 << 20
"""Bytes of one episode in a file: a thousand turns of long responses have some."""
_CHARACTERS = 0xD800
"""Ids below it are written as characters; surrogates, which JSON would join in pairs, begin here."""
_SHOWN = 100
"""Characters of a text in a short form of a turn."""
_log = logging.getLogger(__name__)


class Layout(str, Enum):
    """How turns become token sequences."""

    PER_TURN = "per_turn"
    """Each turn has its own prompt with a window of history."""
    CONVERSATION = "conversation"
    """The episode is a growing sequence; a rewrite begins a new one (``Turn.follows``)."""


class TokenKind(str, Enum):
    """What the token ids of a record are."""

    MODEL = "model"
    """The ids that the policy read and sampled."""
    BYTES = "bytes"
    """UTF-8 bytes: the policy reads and writes text (a script, a server). ``Turn.served`` may hold a server's own."""


class StopReason(str, Enum):
    """Why an episode ended."""

    WON = "won"
    """The task was solved."""
    FAILED = "failed"
    """The environment ended the episode without success."""
    TURN_LIMIT = "turn_limit"
    """The environment's turns were used up."""
    CONTEXT_LIMIT = "context_limit"
    """The next prompt would have exceeded ``max_prompt_tokens``."""
    QUIT = "quit"
    """The agent program (``agents.md``) ended before the environment did."""
    FAULT = "fault"
    """Something outside the policy broke; excluded from losses and statistics."""

    @property
    def is_early(self) -> bool:
        """Whether the environment would have continued, so that it has paid nothing yet."""
        return self in (StopReason.CONTEXT_LIMIT, StopReason.QUIT)


@dataclass(frozen=True, repr=False)
class Turn:
    """One response and its effect.

    Attributes:
        prompt_ids: the full prompt, or with ``follows`` the tokens added since the response it names.
        response_ids: what the engine sampled, as sampled.
        log_probs: one for each of ``response_ids``, see :class:`spear_agents.engines.base.Generation`.
        response: the text of ``response_ids`` without the closing stop token.
        action: parsed by the environment (empty if it could not be parsed).
        observation: the text shown to the policy before this response.
        format_ok: the response was well-formed.
        native_thought: it had a thought that a reasoning model writes by itself, besides what the prompt asks for.
        action_ok: the action had an effect, by the environment's own rule.
        anchor: key of the state in which the response was given (GiGPO groups turns by it).
        reward: the benchmark's own reward of this turn.
        finish: whether the response stopped by itself.
        served: a server's data on the response; None without a server.
        dropped_turns: turns of the history dropped for the prompt's length.
        cached_tokens: tokens of the full prompt found in a local engine's prefix cache; None without one.
        version: training step of the weights that wrote the response, 0 before the first; None outside a training.
        seconds: wait for the response; None if unknown.
        picture: shown to a local model with the prompt, uint8 [height, width, 3], or None. For training rows only, not
            written: a record shows pictures by playing its responses again.
        follows: index of the turn whose tokens this one continues, in a conversation; each is followed at most once.
            None if the prompt starts a sequence.
        snapshot: the moment before the response, if requested, from which other episodes may start; not written.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    response: str
    action: str
    observation: str
    format_ok: bool
    action_ok: bool
    anchor: str
    reward: float
    finish: Finish
    served: Served | None = None
    dropped_turns: int = 0
    cached_tokens: int | None = field(default=None, compare=False)
    version: int | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)
    picture: np.ndarray | None = field(default=None, compare=False, repr=False)
    follows: int | None = None
    native_thought: bool = False
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt_ids):,} + {len(self.response_ids):,} tokens"
        return f"Turn({_shorten(self.response)!r}, action {_shorten(self.action)!r}, reward {self.reward:g}, {tokens})"

    def _repr_html_(self) -> str:
        """Return what was seen, said and done, for notebooks."""
        return (
            f"<pre>{escape(self.observation)}</pre><pre><b>{escape(self.response)}</b></pre>"
            f"<p>action {escape(repr(self.action))}, reward {self.reward:g}, "
            f"{'well-formed' if self.format_ok else 'malformed'}</p>"
        )


@dataclass(frozen=True)
class Row:
    """One training sequence.

    ``response_mask`` is 1 on tokens of the policy and 0 on tokens of the environment; ``log_probs`` are 0 there. All
    three response fields have the same length.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    turn_index: int
    pictures: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, repr=False)
class Trajectory:
    """One episode. ``reward`` is the sum of the environment's rewards, 0 if a fault ended it; ``reward_terms`` are the
    raw terms.

    ``fingerprint`` is that of the task set the task is from, ``fault`` the kind of fault or None and ``detail`` its
    sentence, ``seed`` that of the environment and of the sampling. ``final_observation`` is the text shown after the
    last response.
    ``step`` is the training step that played it, from 1, or after which a validation did, from 0; None outside a
    training. ``trial`` counts the attempts of a policy that learns from its failures within a task, from 1;
    ``memory`` is what it remembered in this one, ``reflection`` what it wrote after it, and ``reflected`` the counts of
    that response. ``seconds`` is how long the episode took. ``retriever`` is the
    fingerprint of the retriever; None if it was not used. ``steps`` are the responses played by a program, each with
    the index of the turn before it (-1 for none); None if each turn's response was played. ``criteria`` are the task's
    requirements as the environment judged them at the end. ``began`` is the number of responses before the snapshot
    from which the episode started, and ``turns`` are those after it; None if it started at the start of its task.
    """

    env_id: str
    task_id: str
    subtask: str
    instruction: str
    fingerprint: str
    layout: Layout
    turns: tuple[Turn, ...]
    reward_terms: Mapping[str, float]
    reward: float
    score: float
    won: bool
    tool_calls: int
    stop: StopReason
    fault: str | None = None
    seed: int = 0
    final_observation: str = ""
    tokens: TokenKind = TokenKind.MODEL
    step: int | None = None
    trial: int = 1
    memory: tuple[str, ...] = ()
    reflection: str | None = None
    retriever: str | None = None
    steps: tuple[tuple[int, str], ...] | None = None
    criteria: tuple[Criterion, ...] = ()
    began: int | None = None
    detail: str = ""
    reflected: Served | None = None
    seconds: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        fault = f" ({self.fault})" if self.fault else ""
        return (
            f"Trajectory({self.env_id}, task {self.task_id}, seed {self.seed}: {self.stop.value}{fault}, "
            f"score {self.score:g}, reward {self.reward:g}, {len(self.turns)} turns)"
        )

    def _repr_html_(self) -> str:
        """Return the episode turn by turn, for notebooks."""
        turns = "".join(
            f"<details><summary>{number}: {escape(_shorten(turn.action))}</summary>{turn._repr_html_()}</details>"
            for number, turn in enumerate(self.turns, 1)
        )
        about, end = f"<p>{escape(repr(self))}</p><p>{escape(self.instruction)}</p>", escape(self.final_observation)
        return f"{about}{turns}<pre>{end}</pre>"

    @property
    def format_ok(self) -> bool:
        """Whether every response was well-formed."""
        return all(turn.format_ok for turn in self.turns)

    def list_steps(self) -> tuple[tuple[int, str], ...]:
        """Return the steps of the environment in order: the index of the turn that led to it, and the response."""
        return self.steps if self.steps is not None else tuple((i, turn.response) for i, turn in enumerate(self.turns))

    def chains(self) -> list[list[int]]:
        """Return the indices of the turns of each training row: those that continue one another, in order."""
        chains: list[list[int]] = []
        ends: dict[int, list[int]] = {}
        for place, turn in enumerate(self.turns):
            chain = ends.pop(turn.follows, None) if turn.follows is not None else None
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(place)
            ends[place] = chain
        return chains

    def rows(self) -> list[Row]:
        """Return the training rows, one for each of :meth:`chains`.

        There is one per turn (``per_turn``), or one for a conversation without rewrites. Their ids are those of the
        record (bytes if ``tokens`` says so).
        """
        return [_make_row(self.turns, chain) for chain in self.chains()]

    def to_json(self, *, timed: bool = False) -> str:
        """Write one line of ASCII JSON, which :meth:`from_json` reads back; with ``seconds`` if ``timed``."""
        # dataclasses.asdict copies every tuple entry by entry and takes ten times as long.
        turns = [vars(turn) | ({"served": _write_served(turn.served)} if turn.served else {}) for turn in self.turns]
        for turn in turns:
            del turn["picture"], turn["snapshot"]
            if not timed:
                turn["seconds"] = None
            for key in ("cached_tokens", "follows", "version", "seconds"):
                if turn[key] is None:
                    del turn[key]
            if not turn["native_thought"]:
                del turn["native_thought"]
        if self.tokens is TokenKind.BYTES:
            turns = list(map(_shrink, turns))
        data = vars(self) | {"turns": turns, "reward_terms": dict(self.reward_terms)}
        if self.steps is None:
            del data["steps"]
        if not self.criteria:
            del data["criteria"]
        if self.reflected is not None:
            data["reflected"] = _write_served(self.reflected)
        if not timed:
            del data["seconds"]
        for key in ("began", "detail", "reflected", "seconds"):
            if data.get(key) in (None, ""):
                data.pop(key, None)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Trajectory:
        """Read a line of :meth:`to_json`. Raises ValueError, KeyError or TypeError if it is not a trajectory.

        An outcome that contradicts how the episode ended is a ValueError, too.
        """
        try:
            data: dict[str, Any] = json.loads(line)
        except RecursionError as error:
            raise ValueError("the line is nested too deeply") from error
        _require_types(data, _TRAJECTORY_TYPES)
        tokens = TokenKind(data.pop("tokens", TokenKind.MODEL))
        turns = tuple(_read_turn(turn, tokens) for turn in data.pop("turns"))
        read: dict[str, Any] = {
            "layout": Layout(data.pop("layout")),
            "stop": StopReason(data.pop("stop")),
            "tokens": tokens,
            "memory": _read_texts(data.pop("memory", ())),
            "steps": _read_steps(data.pop("steps", None)),
            "criteria": tuple(map(_read_criterion, data.pop("criteria", ()))),
            "reflected": _read_served(data.pop("reflected", None)),
        }
        found = cls(turns=turns, **read, **data)
        stop, outcome = found.stop, found.reward_terms.get("outcome")
        is_won = stop is StopReason.WON
        if stop is not StopReason.FAULT and (found.won is not is_won or outcome == (-1 if is_won else 1)):
            raise ValueError(f"won={found.won} contradicts stop={stop.value} or outcome={outcome}")
        return found


def _shorten(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def _make_row(turns: Sequence[Turn], chain: Sequence[int]) -> Row:
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for place in chain:
        turn = turns[place]
        if place != chain[0]:
            ids += turn.prompt_ids
            mask += [0] * len(turn.prompt_ids)
            log_probs += [0.0] * len(turn.prompt_ids)
        ids += turn.response_ids
        mask += [1] * len(turn.response_ids)
        log_probs += turn.log_probs
    pictures = tuple(picture for place in chain if (picture := turns[place].picture) is not None)
    return Row(turns[chain[0]].prompt_ids, tuple(ids), tuple(mask), tuple(log_probs), chain[0], pictures)


_NUMBER = (int, float)
_TRAJECTORY_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("env_id", "task_id", "subtask", "instruction", "fingerprint", "final_observation", "detail"), str),
    **dict.fromkeys(("reward", "score"), _NUMBER),
    **dict.fromkeys(("tool_calls", "seed", "trial"), int),
    **dict.fromkeys(("fault", "reflection", "retriever"), (str, type(None))),
    **dict.fromkeys(("step", "began"), (int, type(None))),
    "seconds": (*_NUMBER, type(None)),
    "won": bool,
    "reward_terms": dict,
}
_TURN_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("response", "action", "observation", "anchor"), str),
    **dict.fromkeys(("format_ok", "action_ok", "native_thought"), bool),
    **dict.fromkeys(("reward", "seconds"), _NUMBER),
    **dict.fromkeys(("dropped_turns", "cached_tokens", "follows", "version"), int),
}
_SERVED_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), (int, type(None))),
    **dict.fromkeys(("model", "note"), str),
    "tries": int,
    "dropped": list,
    "cost": (*_NUMBER, type(None)),
}


def _require_types(record: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise TypeError if a field has a value of another type."""
    for name, kind in types.items():
        if name in record and not isinstance(record[name], kind):
            raise TypeError(f"{name} cannot be {record[name]!r}")


def _read_numbers(written: list[Any], kinds: set[type]) -> tuple[Any, ...]:
    numbers = tuple(written)
    if not set(map(type, numbers)) <= kinds:
        raise TypeError("a list of numbers holds something else")
    return numbers


def _read_texts(written: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(written, str) or not all(isinstance(text, str) for text in written):
        raise TypeError("a list of texts holds something else")
    return tuple(written)


def _spell(response: str, finish: Finish) -> tuple[int, ...]:
    """Return the bytes of a response, and its end."""
    return (*response.encode("utf-8", "surrogatepass"), *((BYTES_END,) if finish is Finish.STOP else ()))


def _shrink(turn: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a turn of bytes what follows from its text: ids, and zeros of a policy without log-probabilities."""
    kept = turn | {key: _write_bytes(turn[key]) for key in ("prompt_ids", "response_ids")}
    if turn["response_ids"] == (ids := _spell(turn["response"], turn["finish"])):
        del kept["response_ids"]
        if turn["log_probs"] == (0.0,) * len(ids):
            del kept["log_probs"]
    return kept


def _write_bytes(ids: tuple[int, ...]) -> str | tuple[int, ...]:
    """Return a character for each id, a quarter of the size of numbers; other ids stay numbers."""
    return "".join(map(chr, ids)) if max(ids, default=0) < _CHARACTERS else ids


def _read_ids(written: str | list[int]) -> tuple[int, ...]:
    return tuple(map(ord, written)) if isinstance(written, str) else _read_numbers(written, {int})


def _read_steps(written: list[Any] | None) -> tuple[tuple[int, str], ...] | None:
    if written is None:
        return None
    steps = tuple((place, response) for place, response in written)
    if not all(isinstance(place, int) and isinstance(response, str) for place, response in steps):
        raise TypeError("a step is not the place of a turn and a response")
    return steps


def _read_criterion(written: Sequence[Any]) -> Criterion:
    criterion = Criterion(*written)
    if [type(value) for value in criterion] != [str, bool, str, str]:
        raise TypeError("a criterion is not a name, a truth value and two texts")
    return criterion


def _read_turn(data: dict[str, Any], tokens: TokenKind) -> Turn:
    _require_types(data, _TURN_TYPES)
    if tokens is TokenKind.BYTES and "response_ids" not in data:
        ids = list(_spell(data["response"], Finish(data["finish"])))
        data = {"log_probs": [0.0] * len(ids)} | data | {"response_ids": ids}
    return Turn(
        **{
            **data,
            "prompt_ids": _read_ids(data["prompt_ids"]),
            "response_ids": _read_ids(data["response_ids"]),
            "log_probs": _read_numbers(data["log_probs"], {int, float}),
            "finish": Finish(data["finish"]),
            "served": _read_served(data.get("served")),
        }
    )


def _write_served(served: Served) -> dict[str, Any]:
    """Return the fields as plain values, without the fields of rare endings if they are empty."""
    return {key: value for key, value in vars(served).items() if value or key not in ("ending", "note", "dropped")}


def _read_served(data: Mapping[str, Any] | None) -> Served | None:
    if data is None:
        return None
    _require_types(data, _SERVED_TYPES)
    kinds: dict[str, set[type]] = {"prompt_ids": {int}, "token_ids": {int}, "log_probs": {int, float}}
    lists = {key: _read_numbers(data[key], kind) for key, kind in kinds.items() if data.get(key) is not None}
    ending = Ending(data["ending"]) if data.get("ending") else None
    return Served(**{**data, **lists, "ending": ending, "dropped": tuple(map(str, data.get("dropped", ())))})


@dataclass
class TrajectoryWriter:
    """Context manager that appends trajectories to a JSON-lines file, one write each: a kill tears the last line only.

    Opening repairs the file: a last line without its newline is cut off with a warning. Raises SpearError if the file
    cannot be opened or written (read-only folder, full disk).
    """

    path: Path
    _file: IO[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> TrajectoryWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            _cut_torn_line(self._file, self.path)
        except OSError as error:
            raise explain_unwritable(self.path, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            if exception[:1] == (None,):  # an error on the way says more
                os.fsync(file.fileno())
                sync(self.path.parent)

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory."""
        if self._file is None:
            raise RuntimeError("the writer is closed: use `with TrajectoryWriter(path) as writer:`")
        data = trajectory.to_json(timed=True).encode("ascii") + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            while data:  # an unbuffered write may be partial, for instance when the disk fills up
                data = data[self._file.write(data) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # a later episode, when there is room again, would go on with half a line
            raise explain_unwritable(self.path, error) from error


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Read the trajectories of a file, oldest first; a torn last line is skipped with a warning.

    Raises SpearError if the file cannot be read, or a complete line is not a trajectory (names the line).
    """
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), start=1):
                if len(line) == MOST_LINE:
                    raise SpearError(f"{path}, line {number} has more than {MOST_LINE >> 20} MiB: remove the file")
                if not line.endswith(b"\n"):
                    _log.warning("%s: line %d is torn (the writer was killed): left out", path, number)
                    return
                try:
                    trajectory = Trajectory.from_json(line.decode("ascii"))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    text = f"{path}, line {number} is not a trajectory ({_shorten(f'{type(error).__name__}: {error}')})"
                    raise SpearError(f"{text}: remove it or the file") from error
                yield trajectory
    except OSError as error:
        raise SpearError(f"{path} cannot be read: {error.strerror}. `spear eval --out FOLDER` writes one.") from error


def _cut_torn_line(file: IO[bytes], path: Path) -> None:
    end, size = find_last_line(file), file.seek(0, os.SEEK_END)
    if end < size:
        _log.warning("%s: the last line is torn (the writer was killed): cut off %d bytes", path, size - end)
        file.truncate(end)
    file.seek(0, os.SEEK_END)
