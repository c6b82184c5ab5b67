"""Sphinx's roles in docstrings (``:class:`…```), which pdoc and editors know, as links of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["RolesExtension", "link_roles"]

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):`(~?)([\w.]+)`")


class RolesExtension(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object that griffe finds."""
        if obj.docstring is not None:
            obj.docstring.value = link_roles(obj.docstring.value)


def link_roles(text: str) -> str:
    """Each role as a link to the API reference where the name is in it, and as its bare name where it is not."""
    return _ROLE.sub(_link, text)


def _link(found: re.Match[str]) -> str:
    shown = found[2].rpartition(".")[2] if found[1] else found[2]
    return f'<autoref optional identifier="{found[2]}"><code>{shown}</code></autoref>'
