"""The calls of one program as token sequences: calls that continue one another share a row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear_agents.engines.base import ContextExceededError, Finish
from spear_agents.play.chat import Chat
from spear_envs.core.errors import STRICT_JSON, SpearError

Message = Mapping[str, Any]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder(strict=False, **STRICT_JSON)
"""Models write line breaks within texts; clients in other languages read no NaN."""
_LISTS = ("<tool_call>", "<|tool_call|>", "functools", "[TOOL_CALLS]", "<TOOLCALL>")
"""Marks before calls as JSON objects: Hermes, Granite and Phi-4, Phi-4-mini, Mistral, Nemotron."""
_HEADS = {
    "[TOOL_CALLS]": re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)"),
    "<｜tool▁call▁begin｜>": re.compile(
        r"\s*(?:function<｜tool▁sep｜>(?=[\w.-]+\s*\n))?([\w.-]+)\s*(?:<｜tool▁sep｜>\s*)?(?:```(?:json)?\s*)?(?=\{)"
    ),
    "<|tool_call_begin|>": re.compile(
        r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
}
"""Marks before a name and its arguments as JSON, and what stands between: Mistral, DeepSeek, Kimi.

No two ``\\s*`` have only what may be missing between them, here and below: blanks would be tried in every division, and
two thousand took 15 seconds.
"""
_FUNCTION = "<function="
_MARKS = tuple(dict.fromkeys((*_LISTS, *_HEADS, _FUNCTION)))
_WRAPPERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_CLOSES = (_CLOSE, "<|/tool_call|>", "</TOOLCALL>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_NEXT = re.compile("|".join(map(re.escape, (*_MARKS, *_WRAPPERS, *_THOUGHTS, *_THOUGHTS.values()))))
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_ARGUMENT = re.compile(r"\s*<arg_key>\s*(?!\s)([^<\n]*[^<\s])\s*</arg_key>\s*<arg_value>\n?")
_ARGUMENT_END = re.compile(r"\n?</arg_value>\s*(?=<arg_key>|</tool_call>)")
_NAME = re.compile(r"\s*([\w.-]+)\s*")
_FENCE = re.compile(r"```(?:json)?(.*)```", re.DOTALL)
_ASKS_FOR_LLAMA = re.compile(r'\{"name": [\w ]+, "parameters": ')
"""Not the schemas of tools, which have ``"parameters"`` in other families too (Command R7B)."""
_MALFORMED = 64
"""Malformed calls after which the rest of a response is text: an error of Python's JSON takes linear time."""
_KEYS = {"name", "parameters", "arguments", "type", "id"}


class CallForm(str, Enum):
    """How a model writes a call."""

    HERMES = "hermes"
    """Between marks: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` of Hermes and Qwen, and the marks of
    Qwen3-Coder, GLM, Mistral, Phi-4, Granite, DeepSeek and Kimi."""
    LLAMA = "llama"
    """The response ends in ``{"name": …, "parameters": {…}}``; semicolons separate several: Llama 3."""
    UNKNOWN = "unknown"
    """The chat template shows no form that is read here."""


@dataclass(frozen=True)
class ToolCall:
    """A call of the function ``name``; ``arguments`` are its keywords."""

    name: str
    arguments: Mapping[str, Any]

    def write(self) -> str:
        """Return the call in Hermes' form."""
        return f"{_OPEN}\n{json.dumps({'name': self.name, 'arguments': self.arguments}, ensure_ascii=False)}\n{_CLOSE}"


def find_form(chat_template: str) -> CallForm:
    """Return the form that a chat template asks for; Hermes' (the one of :func:`spell_out`) if it is empty."""
    if not chat_template or any(mark in chat_template for mark in (*_MARKS, *_WRAPPERS)):
        return CallForm.HERMES
    return CallForm.LLAMA if _ASKS_FOR_LLAMA.search(chat_template) else CallForm.UNKNOWN


def read_calls(
    text: str, form: CallForm, tools: Sequence[Mapping[str, Any]] = (), *, thinking: bool = False
) -> tuple[str, list[ToolCall]]:
    """Split a response into its text and its calls; a malformed call stays text. Never raises; takes linear time.

    A call within thoughts is not read. ``tools`` are those offered, in OpenAI's form: their schemas say which arguments
    are texts, and bare JSON calls only what is offered. ``thinking``: the prompt opened a thought.
    """
    types = {tool["function"]["name"]: _list_types(tool["function"]) for tool in tools}
    kept: list[str] = []
    calls: list[ToolCall] = []
    head = at = start = _end_thought(text, 0, _THOUGHTS.values()) if thinking else 0
    malformed = 0
    while malformed < _MALFORMED and (mark := _NEXT.search(text, at)) is not None:
        written, at = mark[0], mark.end()
        if written in _THOUGHTS:
            at = _end_thought(text, at, [_THOUGHTS[written]])
        elif written in _THOUGHTS.values():  # the prompt had opened it: what came before was rehearsed
            calls, kept, head, start = [], [], at, at
        elif written in _WRAPPERS:
            kept.append(text[start : mark.start()])
            start = at
        else:
            found, end = _read_marked(text, written, at, types)
            if found:
                kept.append(text[start : mark.start()])
                calls += found
                start = at = end
            else:
                malformed += 1
    if calls:
        return "".join([text[:head], *kept, text[start:]]).strip(), calls
    return _read_bare(text, start, form, types)


def _end_thought(text: str, at: int, closes: Any) -> int:
    """Return where the thought open at ``at`` ends; the end of the text if it stays open."""
    ends = [end + len(close) for close in closes if (end := text.find(close, at)) >= 0]
    return min(ends, default=len(text))


_Types = Mapping[str, Mapping[str, frozenset[str]]]


def _read_marked(text: str, mark: str, at: int, types: _Types) -> tuple[list[ToolCall], int]:
    """Return the calls after a mark that ends at ``at``, and where they end; none if they are malformed."""
    calls: list[ToolCall] = []
    end = at
    if mark in _HEADS and (head := _HEADS[mark].match(text, at)) is not None:
        arguments, end = _decode(text, head.end())
        calls = [ToolCall(head[1], arguments)] if isinstance(arguments, dict) else []
        end = end + len(fence[0]) if (fence := re.match(r"\s*```", text[end : end + 8])) else end
    elif mark in _LISTS:
        while (found := _decode(text, end))[0] is not None:
            read = [_make_call(each) for each in (found[0] if isinstance(found[0], list) else [found[0]])]
            if None in read:
                return [], at
            calls += [call for call in read if call is not None]
            end = found[1]
    if not calls and mark == _OPEN:
        begin = text.find(_FUNCTION, at, at + len(_FUNCTION) + 8)
        if begin >= 0 and not text[at:begin].strip():
            return _read_marked(text, _FUNCTION, begin + len(_FUNCTION), types)
        calls, end = _read_pairs(text, at, _ARGUMENT, _ARGUMENT_END, _CLOSE, types)
    elif mark == _FUNCTION:
        calls, end = _read_pairs(text, at, _PARAMETER, _PARAMETER_END, "</function>", types)
    rest = re.compile(r"\s*").match(text, end)
    end = rest.end() if rest is not None else end
    close = next((close for close in _CLOSES if text.startswith(close, end)), "")
    if not calls or not (close or end == len(text) or _NEXT.match(text, end) or mark == _FUNCTION):
        return [], at
    return calls, end + len(close)


def _read_pairs(
    text: str, at: int, opening: re.Pattern[str], closing: re.Pattern[str], last: str, types: _Types
) -> tuple[list[ToolCall], int]:
    """Read a name, keys and values between tags, and ``last``, which stays unless it is the function's own."""
    name = _NAME.match(text, at)
    if name is None:
        return [], at
    known, end = types.get(name[1]), name.end()
    if opening is _PARAMETER:
        end = end + 1 if text.startswith(">", end) else len(text)
    arguments: dict[str, Any] = {}
    while (key := opening.match(text, end)) is not None:
        value = closing.search(text, key.end())
        if value is None:
            return [], at
        kinds = (known or {}).get(key[1], frozenset({"string"}))
        arguments[key[1]] = _read_value(text[key.end() : value.start()], kinds)
        end = value.end()
    end += len(text[end : end + 8]) - len(text[end : end + 8].lstrip())
    if not text.startswith(last, end) or not (arguments or known is not None or opening is _PARAMETER):
        return [], at
    return [ToolCall(name[1], arguments)], end + (len(last) if opening is _PARAMETER else 0)


def _read_value(written: str, kinds: frozenset[str]) -> Any:
    """Return a value in a tag: a text if the schema says so, else JSON where it is."""
    if "string" in kinds and not ("null" in kinds and written == "null"):
        return written
    try:
        return _DECODER.decode(written.lower() if kinds <= {"boolean", "null"} else written)
    except (ValueError, RecursionError):
        return written


def _list_types(function: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter, as far as its schema gives them."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found = {}
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        options = [schema, *_as_list(schema.get("anyOf"))] if isinstance(schema, Mapping) else []
        kinds = [kind for option in options if isinstance(option, Mapping) for kind in _as_list(option.get("type"))]
        found[name] = frozenset(map(str, kinds)) or frozenset({"string"})
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_bare(text: str, thought: int, form: CallForm, types: _Types) -> tuple[str, list[ToolCall]]:
    """Read calls as bare JSON after ``thought`` characters: a whole response, or the end of one in Llama's form."""
    rest = text[thought:].strip().removeprefix(_PYTHON_TAG)
    fence = _FENCE.fullmatch(rest)
    rest = fence[1].strip() if fence is not None else rest
    begin = 0 if rest.startswith("{") else rest.find('{"') if form is CallForm.LLAMA else -1
    if begin < 0:
        return text, []
    calls = []
    for written in _split_objects(rest[begin:]):
        call = _make_call(written)
        is_offered = call is not None and (call.name in types if types else True)
        if call is None or not is_offered or not (set(written) <= _KEYS and len(set(written)) > 1):
            return text, []
        calls.append(call)
    return (f"{text[:thought]}{rest[:begin]}".strip(), calls) if calls else (text, [])


def _split_objects(text: str) -> list[Any]:
    """Return the JSON objects of ``text``, which semicolons and blanks may separate."""
    parts: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] in "; \n\t\r":
            at += 1
            continue
        found, at = _decode(text, at)
        if found is None:
            return [None]
        parts.append(found)
    return parts


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON list or object at ``at``, after blanks, and its end; None if there is none."""
    while text[at : at + 1].isspace():
        at += 1
    if text[at : at + 1] not in ("{", "["):
        return None, at
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _make_call(written: Any) -> ToolCall | None:
    if not isinstance(written, dict):
        return None
    name, arguments = written.get("name"), written.get("arguments", written.get("parameters")) or {}
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _decode(arguments, 0)[0]
    return ToolCall(name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def spell_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, system: str = "system"
) -> list[dict[str, str]]:
    """Rewrite a conversation in plain messages, for chat templates that support neither tools nor their results.

    Messages and the JSON schemas of tools are in OpenAI's form, with arguments of calls as objects. The result has
    messages of system, user and assistant only; the first explains the tools. ``system`` is the role of system
    messages: ``user`` for a template that takes none.
    """
    plain: list[tuple[str, list[str]]] = [(system, [_explain_tools(tools)])] if tools else []
    before = "system"
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        elif role == "assistant":
            calls = [ToolCall(**call["function"]).write() for call in message.get("tool_calls") or ()]
            content = "\n".join([*([content] if content else []), *calls])
        joint = "\n\n" if "system" in (before, role) else "\n"
        before, role = role, system if role == "system" else role
        if plain and plain[-1][0] == role != "assistant":
            plain[-1][1].extend((joint, content))
        else:
            plain.append((role, [content]))
    return [{"role": role, "content": "".join(parts)} for role, parts in plain]


def _explain_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        f'Call one by writing {_OPEN}{{"name": "<its name>", "arguments": {{<its arguments>}}}}{_CLOSE}; '
        "what it returns comes between <tool_response> and </tool_response>."
    )


@dataclass(frozen=True)
class Asked:
    """A prompt of a program: its text and ids for the engine, of which earlier calls of the row lack ``new_ids``.

    It continues the response to the call with index ``follows``, or starts a row. The row's first prompt has
    ``opening`` tokens; ``room`` are those left for the response, None without a limit.
    """

    text: str
    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    follows: int | None
    opening: int
    room: int | None


@dataclass(frozen=True)
class _Said:
    """An answered call."""

    text: str
    """Text of prompt and response."""
    ids: tuple[int, ...]
    finish: Finish
    opening: int


class Transcript:
    """Every prompt of a program and every response to it.

    A prompt continues an earlier call if the chat template, given the program's messages, reproduces that call's prompt
    and response exactly. Then its sampled tokens are kept and only the rest is tokenised. If a template drops earlier
    thoughts, or the program rewrites its history, the texts differ and the prompt starts a new row: a model is trained
    on what it would read when served. ``max_row_tokens`` bounds a row after its first prompt (less for later rows,
    whose prompts are longer), and ``max_prompt_tokens`` then the first prompt only.
    """

    def __init__(self, chat: Chat, max_prompt_tokens: int | None = None, max_row_tokens: int | None = None) -> None:
        self._chat = chat
        self._max_prompt_tokens = max_prompt_tokens
        self._max_row_tokens = max_row_tokens
        source = str(getattr(chat.tokenizer, "chat_template", "") or "")
        self._knows_tools = "tools" in source and chat.takes_tools
        self.form: CallForm = find_form(source if self._knows_tools else "")
        """The model's format of calls."""
        self._said: list[_Said] = []
        self._free: set[int] = set()
        """Indices of calls that no other continues."""

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, goes_on: bool = False
    ) -> Asked:
        """Build the prompt of ``messages``; :meth:`add` or :meth:`leave` must follow.

        Messages and the JSON schemas of tools are in OpenAI's form, with contents as text and arguments of calls as
        objects. Their texts are disarmed (:meth:`~spear_agents.play.chat.Chat.disarm_all`). ``goes_on``: the last
        message is the beginning of the response. Raises ContextExceededError if it is too long, SpearError if the chat
        template refuses the messages.

        The same in steps, of which the first and the third are heavy and may run in a thread: :meth:`render`,
        :meth:`begin`, ``encode`` of the chat, :meth:`finish`.
        """
        text = self.render(messages, tools, goes_on)
        follows, rest = self.begin(text)
        return self.finish(text, follows, self._chat.encode(rest))

    def begin(self, text: str) -> tuple[int | None, str]:
        """Take the earlier call that a prompt continues, if any; return it and the text that is to be tokenised."""
        follows = self._find_begin(text)
        if follows is None:
            return None, text
        self._free.discard(follows)
        said = self._said[follows]
        rest = text[len(said.text) :]
        return follows, self._chat.drop_end(rest) if said.finish is Finish.STOP else rest

    def finish(self, text: str, follows: int | None, new_ids: tuple[int, ...]) -> Asked:
        """Make the prompt. Raises ContextExceededError if it is too long; the call that it continues is free again."""
        said = None if follows is None else self._said[follows]
        ids = new_ids if said is None else said.ids + new_ids
        opening = len(ids) if said is None else said.opening
        try:
            return Asked(text, ids, new_ids, follows, opening, self._measure_room(len(ids), opening))
        except ContextExceededError:
            self.release(follows)
            raise

    def release(self, follows: int | None) -> None:
        """Let another prompt continue a call that one has given up."""
        if follows is not None:
            self._free.add(follows)

    def check_length(self, characters: int) -> None:
        """Raise ContextExceededError for messages that have too many characters for any tokenisation."""
        longest = self._chat.longest_token
        if longest is None or self._max_prompt_tokens is None:
            return
        most = (self._max_prompt_tokens + (self._max_row_tokens or 0)) * longest
        if characters > most:
            raise ContextExceededError(f"the messages have {characters} characters, and {most} are too many tokens")

    def add(self, asked: Asked, token_ids: tuple[int, ...], finish: Finish) -> str:
        """Add the response to ``asked``; return its text."""
        response = self._chat.decode(token_ids)
        self._free.add(len(self._said))
        self._said.append(_Said(asked.text + response, asked.ids + token_ids, finish, asked.opening))
        return response

    def read(self, asked: Asked, response: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        """Return :func:`read_calls` of the response to ``asked``: its first call alone if the chat template of later
        prompts refuses several, as Llama 3's.
        """
        opened = asked.text.rstrip().endswith(tuple(_THOUGHTS))
        text, calls = read_calls(response, self.form, tools, thinking=opened)
        return text, calls if not self._knows_tools or self._chat.takes_several else calls[:1]

    def leave(self, asked: Asked) -> None:
        """Drop ``asked``, which got no response."""
        self.release(asked.follows)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], goes_on: bool) -> str:
        """Return the text of a prompt, disarmed. Raises SpearError if the chat template refuses the messages."""
        messages, tools = self._chat.disarm_all(messages), self._chat.disarm_all(tools)
        keywords: dict[str, Any] = {"continue_final_message": True} if goes_on else {}
        if not self._knows_tools:
            system = "system" if self._chat.takes_system else "user"
            plain = spell_out(messages, tools, system=system)
            return self._chat.render(plain, add_generation_prompt=not goes_on, **keywords)
        if tools and self.form is CallForm.UNKNOWN:
            raise SpearError("the chat template of this model has tool calls of an unknown form: send no tools")
        if tools:
            keywords["tools"] = list(tools)
        return self._chat.render(messages, add_generation_prompt=not goes_on, **keywords)

    def _find_begin(self, text: str) -> int | None:
        """Return the longest open call that ``text`` continues."""
        fitting = []
        for place in self._free:
            said = self._said[place]
            rest = text[len(said.text) :]
            if text.startswith(said.text) and (said.finish is not Finish.STOP or self._chat.starts_with_end(rest)):
                fitting.append((len(said.text), place))
        return max(fitting)[1] if fitting else None

    def _measure_room(self, length: int, opening: int) -> int | None:
        """Return the tokens left for the response.

        The first prompt of an episode has at most ``max_prompt_tokens``. One that starts a later row contains earlier
        rows, so its limit is that of prompt and row together.
        """
        limited = self._max_row_tokens is not None
        checked = opening if limited else length
        longest = self._max_prompt_tokens
        if longest is not None and checked > longest and not (limited and self._said):
            raise ContextExceededError(f"the prompt has {checked} tokens of at most {longest}")
        if self._max_row_tokens is None:
            return None
        most = (opening if longest is None else min(opening, longest)) + self._max_row_tokens
        if length >= most:
            raise ContextExceededError(f"the conversation has {length} tokens, and {most} have no room for a response")
        return most - length
