"""From a policy's code to the program for the sandbox: fences removed, prelude prepended."""

from __future__ import annotations

import re
from enum import Enum

FILE_NAME = "/tmp/main.py"
"""Name of the policy's code in tracebacks."""

OPENING = r"^(?:<action>)?```(?i:python3?|py3?)[ \t]*\r?\n"
"""Regular expression (multi-line) of the line that opens a Python fence."""
_OPENING = re.compile(OPENING, re.MULTILINE)
_CLOSING = re.compile(r"^```[ \t]*(?:</action>[ \t]*)?\r?$", re.MULTILINE)
_INFO = re.compile(r"```[\w.+#-]*[ \t]*\r?")


class Prelude(str, Enum):
    """What precedes the policy's code."""

    RETOOL = "retool"
    """The imports of ReTool and SPEAR: much of the standard library, with and without module names, and NumPy."""
    NONE = "none"
    """Nothing."""


def find_fence(text: str, start: int = 0) -> tuple[int, int, int] | None:
    """Find the first fence that a line opens as ```` ```python ```` or ```` ```py ````.

    Backticks within a line, such as in a string literal, do not count.

    Returns:
        Start and end of the code, and end of the fence; the last two are -1 if it is never closed. None without a
        fence.
    """
    opening = _OPENING.search(text, start)
    if opening is None:
        return None
    closing = _CLOSING.search(text, opening.end())
    if closing is None:
        return opening.end(), -1, -1
    return opening.end(), closing.start(), closing.end()


def strip_fences(code: str) -> str:
    """Return the content of the first Python fence, or of a fence around everything; else the code itself.

    An unclosed fence extends to the end.
    """
    if "```" not in code:
        return code
    found = find_fence(code)
    if found is not None:
        begin, end, _ = found
        return code[begin:] if end < 0 else code[begin:end].removesuffix("\n").removesuffix("\r")
    first, _, rest = code.strip().partition("\n")
    if _INFO.fullmatch(first) and (rest == "```" or rest.endswith("\n```")):
        return rest[:-3].removesuffix("\n").removesuffix("\r")
    return code


_STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_MODULES = (
    *("traceback", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
_IMPORTS = "\n".join([*(f"from {name} import *" for name in _STARS), *(f"import {name}" for name in _MODULES)])
_NUMPY = re.compile(r"\b(?:np|numpy)\b")
_IMPORT_NUMPY = "\ntry:\n    import numpy as np\nexcept ImportError:\n    pass"

# The policy's code is compiled separately, so that tracebacks have its line numbers and find its lines by file name.
# For some syntax errors the compiler reads the file of that name, which may be this program. The driver prints the
# traceback, since it would otherwise contain the driver's frame.
_DRIVER = """\
def run(source, prelude, name):
    import linecache, os, sys, traceback, warnings
    space, show, write = sys.modules["__main__"].__dict__, traceback.print_exception, os.write
    del space["run"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(prelude, space)
    lines = [line + "\\n" for line in source.split("\\n")]
    linecache.cache[name] = len(source), None, lines, name
    try:
        exec(compile(source, name, "exec", dont_inherit=True), space)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            if isinstance(error, SyntaxError) and error.filename == name:
                error.text = "".join(lines[error.lineno - 1 : error.lineno])
            show(type(error), error, error.__traceback__.tb_next)
        except BaseException:
            write(2, b"MemoryError: the traceback could not be printed\\n")
        raise SystemExit(1) from None
"""


def make_program(code: str, prelude: Prelude) -> str:
    """Make the program for the policy's code, whose fences are removed.

    With a prelude it is an ASCII program that executes the prelude and then the code with the prelude's names. Lines
    are counted from the first of the code. NumPy is imported if the code mentions ``np`` or ``numpy`` and the sandbox
    has it.
    """
    if prelude is Prelude.NONE:
        return code
    imports = _IMPORTS + _IMPORT_NUMPY if _NUMPY.search(code) else _IMPORTS
    return f"{_DRIVER}run({code!a}, {imports!a}, {FILE_NAME!r})\n"
