"""The content of a run folder: recorded episodes, read one by one, and metrics of a training."""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from spear_agents.comparison.statistics import estimate_mean, plain_estimate, split_numbers
from spear_agents.engines.base import ChatByteTokenizer, Decoder
from spear_agents.engines.openai import encode_picture
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.records import (
    EPISODES,
    FINE_TUNING,
    METRICS_FOLDER,
    PANELS,
    is_of,
    read_history,
    read_settings,
    sum_usage,
)
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.trajectory import MOST_LINE, TokenKind, Trajectory, Turn
from spear_agents.viewer.gif import replay_frames
from spear_envs.core.errors import SpearError
from spear_envs.data.files import open_regular, read_regular

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def open_decoder(settings: Mapping[str, Any], folder: Path, chosen: Path | None = None) -> Decoder:
    """Return the decoder of a model's tokens: of the folder ``chosen``, or else of ``settings["model"]``.

    A relative path is also resolved in the evaluation's ``folder`` and those above it. Raises SpearError if the
    tokenizer is missing or cannot be read.
    """
    wanted = chosen or settings.get("model")
    if not wanted:
        raise SpearError("the tokenizer of these tokens is unknown: give --tokenizer DIR")
    for place in (Path(), folder, *folder.resolve().parents):
        path = place / str(wanted) / "tokenizer.json"
        if path.is_file():
            return _read_tokenizer(path)
    raise SpearError(f"{wanted} does not contain tokenizer.json: give --tokenizer DIR")


def _read_tokenizer(path: Path) -> Decoder:
    try:
        from tokenizers import Tokenizer

        decoder: Decoder = Tokenizer.from_buffer(read_regular(path))
    except ImportError as error:
        raise SpearError("the package tokenizers is not installed: pip install 'spear-agents[hf]' brings it") from error
    except Exception as error:  # what tokenizers raises for a broken file is a plain Exception
        raise SpearError(f"{path} is not a tokenizer: {error}") from error
    return decoder


def split_text(decoder: Decoder, token_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Split the text of ``token_ids`` into pieces, each with its number of tokens.

    Tokens that form one character together (bytes of an emoji) make one piece. Each piece is decoded after the piece
    before it, since many tokenizers write a token differently at the beginning of a text.
    """
    pieces: list[tuple[str, int]] = []
    before, start = 0, 0
    for end in range(1, len(token_ids) + 1):
        known = _decode(decoder, token_ids[before:start])
        text = _decode(decoder, token_ids[before:end])
        if text.endswith(_UNFINISHED) and end < len(token_ids) and end - start < 8:
            continue
        pieces.append((text[len(known) :], end - start))
        before, start = start, end
    return pieces


def _decode(decoder: Decoder, token_ids: Sequence[int]) -> str:
    return decoder.decode(list(token_ids), skip_special_tokens=False)


_TEXT = ChatByteTokenizer()
_ROLE = re.compile("\ufdd0(system|user|assistant)\ufdd1")  # how ChatByteTokenizer writes the beginning of a message
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)


def describe_episode(
    trajectory: Trajectory, settings: Mapping[str, Any], open_model: Callable[[], Decoder]
) -> dict[str, Any]:
    """Describe an episode for the page, without NaN and infinities, which JSON does not have.

    Missing parts (a moved tokenizer, a picture of another version's level) are None, and ``notes`` explain why. Of the
    evaluation's ``settings``, ``env_kwargs`` and ``split`` are used. ``open_model`` returns the decoder of the model's
    tokens, and raises SpearError if there is none.
    """
    notes: list[str] = []
    pictures = _draw(trajectory, settings, notes)
    is_text = trajectory.tokens is TokenKind.BYTES
    model: Decoder | None = None
    if not is_text or any(turn.served and turn.served.token_ids for turn in trajectory.turns):
        try:
            model = open_model()
            if not _fits(model, trajectory.turns):
                raise SpearError("this tokenizer does not give the recorded texts: give --tokenizer DIR")
        except SpearError as error:
            model = None
            notes.append(f"No {'token colours' if is_text else 'prompts and tokens'}: {error}")
    prompts = _TEXT if is_text else model
    copied = ("subtask", "instruction", "fingerprint", "tool_calls", "fault", "trial", "step", "reflection")
    return {
        **{name: getattr(trajectory, name) for name in (*copied, "final_observation")},
        "env": trajectory.env_id,
        "task": trajectory.task_id,
        "layout": trajectory.layout.value,
        "reward_terms": {str(name): finite(value) for name, value in trajectory.reward_terms.items()},
        "reward": finite(trajectory.reward),
        "score": finite(trajectory.score),
        "won": bool(trajectory.won),
        "stop": trajectory.stop.value,
        "seed": str(trajectory.seed),  # JavaScript would round a training's seeds
        "memory": list(trajectory.memory),
        "turns": [
            _describe_turn(turn, prompts, model, pictures[i] if pictures else None)
            for i, turn in enumerate(trajectory.turns)
        ],
        "criteria": [criterion._asdict() for criterion in trajectory.criteria],
        "final_image": pictures[-1] if pictures else None,
        "unit": "bytes" if is_text else "tokens",
        "notes": notes,
    }


def describe_response(response: str) -> dict[str, str]:
    """Split a response into ``thought`` and the rest, ``said``."""
    found = _THOUGHT.match(response)
    if found is None:
        return {"thought": "", "said": response}
    return {"thought": found[1].strip(), "said": response[found.end() :]}


def finite(value: Any) -> float | None:
    """Return a number that JSON can hold, or None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _describe_turn(turn: Turn, prompts: Decoder | None, model: Decoder | None, picture: str | None) -> dict[str, Any]:
    prompt = None
    if prompts is not None:
        text = prompts.decode(list(turn.prompt_ids), skip_special_tokens=False)
        prompt = _ROLE.sub(r"\n[\1]\n", text).strip("\n")
    return {
        "observation": turn.observation,
        "image": picture,
        "prompt": prompt,
        "prompt_tokens": len(turn.prompt_ids),
        "response_tokens": len(turn.response_ids),
        **describe_response(turn.response),
        "tokens": None if model is None else _colour(model, *_sampled(turn)),
        "action": turn.action,
        "format_ok": turn.format_ok,
        "action_ok": turn.action_ok,
        "anchor": turn.anchor,
        "reward": finite(turn.reward),
        "finish": turn.finish.value,
        "dropped": turn.dropped_turns,
    }


def _sampled(turn: Turn) -> tuple[Sequence[int], Sequence[float]]:
    """Return the model's tokens and their log-probabilities, where known."""
    if turn.served is None:
        return turn.response_ids, turn.log_probs
    return turn.served.token_ids or (), turn.served.log_probs or ()


def _colour(decoder: Decoder, token_ids: Sequence[int], log_probs: Sequence[float]) -> list[Any] | None:
    """Return the pieces of the response with their log-probabilities; None if these are not known."""
    if not log_probs or len(log_probs) != len(token_ids):
        return None
    coloured = []
    start = 0
    for text, count in split_text(decoder, token_ids):
        total = finite(sum(log_probs[start : start + count]))
        coloured.append((text, None if total is None else round(total, 4)))
        start += count
    return coloured


def _fits(decoder: Decoder, turns: Sequence[Turn]) -> bool:
    """Return whether a decoder gives the recorded texts; all ids have to be of its vocabulary."""
    try:
        return all(
            decoder.decode(list(ids), skip_special_tokens=False).startswith(turn.response)
            for turn in turns
            if (ids := _sampled(turn)[0])
        )
    except (ValueError, OverflowError, TypeError):
        return False


def _draw(trajectory: Trajectory, settings: Mapping[str, Any], notes: list[str]) -> list[str]:
    """Return data URLs of pictures before each response and after the last; empty if the environment does not draw."""
    if trajectory.began is not None:
        notes.append(
            f"Began before turn {trajectory.began + 1} of an earlier episode, whose responses are not in this record: "
            "no pictures"
        )
        return []
    try:
        # Only registered names count: a file of episodes must not make this process import anything.
        spec = gym.registry.get(trajectory.env_id)
        if spec is None or spec.entry_point is None:
            return []
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        if not getattr(creator, "draws", False):
            return []
        frames = replay_frames(
            trajectory.env_id,
            settings.get("env_kwargs") or {},
            trajectory,
            split=settings.get("split"),
            method=settings.get("method") or Method.PLAIN,
        )
        return [encode_picture(frame) for frame in frames]
    except Exception as error:  # of an environment given another's responses: show the texts anyway
        notes.append(f"No pictures: {error}")
        return []


SHOWN_SETTINGS = {"env_id": "environment", "env_kwargs": "keywords"} | {
    key: key for key in ("panel", "split", "engine", "model", "method", "temperature", "agent")
}
"""Settings of an evaluation shown in the overview, and their titles there."""


def describe_sources(
    rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one mapping for each source, and each step of a training's source.

    Rows of the list of episodes that do not count are ignored. Each mapping has ``name``, ``source``, ``step``,
    ``settings`` (as text), ``tokens``, ``cost`` (None without cost), and ``parts``: all episodes first, then each
    subtask, with success and its 95 % interval.
    """
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["counts"]:
            groups[row["source"], row["step"]].append(row)
    return [_describe(source, step, found, settings.get(source, {})) for (source, step), found in groups.items()]


def _describe(
    source: str, step: int | None, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    subtasks = sorted({row["subtask"] for row in rows}, key=split_numbers)
    parts = [_describe_part("all", rows)]
    if len(subtasks) > 1:
        parts += [_describe_part(name, [row for row in rows if row["subtask"] == name]) for name in subtasks]
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    return {
        "name": source if step is None else f"{source} of step {step}",
        "source": source,
        "step": step,
        "settings": {
            title: ", ".join(f"{name}={each}" for name, each in value.items())
            if isinstance(value, Mapping)
            else str(value)
            for key, title in SHOWN_SETTINGS.items()
            if (value := settings.get(key) if key != "panel" else _name_panel(settings))
        },
        "tokens": sum(row["tokens"] for row in rows),
        "cost": sum(costs) if costs else None,
        "parts": parts,
    }


def _name_panel(settings: Mapping[str, Any]) -> str | None:
    with suppress(SpearError):  # a page shows what it can
        found = PlayedPanel.read(settings)
        return None if found is None else found.label
    return None


def _describe_part(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    valid = [row for row in rows if row["stop"] != "fault"]
    won: dict[str, list[bool]] = defaultdict(list)
    for row in valid:
        won[row["task"]].append(row["won"])
    return {
        "name": name,
        "episodes": len(valid),
        "faults": len(rows) - len(valid),
        "success": plain_estimate(estimate_mean(list(map(fmean, won.values())))) if won else None,
        "score": _mean(row["score"] for row in valid),
        "turns": _mean(row["turns"] for row in valid),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


DEPTH = 3
"""Depth of folders searched for evaluations."""
SHOWN = 240
"""Maximum characters of an instruction in the list."""

_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Raised by reading a line that is not an episode, or has values of other types."""


@dataclass
class Source:
    """One file of episodes."""

    path: Path
    name: str
    settings: Mapping[str, Any]
    size: int = 0
    inode: int = 0
    env_id: str | None = None
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Entry:
    """Place of an episode in its file, and its row in the list."""

    source: Source
    offset: int
    length: int
    row: dict[str, Any] = field(repr=False)


class Run:
    """The episodes and metrics of a folder, and of folders below it, or of one JSON-lines file. Thread-safe.

    Lines of another environment or other tasks than the settings of their folder name are shown as a source of their
    own. ``tokenizer`` is its folder if the one in the settings is gone. Raises SpearError if there is nothing to show,
    or for a line that is not an episode.
    """

    def __init__(self, path: str | Path, tokenizer: Path | None = None) -> None:
        self.path = Path(path)
        self._tokenizer = tokenizer
        self._sources: dict[Path, Source] = {}
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        if not self.path.exists():
            raise SpearError(f"{path} does not exist: give a folder of spear eval, play or train")
        if self.path.is_file() and self.path.suffix != ".jsonl":
            raise SpearError(f"{path} is not a file of episodes: give its folder, or {EPISODES} in it")
        self.refresh()
        if not self._sources and not self._find_trainings():
            raise SpearError(f"{path} has no {EPISODES} and no metrics: give a folder of spear eval, play or train")

    @property
    def title(self) -> str:
        """Name of the run, from its folder; invalid bytes are replaced."""
        return os.fsencode(self.path.resolve().name).decode("utf-8", "replace")

    def refresh(self) -> None:
        """Read new lines; a torn last line is left for later."""
        with self._lock:
            for path in self._find_files():
                if path not in self._sources:
                    settings: Mapping[str, Any] = {}
                    with suppress(SpearError):  # a file of episodes may come without settings
                        settings = read_settings(path.parent)
                    self._sources[path] = Source(path, self._name(path), settings)
                source = self._sources[path]
                found = path.stat()
                if found.st_size < source.size or found.st_ino != source.inode:  # another file under the old name
                    self._entries = [entry for entry in self._entries if entry.source is not source]
                    source.size, source.inode, source.env_id = 0, found.st_ino, None
                self._entries += _scan(source)

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping for each episode, its number ``i`` among them.

        ``counts`` is False if the same sample of a task was played again later: after a fault, or as a further trial of
        a policy that learns within a task.
        """
        with self._lock:
            rows = [{"i": i, **entry.row} for i, entry in enumerate(self._entries)]
        last = {_name_job(row): row["i"] for row in rows}
        # A person may play a task as often as they like.
        return [row | {"counts": row["person"] or last[_name_job(row)] == row["i"]} for row in rows]

    def read_episode(self, number: int) -> dict[str, Any]:
        """Describe an episode for the page. Raises IndexError, or SpearError if the file was removed or has changed."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise IndexError(number)
            entry = self._entries[number]
        source, trajectory = entry.source, _read_entry(entry)
        try:
            return {"i": number, **describe_episode(trajectory, source.settings, lambda: self._open_decoder(source))}
        except _MALFORMED as error:
            raise SpearError(f"{source.path}, byte {entry.offset}: a value is of another type ({error})") from error

    def search(self, text: str) -> list[int]:
        """Return the numbers of the episodes whose texts have all words of ``text``, in any case. Raises SpearError."""
        words = text.lower().split()
        with self._lock:
            entries = list(self._entries)
        found = []
        for number, entry in enumerate(entries):
            trajectory = _read_entry(entry)
            said = [part for turn in trajectory.turns for part in (turn.observation, turn.response)]
            said += [trajectory.final_observation, trajectory.reflection or ""]
            whole = "\n".join(said).lower()
            if all(word in whole for word in words):
                found.append(number)
        return found

    def mark(self) -> str:
        """Digest that changes when something was written to the run."""
        metrics = (file for folder in self._find_trainings() for file in (folder / METRICS_FOLDER).glob("*.jsonl"))
        digest = hashlib.sha256()
        for path in (*self._find_files(), *metrics):
            with suppress(OSError):
                digest.update(f"{path} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def read_trainings(self) -> list[dict[str, Any]]:
        """Return for each training its ``name``, its ``steps``, and ``metrics`` with a value or None for each step."""
        trainings = []
        for folder in self._find_trainings():
            history = read_history(folder)
            names = sorted({name for record in history for name in record} - {"step"})
            columns = {name: [finite(record.get(name)) for record in history] for name in names}
            columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
            if columns:
                steps = [record["step"] for record in history]
                trainings.append({"name": self._name(folder / "x"), "steps": steps, "metrics": columns})
        return trainings

    def summarise(self) -> dict[str, Any]:
        """Return the initial data of the page."""
        rows = self.rows()
        with self._lock:
            settings = {source.name: source.settings for source in self._sources.values()}
        return {
            "title": self.title,
            "episodes": rows,
            "sources": describe_sources(rows, settings),
            "trainings": self.read_trainings(),
            "panels": [{"title": title, "series": series} for title, series in (*PANELS, *FINE_TUNING)],
        }

    def _open_decoder(self, source: Source) -> Decoder:
        with self._lock:
            if source.decoder is None:
                source.decoder = open_decoder(source.settings, source.path.parent, self._tokenizer)
            return source.decoder

    def _find_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        return [folder / EPISODES for folder in _walk(self.path) if (folder / EPISODES).is_file()]

    def _find_trainings(self) -> list[Path]:
        return [folder for folder in _walk(self.path) if any((folder / METRICS_FOLDER).glob("*.jsonl"))]

    def _name(self, path: Path) -> str:
        if self.path.is_file():
            return self.path.name
        return path.parent.relative_to(self.path).as_posix().removeprefix(".") or self.title


def _walk(root: Path) -> Iterator[Path]:
    """Yield a folder and those below it, without hidden ones and links."""
    for parent, folders, _ in os.walk(root):
        level = len(Path(parent).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if level < DEPTH else []
        yield Path(parent)


def _read_entry(entry: Entry) -> Trajectory:
    """Read an episode from its place in its file. Raises SpearError if the file was removed or has changed."""
    try:
        with open_regular(entry.source.path) as file:
            file.seek(entry.offset)
            return Trajectory.from_json(file.read(entry.length).decode("ascii"))
    except (OSError, *_MALFORMED) as error:
        raise SpearError(f"{entry.source.path} has changed: start spear view again") from error


def _scan(source: Source) -> list[Entry]:
    """Read entries of complete lines after ``source.size``, and advance it."""
    entries = []
    try:
        with open_regular(source.path) as file:
            file.seek(source.size)
            for line in iter(lambda: file.readline(MOST_LINE), b""):
                if len(line) == MOST_LINE:
                    raise SpearError(f"{source.path}, byte {source.size}: more than {MOST_LINE >> 20} MiB in a line")
                if not line.endswith(b"\n"):
                    break
                try:
                    row = _describe_row(Trajectory.from_json(line.decode("ascii")), source)
                except _MALFORMED as error:
                    text = f"{type(error).__name__}: {error}"[:SHOWN]
                    raise SpearError(f"{source.path}, byte {source.size}: not a trajectory ({text})") from error
                entries.append(Entry(source, source.size, len(line), row))
                source.size += len(line)
    except OSError as error:
        raise SpearError(f"{source.path} cannot be read: {error.strerror}") from error
    return entries


def _describe_row(trajectory: Trajectory, source: Source) -> dict[str, Any]:
    usage = sum_usage([trajectory])
    source.env_id = source.env_id or source.settings.get("env_id") or trajectory.env_id
    tasks = source.settings.get("fingerprint", trajectory.fingerprint)
    is_own = is_of(trajectory, str(source.env_id), tasks)
    foreign = f"{source.name}, another evaluation: {trajectory.env_id}, tasks {trajectory.fingerprint[:12]}"
    return {
        "source": source.name if is_own else foreign,
        "env": str(trajectory.env_id),
        "task": str(trajectory.task_id),
        "subtask": str(trajectory.subtask),
        "instruction": re.sub(r"\s+", " ", trajectory.instruction[: 2 * SHOWN]).strip()[:SHOWN],
        "won": bool(trajectory.won),
        "score": _round(trajectory.score),
        "reward": _round(trajectory.reward),
        "stop": trajectory.stop.value,
        "turns": len(trajectory.turns),
        "trial": int(trajectory.trial),
        "step": None if trajectory.step is None else int(trajectory.step),
        "person": source.settings.get("engine") == "person",
        "seed": int(trajectory.seed),
        "tokens": usage.prompt_tokens + usage.completion_tokens,
        "cost": usage.cost,
    }


def _name_job(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key shared by rows of which only the last counts; validations of a training repeat their seeds."""
    return row["source"], row["step"], row["task"], row["seed"]


def _round(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
