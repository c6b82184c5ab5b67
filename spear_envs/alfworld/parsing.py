"""From responses to commands, as far as ALFWorld differs from the other environments."""

from __future__ import annotations

from dataclasses import dataclass

from spear_envs.core.parsing import (
    MAX_RESPONSE_LENGTH,
    ParsedResponse,
    PlainParser,
    TagParser,
    cut_native_thought,
    find_between_tags,
)

PEER_TAIL = 30
"""Characters that verl-agent plays of a response without action tags."""

_OPEN, _CLOSE = "<action>", "</action>"
_STRICT = TagParser()


@dataclass(frozen=True)
class CommandParser:
    """``<think>…</think><action>…</action>``; the command is played in lower case, like all commands.

    Only the strict form earns the format reward. A command between tags is played even if the rest of the form is
    wrong, since its meaning is clear.
    """

    hint: str = _STRICT.hint

    def parse(self, response: str) -> ParsedResponse:
        """Read a response; never raises."""
        parsed = _STRICT.parse(response)
        if parsed.action is not None:
            return parsed._replace(action=parsed.action.lower())
        if not _is_readable(response):
            return parsed
        native, written = cut_native_thought(response)  # an action rehearsed in it is none
        _, opened, rest = written.partition(_OPEN)
        command, closed, _ = rest.partition(_CLOSE)
        command = command.strip().lower()
        if not (opened and closed and command):
            return parsed
        return ParsedResponse(command, False, parsed.problem, native=native)

    def respond(self, action: str, think: str = "") -> str:
        """Thoughts and action between their tags."""
        return _STRICT.respond(action, think)


class VerbatimParser(PlainParser):
    """The text is the command, even if empty: like any unknown command, that does nothing."""

    def parse(self, response: str) -> ParsedResponse:
        """Take the response verbatim; only one that is too long or contains NUL is malformed."""
        if not _is_readable(response):
            return super().parse(response)
        native, rest = cut_native_thought(response, "")
        return ParsedResponse(rest if native is None else rest.strip(), True, "", native or "", native=native)


def find_peer_command(response: str) -> str:
    """What verl-agent plays for a response, see :func:`~spear_envs.core.parsing.find_between_tags`."""
    return find_between_tags(response, PEER_TAIL)


def _is_readable(response: str) -> bool:
    return len(response) <= MAX_RESPONSE_LENGTH and "\0" not in response
