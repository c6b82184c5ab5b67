"""Any server that speaks OpenAI's chat completions: vLLM's ``serve``, llama.cpp, a hosted API.

These servers take and return text, not tokens. The episode's tokenizer is
:class:`~spear_agents.engines.base.ChatByteTokenizer`, from whose ids the messages are recovered, and the record says
so (``Trajectory.tokens``). ``Turn.served`` has the server's data on its own tokens.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from PIL import Image

from spear_agents.engines.base import (
    ChatByteTokenizer,
    ContextExceededError,
    Ending,
    EngineFault,
    EngineFaultKind,
    Finish,
    Generation,
    Sampling,
    Served,
    cut_at_stop,
)
from spear_agents.engines.replies import (
    LIMITS,
    BadReplyError,
    Dialect,
    Prices,
    Refusal,
    RefusedError,
    Reply,
    read_refusal,
    read_reply,
)
from spear_agents.engines.vision import enlarge
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import IMAGE
from spear_envs.core.tools import CallError, Tool, write_call
from spear_sandbox.errors import hide_secret, show_text
from spear_sandbox.options import option
from spear_sandbox.web.endpoints import bound_answers
from spear_sandbox.web.listening import is_loopback

if TYPE_CHECKING:
    import httpx
    import openai

KEY_VARIABLE = "OPENAI_API_KEY"
_SECTION = "Server (--engine openai)"
_OPENAI_HOSTS = ("api.openai.com", ".openai.azure.com", ".cognitiveservices.azure.com")
_log = logging.getLogger(__name__)
_LARGEST_REPLY = 32 * 2**20
_SEED_BITS = 31
_REACH_S = 2.0
_CONNECT_S = 10.0
_PATH = "/chat/completions"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OWN_HEADERS = (
    *("content-type", "content-length", "host", "transfer-encoding", "connection"),
    "x-stainless-retry-count",  # the client counts its tries in it
)
_VERSION = re.compile(r"[A-Za-z0-9.-]+")
_LONGEST_WAIT = 40
"""Characters of a server's Retry-After in a message; a date has 29."""
_LONGEST_NOTE = 500
"""Characters of a call in the record."""
_SHORTEST_SECRET = 8
"""Characters of a header's value that is hidden in messages; a shorter one would hide words."""
_OWN_FIELDS = {
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "seed": "--seed",
    "reasoning_effort": "--reasoning-effort",
    "chat_template_kwargs": "--template-kwarg and --server vllm",
}
"""Fields of a request that have an option."""
_FIXED_FIELDS = ("model", "messages", "n", "stream", "stream_options", "stop", "tools", "tool_choice")
"""Fields that the engine itself depends on."""
_READ = "spear_read"
"""Key under which httpx keeps what was read from a response."""
_ANEW = 16
"""Most times that a request is written anew: there are fewer fields to drop, and the room for a response is halved."""


class ServerKind(str, Enum):
    """Fields that a server supports."""

    COMPATIBLE = "compatible"
    """The common fields: messages, temperature, top_p, max_tokens, seed. Stop strings are applied here."""
    OPENAI = "openai"
    """OpenAI: ``max_completion_tokens`` instead of ``max_tokens``; a temperature and a top_p of 1 are left out, because
    they are its defaults and reasoning models refuse the fields."""
    VLLM = "vllm"
    """vLLM: also top_k, stop strings that stay part of the text, token ids and log-probabilities."""


def _split_url(url: str) -> SplitResult:
    """Return the parts of an address; none of what is not one."""
    try:
        parts = urlsplit(url)
        return parts if parts.port != 0 else urlsplit("")
    except ValueError:  # brackets without an end, or a port that is not a number
        return urlsplit("")


def choose_kind(base_url: str) -> ServerKind:
    """Return the kind of server at an address, as far as the address shows it."""
    host = _split_url(base_url).hostname or ""
    return ServerKind.OPENAI if host.endswith(_OPENAI_HOSTS) else ServerKind.COMPATIBLE


@dataclass(frozen=True)
class Server:
    """Address of a served model, with limits and retries. Raises SpearError for an invalid address or number."""

    base_url: str
    """Address, including ``/v1``, such as ``http://127.0.0.1:8000/v1``; with ``api_version`` that of the resource."""
    model: str
    """Name of the model at the server; with ``api_version`` of the deployment."""
    kind: ServerKind = option(
        ServerKind.COMPATIBLE,
        "Which fields the server understands; default: openai at api.openai.com and Azure, else compatible.",
        flag="server",
        section=_SECTION,
    )
    key_variable: str = option(KEY_VARIABLE, "Variable with the server's key.", section=_SECTION)
    """Environment variable of the key; if it is not set, none is sent."""
    limit: int = option(16, "Requests at a time.", flag="requests", at_least=1, section=_SECTION)
    timeout_s: float = option(
        300.0, "Seconds for one request, including its answer.", flag="request-timeout", above=0, section=_SECTION
    )
    tries: int = option(6, "Tries of one request.", at_least=1, section=_SECTION)
    prices: Prices | None = None
    """Prices of its tokens; None if it is free."""
    sends_seed: bool = True
    """Send the seed of each response."""
    reasoning_effort: str | None = option(
        None, "Effort of a reasoning model, such as low, medium or high.", metavar="EFFORT", section=_SECTION
    )
    api_version: str | None = option(
        None,
        "Version of Azure's API, such as 2024-10-21; --base-url is the resource's, --model the deployment.",
        metavar="VERSION",
        section=_SECTION,
    )
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, as plain values of JSON."""
    tools: bool = option(
        False,
        "Offer the environment's actions as tools, and play the model's calls.",
        flag="native-tools",
        section=_SECTION,
    )
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of each request. Records have only their names."""

    def __post_init__(self) -> None:
        if not self.key_variable.isidentifier():
            raise SpearError(f"--key-variable is the name of a variable, such as {KEY_VARIABLE}, not the key itself")
        parts = _split_url(self.base_url)
        if parts.query or "@" in (parts.netloc or self.base_url):
            raise SpearError(f"the address may not have a user, password or query: set {self.key_variable} for the key")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
            raise SpearError(f"{self.base_url!r} is not an address: give one such as http://127.0.0.1:8000/v1")
        if self.limit < 1 or self.tries < 1 or not self.timeout_s > 0:
            raise SpearError("the server's limit and tries must be at least 1 and its timeout above 0 seconds")
        if self.api_version is not None and not _VERSION.fullmatch(self.api_version):
            raise SpearError(f"--api-version {self.api_version!r} is not a version of Azure's API, such as 2024-10-21")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
                # Of "Authorization: Bearer SECRET=" the name alone may be shown.
                shown = re.split(r"[:\s]", name)[0]
                raise SpearError(f"--header {shown!r} is not the name of a header that can be set: give NAME=VALUE")
            if not (value.isascii() and value.isprintable()):
                raise SpearError(f"the value of --header {name} has characters that are not valid in a header")
        for name in self.extra_body:
            if name in _OWN_FIELDS:
                raise SpearError(f"--extra-body sets {name!r}: give {_OWN_FIELDS[name]} in its place")
            if name in _FIXED_FIELDS:
                raise SpearError(f"--extra-body may not set {name!r}, on which the engine depends")

    @property
    def url(self) -> str:
        """Address of chat completions."""
        base = self.base_url.rstrip("/")
        if self.api_version is None:
            return f"{base}{_PATH}"
        return f"{base}/openai/deployments/{self.model}{_PATH}?api-version={self.api_version}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for records, with the names of the headers alone."""
        return asdict(self) | {"headers": sorted(self.headers)}


def require_reachable(server: Server) -> None:
    """Raise SpearError with the cause if the address cannot be reached."""
    parts = urlsplit(server.base_url)
    host = parts.hostname or ""
    proxies = getproxies()
    if not is_loopback(host) and (proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(host):
        return  # left to the proxy
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError for a host that cannot be a name
        raise SpearError(f"{server.base_url} cannot be reached ({error}): give another --base-url") from None


@dataclass(frozen=True)
class Offer:
    """The tools of an environment, and its form of responses."""

    tools: Callable[[], Sequence[Tool]]
    """Returns the tools of the present task."""
    parser: ResponseParser

    def play(self, reply: Reply) -> Reply:
        """Return the reply as the response that plays its first call, with the text as thoughts.

        A call that cannot be played is a malformed response. The record's note has the call, and what is wrong with it.
        """
        (name, arguments), *others = reply.calls
        note = f"call {name}({arguments})" + (f", and {len(others)} more, not played" if others else "")
        try:
            action = write_call(self.tools(), name, _read_arguments(name, arguments))
        except CallError as error:
            text, note = f"{reply.text}{name}({arguments})", f"{error} {note}"
        else:
            text = self.parser.respond(action, reply.text.replace("<think>", "").replace("</think>", "").strip())
            if self.parser.parse(text).action != action:  # the thoughts hold marks of the form
                text = self.parser.respond(action)
        served = replace(reply.served, ending=None, note=note[:_LONGEST_NOTE])
        return replace(reply, text=text, served=served, opening=0)


def _read_arguments(name: str, written: str) -> dict[str, Any]:
    """Read the arguments of a call. Raises CallError unless they are a JSON object."""
    try:
        found = json.loads(written or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CallError(f"The arguments of {name} are not a JSON object.")
    return found


@dataclass(frozen=True)
class ToolEngine:
    """An :class:`~spear_agents.engines.base.Engine` that offers the tools of one environment to a server."""

    server: OpenAIEngine
    offer: Offer

    @property
    def tokenizer(self) -> ChatByteTokenizer:
        """Return the tokenizer of the server's engine."""
        return self.server.tokenizer

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """See :meth:`OpenAIEngine.generate`."""
        return await self.server.generate(prompt_ids, sampling, request_id=request_id, images=images, offer=self.offer)


class OpenAIEngine:
    """An :class:`~spear_agents.engines.base.Engine` for a server, on OpenAI's own client.

    A field that the server refuses (``seed``, ``temperature``) is left out from then on, and the record says so.
    A request is sent again after connection errors, time-outs, the statuses 408, 409, 425, 429 and 5xx, and answers
    that cannot be read. When the tries are used up the episode gets an
    :class:`~spear_agents.engines.base.EngineFault`. Permanent errors (a wrong key, an unknown model, no credit left)
    are a SpearError and stop the run, and so is a missing package.
    """

    def __init__(self, server: Server, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Make the engine. ``template_kwargs`` are variables of the chat template, which only vLLM's server takes."""
        if find_spec("openai") is None:
            raise SpearError("servers need openai's client: pip install 'spear-agents[api]'")
        if server.key_variable != KEY_VARIABLE and not _read_key(server.key_variable):
            # A word in small letters may be the key itself.
            shown = server.key_variable if server.key_variable.isupper() else "named by --key-variable"
            raise SpearError(f"the variable {shown} is not set: it should hold the server's key")
        if server.api_version is not None and not _read_key(server.key_variable):
            raise SpearError(f"Azure needs a key: set the variable {server.key_variable}, or name another")
        for name, value in server.headers.items():
            for secret in (value, *value.split()):  # of "Bearer SECRET" servers repeat the second word
                if len(secret) >= _SHORTEST_SECRET:
                    hide_secret(secret, name)
        self.server = server
        self._template_kwargs = dict(template_kwargs or {})
        if self._template_kwargs and server.kind is not ServerKind.VLLM:
            raise SpearError(
                f"servers of kind {server.kind.value} take no --template-kwarg: leave it out, or take --server vllm"
            )
        self._reported: set[str] = set()
        self._dialect = Dialect()
        self._answered = False
        self.tokenizer = ChatByteTokenizer()
        self._client: openai.AsyncOpenAI | None = None
        self._options: Any = {}
        self._free: asyncio.Semaphore | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        images: Sequence[np.ndarray] = (),
        offer: Offer | None = None,
    ) -> Generation:
        """See :class:`~spear_agents.engines.base.Engine`; ``prompt_ids`` are those of ``self.tokenizer``.

        With ``offer``, a call of one of its tools becomes the response that plays it.

        Raises SpearError for a conversation that continues within the assistant's own message, which cannot be sent.
        """
        messages = self.tokenizer.read_messages(prompt_ids)
        if not messages or messages[-1]["role"] != "user":
            raise SpearError("chat servers cannot continue the model's own message: use layout per_turn")
        request = _write_request(self.server, messages, sampling, images)
        if self._template_kwargs:
            request["chat_template_kwargs"] = self._template_kwargs
        if offer is not None:
            request |= {"tools": [tool.schema() for tool in offer.tools()], "parallel_tool_calls": False}
        if self._free is None:
            self._free = asyncio.Semaphore(self.server.limit)
        async with self._free:
            reply, tries = await self._ask(request)
        if offer is not None and reply.calls:
            reply = offer.play(reply)
        said, cut = cut_at_stop(reply.text[reply.opening :], sampling.stop_strings)
        text = reply.text[: reply.opening] + said
        ids = self.tokenizer.encode_plain(text)
        finish = Finish.STRING if cut else Finish.LENGTH if reply.cut_short else Finish.STOP
        if finish is Finish.STOP:
            ids.append(self.tokenizer.eos_token_id or 0)
        return Generation(tuple(ids), (0.0,) * len(ids), finish, self._record(reply, tries))

    def _record(self, reply: Reply, tries: int) -> Served:
        return replace(reply.to_served(tries, self.server.prices), dropped=tuple(self._dialect.dropped))

    async def aclose(self) -> None:
        """Close the connections; the engine may be used again, also in another event loop."""
        client, self._client, self._free = self._client, None, None
        if client is not None:
            await client.close()

    async def _ask(self, request: dict[str, Any]) -> tuple[Reply, int]:
        """Send a request until it has a usable answer; return it and the number of requests.

        A request that was refused for its form is written anew, which is not one of the tries.
        """
        import httpx
        import openai

        tries = 0
        for anew in range(_ANEW + 1):
            sent = self._dialect.write(request)
            try:
                body = json.dumps(sent).encode("ascii")  # the client's own JSON has no lone surrogates
                client = self._open_client()
                response = await client.post(_PATH, cast_to=httpx.Response, content=body, options=self._options)
                self._answered = True
                return response.extensions[_READ], tries + _count_tries(response.request)
            except openai.APIStatusError as error:
                tries += _count_tries(error.response.request)
                found = error.response.extensions[_READ]
                if isinstance(found, BadReplyError):
                    self._fail(EngineFaultKind.BAD_REPLY, str(found))
                if anew < _ANEW and self._rewrite(request, sent, found):
                    continue
                if found.is_withheld:
                    return Reply("", False, Served(ending=Ending.FILTER, note=found.message)), tries
                kind = EngineFaultKind.OVERLOADED if found.status == 429 else EngineFaultKind.SERVER_ERROR
                asks = error.response.headers.get("retry-after")
                wait = f" It asks to wait {asks[:_LONGEST_WAIT]} s" if asks else ""
                self._fail(kind, f"it answered {found.status}: {found.message}{wait}")
            except openai.APITimeoutError:
                self._fail(EngineFaultKind.TIMEOUT, f"no complete answer within {self.server.timeout_s:g} s")
            except openai.APIConnectionError as error:
                cause = error.__cause__
                if isinstance(cause, httpx.DecodingError):  # packed, or too large
                    self._fail(EngineFaultKind.BAD_REPLY, str(cause))
                self._explain(str(cause))
                self._fail(EngineFaultKind.UNREACHABLE, str(cause) or type(cause).__name__)
        raise AssertionError("unreachable: the last refusal is an error")

    def _fail(self, kind: EngineFaultKind, message: str) -> NoReturn:
        """Raise the fault of an episode; the first of its kind is logged."""
        fault = EngineFault(kind, f"{self.server.url}: {message}")
        if kind not in self._reported:
            self._reported.add(kind)
            _log.warning("%s (further faults of this kind are only counted)", show_text(str(fault)))
        raise fault

    def _explain(self, cause: str) -> None:
        """Raise SpearError for a connection that would fail in the same way at every try."""
        if "WRONG_VERSION_NUMBER" in cause:
            raise SpearError(f"{self.server.url} does not speak TLS: write http:// in --base-url")
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            raise SpearError(f"the certificate of {self.server.url} is not trusted ({cause}); see SSL_CERT_FILE")

    def _rewrite(self, request: dict[str, Any], sent: dict[str, Any], refusal: Refusal) -> bool:
        """Return whether the refused request is to be sent again in another form.

        Raises ContextExceededError if its prompt is too long, and SpearError if nothing can be changed about it.
        """
        if self._dialect.stream(refusal, sent):
            return True
        limit = next(name for name in LIMITS if name in request)
        if (room := refusal.find_room(request[limit])) is not None:
            if room.never_fits and not self._answered:
                raise SpearError(
                    f"{self.server.url} refuses responses of {request[limit]:,} tokens: give another --max-tokens. "
                    f"It said: {refusal.message}"
                )
            if 0 < room.tokens < request[limit]:
                request[limit] = room.tokens
                return True
        if room is not None or refusal.is_too_long:
            raise ContextExceededError(f"the prompt is too long for {self.server.model}: {refusal.message}")
        if refusal.is_withheld:
            return False
        if name := self._dialect.learn(refusal, sent):
            if name not in self._reported:
                self._reported.add(name)
                _log.warning("%s refuses %s, which is left out from now on: %s", self.server.url, name, refusal.message)
            return True
        if refusal.will_pass:
            return False
        raise refusal.explain(self.server.url, self.server.model, self.server.key_variable)

    def _open_client(self) -> openai.AsyncOpenAI:
        import httpx
        import openai

        if self._client is None:
            server = self.server
            is_local = is_loopback(urlsplit(server.base_url).hostname or "")
            connections = httpx.AsyncClient(
                limits=httpx.Limits(max_connections=server.limit, max_keepalive_connections=server.limit),
                trust_env=not is_local,
            )
            bound_answers(connections, _LARGEST_REPLY)
            _bound_time(connections, server.timeout_s)
            connections.event_hooks["response"].append(self._judge)
            key = _read_key(server.key_variable)
            omitted = {} if key else {"Authorization": openai.Omit()}
            self._options = {"headers": {"Content-Type": "application/json", **omitted, **server.headers}}
            common: dict[str, Any] = {
                "api_key": key or "none",  # which is not sent
                "timeout": httpx.Timeout(server.timeout_s, connect=_CONNECT_S),
                "max_retries": server.tries - 1,
                "http_client": connections,
            }
            if server.api_version is None:
                self._client = openai.AsyncOpenAI(base_url=server.base_url, **common)
            else:
                self._client = openai.AsyncAzureOpenAI(
                    azure_endpoint=server.base_url,
                    azure_deployment=server.model,
                    api_version=server.api_version,
                    **common,
                )
        return self._client

    async def _judge(self, response: httpx.Response) -> None:
        """Read an answer, and decide for the client whether it is sent again: servers put failures into a 200, too."""
        await response.aread()
        found: Reply | Refusal | BadReplyError
        try:
            if response.is_success:
                found = read_reply(response.content)
                response.extensions[_READ] = found
                return
            found = read_refusal(response.status_code, response.content)
        except RefusedError as error:
            found = error.refusal
        except BadReplyError as error:
            found = error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            found = BadReplyError(f"the answer has values of other types ({type(error).__name__})")
        response.extensions[_READ] = found
        is_passing = isinstance(found, BadReplyError) or found.will_pass
        if response.is_success:
            response.status_code = found.status if isinstance(found, Refusal) else 502
        waits = "retry-after" in response.headers  # the client itself refuses to wait too long
        if not (waits and is_passing):
            response.headers["x-should-retry"] = str(is_passing).lower()


def _bound_time(client: httpx.AsyncClient, seconds: float) -> None:
    """Have each request of a client end within ``seconds``, head and all: httpx's own limit begins anew with a byte."""
    import httpx

    send = client.send

    async def send_in_time(request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            return await asyncio.wait_for(send(request, **options), seconds)
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout("the answer did not end", request=request) from None

    client.send = send_in_time  # type: ignore[method-assign]


def _count_tries(request: httpx.Request) -> int:
    """Return how often the client has sent a request."""
    return 1 + int(request.headers.get("x-stainless-retry-count", 0))


def _read_key(variable: str) -> str:
    """Read the key, stripped; empty if there is none. Raises SpearError if it is not valid in a header."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise SpearError(f"the variable {variable} contains characters that are not valid in a key: set it again")
    hide_secret(key, variable)
    return key


def _write_request(
    server: Server, messages: list[dict[str, str]], sampling: Sampling, images: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Write the body of a request, with the fields that the server supports."""
    limit = "max_completion_tokens" if server.kind is ServerKind.OPENAI else "max_tokens"
    request: dict[str, Any] = {
        "model": server.model,
        "messages": _show_images(messages, images),
        limit: sampling.max_tokens,
    }
    for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if server.kind is not ServerKind.OPENAI or value != 1:
            request[name] = value
    if server.reasoning_effort is not None:
        request["reasoning_effort"] = server.reasoning_effort
    if sampling.seed is not None and server.sends_seed:
        request["seed"] = sampling.seed % 2**_SEED_BITS
    if server.kind is ServerKind.VLLM:
        request |= {"return_token_ids": True, "logprobs": True}
        # vLLM takes missing fields from the model's generation_config.json.
        request |= {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        if sampling.stop_strings:
            request |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
    elif sampling.top_k:
        raise SpearError(f"servers of kind {server.kind.value} lack top_k: leave it at 0, or take --server vllm")
    return request | dict(server.extra_body)


def _show_images(messages: list[dict[str, str]], images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Put pictures, oldest first, in the places of ``<image>``."""
    if not images:
        return list(messages)
    left = iter(images)
    shown: list[dict[str, Any]] = []
    for message in messages:
        first, *rest = message["content"].split(IMAGE) if message["role"] == "user" else [message["content"]]
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
        for text in rest:
            picture = next(left, None)
            if picture is not None:
                parts.append({"type": "image_url", "image_url": {"url": encode_picture(enlarge(picture))}})
            parts += [{"type": "text", "text": text}] if text else []
        shown.append({"role": message["role"], "content": parts if rest else message["content"]})
    return shown


def encode_picture(image: np.ndarray) -> str:
    """Encode a uint8 picture [height, width, 3] as the data URL of a PNG."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
