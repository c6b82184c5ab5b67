"""Reading actions from responses, where WebShop differs from the other environments."""

from __future__ import annotations

from spear_envs.core.parsing import ParsedResponse, PlainParser, find_between_tags

PEER_TAIL = 20
"""Characters that verl-agent plays of a response without action tags."""


class VerbatimParser(PlainParser):
    """The whole text is the action, blanks included: the shop ignores ``" click[x]"``."""

    def parse(self, response: str) -> ParsedResponse:
        """Take the response unchanged; only one that is too long or contains NUL is malformed."""
        parsed = super().parse(response)
        refused = parsed.action is None and response.strip()
        return parsed if refused or parsed.native is not None else ParsedResponse(response, True)


def find_peer_action(response: str) -> str:
    """Return what verl-agent plays for a response, see :func:`~spear_envs.core.parsing.find_between_tags`."""
    return find_between_tags(response, PEER_TAIL)
