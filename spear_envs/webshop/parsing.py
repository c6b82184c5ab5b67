"""Reading actions from responses, where WebShop differs from the other environments."""

from __future__ import annotations

from dataclasses import dataclass

from spear_envs.core.parsing import ParsedResponse, PlainParser

PEER_TAIL = 20
"""Characters that verl-agent plays of a response without action tags."""
_PLAIN = PlainParser()


@dataclass(frozen=True)
class VerbatimParser:
    """The whole text is the action, blanks included: the shop ignores ``" click[x]"``."""

    hint: str = _PLAIN.hint

    def parse(self, response: str) -> ParsedResponse:
        """Take the response unchanged; only one that is too long or contains NUL is malformed."""
        parsed = _PLAIN.parse(response)
        refused = parsed.action is None and response.strip()
        return parsed if refused else ParsedResponse(response, True)

    def respond(self, action: str, think: str = "") -> str:
        """Return the action; this form has no thoughts."""
        return action


def find_peer_action(response: str) -> str:
    """Return the action that verl-agent plays for a response: the text between the first ``<action>`` and the first
    ``</action>``, stripped, or the last 20 characters if a tag is missing, in lower case."""
    lowered = response.lower()
    begin, end = lowered.find("<action>"), lowered.find("</action>")
    if begin < 0 or end < 0:
        return lowered[-PEER_TAIL:]
    return lowered[begin + len("<action>") : end].strip()
