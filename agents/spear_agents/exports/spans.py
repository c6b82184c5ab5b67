"""An evaluation as spans of OpenTelemetry, in OTLP's JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import spear_envs
from spear_agents.exports.recorded import Recorded, Said, mend_text
from spear_agents.trajectory import TokenKind, Trajectory

NOMINAL_NS = 1_000_000
"""Nominal duration of a turn or a step: records do not hold times."""
INTERNAL, CLIENT = 1, 3
"""``Span.SpanKind`` of opentelemetry-proto."""


def make_spans(recorded: Recorded, end_ns: int) -> dict[str, Any]:
    """An ``ExportTraceServiceRequest`` with one trace for each episode.

    The root span is the episode (``invoke_agent``), below it each response (``chat``) and each step of the environment
    (``execute_tool``), in order, named and described by OpenTelemetry's conventions for generative AI. Records do not
    hold times: a turn and a step take a millisecond each, and all episodes end at ``end_ns`` (nanoseconds since 1970;
    ``spear.times`` says so). Ids are derived from the record, so exporting twice gives the same spans.
    """
    spans: list[dict[str, Any]] = []
    for episode in recorded.episodes:
        said = recorded.tell(episode)
        if said is not None:
            spans += _make_trace(
                episode, str(recorded.settings.get("model") or recorded.settings["engine"]), said, end_ns
            )
    resource = {"service.name": "spear", "service.version": spear_envs.__version__}
    scope = {"name": "spear_agents", "version": spear_envs.__version__}
    resources = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
    return {"resourceSpans": [resources]}


def _make_trace(episode: Trajectory, model: str, said: list[Said], end_ns: int) -> list[dict[str, Any]]:
    """The spans of one episode: root, turns and steps."""
    key = f"{episode.fingerprint} {model} {episode.task_id} {episode.seed}"

    def make_span(part: str, name: str, kind: int, start: int, end: int, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "traceId": hashlib.sha256(key.encode()).hexdigest()[:32],
            "spanId": hashlib.sha256(f"{key} {part}".encode()).hexdigest()[:16],
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(end),
            "attributes": _attributes(given),
        }

    steps: dict[int, list[str]] = {}
    for place, response in episode.list_steps():
        steps.setdefault(place, []).append(response)
    parts: list[tuple[str, int, dict[str, Any]]] = []
    for place in range(-1, len(episode.turns)):
        if place >= 0:
            parts.append((f"chat {model}", CLIENT, _describe_turn(episode, model, place, said[place])))
        for response in steps.get(place, ()):
            given = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": episode.env_id,
                "gen_ai.tool.call.arguments": response,
                "spear.turn": place,
            }
            parts.append((f"execute_tool {episode.env_id}", INTERNAL, given))
    start = end_ns - NOMINAL_NS * max(1, len(parts))
    root = make_span("root", f"invoke_agent {model}", INTERNAL, start, end_ns, _describe_episode(episode, model))
    root["events"] = [
        {
            "timeUnixNano": str(end_ns),
            "name": "gen_ai.evaluation.result",
            "attributes": _attributes(
                {
                    "gen_ai.evaluation.name": name,
                    "gen_ai.evaluation.score.value": float(value),
                    "gen_ai.evaluation.score.label": label,
                }
            ),
        }
        for name, value, label in (
            ("success", episode.won, "won" if episode.won else "lost"),
            ("score", episode.score, episode.stop.value),
        )
    ]
    spans = [root]
    for number, (name, kind, attributes) in enumerate(parts):
        begin = start + number * NOMINAL_NS
        span = make_span(str(number), name, kind, begin, begin + NOMINAL_NS, attributes)
        spans.append(span | {"parentSpanId": root["spanId"]})
    return spans


def _describe_episode(episode: Trajectory, model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "spear",
        "gen_ai.request.model": model,
        "gen_ai.request.seed": episode.seed,
        "gen_ai.conversation.id": f"{episode.task_id}#{episode.seed}",
        "spear.env_id": episode.env_id,
        "spear.task_id": episode.task_id,
        "spear.subtask": episode.subtask,
        "spear.fingerprint": episode.fingerprint,
        "spear.reward": float(episode.reward),
        "spear.times": "nominal",
    }


def _describe_turn(episode: Trajectory, model: str, place: int, said: Said) -> dict[str, Any]:
    turn = episode.turns[place]
    is_text = isinstance(said.prompt, str)
    messages: Any = [{"role": "user", "content": said.prompt}] if is_text else said.prompt
    counts: dict[str, Any] = {}
    if turn.served is not None:
        counts = {"input": turn.served.prompt_tokens, "output": turn.served.completion_tokens}
    elif episode.tokens is TokenKind.MODEL:
        counts = {"output": len(turn.response_ids)}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "spear",
        "gen_ai.request.model": model,
        "gen_ai.response.finish_reasons": [turn.finish.value],
        **{f"gen_ai.usage.{kind}_tokens": count for kind, count in counts.items() if count is not None},
        "gen_ai.input.messages": json.dumps([_write_message(**message) for message in messages]),
        "gen_ai.output.messages": json.dumps(
            [{**_write_message("assistant", said.response), "finish_reason": turn.finish.value}]
        ),
        "spear.turn": place,
        **({"spear.follows": turn.follows} if turn.follows is not None else {}),
        "spear.action": turn.action,
        "spear.format_ok": turn.format_ok,
        "spear.action_ok": turn.action_ok,
        "spear.reward": float(turn.reward),
    }


def _write_message(role: str, content: str) -> dict[str, Any]:
    """A message in the form of the conventions for generative AI."""
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OTLP's ``KeyValue`` list."""
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits: a string in JSON
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": mend_text(str(value))}
