"""OpenAI's chat completions: requests and responses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spear_agents.engines.base import Finish
from spear_agents.gateway.session import Completion

MOST_STOPS = 16


_IGNORED = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "service_tier"),
        *("store", "timeout", "prompt_cache_options", "cache_control", "inference_geo"),
    }
)
"""Fields about the request that never change a response."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_p"), (0,)),
    **dict.fromkeys(("repetition_penalty", "best_of"), (1,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "reasoning", "context_management"), ({},)),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "functions": ([],),
    "include": (["reasoning.encrypted_content"],),
    "speed": ("standard",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "thinking": ({"type": "disabled"},),
    "background": (False,),
    "skip_special_tokens": (True,),
}
"""Values of fields that are not supported with which they change nothing."""
_DATA = frozenset({"arguments", "input", "input_schema", "parameters"})
"""Keys whose objects are the program's own."""


def drop_neutral(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that change nothing, as clients send them that write out their defaults."""
    return {
        key: value
        for key, value in _drop_nulls(body).items()
        if key not in _IGNORED and not any(value == neutral for neutral in _NEUTRAL.get(key, ()))
    }


def _drop_nulls(value: Any, depth: int = 0) -> Any:
    if isinstance(value, list) and depth < 8:
        return [_drop_nulls(each, depth + 1) for each in value]
    if not isinstance(value, dict) or depth >= 8:
        return value
    kept = {key: each for key, each in value.items() if each is not None}
    return {
        key: each if key in _DATA and isinstance(each, dict) else _drop_nulls(each, depth + 1)
        for key, each in kept.items()
    }


class Function(BaseModel):
    """A function called by a message, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel):
    """A call of a tool in a message."""

    id: str = ""
    function: Function


class ChatMessage(BaseModel):
    """A message; other fields (``refusal``, ``audio``) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def to_message(self) -> dict[str, Any]:
        """Convert to the form of chat templates. Raises ValueError for a part that is not text."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": join_parts(self.content),
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.function.name, "arguments": read_arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def join_parts(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content. Raises ValueError if it is neither a text nor a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("a content is a text or a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a content contains a part of type {kind!r}: this address takes text only")
    return "".join(part["text"] for part in content)


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Parse the arguments of a call; empty if they are not a JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}
    return arguments if isinstance(arguments, dict) else {}


class ToolFunction(BaseModel):
    """A function offered to the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class Tool(BaseModel):
    """A tool offered to the model."""

    type: Literal["function"] = "function"
    function: ToolFunction


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a request.

    The run sets how responses are sampled: ``temperature``, ``top_p``, ``top_k`` and ``seed`` are accepted and ignored,
    since the trainer's log-probabilities would be of another distribution.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    def read_stops(self) -> list[str]:
        """Return the stop strings. Raises ValueError if one is empty or there are too many."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or "" in stops:
            raise ValueError(f"stop takes at most {MOST_STOPS} non-empty texts")
        return stops

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools]

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the response."""
        return self.max_completion_tokens or self.max_tokens


def limit_calls(answer: Completion, parallel: bool | None) -> Completion:
    """Return the answer with its first call alone where a program allows no more (``parallel_tool_calls=false``)."""
    return replace(answer, calls=answer.calls[:1]) if parallel is False else answer


def write_completion(
    answer: Completion, request: ChatRequest, key: str, spell: Callable[[Sequence[int]], list[str]]
) -> dict[str, Any]:
    """Return the body of a response; ``spell`` gives the text of each token, for log-probabilities."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _write_calls(answer)
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": _name_finish(answer), "logprobs": None}
    choice["stop_reason"] = answer.stop_string  # vLLM's field
    if request.logprobs:
        choice["logprobs"] = _list_log_probs(answer, spell)
    return _frame(answer, request, key, "chat.completion") | {"choices": [choice], "usage": _count(answer)}


def _list_log_probs(answer: Completion, spell: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
    tokens = zip(spell(answer.generation.token_ids), answer.generation.log_probs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": known, "top_logprobs": []}
            for text, value in tokens
            for known in [None if "\ufffd" in text else list(text.encode())]  # part of a character
        ]
    }


def write_stream(
    answer: Completion, request: ChatRequest, key: str, spell: Callable[[Sequence[int]], list[str]]
) -> Iterator[str]:
    """Return the events of a stream: the complete response in one piece, with its log-probabilities if asked for."""
    frame = _frame(answer, request, key, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(_write_calls(answer))]
    log_probs = _list_log_probs(answer, spell) if request.logprobs else None
    for part, finish, found in ((delta, None, log_probs), ({}, _name_finish(answer), None)):
        choice = {"index": 0, "delta": part, "finish_reason": finish, "logprobs": found}
        yield _event(frame | {"choices": [choice]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield _event(frame | {"choices": [], "usage": _count(answer)})
    yield "data: [DONE]\n\n"


def write_error(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def write_named_event(data: Mapping[str, Any]) -> str:
    """Return an event of a stream, named after its type."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"


def name_call(answer: Completion, place: int) -> str:
    """Make the id of a tool call: nine letters and digits, as Mistral's chat template demands."""
    return f"c{answer.number:05d}{place:03d}"


def _write_calls(answer: Completion) -> list[dict[str, Any]]:
    return [
        {
            "id": name_call(answer, place),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(answer.calls)
    ]


def _name_finish(answer: Completion) -> str:
    if answer.calls:
        return "tool_calls"
    return "length" if answer.generation.finish is Finish.LENGTH else "stop"


def _count(answer: Completion) -> dict[str, Any]:
    written = len(answer.generation.token_ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": answer.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": answer.generation.cached_tokens or 0},
    }


def _frame(answer: Completion, request: ChatRequest, key: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{key}-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
