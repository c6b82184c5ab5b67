"""OpenAI's responses, translated to and from the form of chat templates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spear_agents.engines.base import Finish
from spear_agents.gateway.openai_wire import join_parts, name_call, read_arguments, write_named_event
from spear_agents.gateway.session import Completion

_TEXTS = ("input_text", "output_text", "text")


class ResponsesTool(BaseModel):
    """A function offered to the model."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = ""
    parameters: dict[str, Any] | None = None


class ResponsesRequest(BaseModel):
    """The body of a request; as in chat completions, the run sets how responses are sampled.

    Requests are stateless: ``previous_response_id`` and ``conversation`` are unknown fields.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    tools: list[ResponsesTool] = []
    tool_choice: Literal["auto", "none"] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = Field(default=None, max_length=0)

    def to_messages(self) -> list[dict[str, Any]]:
        """Convert to the form of chat templates, where a text and the calls after it are one message.

        Raises ValueError for an item that is not a message of texts, a call or a result.
        """
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        open_message: dict[str, Any] | None = None  # the assistant's, to which a call belongs
        for item in items:
            kind = item.get("type", "message")
            if kind == "function_call":
                if open_message is None:
                    open_message = {"role": "assistant", "content": ""}
                    messages.append(open_message)
                function = {"name": str(item.get("name")), "arguments": read_arguments(item.get("arguments"))}
                call = {"type": "function", "id": str(item.get("call_id")), "function": function}
                open_message.setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                open_message = None
                result = join_parts(item.get("output"), _TEXTS)
                messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": result})
            elif kind == "message":
                role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
                if role not in ("system", "user", "assistant"):
                    raise ValueError(f"a message has the role {role!r}: give system, developer, user or assistant")
                message = {"role": role, "content": join_parts(item.get("content"), _TEXTS)}
                messages.append(message)
                open_message = message if role == "assistant" else None
            else:
                raise ValueError(f"the input has an item of type {kind!r}: this address takes messages and functions")
        return messages

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        if self.tool_choice == "none":
            return []
        empty = {"type": "object", "properties": {}}
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.parameters or empty,
                },
            }
            for tool in self.tools
        ]


def write_response(answer: Completion, request: ResponsesRequest, key: str) -> dict[str, Any]:
    """Return the body of a response."""
    written = len(answer.generation.token_ids)
    cut = answer.generation.finish is Finish.LENGTH
    return {
        "id": f"resp_{key}_{answer.number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "model": request.model,
        "output": _write_items(answer, key),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.model_dump() | {"strict": False} for tool in request.tools],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.generation.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + written,
        },
    }


def write_events(answer: Completion, request: ResponsesRequest, key: str) -> Iterator[str]:
    """Return the events of a stream: the complete response, an item at a time."""
    whole = write_response(answer, request, key)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            empty, inner = item | {"content": [], "status": "in_progress"}, at | {"content_index": 0}
            steps = [
                {"type": "response.content_part.added", **inner, "part": part | {"text": ""}},
                {"type": "response.output_text.delta", **inner, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **inner, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **inner, "part": part},
            ]
        else:
            empty, given = item | {"arguments": "", "status": "in_progress"}, item["arguments"]
            steps = [
                {"type": "response.function_call_arguments.delta", **at, "delta": given},
                {"type": "response.function_call_arguments.done", **at, "arguments": given, "name": item["name"]},
            ]
        place = {"output_index": index}
        events += [{"type": "response.output_item.added", **place, "item": empty}, *steps]
        events.append({"type": "response.output_item.done", **place, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield write_named_event(event | {"sequence_number": number})


def _write_items(answer: Completion, key: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        about = {"id": f"msg_{key}_{answer.number}", "type": "message", "role": "assistant", "status": "completed"}
        items.append(about | {"content": [part]})
    for place, call in enumerate(answer.calls):
        name = name_call(answer, place)
        given = json.dumps(call.arguments, ensure_ascii=False)
        about = {"id": f"fc_{key}_{answer.number}_{place}", "type": "function_call", "status": "completed"}
        items.append(about | {"call_id": name, "name": call.name, "arguments": given})
    return items
