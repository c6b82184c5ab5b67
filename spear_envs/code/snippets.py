"""From the code that a policy wrote to the program that a sandbox runs: fences off, prelude in front."""

from __future__ import annotations

import re
from enum import Enum

FILE_NAME = "/tmp/main.py"
"""What tracebacks call the policy's code."""

OPENING = r"^(?:<action>)?```(?i:python3?|py3?)[ \t]*\r?\n"
"""Regular expression (multi-line) of the line that opens a Python fence."""
_OPENING = re.compile(OPENING, re.MULTILINE)
_CLOSING = re.compile(r"^```[ \t]*(?:</action>[ \t]*)?\r?$", re.MULTILINE)
_INFO = re.compile(r"```[\w.+#-]*[ \t]*\r?")


class Prelude(str, Enum):
    """What precedes the policy's code."""

    RETOOL = "retool"
    """The imports of ReTool and SPEAR: much of the standard library, with and without modules' names, and NumPy."""
    NONE = "none"
    """Nothing."""


def find_fence(text: str, start: int = 0) -> tuple[int, int, int] | None:
    """The first fence that a line opens as ```` ```python ```` or ```` ```py ```` and that another line closes.

    Backticks within a line, such as those of a string literal, open and close nothing.

    Returns:
        Where the code begins, where it ends, and where what is behind the fence begins. A fence that is never closed
        has -1 for the last two; None if no line opens one.
    """
    opening = _OPENING.search(text, start)
    if opening is None:
        return None
    closing = _CLOSING.search(text, opening.end())
    if closing is None:
        return opening.end(), -1, -1
    return opening.end(), closing.start(), closing.end()


def strip_fences(code: str) -> str:
    """The content of the first Python fence, or of a fence around all of it; else the code as it is.

    A fence that is never closed reaches to the end.
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

# The policy's code is compiled by itself, so that the lines of a traceback are its own, and what a traceback shows of
# them is looked up by name. For some errors of syntax the compiler reads the file of that name, which may be this
# program. The driver prints the traceback, since a frame of its own would stand there otherwise.
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
    """What the sandbox is given for the policy's code, fences off already.

    With a prelude it is a program of ASCII letters that executes the prelude, and then the code with the prelude's
    names. Lines are counted from the first of the code. NumPy is imported where the code says ``np`` or ``numpy`` and
    the sandbox has it.
    """
    if prelude is Prelude.NONE:
        return code
    imports = _IMPORTS + _IMPORT_NUMPY if _NUMPY.search(code) else _IMPORTS
    return f"{_DRIVER}run({code!a}, {imports!a}, {FILE_NAME!r})\n"
