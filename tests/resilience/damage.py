"""Files as a stranger, a torn transfer or a bad disk would leave them."""

import json
import os
from typing import Any

from hypothesis import strategies as st

__all__ = ["EXAMPLES", "damaged", "json_values"]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, 1e308, "1e999", "\ud800", "\x00", "../../x", "[" * 2000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


class _Short(bytes):
    """Shows its beginning alone where a failing example is printed."""

    def __repr__(self) -> str:
        return f"{bytes(self[:200])!r}… ({len(self):,} bytes)" if len(self) > 200 else super().__repr__()


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Other bytes than ``content``: a value of its JSON replaced or left out, or bytes cut, changed, put in."""
    return _damaged(content).map(_Short)


@st.composite
def _damaged(draw: st.DrawFn, content: bytes) -> bytes:
    how = draw(st.sampled_from(["value", "value", "value", "missing", "cut", "flip", "insert", "deep", "bytes"]))
    if how in ("value", "missing"):
        lines = content.split(b"\n")
        number = draw(st.integers(0, max(0, len(lines) - 2)))
        for at, text in ((None, content), (number, lines[number])):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            changed = json.dumps(_replace(draw, value, how == "missing")).encode()
            if at is None:
                return changed
            return b"\n".join([*lines[:at], changed, *lines[at + 1 :]])
    if how == "deep":
        return b'{"a":' * 100_000 + b"\n"
    if how == "bytes":
        return draw(st.binary(max_size=64))
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    return content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]


def _replace(draw: st.DrawFn, value: Any, leave_out: bool) -> Any:
    """A JSON value with something in it replaced or left out."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)) > 0:
        key = draw(st.sampled_from(sorted(value)))
        if leave_out and draw(st.booleans()):
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _replace(draw, value[key], leave_out)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)) > 0:
        place = draw(st.integers(0, len(value) - 1))
        if leave_out and draw(st.booleans()):
            return [*value[:place], *value[place + 1 :]]
        return [*value[:place], _replace(draw, value[place], leave_out), *value[place + 1 :]]
    return draw(json_values)


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
"""Of each property; a thousand and more find what forty do not."""
