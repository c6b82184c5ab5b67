"""Anthropic's messages, translated to and from the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spear_agents.engines.base import Finish
from spear_agents.gateway.openai_wire import MOST_STOPS, join_parts, name_call, write_named_event
from spear_agents.gateway.session import Completion

Content = str | list[dict[str, Any]]


class AnthropicMessage(BaseModel):
    """A message of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: Content

    def to_messages(self) -> list[dict[str, Any]]:
        """Convert to chat templates' form; results of tools become messages. Raises ValueError for other blocks."""
        blocks = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content
        messages: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for block in blocks:
            if block.get("type") == "tool_result" and self.role == "user":
                result = join_parts(block.get("content"))
                messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result})
            elif block.get("type") == "tool_use" and self.role == "assistant":
                arguments = block.get("input") if isinstance(block.get("input"), dict) else {}
                function = {"name": str(block.get("name")), "arguments": arguments}
                calls.append({"type": "function", "id": str(block.get("id")), "function": function})
            else:
                texts.append(block)
        if texts or calls:
            message: dict[str, Any] = {"role": self.role, "content": join_parts(texts)}
            messages.append(message | ({"tool_calls": calls} if calls else {}))
        return messages


class AnthropicTool(BaseModel):
    """A tool offered to the model."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolChoice(BaseModel):
    """Whether the model may call tools; no form of it that forces a call is supported."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False


class MessagesRequest(BaseModel):
    """The body of a request; as in OpenAI's, the run sets how responses are sampled."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: Content | None = None
    tools: list[AnthropicTool] = []
    tool_choice: ToolChoice | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MOST_STOPS)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def to_messages(self) -> list[dict[str, Any]]:
        """Convert to the form of chat templates. Raises ValueError unless blocks are texts, calls and results."""
        system = [{"role": "system", "content": join_parts(self.system)}] if self.system else []
        return [*system, *(part for message in self.messages for part in message.to_messages())]

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the response."""
        return self.messages[-1].role == "assistant"

    @property
    def takes_several(self) -> bool:
        """Whether the response may have several calls."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [
            {
                "type": "function",
                "function": tool.model_dump(exclude={"input_schema", "type"}) | {"parameters": tool.input_schema},
            }
            for tool in self.tools
        ]


def write_message(answer: Completion, request: MessagesRequest, key: str) -> dict[str, Any]:
    """Return the body of a response."""
    written = len(answer.generation.token_ids)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    for place, call in enumerate(answer.calls):
        name = name_call(answer, place)
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": dict(call.arguments)})
    stops = {Finish.LENGTH: "max_tokens", Finish.STRING: "stop_sequence", Finish.STOP: "end_turn"}
    return {
        "id": f"msg_{key}_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": "tool_use" if answer.calls else stops[answer.generation.finish],
        "stop_sequence": answer.stop_string,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": written},
    }


def write_events(answer: Completion, request: MessagesRequest, key: str) -> Iterator[str]:
    """Return the events of a stream: the complete response, a block at a time."""
    whole = write_message(answer, request, key)
    start = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield write_named_event({"type": "message_start", "message": start})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield write_named_event({"type": "content_block_start", "index": index, "content_block": empty})
        yield write_named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield write_named_event({"type": "content_block_stop", "index": index})
    stop = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    usage = {"output_tokens": whole["usage"]["output_tokens"]}
    yield write_named_event({"type": "message_delta", "delta": stop, "usage": usage})
    yield write_named_event({"type": "message_stop"})


def write_error(message: str, kind: str) -> dict[str, Any]:
    """Return the body of an error."""
    return {"type": "error", "error": {"type": kind, "message": message}}
