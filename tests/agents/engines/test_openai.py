"""The engine of servers against a local server that answers as badly as servers do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spear_agents.engines import openai
from spear_agents.engines.base import ContextExceededError, EngineFault, EngineFaultKind, Finish, Generation, Sampling
from spear_agents.engines.openai import OpenAIEngine, Server, ServerKind, choose_kind
from spear_agents.engines.replies import Prices, explain_refusal
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import TagParser
from tests.agents.chat_server import GO, Answer, Handler, Script, complete, cut, drip, hang_up, say
from tests.agents.corridor import CorridorEnv

pytest.importorskip("httpx")


def ask(server: Server, text: str = "where to?", calls: int = 1, **sampling: Any) -> list[Generation]:
    async def run() -> list[Generation]:
        engine = OpenAIEngine(server)
        ids = engine.tokenizer.encode(
            engine.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        )
        try:
            return await asyncio.gather(
                *(engine.generate(ids, Sampling(**sampling), request_id=str(i)) for i in range(calls))
            )
        finally:
            await engine.aclose()

    return asyncio.run(run())


def text_of(generation: Generation) -> str:
    return bytes(i for i in generation.token_ids if i < 256).decode("utf-8", "surrogatepass")


def play(server: Server, layout: Layout = Layout.PER_TURN, **options: Any) -> Trajectory:
    async def run() -> Trajectory:
        engine = OpenAIEngine(server)
        env = CorridorEnv()
        prompts = PromptBuilder(engine.tokenizer, env.templates["compact"], layout, **options)
        try:
            return await play_episode(
                env, engine, prompts, task_id="corridor/test/000", sampling=Sampling(), seed=0, env_id="corridor"
            )
        finally:
            await engine.aclose()

    return asyncio.run(run())


def test_text_goes_out_and_text_comes_back(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    script.answers = [say(complete("Grüße \ud83d\ude00 \ud800"))]
    (found,) = ask(script.server(key_variable="A_KEY"), "é \ud800 <|im_end|>", temperature=0.4, top_p=0.6, seed=2**62)
    assert text_of(found) == "Grüße 😀 \ud800"
    assert found.token_ids[-1] == 256 and found.finish is Finish.STOP
    (request,) = script.requests
    assert request["messages"] == [{"role": "user", "content": "é \ud800 <|im_end|>"}]
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.4, 0.6, 512)
    assert 0 <= request["seed"] < 2**31
    assert script.keys == ["Bearer secret"]
    assert not {"stop", "top_k", "logprobs"} & set(request)


def test_fields_are_those_of_the_kind_of_server(script: Script) -> None:
    script.answers = [say(complete())]
    ask(script.server(kind=ServerKind.OPENAI))
    ask(script.server(kind=ServerKind.VLLM), top_k=5, stop_strings=("</a>",))
    ask(script.server(kind=ServerKind.OPENAI), temperature=0.5, top_p=0.9)
    ask(script.server())
    first, second, third, fourth = script.requests
    assert first["max_completion_tokens"] == 512 and "max_tokens" not in first
    assert not {"temperature", "top_p"} & set(first)  # reasoning models refuse the fields
    assert (third["temperature"], third["top_p"]) == (0.5, 0.9)
    assert (fourth["temperature"], fourth["top_p"]) == (1, 1)  # such servers have defaults of their own
    assert second["top_k"] == 5 and second["stop"] == ["</a>"] and second["include_stop_str_in_output"]
    assert second["return_token_ids"] and second["logprobs"]
    with pytest.raises(SpearError, match="top_k"):
        ask(script.server(), top_k=5)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("https://api.openai.com/v1", ServerKind.OPENAI),
        ("https://api.openai.com.example.org/v1", ServerKind.COMPATIBLE),
        ("http://127.0.0.1:8000/v1", ServerKind.COMPATIBLE),
    ],
)
def test_the_address_of_openai_tells_the_kind_of_server(address: str, kind: ServerKind) -> None:
    assert choose_kind(address) is kind


def test_what_the_server_tells_of_its_tokens_is_kept(script: Script) -> None:
    tokens = {"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]}}
    script.answers = [say(complete("ab", choice=tokens, prompt_token_ids=[1, 2, 3]))]
    (found,) = ask(script.server(prices=Prices(10.0, 30.0, cached=1.0)))
    served = found.served
    assert served is not None
    assert (served.prompt_ids, served.token_ids, served.log_probs) == ((1, 2, 3), (5, 6), (-0.5, -1.0))
    assert (served.prompt_tokens, served.completion_tokens, served.cached_tokens) == (1000, 100, 400)
    assert served.cost == pytest.approx((600 * 10 + 400 * 1 + 100 * 30) / 1e6)
    assert served.model == "served-name"


def test_stop_strings_are_cut_here_and_stay_part_of_the_text(script: Script) -> None:
    script.answers = [say(complete("<search>x</search> and on it goes"))]
    (found,) = ask(script.server(), stop_strings=("</search>", "</answer>"))
    assert (text_of(found), found.finish) == ("<search>x</search>", Finish.STRING)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("\n<action>go</action>", "<think>hm</think><action>go</action>"),
        ("<think>t</think><action>go</action>", "<think>\nhm\n</think>\n\n<think>t</think><action>go</action>"),
    ],
)
def test_thoughts_that_come_apart_are_put_in_front(script: Script, content: str, text: str) -> None:
    message = {"role": "assistant", "content": content, "reasoning_content": "hm "}
    script.answers = [say(complete(choice={"message": message, "finish_reason": "length"}))]
    (found,) = ask(script.server())
    assert (text_of(found), found.finish) == (text, Finish.LENGTH)
    assert TagParser().parse(text).format_ok


@pytest.mark.parametrize(
    "broken",
    [
        say({"error": {"message": "slow down"}}, 429),
        say(b"oops", 500),
        say({"error": "loading"}, 503),
        say(b"<html>bad gateway</html>", 502),
        say(b"{not json"),
        say(b"[" * 100_000),
        say({"choices": []}),
        say({"choices": [{"message": {"content": 7}}]}),
        say({"object": "error", "message": "inside of 200"}),
        say(b""),
        hang_up,
        cut,
    ],
)
def test_a_passing_failure_is_tried_again(script: Script, broken: Answer) -> None:
    script.answers = [broken, broken, say(complete("fine"))]
    (found,) = ask(script.server())
    assert text_of(found) == "fine"
    assert found.served is not None and found.served.tries == 3


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (say({}, 429), EngineFaultKind.OVERLOADED),
        (say({}, 500), EngineFaultKind.SERVER_ERROR),
        (say(b"?"), EngineFaultKind.BAD_REPLY),
        (hang_up, EngineFaultKind.UNREACHABLE),
        (drip, EngineFaultKind.TIMEOUT),
    ],
)
def test_a_lasting_failure_is_a_fault_of_its_kind(script: Script, broken: Answer, kind: EngineFaultKind) -> None:
    script.answers = [broken]
    with pytest.raises(EngineFault) as found:
        ask(script.server(tries=2, timeout_s=0.3 if kind is EngineFaultKind.TIMEOUT else 30.0))
    assert found.value.kind is kind
    assert len(script.requests) == 2


def test_nobody_there_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="unreachable"):
        ask(Server("http://127.0.0.1:9/v1", "name", tries=2, wait_s=0.01))


def test_a_server_that_asks_to_wait_holds_all_requests_back(script: Script) -> None:
    script.answers = [say({}, 429, Retry_After="0.4"), say(complete())]
    ask(script.server(limit=1), calls=3)
    assert min(script.times[1:]) - script.times[0] >= 0.39
    assert len(script.requests) == 4
    script.answers = [say({}, 429, Retry_After="3600")]
    start = time.monotonic()
    with pytest.raises(EngineFault, match="overloaded"):
        ask(script.server())
    assert time.monotonic() - start < 2


def test_no_more_requests_at_a_time_than_allowed(script: Script) -> None:
    def slow(handler: Handler) -> None:
        time.sleep(0.03)
        say(complete())(handler)

    script.answers = [slow]
    ask(script.server(limit=3), calls=12)
    assert len(script.requests) == 12
    assert script.most <= 3


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, {"error": {"message": "no key"}}, "variable OPENAI_API_KEY"),
        (404, {"error": {"message": "no such model"}}, "--model"),
        (400, {"error": {"message": "temperature must be 1."}}, "temperature must be 1. Change the option it names"),
        (400, {"error": {"message": "Use 'max_completion_tokens' instead."}}, "instead. --server openai sends max_"),
        (429, {"error": {"message": "pay first", "code": "insufficient_quota"}}, "no credit"),
        (301, {}, "leads elsewhere .301.: give the final address"),
    ],
)
def test_what_waiting_cannot_mend_stops_at_once(script: Script, status: int, body: Any, words: str) -> None:
    script.answers = [say(body, status)]
    with pytest.raises(SpearError, match=words) as found:
        ask(script.server())
    assert not isinstance(found.value, EngineFault)
    assert len(script.requests) == 1


@pytest.mark.parametrize(("root", "told"), [("http://host:1", True), ("http://host:1/v1", False)])
def test_an_address_without_its_version_is_told(root: str, told: bool) -> None:
    error = explain_refusal(404, b"{}", f"{root}/chat/completions", "toy", "OPENAI_API_KEY")
    assert ("ends in /v1" in str(error)) is told


def test_an_address_of_the_wrong_scheme_stops_at_once(script: Script) -> None:
    address = script.server().base_url.replace("http:", "https:")
    with pytest.raises(SpearError, match="write http:// instead of https://"):
        ask(replace(script.server(), base_url=address))


def test_a_fault_is_told_once(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.answers = [say({}, 500)]

    with pytest.raises(EngineFault):
        ask(script.server(tries=1), calls=3)
    assert [record.message.count("answered 500") for record in caplog.records] == [1]


def test_a_prompt_that_is_too_long_is_told_apart(script: Script) -> None:
    script.answers = [say({"error": {"message": "This model's maximum context length is 8 tokens"}}, 400)]
    with pytest.raises(ContextExceededError):
        ask(script.server())
    assert play(script.server()).stop is StopReason.CONTEXT_LIMIT


@pytest.mark.parametrize("layout", list(Layout))
def test_an_episode_is_played_and_says_what_its_tokens_are(script: Script, layout: Layout) -> None:
    script.answers = [say(complete())]
    found = play(script.server(), layout)
    assert found.won and found.tokens is TokenKind.BYTES and len(found.turns) == 2
    assert Trajectory.from_json(found.to_json()) == found
    last = script.requests[-1]["messages"]
    roles = [message["role"] for message in last]
    assert roles == (["user"] if layout is Layout.PER_TURN else ["user", "assistant", "user"])
    if layout is Layout.CONVERSATION:
        assert last[1]["content"] == GO


def test_a_fault_of_the_engine_is_no_failure_of_the_policy(script: Script) -> None:
    script.answers = [say(complete()), say({}, 500)]
    found = play(script.server(tries=1))
    assert (found.stop, found.fault, found.reward) == (StopReason.FAULT, "engine_server_error", 0.0)
    assert len(found.turns) == 1


def test_a_log_probability_that_is_no_number_is_a_fault(script: Script) -> None:
    tokens = b'{"choices": [{"message": {"content": "x"}, "logprobs": {"content": [{"logprob": NaN}]}}]}'
    script.answers = [say(tokens)]
    assert play(script.server()).fault == "engine_nan"


@pytest.mark.parametrize("text", ["<think>and on and on", "", None, "\x00", "<action>" * 50])
def test_a_model_that_never_closes_its_tags_loses_its_turns(script: Script, text: str | None) -> None:
    script.answers = [say(complete(text))]
    found = play(script.server())
    assert found.stop is StopReason.TURN_LIMIT and not any(turn.format_ok for turn in found.turns)


def test_pictures_are_sent_in_their_places(script: Script) -> None:
    script.answers = [say(complete())]
    picture = np.zeros((2, 3, 3), np.uint8)

    async def run() -> None:
        engine = OpenAIEngine(script.server())
        ids = engine.tokenizer.encode("\ufdd0user\ufdd1before <image> after\ufdd0assistant\ufdd1")
        await engine.generate(ids, Sampling(), request_id="1", images=[picture])
        await engine.aclose()

    asyncio.run(run())
    parts = script.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_a_conversation_within_the_models_own_message_is_refused(script: Script) -> None:
    async def run() -> None:
        engine = OpenAIEngine(script.server())
        ids = engine.tokenizer.encode("\ufdd0user\ufdd1q\ufdd0assistant\ufdd1<search>x</search> passage")
        await engine.generate(ids, Sampling(), request_id="1")

    with pytest.raises(SpearError, match="layout per_turn"):
        asyncio.run(run())


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_is_none_is_said_and_not_shown(script: Script, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("A_KEY", key)
    script.answers = [say(complete())]
    with pytest.raises(SpearError, match="variable A_KEY") as found:
        ask(script.server(key_variable="A_KEY"))
    assert key not in str(found.value) and not script.requests


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "find_spec", lambda name: None)
    with pytest.raises(SpearError, match=r"spear-agents\[api\]"):
        OpenAIEngine(Server("http://127.0.0.1/v1", "name"))


def test_an_endless_answer_is_given_up(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_LARGEST_REPLY", 10_000)
    script.answers = [say(complete("x" * 20_000))]
    with pytest.raises(EngineFault, match="bad_reply"):
        ask(script.server(tries=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_url": "localhost:8000"}, "not an address"),
        ({"base_url": "http://me:secret@host/v1"}, "may not have a user"),
        ({"limit": 0}, "at least 1"),
        ({"timeout_s": float("nan")}, "above 0"),
    ],
)
def test_settings_of_a_server_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpearError, match=words):
        replace(Server("http://127.0.0.1/v1", "name"), **changes)
    with pytest.raises(SpearError, match="price"):
        Prices(-1, 2)
