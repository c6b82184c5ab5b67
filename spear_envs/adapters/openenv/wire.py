"""OpenEnv's messages and schemas, read strictly and without its package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from spear_envs.adapters.conversation import Message

TOKEN_VARIABLE = "SPEAR_ENV_TOKEN"
"""Environment variable with the bearer token that clients must send."""
IN_OBSERVATION = frozenset({"instruction", "admissible_actions"})
"""Keys of ``info`` that go into the observation; the others are metadata."""


class ErrorCode(str, Enum):
    """OpenEnv's error codes."""

    INVALID_JSON = "INVALID_JSON"
    """The message is not a JSON object."""
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    """The message is of an unknown type."""
    VALIDATION_ERROR = "VALIDATION_ERROR"
    """The message is incomplete or malformed."""
    EXECUTION_ERROR = "EXECUTION_ERROR"
    """The environment refused or failed; the session continues."""
    CAPACITY_REACHED = "CAPACITY_REACHED"
    """All sessions are taken; the connection ends."""
    FACTORY_ERROR = "FACTORY_ERROR"
    """The environment could not be made."""
    SESSION_ERROR = "SESSION_ERROR"
    """The session ended: it was idle for too long."""


class WireError(Exception):
    """A message that is answered with an error."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Reset:
    """Begin an episode."""

    seed: int | None = None
    episode_id: str | None = None
    """The client's name for the episode."""
    task: str | None = None
    """Task id; without it and ``index`` the seed draws the task."""
    split: str | None = None
    """A split other than the server's."""
    index: int | None = None
    """Position of the task in its split."""


_RESET_ARGUMENTS: Mapping[str, type] = {"seed": int, "episode_id": str, "task": str, "split": str, "index": int}


def read_message(text: str) -> tuple[str, Reset | str]:
    """Read a WebSocket message.

    Returns:
        ``"reset"`` and its arguments, ``"step"`` and the response to play, or ``"state"`` or ``"close"`` and nothing.

    Raises:
        WireError: it does not follow the protocol.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(ErrorCode.INVALID_JSON, f"the message is not JSON ({error}).") from None
    if not isinstance(message, dict):
        raise WireError(ErrorCode.INVALID_JSON, "the message is not a JSON object.")
    kind, data = message.get("type", ""), message.get("data", {})
    if not isinstance(data, dict):
        raise WireError(ErrorCode.VALIDATION_ERROR, f"'data' of a message is an object, not {_name(data)}.")
    if kind == "reset":
        return kind, read_reset(data)
    if kind == "step":
        return kind, _read_response(data)
    if kind in ("state", "close"):
        return kind, ""
    raise WireError(ErrorCode.UNKNOWN_TYPE, f"unknown message {kind!r}: send reset, step, state or close.")


def read_reset(data: Mapping[str, Any]) -> Reset:
    """Read the arguments of a reset; those that only other environments take are refused.

    Raises:
        WireError: an unknown argument, or one of the wrong kind.
    """
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in _RESET_ARGUMENTS:
            known = ", ".join(_RESET_ARGUMENTS)
            raise WireError(ErrorCode.VALIDATION_ERROR, f"unknown argument {name!r} of reset: it takes {known}.")
        wanted = _RESET_ARGUMENTS[name]
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise WireError(ErrorCode.VALIDATION_ERROR, f"{name!r} is {wanted.__name__}, not {_name(value)}.")
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise WireError(ErrorCode.VALIDATION_ERROR, f"{name!r} is a number from 0 to 2^63 - 1.")
        values[name] = value
    reset = Reset(**values)
    if reset.task is not None and reset.index is not None:
        raise WireError(ErrorCode.VALIDATION_ERROR, "reset takes a 'task' or an 'index', not both.")
    return reset


def _read_response(data: Mapping[str, Any]) -> str:
    unknown = sorted(set(data) - {"response", "metadata"})
    response = data.get("response")
    if unknown or not isinstance(response, str):
        what = f"has {unknown[0]!r}" if unknown else f"has {_name(response)} as its response"
        form = '{"response": "what the model wrote"}'
        raise WireError(ErrorCode.VALIDATION_ERROR, f"an action is {form}; this one {what}.")
    return response


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def write_observation(message: Message) -> dict[str, Any]:
    """Write what an environment says in OpenEnv's form: observation, reward, done, metadata."""
    info = message.info
    return {
        "observation": {
            "prompt": message.text,
            "text": message.observation,
            "image": message.encode_image(),
            "instruction": info["instruction"],
            "admissible_actions": info["admissible_actions"],
        },
        "reward": message.reward if info["turn"] else None,
        "done": message.done,
        "metadata": {
            "terminated": message.terminated,
            "truncated": message.truncated,
            **{key: value for key, value in info.items() if key not in IN_OBSERVATION},
        },
    }


def write_error(code: ErrorCode, message: str, **more: Any) -> str:
    """Write the WebSocket message of an error."""
    return write_json({"type": "error", "data": {"message": message, "code": code.value, **more}})


def write_json(value: Any) -> str:
    """Write plain JSON; NumPy values become lists and numbers."""
    return json.dumps(value, default=_make_plain, separators=(",", ":"))


def _make_plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _describe(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": text, **more}


def _or_null(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": kind, **more}, {"type": "null"}], "description": text}


ACTION_SCHEMA: dict[str, Any] = {
    "title": "SpearAction",
    "type": "object",
    "additionalProperties": False,
    "required": ["response"],
    "properties": {
        "response": _describe("string", "One whole response of the model, in the form that the prompt asks for."),
        "metadata": _describe("object", "Not read."),
    },
}
OBSERVATION_SCHEMA: dict[str, Any] = {
    "title": "SpearObservation",
    "type": "object",
    "required": ["prompt", "text", "image", "instruction", "admissible_actions"],
    "properties": {
        "prompt": _describe("string", "The next message for the model."),
        "text": _describe("string", "What the environment shows, without the words around it."),
        "image": _or_null("string", "Its picture: a PNG file.", contentEncoding="base64", contentMediaType="image/png"),
        "instruction": _describe("string", "What is to be done."),
        "admissible_actions": _or_null(
            "array", "Actions that would do something now; null where they cannot be listed.", items={"type": "string"}
        ),
    },
}
STATE_SCHEMA: dict[str, Any] = {
    "title": "SpearState",
    "type": "object",
    "properties": {
        "episode_id": _or_null("string", "What the client called the episode."),
        "step_count": _describe("integer", "Responses so far."),
        "task_id": _or_null("string", "The task being played."),
        "done": _describe("boolean", "Whether the episode has ended, or none has begun."),
    },
}
