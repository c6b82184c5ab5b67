"""Tool calls in the text of a response: reads and writes the forms that chat models are trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = Mapping[str, Any]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


class CallForm(str, Enum):
    """How a model writes a call."""

    HERMES = "hermes"
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen."""
    LLAMA = "llama"
    """The response is ``{"name": …, "parameters": {…}}``; semicolons separate several: Llama 3."""


@dataclass(frozen=True)
class ToolCall:
    """A call of the function ``name``; ``arguments`` are its keywords."""

    name: str
    arguments: Mapping[str, Any]

    def write(self) -> str:
        """The call in Hermes' form."""
        return f"{_OPEN}\n{json.dumps({'name': self.name, 'arguments': self.arguments}, ensure_ascii=False)}\n{_CLOSE}"


def find_form(chat_template: str) -> CallForm:
    """The form that a chat template asks for; Hermes' (the one of :func:`spell_out`) if it does not support tools."""
    return CallForm.LLAMA if '"parameters"' in chat_template and _OPEN not in chat_template else CallForm.HERMES


def read_calls(text: str, form: CallForm) -> tuple[str, list[ToolCall]]:
    """Split a response into its text and its calls; a malformed call stays text. Never raises; takes linear time."""
    return _read_hermes(text) if form is CallForm.HERMES else _read_llama(text)


def _read_hermes(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    while (begin := text.find(_OPEN, at)) >= 0:
        inner = begin + len(_OPEN)
        end = text.find(_CLOSE, inner)
        after = len(text) if end < 0 else end + len(_CLOSE)
        call = _read_call(text[inner : end if end >= 0 else None], "arguments")
        if call is None:
            kept.append(text[at:after])
        else:
            kept.append(text[at:begin])
            calls.append(call)
        at = after
    kept.append(text[at:])
    return ("".join(kept).strip(), calls) if calls else (text, [])


def _read_llama(text: str) -> tuple[str, list[ToolCall]]:
    calls = [_read_call(part, "parameters") for part in _split_objects(text.strip().removeprefix(_PYTHON_TAG))]
    found = [call for call in calls if call is not None]
    return ("", found) if found and len(found) == len(calls) else (text, [])


def _split_objects(text: str) -> list[str]:
    """The JSON objects of ``text``, without the semicolons and blanks between them."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in "; \n\t\r":
            at += 1
            continue
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [text]
        parts.append(text[at:end])
        at = end
    return parts


def _read_call(written: str, key: str) -> ToolCall | None:
    try:
        call = json.loads(written)
        name, arguments = call["name"], call.get(key) or {}
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = json.loads(arguments)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return ToolCall(name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def spell_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rewrite a conversation in plain messages, for chat templates that support neither tools nor their results.

    Messages and the JSON schemas of tools are in OpenAI's form, with arguments of calls as objects. The result has
    messages of system, user and assistant only; the first explains the tools.
    """
    plain: list[dict[str, str]] = []
    if tools:
        plain.append({"role": "system", "content": _explain_tools(tools)})
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        elif role == "assistant":
            calls = [ToolCall(**call["function"]).write() for call in message.get("tool_calls") or ()]
            content = "\n".join([*([content] if content else []), *calls])
        if plain and plain[-1]["role"] == role != "assistant":
            plain[-1]["content"] += f"\n\n{content}" if role == "system" else f"\n{content}"
        else:
            plain.append({"role": role, "content": content})
    return plain


def _explain_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        f'Call one by writing {_OPEN}{{"name": "<its name>", "arguments": {{<its arguments>}}}}{_CLOSE}; '
        "what it returns comes between <tool_response> and </tool_response>."
    )
