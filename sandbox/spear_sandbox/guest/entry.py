"""The frame below the program's own. It imports nothing of the sandbox, since the program can see it."""

import _signal  # type: ignore[import-not-found]  # signal would be a module that the program has not imported
import gc
import os
import sys
from types import ModuleType

_INTERRUPTED = -_signal.SIGINT


def execute(source: str, path: str, held: list[ModuleType]) -> None:
    """Run a program as an interpreter does and end the process with its exit code.

    ``held`` has the program's main module, which nothing but it and ``sys.modules`` refers to.
    """
    code = play(source, path, held[0].__dict__)
    for module, finish in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        try:
            if module in sys.modules:
                getattr(sys.modules[module], finish)()
        except BaseException:
            code = code or 1
    # Whatever the program has done to these names.
    for _ in range(2):
        if not (_settle(getattr(sys, "stdout", None)) and _settle(getattr(sys, "stderr", None))):
            code = code or 120
        try:
            _release(held)
        except BaseException:
            continue
    if code == _INTERRUPTED:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _signal.raise_signal(_signal.SIGINT)
        code = 128 - code  # it is blocked
    os._exit(code)


def _release(held: list[ModuleType]) -> None:
    """Let go of what the program made: files write what they hold back, and finalizers run."""
    if held:
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        # Twice, as the interpreter: after the first, files are found before what they write with.
        gc.collect()
        sys.modules.pop("__main__", None)
        held.clear()
        gc.collect()


def play(source: str, path: str, names: dict[str, object]) -> int:
    """Run a program's text and return the exit code that it asks for; that of an interrupted one is negative."""
    try:
        exec(compile(source.removeprefix("\ufeff"), path, "exec", dont_inherit=True), names)
    except SystemExit as end:
        return _report_exit(end.code)
    except BaseException as error:
        return _report_error(error)
    return 0


def _report_exit(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value) & 0xFF if -(1 << 63) <= value < 1 << 63 else 0xFF
    try:
        sys.stdout.flush()
        sys.stderr.write(f"{value}\n")
    except BaseException:
        os.write(2, b"SystemExit\n")
    return 1


def _report_error(error: BaseException) -> int:
    trace = error.__traceback__
    flush(getattr(sys, "stdout", None))
    for hook in (sys.excepthook, sys.__excepthook__):
        try:
            # Without the frame of this module.
            hook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
            break
        except SystemExit as end:
            return _report_exit(end.code)
        except BaseException:
            continue
    else:
        # Memory may be so short that not even a traceback can be made.
        os.write(2, b"MemoryError: the traceback could not be printed\n")
    return _INTERRUPTED if type(error) is KeyboardInterrupt else 1


def _settle(stream: object) -> bool:
    """Flush a stream unless there is none or it is closed; return whether that worked."""
    try:
        if stream is None or stream.closed:  # type: ignore[attr-defined]
            return True
    except BaseException:
        pass
    return flush(stream)


def flush(stream: object) -> bool:
    """Flush a stream; return whether that worked."""
    try:
        stream.flush()  # type: ignore[attr-defined]
    except BaseException:
        return False
    return True
