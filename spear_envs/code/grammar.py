"""Parsing responses of the code environment, in time linear in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.parsing import ParsedResponse, ResponseFormat, cut_native_thought, split_elements

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


TOOL_NAME = "code_interpreter"
"""The one tool."""

_OPENINGS = re.compile(rf"<tool_call>|<code>|{OPENING}", re.MULTILINE)
_FENCE = ("```python\n", "\n```")
_ENCODINGS = 2
"""Most times that arguments may be encoded as JSON within JSON."""


class ResponseKind(str, Enum):
    """What a response is."""

    CALL = "call"
    """Code to run."""
    ANSWER = "answer"
    """A box and no call: ends the episode."""
    NO_ANSWER = "no_answer"
    """Neither: also ends the episode."""
    BAD_CALL = "bad_call"
    """A call that cannot be read: answered with an error."""


class Parsed(NamedTuple):
    """What was found in a response."""

    kind: ResponseKind
    content: str
    """Code verbatim, or the content of the box; else empty."""
    format_ok: bool
    """Whether it is a call with nothing after it, or an answer in a box, and thoughts are closed."""
    problem: str = ""
    """The fault, as a clause; empty if there is a call or an answer."""
    think: str = ""
    """The first thought, stripped."""


class _BadCallError(Exception):
    """A call that cannot be read; the message is a clause."""


def parse_response(text: str) -> Parsed:
    """Read a response; never raises, and takes time linear in its length.

    Thoughts (``<think>…</think>``, also from the beginning to an unopened ``</think>``, and from an unclosed
    ``<think>`` to the end) are left out. A call is a JSON object between ``<tool_call>`` and
    ``</tool_call>``, code between ``<code>`` and ``</code>``, or a fence that a line opens as Python; the first valid
    one counts. A response without any call, valid or not, is the final answer.
    """
    rest, thoughts, closed = remove_thoughts(text)
    think = thoughts[0].strip() if thoughts else ""
    problem = ""
    for end, found in _find_calls(rest):
        if isinstance(found, _BadCallError):
            problem = problem or str(found)
            continue
        single = not problem and rest[end:].strip() in ("", "</action>")
        return Parsed(ResponseKind.CALL, found, closed and single, "", think)
    if problem:
        return Parsed(ResponseKind.BAD_CALL, "", False, problem, think)
    box = find_last_box(rest)
    if box is not None and box.strip():
        return Parsed(ResponseKind.ANSWER, box.strip(), closed, "", think)
    return Parsed(ResponseKind.NO_ANSWER, "", False, _explain_lack(text, closed), think)


def remove_thoughts(text: str) -> tuple[str, list[str], bool]:
    """Split a text into the rest and its thoughts; also return whether each thought was closed."""
    native, rest = cut_native_thought(text)
    kept, thoughts, closed = split_elements(rest, "think")
    return "".join(kept), thoughts if native is None else [native, *thoughts], closed


def _find_calls(text: str) -> Iterator[tuple[int, str | _BadCallError]]:
    """Yield end, and code or error, of each call in order, without nested ones."""
    unclosed: set[str] = set()
    position = 0
    while (opening := _OPENINGS.search(text, position)) is not None:
        name = opening[0] if opening[0].startswith(("<t", "<c")) else "```"
        end = -1
        if name not in unclosed:  # without a closing tag after one, there is none after a later one
            inside, closing, end = _find_end(text, opening, name)
        if end < 0:
            if name not in unclosed:
                unclosed.add(name)
                shown = "fence" if name == "```" else name
                yield len(text), _BadCallError(f"the {shown} is never closed by {_closing(name)}")
            position = opening.end()
            continue
        content = text[inside:closing]
        try:
            yield end, _read_json(content) if name == "<tool_call>" else content.strip("\r\n")
        except _BadCallError as error:
            yield end, error
        position = end


def _closing(name: str) -> str:
    return "```" if name == "```" else f"</{name[1:]}"


def _find_end(text: str, opening: re.Match[str], name: str) -> tuple[int, int, int]:
    """Start and end of an element's content, and end of the element; -1 if it is not closed."""
    if name == "```":
        return find_fence(text, opening.start()) or (-1, -1, -1)
    tag = _closing(name)
    closing = text.find(tag, opening.end())
    return opening.end(), closing, closing + len(tag) if closing >= 0 else -1


def _read_json(text: str) -> str:
    """Read the code of a call in JSON.

    Raises:
        _BadCallError: the text is not such a call.
    """
    call = _load_json(text, "the tool call")
    if not isinstance(call, dict):
        raise _BadCallError("the tool call is not a JSON object")
    name = call.get("name")
    if name != TOOL_NAME:
        shown = repr(name)[:80] if isinstance(name, str) else "without a name"
        raise _BadCallError(f"there is no tool {shown}; the only one is {TOOL_NAME!r}")
    arguments = call.get("arguments")
    for _ in range(_ENCODINGS):
        if isinstance(arguments, str):
            arguments = _load_json(arguments, "what is in 'arguments'") if arguments.strip() else None
    if arguments is None:
        return ""
    if not isinstance(arguments, dict):
        raise _BadCallError("'arguments' is not a JSON object")
    code = arguments.get("code")
    if code is not None and not isinstance(code, str):
        raise _BadCallError("'code' is not a string")
    return code or ""


def _load_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number too long, or too many brackets
        reason = str(error).partition(";")[0][:120]
    raise _BadCallError(f"{what} is not valid JSON ({reason})")


def _explain_lack(text: str, closed: bool) -> str:
    if not text.strip():
        return "it is empty"
    if not closed:
        return "<think> is never closed by </think>"
    return "it holds neither a tool call nor an answer in \\boxed{}"


def write_call(code: str) -> str:
    """Write a call in plain form: the code in a fence."""
    return f"{_FENCE[0]}{code}{_FENCE[1]}"


def write_answer(answer: str) -> str:
    """Write an answer in plain form: its box."""
    return f"\\boxed{{{answer}}}"


def read_call(action: str) -> str | None:
    """Read the code of a call in plain form; None for an answer."""
    if action.startswith(_FENCE[0]) and action.endswith(_FENCE[1]):
        return action[len(_FENCE[0]) : -len(_FENCE[1])]
    return None


@dataclass(frozen=True)
class CodeParser:
    """The grammar of the code environment as a :class:`~spear_envs.core.parsing.ResponseParser`.

    In plain form an action is the code in a fence, or the answer in its box.

    Args:
        response_format: with ``plain`` a text with neither is also an answer, without its box.
    """

    response_format: ResponseFormat = ResponseFormat.TAGS

    @property
    def hint(self) -> str:
        """Return the forms of a call and of an answer."""
        call = json.dumps({"name": TOOL_NAME, "arguments": {"code": "print(6 * 7)"}})
        return f"Call the tool with <tool_call>\n{call}\n</tool_call> or answer with \\boxed{{your answer}}."

    def parse(self, response: str) -> ParsedResponse:
        """Read a response of any length; never raises."""
        parsed = parse_response(response)
        native, rest = cut_native_thought(response, "")  # the prompt asks for no tags around thoughts
        kind = parsed.kind
        if kind is ResponseKind.CALL:
            return ParsedResponse(write_call(parsed.content), parsed.format_ok, "", parsed.think, kind.value, native)
        answer = parsed.content
        if self.response_format is ResponseFormat.PLAIN and kind is ResponseKind.NO_ANSWER and rest.strip():
            kind, answer = ResponseKind.ANSWER, rest.strip()
        if kind is ResponseKind.ANSWER:
            plain = self.response_format is ResponseFormat.PLAIN
            return ParsedResponse(write_answer(answer), parsed.format_ok or plain, "", parsed.think, kind.value, native)
        return ParsedResponse(None, False, parsed.problem, parsed.think, kind.value, native)

    def respond(self, action: str, think: str = "") -> str:
        """Write a call as in Qwen's chat templates, or the action itself, after the thoughts, if any."""
        if self.response_format is ResponseFormat.PLAIN:
            return action
        code = read_call(action)
        if code is not None:
            call = json.dumps({"name": TOOL_NAME, "arguments": {"code": code}}, ensure_ascii=False)
            action = f"<tool_call>\n{call}\n</tool_call>"
        return f"<think>\n{think}\n</think>\n\n{action}" if think else action


_BOX = "\\boxed{"
_BRACES = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|([+-]?(?:[0-9]+(?:,[0-9]{3})*)?(?:\.[0-9]+)?(?:/[0-9]+)?)(?<=[0-9])"
    r"(?![\w!*/]|[.,][0-9]|\^(?!\{?\\circ)|\\(?:[dt]?frac|sqrt|pi|cdot|times)(?![a-z])))|[{}]"
)


def find_last_box(text: str) -> str | None:
    r"""Return the content of the closed box that begins last, the innermost of nested ones; None if there is none.

    A box is ``\boxed{…}`` or ``\fbox{…}``, also with blanks before its brace, or ``\boxed`` before a bare number
    that ends there. Takes time linear in the text.
    """
    opened: list[int] = []
    best = (-1, -1)
    for brace in _BRACES.finditer(text):
        if brace[1]:
            best = max(best, brace.span(1))
        elif brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else -1)
        elif opened:
            begin = opened.pop()
            if begin > best[0]:
                best = begin, brace.start()
    return text[best[0] : best[1]] if best[0] >= 0 else None


def read_last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{``, as the authors read it; None if that is not closed."""
    begin = text.rfind(_BOX)
    if begin < 0:
        return None
    begin += len(_BOX)
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()]
    return None
