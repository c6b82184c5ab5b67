"""The program of a session, which plays cells as a notebook does. It imports nothing of the sandbox.

Requests are JSON after their length, over a socket passed as standard input. Replies are flat lists of named texts
(:func:`pack_reply`), whose size and shape the pool checks before it reads them.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import inspect
import io
import json
import linecache
import os
import signal
import socket
import stat
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

MAX_REPLY = 24 << 20
"""Largest reply in bytes: the pool holds it in memory."""
MAX_PARTS = 16_384
"""Most named texts of a reply."""
MAX_READ = 12 << 20
"""Largest file in bytes that can be read: it must fit into a reply."""
MAX_LISTED = 4096
HEAD = struct.Struct("<III")
"""Before the parts of a reply: number of its question, number of parts, bytes that follow."""
Reply = list[tuple[str, "str | bytes"]]
RICH = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
)


class Interpreter:
    """One namespace, cells that run in it, and what they show."""

    def __init__(self) -> None:
        self.main = types.ModuleType("__main__")
        self.main.__dict__.update(__builtins__=builtins, display=self.display)
        sys.modules["__main__"] = self.main
        self.shown: list[dict[str, str]] = []
        self.count = 0
        self.loop: Any = None
        sys.displayhook = self.show_result

    def run(self, code: str) -> Reply:
        """Run a cell; return what it showed and its error, if any.

        Each thing shown is a part ``shown`` and one for each of its media types; an error is ``ename``, ``evalue``, and
        a ``line`` for each of the traceback.
        """
        self.count += 1
        self.shown = []
        name = f"<cell {self.count}>"
        # Tracebacks show the lines of cells.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        error: Reply = []
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                self.execute(code, name)
                self.take_figures()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as caught:
            error = describe_error(caught)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # where the interruption came just before this
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        shown, self.shown = self.shown, []
        parts: Reply = []
        for forms in shown:
            parts += [("shown", ""), *forms.items()]
        return parts + error

    def execute(self, code: str, name: str) -> None:
        """Execute each statement in turn and show the value of a last expression."""
        # ast.parse would add a frame of its own to the traceback of a SyntaxError.
        tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last: ast.Interactive | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Interactive([tree.body.pop()])
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for part, mode in ((tree, "exec"), (last, "single")):
            if part is None:
                continue
            compiled = compile(part, name, mode, flags, dont_inherit=True)
            result = eval(compiled, self.main.__dict__)
            if compiled.co_flags & inspect.CO_COROUTINE:
                self.await_cell(result)

    def await_cell(self, coroutine: Any) -> None:
        """Run a cell with ``await`` outside of functions; one event loop serves all cells."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(coroutine)

    def show_result(self, value: Any) -> None:
        """Show the value of the last expression of a cell."""
        if value is not None:
            builtins.__dict__["_"] = value
            self.display(value)

    def display(self, *values: Any) -> None:
        """Show values in all forms that they have."""
        for value in values:
            forms = {"text/plain": repr(value)}
            for kind, method in RICH:
                find = None if isinstance(value, type) else getattr(value, method, None)
                if callable(find):
                    try:
                        made = find()
                    except Exception:
                        continue
                    if isinstance(made, bytes):
                        made = base64.b64encode(made).decode()
                    if isinstance(made, str):
                        forms[kind] = made
            self.shown.append(forms)

    def take_figures(self, *_: object, **__: object) -> None:
        """Show the figures of Matplotlib that are open, and close them."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        pyplot.show = self.take_figures
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            picture = io.BytesIO()
            figure.savefig(picture, format="png", bbox_inches="tight")
            self.shown.append({"text/plain": repr(figure), "image/png": base64.b64encode(picture.getvalue()).decode()})
        pyplot.close("all")


def describe_error(error: BaseException) -> Reply:
    """Describe it as a notebook does: kind, message and traceback lines, without frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(type(error), error.with_traceback(trace), trace)
        message = str(error)
    except BaseException:
        lines, message = ["the traceback could not be printed\n"], ""
    return [("ename", type(error).__name__), ("evalue", message), *(("line", line.rstrip("\n")) for line in lines)]


def write_file(name: str, content: str) -> Reply:
    """Write a file below the working folder."""
    if os.path.dirname(name):
        os.makedirs(os.path.dirname(name), exist_ok=True)
    # A pipe would wait for its reader.
    with open(name, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666)) as file:
        file.write(base64.b64decode(content))
    return []


def read_file(name: str) -> Reply:
    """Read a file below the working folder."""
    # A pipe would wait for its writer.
    with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(MAX_READ + 1)
    if len(content) > MAX_READ:
        raise ValueError(f"it has more than {MAX_READ >> 20} MiB")
    return [("content", content)]


def list_files() -> Reply:
    """List files below the working folder: a part ``file`` with size and name for each."""
    found: Reply = []
    for folder, _, names in os.walk("."):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and len(found) < MAX_LISTED:
                found.append(("file", f"{os.path.getsize(path)} {os.path.relpath(path, '.')}"))
    return found


def pack_reply(number: int, parts: Reply) -> bytes:
    """Pack the head, a table with the sizes of each part's name and content, and then all names and contents.

    Raises ValueError if there is too much.
    """
    if len(parts) > MAX_PARTS:
        raise ValueError(f"it showed {len(parts)} things and lines: at most {MAX_PARTS}")
    data = [piece for name, content in parts for piece in (to_bytes(name), to_bytes(content))]
    table = struct.pack(f"<{len(data)}I", *map(len, data))
    body = b"".join((table, *data))
    if len(body) > MAX_REPLY:
        raise ValueError(f"what it showed has {len(body)} bytes: at most {MAX_REPLY}")
    return HEAD.pack(number, len(parts), len(body)) + body


def to_bytes(text: str | bytes) -> bytes:
    """Encode as UTF-8; halves of a character become U+FFFD, or one character if they belong together."""
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def receive(line: socket.socket, size: int) -> bytes:
    """Receive this many bytes; end the process when the other side hangs up."""
    data = b""
    while len(data) < size:
        part = line.recv(min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return data


def serve() -> None:
    """Answer requests until the other side hangs up."""
    line = socket.socket(fileno=os.dup(0))
    # Neither programs nor what they start find the socket.
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    folder = os.getcwd()
    # The empty program that the session was started with is not one of its files.
    if not os.path.getsize(sys.argv[0]):
        os.unlink(sys.argv[0])
    sys.argv = [""]
    interpreter = Interpreter()
    actions: dict[str, Callable[..., Reply]] = {
        "run": interpreter.run,
        "write": write_file,
        "read": read_file,
        "list": list_files,
    }
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        asked = json.loads(receive(line, int.from_bytes(receive(line, 4), "big")))
        try:
            if asked["action"] != "run":
                os.chdir(folder)
            reply = actions[asked["action"]](**asked["arguments"])
        except Exception as error:
            reply = [("failure", f"{type(error).__name__}: {error}")]
        try:
            data = pack_reply(asked["number"], reply)
        except Exception as error:
            data = pack_reply(asked["number"], [("failure", f"{error}"[:1000])])
        line.sendall(data)
        del asked, reply, data


def warm_up() -> None:
    """Do once what every session does, so that sessions share the memory for it."""
    main, hook = sys.modules["__main__"], sys.displayhook
    interpreter = Interpreter()
    for code in ("import math\nmath.pi", "def f(x):\n    return [x, {x: 1}]\nf('a')", "1 / 0"):
        pack_reply(0, interpreter.run(code))
    linecache.cache.clear()
    sys.modules["__main__"], sys.displayhook = main, hook
    del builtins.__dict__["_"]
