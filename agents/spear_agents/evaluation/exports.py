"""``spear export-data``: recorded episodes for other tools."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import click

from spear_agents.engines.base import ChatByteTokenizer, Decoder
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.collect import Message, SampleMaker, write_lines
from spear_agents.evaluation.options import TRUST
from spear_agents.evaluation.records import EPISODES, read_last, read_settings
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_agents.viewer.episodes import open_decoder, open_measure
from spear_envs.core import canonical_json
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env, require_harmless
from spear_envs.core.parsing import mend_text
from spear_envs.core.prompts import IMAGE
from spear_envs.data.files import draft_file, write_text
from spear_sandbox.console import FilePath, echo


@dataclass(frozen=True)
class Said:
    """One response and its prompt."""

    prompt: list[Message] | str
    """Messages, or the text of the model's own chat template."""
    response: str


@dataclass
class Recorded:
    """An opened run: its settings, and the last complete episode of each job.

    ``faults`` counts episodes cut short by a fault, ``unrepeatable`` those without messages, since the environment
    answered differently when they were played again.
    """

    settings: dict[str, Any]
    episodes: Sequence[Trajectory]
    faults: int
    unrepeatable: int = 0
    _maker: SampleMaker | None = field(default=None, repr=False)
    _decoder: Decoder | None = field(default=None, repr=False)

    def report(self, trajectory: Trajectory) -> list[Said] | None:
        """Return prompt and response of each turn, None for an unrepeatable episode. Raises SpearError for pictures.

        Each prompt ends where its response begins, also if a program continued from an earlier call than the last
        (``Turn.follows``).
        """
        text: Trajectory | None = trajectory
        if self._maker is not None and not self._maker.has_messages(trajectory):
            text = self._maker.rephrase(trajectory)
        if text is None:
            self.unrepeatable += 1
            return None
        said: list[Said] = []
        whole: list[list[int]] = []
        for turn in text.turns:
            # The record has only the tokens added since the turn it continues.
            before = [] if turn.follows is None else [*whole[turn.follows], *text.turns[turn.follows].response_ids]
            ids = [*before, *turn.prompt_ids]
            whole.append(ids)
            if self._decoder is not None:
                texts = [self._decoder.decode(each, skip_special_tokens=False) for each in (ids, turn.response_ids)]
                said.append(Said(texts[0], texts[1]))
                continue
            messages = [
                {"role": each["role"], "content": mend_text(each["content"])}
                for each in ChatByteTokenizer().read_messages(ids)
            ]
            if any(IMAGE in message["content"] for message in messages if message["role"] != "assistant"):
                raise SpearError(f"{trajectory.env_id} shows pictures, which messages cannot hold: set modality=text")
            said.append(Said(messages, mend_text(turn.response)))
        return said


@contextmanager
def open_recorded(run: Path, tokenizer: Path | None = None, *, trust: bool = False) -> Iterator[Recorded]:
    """Open a folder of ``spear eval --out`` for the duration of the block.

    The records of a server's model or a scripted player hold messages. Those of a local model hold tokens, and those of
    native tools prompts that ask for calls: such episodes are played again for their messages. Those of a program,
    whose messages are lost, are given as the text of the model's chat template; ``tokenizer`` is its folder if the one
    in the settings is gone. ``trust``: the environment may run, reach and read what the folder names, see
    :func:`~spear_envs.core.making.require_harmless`.

    Raises SpearError if the folder is not an evaluation's, it has no complete episode, or its environment cannot be
    made.
    """
    settings = read_settings(run)
    last = read_last(run / EPISODES)
    episodes = [each for each in last if each.stop is not StopReason.FAULT]
    if not episodes:
        raise SpearError(f"{run} does not contain a complete episode: there is nothing to export.")
    found = Recorded(settings, episodes, len(last) - len(episodes))
    is_native = bool(settings.get("native_tools"))
    if all(each.tokens is TokenKind.BYTES for each in episodes) and not is_native:
        yield found
        return
    if any(each.steps is not None for each in episodes):
        found._decoder = open_decoder(settings, run, tokenizer)
        yield found
        return
    try:
        played = EvalSettings(
            settings["env_id"],
            EngineKind.EXPERT if is_native else EngineKind(settings["engine"]),  # the record plays, not a server
            None if is_native else settings["model"],
            settings["env_kwargs"],
            settings["split"],
            template=settings["template"],
            template_kwargs=settings["template_kwargs"],
            layout=Layout(settings["layout"]),
            history=settings["history"],
            method=Method(settings["method"]),
        )
    except (KeyError, ValueError) as error:
        raise SpearError(f"{run} was not written by this version of spear eval: its settings lack {error}.") from error
    if not trust:
        require_harmless(played.env_id, {**played.env_kwargs, "split": played.split}, str(run))
    with closing(make_env(played.env_id, played.split or "", played.env_kwargs)) as env:
        measure = open_measure(settings, run, tokenizer)
        found._maker = SampleMaker(env, played, measure=measure, is_native=is_native)
        yield found


def make_pairs(recorded: Recorded, most: int = 4) -> Iterator[dict[str, Any]]:
    """Make pairs ``{prompt, chosen, rejected}`` of a won and a lost episode of one task, at most ``most`` of a task.

    A pair is taken where the two episodes diverge: the first response of the won one to a prompt that the lost one
    answered differently. Both responses answer the same prompt and contain no text of the environment. Each is a list
    of messages, or a text if a program played with a local model. Each episode is used once before any is used again.
    """
    by_task: dict[str, tuple[list[list[Said]], list[list[Said]]]] = defaultdict(lambda: ([], []))
    outcomes: dict[str, set[bool]] = defaultdict(set)
    for episode in recorded.episodes:
        outcomes[episode.task_id].add(episode.won)
    for episode in recorded.episodes:
        if len(outcomes[episode.task_id]) == 2 and (said := recorded.report(episode)) is not None:
            by_task[episode.task_id][not episode.won].append(said)
    first = recorded.episodes[0]
    for task, (won, lost) in by_task.items():
        seen: set[str] = set()
        for shift in range(len(lost)):
            for place, better in enumerate(won):
                pair = _part(better, lost[(place + shift) % len(lost)])
                key = canonical_json(pair) if pair is not None else ""
                if pair is None or key in seen or len(seen) >= most:
                    continue
                seen.add(key)
                yield {**pair, "env_id": first.env_id, "task_id": task, "fingerprint": first.fingerprint}


def _part(won: list[Said], lost: list[Said]) -> dict[str, Any] | None:
    """Return the pair where two episodes diverge, or None."""
    answers: dict[str, set[str]] = defaultdict(set)
    first: dict[str, str] = {}
    for said in lost:
        key = canonical_json(said.prompt)
        answers[key].add(said.response)
        first.setdefault(key, said.response)
    for said in won:
        key = canonical_json(said.prompt)
        if key not in first or said.response in answers[key]:
            continue
        if isinstance(said.prompt, str):
            return {"prompt": said.prompt, "chosen": said.response, "rejected": first[key]}
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (said.response, first[key]))
        return {"prompt": said.prompt, "chosen": chosen, "rejected": rejected}
    return None


CARD = """---
configs:
- config_name: default
  data_files:
  - split: {split}
    path: data/{split}-*.parquet
---

# {env_id}: {count} episodes

Played by {player} on split `{split}`, task fingerprint `{fingerprint}`. Written by `spear export-data`.

A row is an episode. `turns` holds each response with the messages that it answered (`prompt_text` instead where a
program asked a local model: the text of the model's chat template), what the environment showed, the action read out of
the response, and `follows`, the index of the turn that the prompt continues (null if none). `steps` are the responses
that the environment was given, each with the index of the turn that led to it (-1: none).
"""


def write_dataset(recorded: Recorded, folder: Path) -> int:
    """Write the episodes to a new folder; return their number.

    Raises SpearError if the folder exists or cannot be written, no episode has messages, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise SpearError("pyarrow is not installed: pip install 'spear-agents[export]' brings it.") from error
    if folder.exists():
        raise SpearError(f"{folder} exists: choose another folder, or remove this one.")
    reports = ((episode, recorded.report(episode)) for episode in recorded.episodes)
    rows = [_make_row(episode, said) for episode, said in reports if said is not None]
    if not rows:
        raise SpearError("no episode could be reproduced: there is nothing to write.")
    if (largest := max(row["seed"] for row in rows)) >= 2**63:
        raise SpearError(f"the seed {largest} does not fit into the 64 bits of a data set: play with a smaller --seed.")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    turn = pa.struct(
        [
            ("prompt", pa.list_(message)),
            ("prompt_text", pa.string()),
            ("response", pa.string()),
            ("observation", pa.string()),
            ("action", pa.string()),
            ("format_ok", pa.bool_()),
            ("action_ok", pa.bool_()),
            ("reward", pa.float64()),
            ("finish", pa.string()),
            ("follows", pa.int64()),
        ]
    )
    strings = ("env_id", "task_id", "subtask", "instruction", "fingerprint", "stop", "final_observation")
    schema = pa.schema(
        [
            *((name, pa.string()) for name in strings),
            ("seed", pa.int64()),
            ("won", pa.bool_()),
            ("score", pa.float64()),
            ("reward", pa.float64()),
            ("tool_calls", pa.int64()),
            ("turns", pa.list_(turn)),
            ("steps", pa.list_(pa.struct([("turn", pa.int64()), ("response", pa.string())]))),
        ]
    )
    split, first = str(recorded.settings.get("split") or "train"), recorded.episodes[0]
    if not re.fullmatch(r"\w+(?:[.-]\w+)*", split):  # the settings may come from anybody
        raise SpearError(f"the settings name the split {split!r}, which cannot be part of a file's name")
    card = CARD.format(
        split=split,
        env_id=first.env_id,
        count=len(rows),
        player=recorded.settings.get("model") or recorded.settings.get("engine"),
        fingerprint=first.fingerprint,
    )
    with draft_file(folder) as draft:
        try:
            (draft / "data").mkdir(parents=True)
            table = pa.Table.from_pylist(rows, schema=schema)
            parquet.write_table(table, draft / "data" / f"{split}-00000-of-00001.parquet")
            write_text(draft / "README.md", card)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return len(rows)


def _make_row(episode: Trajectory, said: list[Said]) -> dict[str, Any]:
    names: tuple[str, ...] = ("env_id", "task_id", "subtask", "instruction", "fingerprint", "final_observation")
    names += ("seed", "won", "score", "reward", "tool_calls")
    row = {name: getattr(episode, name) for name in names} | {"stop": episode.stop.value}
    row["steps"] = [{"turn": place, "response": response} for place, response in episode.list_steps()]
    row["turns"] = [
        {
            "prompt": None if isinstance(each.prompt, str) else each.prompt,
            "prompt_text": each.prompt if isinstance(each.prompt, str) else None,
            "response": turn.response,
            "finish": turn.finish.value,
            **{
                name: getattr(turn, name)
                for name in ("observation", "action", "format_ok", "action_ok", "reward", "follows")
            },
        }
        for turn, each in zip(episode.turns, said, strict=True)
    ]
    return dict(_mend(row))


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return mend_text(value)
    if isinstance(value, dict):
        return {key: _mend(each) for key, each in value.items()}
    return [_mend(each) for each in value] if isinstance(value, list) else value


class Form(str, Enum):
    """What is written."""

    PAIRS = "pairs"
    """JSON lines of preferences."""
    DATASET = "dataset"
    """A folder of Hugging Face datasets."""


@click.command("export-data")
@click.argument("run", type=FilePath(file_okay=False))
@click.option("--form", type=click.Choice([form.value for form in Form]), required=True, help="What to write.")
@click.option("--out", type=FilePath(), required=True, help="File, or folder of a dataset.")
@click.option("--per-task", type=click.IntRange(1), default=4, help="Maximum pairs of one task (pairs only).")
@click.option("--tokenizer", type=FilePath(), help="Tokenizer's folder if RUN's model has moved.")
@TRUST
def export_data(run: Path, form: str, out: Path, per_task: int, tokenizer: Path | None, trust: bool) -> None:
    """Write the episodes of RUN, a folder of spear eval --out, for other tools.

    \b
    pairs    {prompt, chosen, rejected} of won and lost episodes, for DPO: JSON lines
    dataset  an episode a row: a folder that datasets.load_dataset opens

    \b
      spear export-data runs/first --form pairs --out pairs.jsonl
    """
    if out.resolve() == (run / EPISODES).resolve():
        raise SpearError(f"{out} is the record itself: name another file")
    with open_recorded(run, tokenizer, trust=trust) as recorded:
        if form == Form.DATASET:
            text = f"{write_dataset(recorded, out):,} episodes"
        else:
            pairs = list(make_pairs(recorded, per_task))
            if not pairs:
                raise SpearError(f"no task of {run} has a won and a lost episode that differ after one prompt")
            text = f"{write_lines(out, iter(pairs)):,} pairs of {len({p['task_id'] for p in pairs}):,} tasks"
    left_out = [f"{recorded.faults:,} that a fault cut short"] if recorded.faults else []
    if recorded.unrepeatable:
        left_out.append(f"{recorded.unrepeatable:,} that could not be repeated")
    echo(f"{text}: {out}" + (f" (left out: {', '.join(left_out)})" if left_out else ""))
