"""What single providers want of a request: headers, further fields, reasoning effort, Azure's addresses."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from spear_agents.cli import evaluate
from spear_agents.engines.base import Sampling
from spear_agents.engines.openai import OpenAIEngine, Server, ServerKind, choose_kind
from spear_agents.shortcuts import load
from spear_envs.core.errors import SpearError
from spear_sandbox.errors import show_text
from tests.agents.chat_server import Answer, Handler, Script, complete, say

pytest.importorskip("openai")
SECRET = "sesame-open-4711"


def ask(server: Server, **options: Any) -> None:
    async def run() -> None:
        engine = OpenAIEngine(server, **options)
        chat = engine.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        try:
            await engine.generate(engine.tokenizer.encode(chat), Sampling(), request_id="1")
        finally:
            await engine.aclose()

    asyncio.run(run())


def spear_eval(script: Script, *options: str) -> Result:
    words = ["spear/Sokoban-v1", "--engine", "openai", "--base-url", script.url, "--model", "m", "--tasks", "1"]
    return CliRunner().invoke(evaluate, [*words, *options])


def test_options_reach_the_server_and_secrets_no_record(script: Script, tmp_path: Path) -> None:
    script.answers = [say(complete())]
    options: tuple[str, ...] = ("--header", f"X-Team={SECRET}", "--header", "X-Route=a=b", "--reasoning-effort", "low")
    done = spear_eval(
        script, *options, "--extra-body", '{"provider": {"order": ["x"]}}', "--out", str(tmp_path / "run")
    )
    assert done.exit_code == 0, done.output
    headers, body = script.headers[0], script.requests[0]
    assert (headers["x-team"], headers["x-route"]) == (SECRET, "a=b")
    assert (body["reasoning_effort"], body["provider"]) == ("low", {"order": ["x"]})

    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET in path.read_text("utf-8")]
    written = json.loads((tmp_path / "run" / "settings.json").read_text("utf-8"))
    assert written["headers"] == ["X-Route", "X-Team"]
    assert (written["reasoning_effort"], written["extra_body"]) == ("low", {"provider": {"order": ["x"]}})
    server = load(tmp_path / "run").settings.server
    assert server is not None and set(server.headers) == {"X-Route", "X-Team"}


def test_another_effort_is_another_evaluation(script: Script, tmp_path: Path) -> None:
    script.answers = [say(complete())]
    assert spear_eval(script, "--reasoning-effort", "low", "--out", str(tmp_path)).exit_code == 0
    done = spear_eval(script, "--reasoning-effort", "high", "--out", str(tmp_path))
    assert isinstance(done.exception, SpearError) and "reasoning_effort" in str(done.exception)


def test_a_secret_is_not_shown_by_an_error(script: Script) -> None:
    script.answers = [say({"error": {"message": f"the token {SECRET} is unknown"}}, 401)]
    with pytest.raises(SpearError) as found:
        ask(script.server(headers={"X-Team": SECRET}))
    shown = show_text(str(found.value))
    assert "unknown" in shown and SECRET not in shown
    assert SECRET not in repr(script.server(headers={"X-Team": SECRET}))


@pytest.mark.parametrize(
    "answer",
    [
        say({"error": {"message": f"{'x ' * 143}token {SECRET} is unknown"}}, 500),
        say(f"no token {SECRET}".encode(), 503),
        say({"error": {"message": f"the content management policy forbids {SECRET}"}}, 400),
        say(f"{SECRET} is not JSON".encode()),
    ],
)
@pytest.mark.parametrize("how", ["key", "header"])
def test_a_secret_that_a_server_repeats_is_not_recorded(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, how: str
) -> None:
    monkeypatch.setenv("MY_ACCESS", SECRET)
    options = ("--key-variable", "MY_ACCESS") if how == "key" else ("--header", f"Authorization=Bearer {SECRET}")
    script.answers = [answer]
    done = spear_eval(script, *options, "--tries", "1", "--out", str(tmp_path))
    assert script.headers[0]["authorization"] == f"Bearer {SECRET}"
    written = [path.read_text("utf-8") for path in tmp_path.iterdir() if path.is_file()]
    assert any("[MY_ACC" in text or "[Author" in text for text in written), "the record says what was hidden"
    assert SECRET[:8] not in "".join(written) + str(done.exception)


def answer_as_azure(handler: Handler) -> None:
    """Checks what Azure does: the deployment's path, the version and the key in a header of its own."""
    address = urlsplit(handler.path)
    if address.path != "/openai/deployments/my-model/chat/completions":
        say({"error": {"code": "404", "message": "Resource not found"}}, 404)(handler)
    elif parse_qs(address.query) != {"api-version": ["2024-10-21"]}:
        say({"error": {"code": "404", "message": "API version not supported"}}, 404)(handler)
    elif handler.headers.get("api-key") != "azure-key" or "Authorization" in handler.headers:
        say({"error": {"code": "401", "message": "Access denied due to invalid subscription key"}}, 401)(handler)
    else:
        say(complete())(handler)


def test_azure(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.answers = [answer_as_azure]
    resource = script.url.removesuffix("/v1")
    server = Server(resource, "my-model", key_variable="AZURE_KEY", api_version="2024-10-21", tries=1)
    monkeypatch.setenv("AZURE_KEY", "azure-key")
    ask(server)
    assert urlsplit(server.url).path == urlsplit(script.paths[0]).path
    assert choose_kind("https://mine.openai.azure.com") is ServerKind.OPENAI
    monkeypatch.setenv("AZURE_KEY", "another")
    with pytest.raises(SpearError, match="AZURE_KEY"):
        ask(server)
    monkeypatch.setenv("AZURE_KEY", "")
    with pytest.raises(SpearError, match="AZURE_KEY"):
        ask(server)


def test_variables_of_the_chat_template_go_to_vllm_alone(script: Script) -> None:
    script.answers = [say(complete())]
    ask(script.server(kind=ServerKind.VLLM), template_kwargs={"enable_thinking": False})
    assert script.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(SpearError, match="template-kwarg"):
        ask(script.server(), template_kwargs={"enable_thinking": False})
    done = spear_eval(script, "--server", "vllm", "--template-kwarg", "enable_thinking=false")
    assert done.exit_code == 0, done.output
    assert script.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--extra-body", "[1]"], "JSON"),
        (["--extra-body", "{"], "JSON"),
        (["--extra-body", '{"temperature": 1}'], "--temperature"),
        (["--extra-body", '{"messages": []}'], "messages"),
        (["--header", "X-Team"], "NAME=VALUE"),
        (["--header", "Content-Length=3"], "Content-Length"),
        (["--header", "a b=c"], "header"),
        (["--header", "X-Team=a", "--header", "x-team=b"], "twice"),
        (["--header", "X-Stainless-Retry-Count=x"], "X-Stainless-Retry-Count"),
        (["--extra-body", '{"a": NaN}'], "JSON"),
        (["--extra-body", '{"a": 1e999}'], "JSON"),
        (["--base-url", "http://[::1/v1"], "[::1"),
        (["--base-url", "http://127.0.0.1:99999/v1"], "99999"),
        (["--base-url", f"http://{'x' * 70}.org/v1"], "cannot be reached"),
        (["--header", "X-Team=\u00fc"], "X-Team"),
        (["--api-version", "a/b"], "version"),
    ],
)
def test_wrong_values_are_named(script: Script, options: list[str], word: str) -> None:
    done = spear_eval(script, *options)
    assert isinstance(done.exception, SpearError) and word in str(done.exception)
    assert not script.requests


@pytest.mark.parametrize(
    "options",
    [
        ["--header", f"Authorization: Bearer {SECRET}=="],
        ["--key-variable", f"sk-{SECRET}"],
        ["--key-variable", SECRET.replace("-", "_")],
        ["--base-url", f"me:{SECRET}@127.0.0.1/v1"],
        ["--base-url", f"http://me:{SECRET}@127.0.0.1/v1"],
    ],
)
def test_a_secret_in_the_wrong_place_is_not_shown(script: Script, options: list[str]) -> None:
    done = spear_eval(script, *options)
    assert isinstance(done.exception, SpearError) and not script.requests
    assert SECRET[:6] not in f"{done.exception}{done.output}" and "sesame_open" not in str(done.exception)


@pytest.mark.parametrize(
    "options", [["--header", "a=b"], ["--extra-body", "{}"], ["--reasoning-effort", "low"], ["--api-version", "1"]]
)
def test_options_of_a_server_need_a_server(options: list[str]) -> None:
    done = CliRunner().invoke(evaluate, ["spear/Sokoban-v1", "--engine", "random", "--tasks", "1", *options])
    assert isinstance(done.exception, SpearError) and options[0] in str(done.exception)
