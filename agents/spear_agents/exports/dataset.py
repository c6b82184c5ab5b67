"""Episodes as a folder that ``datasets.load_dataset`` opens: a Parquet file and its card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from spear_agents.exports.recorded import Recorded, Said, mend_text
from spear_agents.files import draft_file, write_text
from spear_agents.trajectory import Trajectory
from spear_envs.core.errors import SpearError

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
    told = ((episode, recorded.tell(episode)) for episode in recorded.episodes)
    rows = [_make_row(episode, said) for episode, said in told if said is not None]
    if not rows:
        raise SpearError("no episode could be reproduced: there is nothing to write.")
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
