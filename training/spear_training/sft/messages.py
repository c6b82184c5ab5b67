"""Rows of fine-tuning data as messages and variables of a chat template.

They are those of ``spear collect``, of other tools, and of ReTool-SFT as it is published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from spear_agents.play.chat import check_taken_keywords
from spear_envs.code.prompts import TOOLS
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import mend_text
from spear_envs.data.rows import parse_rows

_FLAGS = ("loss_mask", "weight", "train", "training", "loss", "trainable")
"""Fields of a message by which tools say whether it is learnt."""
_UNREAD_OF_MESSAGES = ("function_call", "images", "image", "audio", "videos", "train_detail", "loss_weight", "prefix")
_UNREAD = (
    *("weight", "loss_weight", "sample_weight", "labels", "completion_mask", "assistant_masks", "assistant_mask"),
    *("images", "image", "videos", "audios", "documents", "functions", "system", "train_on_inputs", "chat_template"),
)
"""Fields of a row that other tools read and this one does not."""

_EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
_QUESTION = "*user question:*"
"""Text before the problem in a prompt of ReTool-SFT."""
_CALL_TAGS = ("<code>", "</code>", "<interpreter>", "</interpreter>")
_FENCE = re.compile(r"```python(.*?)```", re.DOTALL)


def read_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return the rows of a ``.jsonl`` or ``.parquet`` file with their numbers, from 1.

    Raises SpearError as :func:`spear_envs.data.rows.parse_rows`.
    """
    # A column of a table has every field that one of its rows has, empty in the others.
    clean = _drop_nulls if path.suffix == ".parquet" else lambda row: row
    return parse_rows(path, "sandbox", lambda row, number: (number, clean(row)), noun="sample", example=_EXAMPLE)


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(part) for key, part in value.items() if part is not None}
    return [_drop_nulls(part) for part in value] if isinstance(value, list) else value


def unfold_solution(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of ReTool-SFT with its code as calls of a tool and its output as their results; others unchanged.

    As published, a solution is one message, ``text <code>…</code> <interpreter>…</interpreter> … <answer>…</answer>``.
    The prompt keeps the problem and what follows it, without the tags of the answer; text between code and output is
    dropped. The authors of the paper prepare the rows so (``recipe/spear/sft_preprocess.py``); the tool's schema is the
    code environment's.

    Raises:
        SpearError: the solution has another form.
    """
    messages = record.get("messages")
    if not isinstance(messages, list) or [_find(message, "role") for message in messages] != ["user", "assistant"]:
        return record
    asked, said = (_find(message, "content") for message in messages)
    if not isinstance(asked, str) or _QUESTION not in asked or not isinstance(said, str):
        return record
    problem = asked.partition(_QUESTION)[2].replace("<answer>", "").replace("</answer>", "").strip()
    unfolded: list[dict[str, Any]] = [{"role": "user", "content": problem}]
    while len(parts := _split_call(said)) > len(_CALL_TAGS):
        text, code, between, output, rest = parts
        if "<code>" in between:
            break
        fenced = _FENCE.search(code)
        call = {"name": TOOLS[0].name, "arguments": {"code": fenced[1].strip() if fenced else code}}
        unfolded.append(
            {"role": "assistant", "content": text.strip(), "tool_calls": [{"type": "function", "function": call}]}
        )
        unfolded.append({"role": "tool", "content": output.strip()})
        said = rest
    text, _, answer = said.rstrip().partition("<answer>")
    if not answer.endswith("</answer>") or "<code>" in text:
        shown = " ".join(said.split())[:60]
        raise SpearError(f"its prompt is ReTool's, but {shown!r} is neither <code> with its output nor an <answer>")
    unfolded.append({"role": "assistant", "content": (text + answer.removesuffix("</answer>")).strip()})
    return {**record, "messages": unfolded, "tools": [TOOLS[0].schema()]}


def _split_call(text: str) -> list[str]:
    """Split a text at the first call's tags, in linear time; fewer parts if one of them is missing."""
    parts = [text]
    for tag in _CALL_TAGS:
        parts[-1:] = parts[-1].split(tag, 1)
    return parts


def _find(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else None


def read_keywords(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template: the tools, and what else a row names. Raises SpearError for wrong
    ones.
    """
    keywords = _read_json(record.get("chat_template_kwargs"), dict, "chat_template_kwargs") or {}
    if record.get("enable_thinking") is not None:
        keywords["enable_thinking"] = record["enable_thinking"]
    check_taken_keywords(keywords)
    tools = _read_json(record.get("tools"), list, "tools")
    return {**keywords, **({"tools": tools} if tools else {})}


def _read_json(value: Any, kind: type, name: str) -> Any:
    """Return a value that may be written as JSON in a string."""
    try:
        found = json.loads(value) if isinstance(value, str) and value else value or None
    except (ValueError, RecursionError):
        found = value
    if found is not None and not isinstance(found, kind):
        raise SpearError(f"its {name} must be a JSON {'object' if kind is dict else 'array'}, not {str(value)[:60]!r}")
    return found


def refuse_unread(record: Mapping[str, Any]) -> None:
    """Raise SpearError if a row has a field that would change what is learnt and is not read here."""
    _refuse_fields(record, _UNREAD, "it")


def _refuse_fields(values: Mapping[str, Any], names: Collection[str], owner: str) -> None:
    for name in names:
        if values.get(name) not in (None, [], {}, ""):
            raise SpearError(f"{owner} has the field {name!r}, which would change what is learnt and is not read here")


def _complete(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty fields, whose calls have arguments as objects: templates write them as JSON."""
    _refuse_fields(message, _UNREAD_OF_MESSAGES, f"a message of {message['role']!r}")
    made = {key: value for key, value in message.items() if value is not None} | {"content": _read_text(message) or ""}
    flags = [name for name in _FLAGS if name in made]
    for name in flags:
        if made[name] not in (0, 1) or (made[name] and message["role"] != "assistant"):
            raise SpearError(f"{name}={made[name]!r} of a {message['role']!r}: it is 0, or 1 for the assistant")
    if "tool_calls" in made:
        if not isinstance(made["tool_calls"], list):
            raise SpearError(f"tool_calls must be a list of calls, not {made['tool_calls']!r:.60}")
        made["tool_calls"] = [_read_call(call) for call in made["tool_calls"]]
    return made


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Return whether no flag of a message says that it is only read."""
    return all(message.get(name, 1) for name in _FLAGS)


def _read_call(call: Any) -> dict[str, Any]:
    holder = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(holder, dict):
        raise SpearError("a tool call is not an object with a name and arguments")
    made = {**holder, "arguments": _read_json(holder.get("arguments"), dict, "arguments of a tool call") or {}}
    return {**call, "function": made} if "function" in call else made


def write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as text."""

    def write(call: Mapping[str, Any]) -> dict[str, Any]:
        holder = call.get("function", call)
        made = {**holder, "arguments": json.dumps(holder["arguments"], ensure_ascii=False)}
        return {**call, "function": made} if "function" in call else made

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [write(call) for call in calls]} if calls else dict(message)


def read_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row, whose contents are texts and whose calls have arguments as objects.

    Raises:
        SpearError: they are malformed, have a field that is not read here, or hold the environment's words.
    """
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise SpearError("it has neither input_ids nor messages with a role and a text each")
    messages = [_complete(message) for message in messages]
    if record.get("joined") and "input_ids" not in record:
        raise SpearError("its response holds the environment's words too: run `spear collect --tokenizer MODEL`")
    return messages


def _is_message(message: Any) -> bool:
    texts = [message.get("role"), _read_text(message)] if isinstance(message, dict) else [None]
    # JSON may hold halves of surrogate pairs, which no tokenizer takes.
    return all(isinstance(text, str) and text == mend_text(text) for text in texts)


def _read_text(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message, which may be written in parts, or missing beside calls; None if there is another
    part.
    """
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and content:
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        return "".join(map(str, texts)) if whole else None
    return content if isinstance(content, str) else None
