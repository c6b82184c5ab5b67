"""``spear sandbox`` and ``spear-sandbox``: the service, a check-up of this machine, and single files."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from spear_sandbox.console import Number, echo, take_address, take_options, warn_of_open_address
from spear_sandbox.installation import LANGUAGES, PACKAGES, find_installation
from spear_sandbox.options import take_values
from spear_sandbox.pool.admission import ServiceSettings
from spear_sandbox.pool.cgroups import Groups, choose_places, find_memory_limit
from spear_sandbox.pool.local import EXIT_CODE, IsolationRefusedError, LocalExecutor, examine
from spear_sandbox.protocol import Executor, Isolation, Limits, Outcome, RunStatus, SandboxFault
from spear_sandbox.service.wire import TOKEN_VARIABLE
from spear_sandbox.web.listening import bind_socket, is_loopback, read_token, write_url

if TYPE_CHECKING:
    from spear_sandbox.selftest import Probe


TIMED_OUT = 124
"""Exit code of a run that took too long, as of the command ``timeout``."""
FAULT = 70
"""Exit code of a run that was not carried out: EX_SOFTWARE of sysexits.h."""
DRAIN_S = 30
"""Seconds that runs under way may take after a signal to stop, before they are killed."""
STRONG = [level.value for level in Isolation if not level.weak]
WEAK = [level.value for level in Isolation if level.weak]


def _read_hosts(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> frozenset[str]:
    for value in values:
        if not re.fullmatch(r"[A-Za-z0-9.-]+", value):
            raise click.BadParameter(f"{value!r} is not a name: give, for instance, sandbox.example.org.")
    return frozenset(value.lower().rstrip(".") for value in values)


take_hosts = click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    callback=_read_hosts,
    help="Host name accepted without a token, besides addresses and names without a dot; can be repeated.",
)


class RefusedError(click.ClickException):
    """No isolation holds."""

    exit_code = EXIT_CODE


def _take_isolation(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--allow-weak-isolation",
        "weak",
        type=click.Choice(WEAK),
        help="Where none of these holds, use this one. It does not contain hostile code.",
    )(command)
    return click.option(
        "--isolation",
        type=click.Choice(["auto", *STRONG]),
        default="auto",
        help="What runs are isolated with; auto takes the first that holds.",
    )(command)


def _split_packages(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (value or "").split(",") if name.strip())
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.has_location:  # a namespace's packages have separate folders
            raise click.BadParameter(f"{name!r} is not installed here: give import names, such as pandas,matplotlib.")
    return names


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="spear-sandbox", prog_name="spear-sandbox", message="%(prog)s %(version)s")
def sandbox() -> None:
    """Run untrusted Python, isolated from this machine and from other runs."""


@sandbox.command(name="serve")
@_take_isolation
@take_address(8080)
@take_hosts
@click.option(
    "--max-running", type=click.IntRange(1), help="Runs at a time; by default 2 for each core, if memory allows."
)
@click.option(
    "--memory-mb",
    type=click.IntRange(16),
    default=1024,
    help="MiB of one process; a whole run may hold 1.5 times as much. Requests may ask for less.",
)
@take_options(ServiceSettings)
@click.option("--zygotes", type=click.IntRange(1), help="Warm interpreters of each kind; by default 1 for 4 cores.")
@click.option(
    "--packages",
    callback=_split_packages,
    help="Import names, separated by commas, of packages for programs, besides numpy, scipy and sympy.",
)
@click.option("--self-test-only", is_flag=True, help="Test the isolation and end: code 0 if it holds, 78 if not.")
def serve_runs(
    isolation: str,
    weak: str | None,
    host: str,
    port: int,
    hosts: frozenset[str],
    max_running: int | None,
    memory_mb: int,
    zygotes: int | None,
    packages: tuple[str, ...],
    self_test_only: bool,
    **options: Any,
) -> None:
    """Serve POST /run_code in SandboxFusion's form.

    Before it listens it tests the isolation from inside a run, and ends with code 78 if it does not hold. It listens on
    this machine only, unless --host says otherwise. If SPEAR_SANDBOX_TOKEN is set, requests must carry it as a bearer
    token.

    \b
      spear sandbox serve --port 8080 --max-running 4
    """
    values = take_values(ServiceSettings, options)
    limits = Limits(wall_s=values["max_run_s"], memory_mb=memory_mb)
    if max_running is not None and (held := find_memory_limit()) is not None:
        fitting = choose_places(max_running, limits, held)
        if fitting < max_running:
            _warn(f"{max_running} runs may need more than this container has ({held >> 20} MiB); {fitting} always fit.")
    token = read_token(TOKEN_VARIABLE)
    if not self_test_only:
        # A package that they miss is named before the self-test.
        import spear_sandbox.service.server
        import spear_sandbox.web.serving  # noqa: F401

    async def work() -> None:
        installation = find_installation((*PACKAGES, *packages))
        make = partial(
            LocalExecutor, limits=limits, max_running=max_running, zygotes=zygotes, installation=installation
        )
        executor = await _start(make, isolation, weak)
        try:
            if self_test_only:
                echo(f"the isolation {executor.health().level.value!r} holds.")
                return
            settings = ServiceSettings(
                executor.max_running, limits=limits, token=token, local=is_loopback(host), hosts=hosts, **values
            )
            await _answer(executor, settings, host, port)
        finally:
            await executor.close()

    asyncio.run(work())


async def _answer(executor: LocalExecutor, settings: ServiceSettings, host: str, port: int) -> None:
    from spear_sandbox.service.server import RunService, make_app
    from spear_sandbox.web.serving import make_server, return_large_blocks, stop_on_signals

    listener = bind_socket(host, port)
    url = write_url(host, listener.getsockname()[1])
    warn_of_open_address(url, host, settings.token, allows="run code", variable=TOKEN_VARIABLE)
    level = executor.health().level.value
    echo(f"ready: isolation {level}, {settings.max_running} runs at a time, at {url}/run_code")
    return_large_blocks()
    sys.setswitchinterval(0.001)  # the event loop waits this long for the thread that handles large answers
    service = RunService(executor, settings)
    server = make_server(make_app(lambda: service), drain_s=DRAIN_S, lifespan="off", ws="none")
    with listener, stop_on_signals(server):
        await server.serve(sockets=[listener])


async def _start(make: Callable[[str], LocalExecutor], isolation: str, weak: str | None) -> LocalExecutor:
    """Start an executor; with the weak level if allowed and nothing better holds. Raises RefusedError if none does."""
    for level in (isolation, weak):
        if level is None:
            continue
        executor = make(level)
        try:
            await executor.start()
        except IsolationRefusedError as error:
            await executor.close()
            if weak is None or level == weak:
                raise RefusedError(str(error)) from None
            _warn(f"no strong isolation holds here: {error}")
        except BaseException:
            await executor.close()
            raise
        else:
            if level == weak:
                _warn(f"runs are isolated by {weak!r} only, which does not contain hostile code.")
            return executor
    raise AssertionError("unreachable: the last level is returned or refused")


def _warn(text: str) -> None:
    echo(f"Warning: {text}", err=True)


@sandbox.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(as_json: bool) -> None:
    """Test each level of isolation on this machine.

    The table says which levels hold and what to do about the others. Weak levels promise less and are tested for
    that. Exit code 78 if no strong level holds.

    \b
      spear sandbox doctor
    """
    found = {level: asyncio.run(examine(level)) for level in Isolation}
    groups = Groups.find()
    if groups is not None:
        groups.close()
    strong = any(all(probe.ok for probe in probes) for level, probes in found.items() if not level.weak)
    if as_json:
        levels = {level.value: [asdict(probe) for probe in probes] for level, probes in found.items()}
        about = {"version": version("spear-sandbox"), "kernel": platform.release(), "python": sys.executable}
        tools = {language.name: language.find() for language in LANGUAGES}
        echo(
            json.dumps(
                {"ok": strong, **about, "levels": levels, "languages": tools, "control_groups": groups is not None}
            )
        )
    else:
        _show_levels(found)
        for language in LANGUAGES:
            place = language.find() or f"not installed ({language.tool or language.module})"
            echo(f"language {language.name}: {place}")
        echo(f"memory: {_IN_GROUPS if groups is not None else _WITHOUT_GROUPS}")
    if not strong:
        sys.exit(EXIT_CODE)


_IN_GROUPS = "the kernel limits each run as a whole, in a control group of its own"
_WITHOUT_GROUPS = (
    "no control groups can be made here. The kernel limits each process; all of a run together are checked every 50 ms,"
    " those of a session at rest every 2 s."
)


def _show_levels(found: Mapping[Isolation, Sequence[Probe]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from spear_sandbox.terminal import Console

    table = Table(title="isolation on this machine")
    table.add_column("level")
    table.add_column("strong")
    table.add_column("result")
    table.add_column("probes", overflow="fold")
    for level, probes in found.items():
        failed = [probe for probe in probes if not probe.ok]
        verdict = Text("FAILS", style="bold red") if failed else Text("holds", style="green")
        lines = [f"{len(probes) - len(failed)} of {len(probes)} pass", *(f"{p.name}: {p.detail}" for p in failed)]
        table.add_row(level.value, "no" if level.weak else "yes", verdict, Text("\n".join(lines)))
    Console().print(table)


@sandbox.command(name="run")
@_take_isolation
@click.argument("file", type=click.File("rb"))
@click.option("--url", help="Run on this service instead of on this machine.")
@click.option("--timeout", type=Number(0, 86_400, min_open=True), default=30.0, help="Seconds of wall time.")
@click.option("--memory-mb", type=click.IntRange(16), default=1024, help="MiB of one process.")
@click.option("--stdin", "stdin", type=click.File("rb"), help="File with the program's input; - for standard input.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def run_file(
    isolation: str,
    weak: str | None,
    file: BinaryIO,
    url: str | None,
    timeout: float,
    memory_mb: int,
    stdin: BinaryIO | None,
    as_json: bool,
) -> None:
    """Run the program FILE (- for standard input) in a sandbox.

    The exit code is the program's; 128 + n if signal n ended it, 124 if its time was up, 70 if the sandbox failed, 78
    if no isolation holds.

    \b
      spear sandbox run solution.py --timeout 10 --memory-mb 256
    """
    code = _read_text(file)
    given = None if stdin is None else _read_text(stdin)
    limits = Limits(wall_s=timeout, memory_mb=memory_mb)

    async def work() -> Outcome:
        executor: Executor
        if url is None:
            executor = await _start(partial(LocalExecutor, limits=limits, zygotes=1), isolation, weak)
        else:
            from spear_sandbox.client import HttpExecutor

            executor = HttpExecutor(url)
        try:
            return await executor.run(code, stdin=given, limits=limits)
        finally:
            await executor.close()

    try:
        outcome = asyncio.run(work())
    except SandboxFault as fault:
        echo(f"Error: {fault}", err=True)
        sys.exit(FAULT)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        names = ("status", "return_code", "stdout", "stderr", "reason", "truncated", "wall_s", "cpu_s", "peak_rss_kb")
        found = {name: getattr(outcome, name) for name in (*names, "level")}
        echo(json.dumps({name: each.value if isinstance(each, Enum) else each for name, each in found.items()}))
    else:
        _print_outcome(outcome, timeout)
    sys.exit(_choose_code(outcome))


@sandbox.command(name="mcp")
@_take_isolation
@click.option("--url", help="Run on this service instead of on this machine.")
@click.option("--http", is_flag=True, help="Listen at --host and --port, path /mcp, instead of stdin and stdout.")
@take_address(8082)
@take_hosts
@click.option("--memory-mb", type=click.IntRange(16), default=1024, help="MiB of one process.")
@click.option("--max-sessions", type=click.IntRange(1), default=16, help="Sessions that may be open.")
def serve_mcp(
    isolation: str,
    weak: str | None,
    url: str | None,
    http: bool,
    host: str,
    port: int,
    hosts: frozenset[str],
    memory_mb: int,
    max_sessions: int,
) -> None:
    """Offer runs, sessions and their files as tools of MCP.

    Over stdin and stdout, or over HTTP, where clients must send SPEAR_SANDBOX_TOKEN if it is set. Needs the extra
    'mcp'.

    \b
    Example, for a client that starts it:
        {"mcpServers": {"sandbox": {"command": "spear-sandbox", "args": ["mcp"]}}}

    \b
      spear sandbox mcp
    """
    from spear_sandbox.service.mcp_server import SessionExecutor, make_mcp_server
    from spear_sandbox.web.answering import serve_http

    limits = Limits(wall_s=300.0, memory_mb=memory_mb)
    executor: SessionExecutor
    if url is None:

        async def find_level() -> str:
            found = await _start(partial(LocalExecutor, limits=limits, zygotes=1), isolation, weak)
            level = found.health().level.value
            await found.close()
            return level

        executor = LocalExecutor(asyncio.run(find_level()), limits=limits)
    else:
        from spear_sandbox.client import HttpExecutor

        executor = HttpExecutor(url)
    server = make_mcp_server(executor, most_sessions=max_sessions, limits=limits)
    if not http:
        server.run("stdio")
        return
    token = read_token(TOKEN_VARIABLE)
    listener = bind_socket(host, port)
    address = write_url(host, listener.getsockname()[1])
    warn_of_open_address(address, host, token, allows="run code", variable=TOKEN_VARIABLE)
    echo(f"ready: tools at {address}/mcp")
    serve_http(server, listener, host=host, token=token, names=hosts)


def _read_text(file: BinaryIO) -> str:
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:  # neither a request nor an executor can carry them
        raise click.UsageError(f"{file.name} is not UTF-8 ({error}).") from None


def _print_outcome(outcome: Outcome, timeout: float) -> None:
    echo(outcome.stdout.encode("utf-8", "replace"), nl=False)
    echo(outcome.stderr.encode("utf-8", "replace"), nl=False, err=True)
    if outcome.status is RunStatus.TIME_LIMIT:
        _warn(f"killed after {timeout:g} s; --timeout gives more.")
    elif outcome.truncated:
        _warn("the output is cut; the program printed more.")


def _choose_code(outcome: Outcome) -> int:
    if outcome.status is RunStatus.TIME_LIMIT or outcome.return_code is None:
        return TIMED_OUT
    return outcome.return_code if outcome.return_code >= 0 else 128 - outcome.return_code
