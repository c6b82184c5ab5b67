"""The frame below the program's own. It imports nothing of the sandbox, since the program can see it."""

import os
import sys


def execute(source: str, path: str, names: dict[str, object]) -> None:
    """Run a program as an interpreter does and end the process with its exit code."""
    code = play(source, path, names)
    for module, finish in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        try:
            if module in sys.modules:
                getattr(sys.modules[module], finish)()
        except BaseException:
            code = code or 1
    # Whatever the program has done to these names.
    if not (flush(getattr(sys, "stdout", None)) and flush(getattr(sys, "stderr", None))):
        code = code or 120
    os._exit(code)


def play(source: str, path: str, names: dict[str, object]) -> int:
    """Run a program's text and return the exit code that it asks for."""
    try:
        exec(compile(source.removeprefix("\ufeff"), path, "exec", dont_inherit=True), names)
    except SystemExit as end:
        return _report_exit(end.code)
    except BaseException as error:
        _report_error(error)
        return 1
    return 0


def _report_exit(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value) & 0xFF
    try:
        sys.stdout.flush()
        sys.stderr.write(f"{value}\n")
    except BaseException:
        os.write(2, b"SystemExit\n")
    return 1


def _report_error(error: BaseException) -> None:
    trace = error.__traceback__
    flush(getattr(sys, "stdout", None))
    for hook in (sys.excepthook, sys.__excepthook__):
        try:
            # Without the frame of this module.
            hook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
            return
        except BaseException:
            continue
    # Memory may be so short that not even a traceback can be made.
    os.write(2, b"MemoryError: the traceback could not be printed\n")


def flush(stream: object) -> bool:
    """Flush a stream; return whether that worked."""
    try:
        stream.flush()  # type: ignore[attr-defined]
    except BaseException:
        return False
    return True
