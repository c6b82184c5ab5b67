"""What all services share in answering: access checks, bounded bodies, and error pages."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from spear_sandbox.web.listening import LARGE, find_foreign_name, find_stranger, is_loopback
from spear_sandbox.web.serving import make_server, stop_on_signals

if TYPE_CHECKING:
    from mcp.server import MCPServer


GONE = "the sender of the request is gone."
Result = TypeVar("Result")


def refuse(
    headers: Mapping[str, str], *, token: str | None, local: bool, hosts: Collection[str] | None = None
) -> tuple[int, str] | None:
    """Return the status and reason if a request is refused; None if it may come in.

    Refused are requests from pages of other sites, which a browser would let talk to this machine, and those without
    the token.

    Args:
        headers: of the request, in lower case.
        token: bearer token that it must carry; None for no token.
        local: whether the service listens on the loopback interface.
        hosts: names of a service that runs code, see :func:`~spear_sandbox.web.listening.find_foreign_name`; checked
            if there is no token. None for a service that may have any name.
    """
    stranger = find_stranger(headers, local)
    if stranger is None and token is None and hosts is not None:
        stranger = find_foreign_name(headers, hosts)
    if stranger is not None:
        return 403, stranger
    if token is not None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            return 401, "this service needs its token: send the header 'Authorization: Bearer <token>'."
    return None


def check_sender(request: Request, *, token: str | None, local: bool, hosts: Collection[str] | None = None) -> None:
    """Let a request in, as :func:`refuse` decides. Raises HTTPException, status 401 or 403, if it is refused."""
    refused = refuse(request.headers, token=token, local=local, hosts=hosts)
    if refused is not None:
        raise HTTPException(*refused, headers={"WWW-Authenticate": "Bearer"} if refused[0] == 401 else None)


class Gate:
    """Middleware that refuses strangers, see :func:`refuse`; for ASGI applications of others."""

    def __init__(self, app: ASGIApp, *, token: str | None, local: bool, hosts: Collection[str] | None = None) -> None:
        self._app = app
        self._refuse = partial(refuse, token=token, local=local, hosts=hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it in."""
        refused = self._refuse(Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await write_json(refused[0], {"detail": refused[1]})(scope, receive, send)


class BodyRoom:
    """Memory for the bodies of all requests that are being read, each of which may take ``seconds`` to arrive."""

    def __init__(self, total_bytes: int = 256 << 20, seconds: float = 30.0) -> None:
        self.total_bytes = total_bytes
        self.seconds = seconds
        self._used = 0

    async def read(self, request: Request, limit: int, advice: str) -> bytes:
        """Read the body of a request; never more than ``limit`` bytes are kept.

        Raises HTTPException: it is larger, status 413, with ``advice`` on what to do; it did not arrive in time, 408;
        others take all the room, 503; or the sender has gone, 499.
        """
        detail = f"the body has more than {limit} bytes: {advice}."
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise HTTPException(413, detail)
        chunks: list[bytes] = []
        size = 0
        task, is_late = asyncio.current_task(), False

        def stop() -> None:
            nonlocal is_late
            is_late = True
            assert task is not None
            task.cancel()

        # asyncio.wait_for would make a task for each body, which costs as much as reading most of them.
        clock = asyncio.get_running_loop().call_later(self.seconds, stop)
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise HTTPException(413, detail)
                if self._used + len(chunk) > self.total_bytes:
                    busy = "the bodies of other requests take all the room there is: try again in a moment."
                    raise HTTPException(503, busy, headers={"Retry-After": "1", "Connection": "close"})
                self._used += len(chunk)
                chunks.append(chunk)
        except asyncio.CancelledError:
            if not is_late:
                raise
            late = f"the body did not come within {self.seconds:g} s: send it at once."
            raise HTTPException(408, late, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise HTTPException(499, GONE) from None
        finally:
            clock.cancel()
            self._used -= sum(map(len, chunks))
        return b"".join(chunks)


async def work_for(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of ``work``, which is cancelled and awaited if the sender of the request leaves first.

    The request's body has been read. Raises HTTPException, status 499, if the sender is gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_end(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    raise HTTPException(499, GONE)


async def _wait_for_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def write_json(status: int, content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Make a JSON response."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


class _LargeResponse(Response):
    def __init__(self, pieces: Sequence[bytes], *options: Any) -> None:
        super().__init__(b"", *options)
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            for start in range(0, len(piece), LARGE):
                await send({"type": "http.response.body", "body": piece[start : start + LARGE], "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body"})


def write_pieces(
    pieces: Sequence[bytes], media_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Make a response; a large one goes out little by little, so that the event loop never copies much at once."""
    if sum(map(len, pieces)) < LARGE:
        return Response(b"".join(pieces), status, headers, media_type)
    return _LargeResponse(pieces, status, headers, media_type)


class AnyConvertor(PathConvertor):
    """The rest of a path, line breaks included: ``{name:any}``."""

    regex = "(?s:.*)"


register_url_convertor("any", AnyConvertor())


def add_error_pages(app: FastAPI, served: str) -> None:
    """Answer a wrong path (with those ``served``), a wrong method and a bug of the service in one sentence."""

    async def explain_path(request: Request, _: Exception) -> Response:
        return write_json(404, {"detail": f"there is no {request.url.path} here: ask {served}."})

    async def explain_method(request: Request, error: Exception) -> Response:
        headers = dict(getattr(error, "headers", None) or {})
        allowed = headers.get("Allow", "another method")
        detail = f"{request.method} is not answered at {request.url.path}: use {allowed}."
        return write_json(405, {"detail": detail}, headers)

    async def explain_bug(_: Request, error: Exception) -> Response:
        return write_json(500, {"detail": f"the service failed on this request: {type(error).__name__}."})

    app.add_exception_handler(404, explain_path)
    app.add_exception_handler(405, explain_method)
    app.add_exception_handler(500, explain_bug)


DRAIN_S = 10


def serve_http(
    server: MCPServer[Any], listener: socket.socket, *, host: str, token: str | None, names: Collection[str] = ()
) -> None:
    """Serve over streamable HTTP, at ``/mcp``, until SIGINT or SIGTERM; the listener is closed at the end.

    Requests must carry the ``token``, if any. ``names`` are host names accepted without one, besides addresses and
    names without a dot.
    """
    app = Gate(server.streamable_http_app(host=host), token=token, local=is_loopback(host), hosts=names)
    served = make_server(app, drain_s=DRAIN_S, lifespan="on", ws="none")
    with listener, stop_on_signals(served):
        served.run(sockets=[listener])
