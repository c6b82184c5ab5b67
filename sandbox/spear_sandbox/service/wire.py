"""Both ends of SandboxFusion's ``/run_code`` on the wire."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spear_sandbox.protocol import FaultKind, Isolation, KillReason, Outcome, RunStatus, SandboxFault

TOKEN_VARIABLE = "SPEAR_SANDBOX_TOKEN"
"""Environment variable with the bearer token, for the service and its clients."""
ISOLATION_HEADER = "X-Sandbox-Isolation"
LANGUAGE = "python"
DEFAULT_TIMEOUT_S = 10.0
MAX_FILES = 256
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
SHOWN_CHARACTERS = 60
_PIECE = 1 << 18
"""Characters that are encoded at once, so that a thread with a long text lets others run."""


class BadRequestError(ValueError):
    """The body is not a request; the message is for the sender."""


class BadReplyError(Exception):
    """The body is not an answer; the message says why."""


@dataclass(frozen=True)
class RunRequest:
    """The parsed body of ``POST /run_code``; times in seconds."""

    code: str
    language: str = LANGUAGE
    run_timeout: float = DEFAULT_TIMEOUT_S
    compile_timeout: float = DEFAULT_TIMEOUT_S
    memory_mb: int | None = None
    """MiB; None for the server's limit."""
    stdin: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    """Further arguments for pytest."""


def read_request(body: bytes) -> RunRequest:
    """Read a request. Unknown fields are ignored, as by SandboxFusion. Raises BadRequestError if it is malformed."""
    try:
        content = json.loads(body)
    except RecursionError:
        raise BadRequestError("the body is nested too deeply: 'code' holds text, 'files' holds base64.") from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON ({error}): send an object in UTF-8.") from None
    if not isinstance(content, dict):
        raise BadRequestError("the body is not a JSON object: send one with the field 'code'.")
    if "code" not in content:
        raise BadRequestError("the field 'code' is missing: it holds the source to run.")
    files = read_files(content.get("files", {}))
    return RunRequest(
        code=_read_text(content, "code"),
        language=_read_text(content, "language") if "language" in content else LANGUAGE,
        run_timeout=_read_seconds(content, "run_timeout", above_zero=True),
        compile_timeout=_read_seconds(content, "compile_timeout", above_zero=False),
        memory_mb=_read_memory(content.get("memory_limit_MB", -1)),
        stdin=None if content.get("stdin") is None else _read_text(content, "stdin"),
        files=files,
        fetch_files=_read_fetch(content.get("fetch_files", [])),
        args=_read_args(content.get("args", [])),
    )


def _read_text(content: dict[str, Any], name: str) -> str:
    value = content[name]
    if not isinstance(value, str):
        raise BadRequestError(f"{name} is {_show(value)}: give a string.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_seconds(content: dict[str, Any], name: str, *, above_zero: bool) -> float:
    value = content.get(name, DEFAULT_TIMEOUT_S)
    too_small = _is_number(value) and (value <= 0 if above_zero else value < 0)
    # An integer may be too large for a float; it is cut to the limit like others.
    if not _is_number(value) or too_small or (isinstance(value, float) and not math.isfinite(value)):
        bound = "above 0" if above_zero else "of at least 0"
        raise BadRequestError(f"{name} is {_show(value)}: give seconds, a number {bound}.")
    return float(min(value, 1e9))


def _read_memory(value: Any) -> int | None:
    broken = isinstance(value, float) and not value.is_integer()
    if not _is_number(value) or broken or (value < 1 and value != -1):
        raise BadRequestError(f"memory_limit_MB is {_show(value)}: give a whole number above 0, or -1 for the default.")
    return None if value == -1 else int(min(value, 10**9))


def read_base64(text: str) -> bytes:
    """Decode base64, which many encoders break into lines. Raises ValueError if it is something else."""
    return base64.b64decode("".join(text.split()), validate=True)


def read_files(value: Any) -> dict[str, bytes]:
    if not isinstance(value, dict):
        raise BadRequestError(f"files is {_show(value)}: give an object of names and base64.")
    files = {}
    for name, content in value.items():
        check_name(name)
        if content is None:
            continue
        if not isinstance(content, str):
            raise BadRequestError(f"the file {_show(name)} is {_show(content)}: give base64 or null.")
        try:
            files[name] = read_base64(content)
        except ValueError:
            raise BadRequestError(f"the content of the file {_show(name)} is not base64.") from None
    if len(files) > MAX_FILES:
        raise BadRequestError(f"there are {len(files)} files: send at most {MAX_FILES}.")
    check_folders(files)
    return files


def _read_fetch(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadRequestError(f"fetch_files is {_show(value)}: give a list of file names.")
    if len(value) > MAX_FILES:
        raise BadRequestError(f"fetch_files has {len(value)} names: ask for at most {MAX_FILES}.")
    for name in value:
        check_name(name)
    return tuple(dict.fromkeys(value))


def _read_args(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and "\0" not in text for text in value):
        raise BadRequestError(f"args is {_show(value)}: give a list of strings without NUL.")
    return tuple(value)


def _split_name(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def check_name(name: str) -> None:
    """Raise BadRequestError for a name that is not of a file below the working directory."""
    parts = _split_name(name)
    if name.startswith("/") or ".." in parts:
        raise BadRequestError(f"the file name {_show(name)} leaves the working directory.")
    too_long = len(_encode(name)) > MAX_PATH_BYTES or any(len(_encode(part)) > MAX_NAME_BYTES for part in parts)
    if not parts or too_long or name.endswith(("/", "/.")) or "\0" in name:
        raise BadRequestError(f"{_show(name)} is not a file name of at most {MAX_NAME_BYTES} bytes without NUL.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadRequestError(f"the file name {_show(name)} holds half a character: give valid Unicode.") from None


def check_folders(names: Collection[str]) -> None:
    """Raise BadRequestError if the name of a file is also a folder of another, ``main.py`` included."""
    folders = {"/".join(parts[:end]) for parts in map(_split_name, names) for end in range(1, len(parts))}
    if "main.py" in folders:
        raise BadRequestError("main.py is the program, not a folder: rename the folder.")
    for name in names:
        if "/".join(_split_name(name)) in folders:
            raise BadRequestError(f"{_show(name)} is a file and a folder at once: rename one of them.")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool):
        shown = str(min(value, 10**SHOWN_CHARACTERS))
    else:
        shown = ascii(value) if isinstance(value, (str, float)) else json.dumps(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"


def write_reply(outcome: Outcome | None, queue_s: float, compiled: Outcome | None = None) -> list[bytes]:
    """Write the reply for a run in pieces; without an outcome compiling failed. ``queue_s``: wait of the request."""
    last = outcome or compiled
    assert last is not None
    return _write(
        "Success" if last.status is RunStatus.FINISHED and last.return_code == 0 else "Failed",
        "",
        None if outcome is None else _describe(outcome),
        {} if outcome is None else _encode_files(outcome.files),
        {
            "level": last.level.value if last.level else None,
            "reason": last.reason.value,
            "cpu_s": last.cpu_s,
            "peak_rss_kb": last.peak_rss_kb,
            "queue_s": queue_s,
            "stdout_bytes": last.stdout_bytes,
            "stderr_bytes": last.stderr_bytes,
            "truncated": last.truncated,
        },
        None if compiled is None else _describe(compiled),
    )


def _encode_files(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode("ascii") for name, content in files.items()}


def _describe(outcome: Outcome) -> dict[str, Any]:
    return {
        "status": outcome.status.value,
        "execution_time": outcome.wall_s,
        "return_code": outcome.return_code if outcome.status is RunStatus.FINISHED else None,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }


def write_error(
    message: str, level: Isolation, queue_s: float = 0.0, kind: FaultKind = FaultKind.UNAVAILABLE
) -> list[bytes]:
    """Write the reply, in pieces, for a run that was not carried out, which is not the fault of its code."""
    run = {"status": "Error", "execution_time": 0.0, "return_code": None, "stdout": "", "stderr": ""}
    counts = {"cpu_s": 0.0, "peak_rss_kb": 0, "queue_s": queue_s, "stdout_bytes": 0, "stderr_bytes": 0}
    block = {"level": level.value, "reason": "not_run", "fault": kind.value, **counts, "truncated": False}
    return _write("SandboxError", message, run, {}, block)


def _write(
    status: str,
    message: str,
    run: dict[str, Any] | None,
    files: dict[str, str],
    block: dict[str, Any],
    compiled: dict[str, Any] | None = None,
) -> list[bytes]:
    content = {
        "status": status,
        "message": message,
        "compile_result": compiled,
        "run_result": run,
        "executor_pod_name": None,
        "files": files,
        "sandbox": block,
    }
    # In ASCII, so that lone surrogates cannot break the answer.
    return dump_json(content) if files else [json.dumps(content, separators=(",", ":")).encode("ascii")]


def dump_json(value: Any) -> list[bytes]:
    """Encode as JSON in pieces, so that a thread with a long text lets others run."""
    pieces = [bytearray()]
    for piece in _dump_pieces(value):
        if len(pieces[-1]) + len(piece) > _PIECE:
            pieces.append(bytearray())
        pieces[-1] += piece
    return [bytes(piece) for piece in pieces]


def _dump_pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for number, (name, part) in enumerate(value.items()):
            yield (b"," if number else b"{") + json.dumps(name).encode("ascii") + b":"
            yield from _dump_pieces(part)
        yield b"}" if value else b"{}"
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield b"," if number else b"["
            yield from _dump_pieces(part)
        yield b"]" if value else b"[]"
    elif isinstance(value, str) and len(value) > _PIECE:
        yield b'"'
        for start in range(0, len(value), _PIECE):
            yield json.dumps(value[start : start + _PIECE])[1:-1].encode("ascii")
        yield b'"'
    else:
        yield json.dumps(value).encode("ascii")


def write_request(asked: RunRequest) -> bytes:
    """Write the body of a request."""
    content = {
        "code": asked.code,
        "language": asked.language,
        "run_timeout": asked.run_timeout,
        "compile_timeout": asked.compile_timeout,
        "memory_limit_MB": -1 if asked.memory_mb is None else asked.memory_mb,
        "stdin": asked.stdin,
        "files": _encode_files(asked.files),
        "fetch_files": list(asked.fetch_files),
    }
    return json.dumps(content).encode("ascii")


def read_reply(body: bytes) -> Outcome:
    """Read an answer of our service, or of SandboxFusion, which has no block ``sandbox``.

    Raises SandboxFault if the run was not carried out, BadReplyError if the body is not an answer.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(f"the answer is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadReplyError("the answer is not a JSON object")
    run = content.get("run_result")
    status = content.get("status")
    if status == "SandboxError":
        raise _make_fault(content.get("message"), content.get("sandbox"))
    if status not in ("Success", "Failed") or not isinstance(run, dict):
        raise BadReplyError(f"the answer has the status {_show(status)} and run_result {_show(run)}")
    try:
        return _read_outcome(run, content.get("files") or {}, content.get("sandbox") or {})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadReplyError(f"the answer is not of SandboxFusion's form ({type(error).__name__}: {error})") from None


def _read_outcome(run: dict[str, Any], files: dict[str, str], block: dict[str, Any]) -> Outcome:
    status = RunStatus(run["status"])
    if status is RunStatus.ERROR:
        raise _make_fault(run.get("stderr"))
    stdout, stderr = _take(run, "stdout"), _take(run, "stderr")
    code = run.get("return_code")
    if status is RunStatus.FINISHED and (not isinstance(code, int) or isinstance(code, bool)):
        raise ValueError(f"return_code is {_show(code)}")
    late = status is RunStatus.TIME_LIMIT
    level = block.get("level")
    return Outcome(
        status=status,
        return_code=None if late else code,
        stdout=stdout,
        stderr=stderr,
        wall_s=float(run.get("execution_time") or 0.0),
        cpu_s=float(block.get("cpu_s", 0.0)),
        peak_rss_kb=int(block.get("peak_rss_kb", 0)),
        queue_s=float(block.get("queue_s", 0.0)),
        stdout_bytes=int(block.get("stdout_bytes", len(_encode(stdout)))),
        stderr_bytes=int(block.get("stderr_bytes", len(_encode(stderr)))),
        truncated=bool(block.get("truncated", False)),
        level=None if level is None else Isolation(level),
        reason=KillReason(block.get("reason", KillReason.TIMEOUT.value if late else KillReason.NONE.value)),
        files={name: read_base64(content) for name, content in files.items()},
    )


def _take(run: dict[str, Any], name: str) -> str:
    text = run.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {_show(text)}")
    return text


def _make_fault(message: Any, block: Any = None) -> SandboxFault:
    reason = " ".join(str(message or "no reason given").split())[:200]
    is_memory = isinstance(block, dict) and block.get("fault") == FaultKind.MEMORY.value
    return SandboxFault(
        FaultKind.MEMORY if is_memory else FaultKind.UNAVAILABLE, f"the server could not run the code: {reason}"
    )
