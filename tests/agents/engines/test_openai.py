"""The engine of servers against a local server that answers as badly as servers do."""

import asyncio
import json
import time
from base64 import b64decode
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spear_agents.engines.base import (
    ContextExceededError,
    Ending,
    EngineFault,
    EngineFaultKind,
    Finish,
    Generation,
    Sampling,
)
from spear_agents.engines.openai import OpenAIEngine, Server, ServerKind, choose_kind, require_reachable
from spear_agents.engines.replies import Prices
from spear_agents.evaluation.records import sum_usage
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import TagParser
from tests.agents.chat_server import GO, Answer, Handler, Script, complete, cut, drip, hang_up, say
from tests.agents.corridor import CorridorEnv

pytest.importorskip("openai", reason="needs the extra 'api'")


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


def test_stop_strings_do_not_end_thoughts_that_come_apart(script: Script) -> None:
    thought = "Either <search>x</search> or an answer."
    message = {"reasoning_content": thought, "content": "<answer>Paris</answer> and"}
    script.answers = [say({"choices": [{"finish_reason": "stop", "message": message}]})]
    (found,) = ask(script.server(), stop_strings=("</search>", "</answer>"))
    assert text_of(found) == f"<think>{thought}</think><answer>Paris</answer>" and found.finish is Finish.STRING


@pytest.mark.parametrize(
    ("start", "more"), [(b"HTTP/1.1 200 OK\r\nX: ", b"a"), (b"", b"HTTP/1.1 102 Processing\r\n\r\n")]
)
def test_a_head_that_does_not_end_is_a_timeout(script: Script, start: bytes, more: bytes) -> None:
    def drip_head(handler: Handler) -> None:
        with suppress(OSError):
            handler.wfile.write(start)
            for _ in range(60):
                handler.wfile.write(more)
                handler.wfile.flush()
                time.sleep(0.1)

    script.answers = [drip_head]
    begun = time.monotonic()
    with pytest.raises(EngineFault) as found:
        ask(script.server(tries=1, timeout_s=0.5))
    assert found.value.kind is EngineFaultKind.TIMEOUT and time.monotonic() - begun < 4


def test_a_proxy_of_all_schemes_is_left_to_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    require_reachable(Server("http://model.invalid/v1", "m"))


def test_any_status_of_success_may_have_a_response(script: Script) -> None:
    script.answers = [say(complete("made"), 201)]
    (found,) = ask(script.server())
    assert text_of(found) == "made" and found.served is not None and found.served.tries == 1


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
        say(b"{not json"),
        say(b"[" * 100_000),
        say({"choices": [{"message": {"content": 7}}]}),
        say({"object": "error", "message": "inside of 200"}),
        say({"error": {"code": 429, "message": "inside of 200"}}),
        say(complete("", choice={"error": {"code": 502, "message": "upstream"}, "finish_reason": "error"})),
        say(complete("<think>I", choice={"finish_reason": "abort"})),
        say(b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'),
        say(b'data: {"choices": [{"delta": {"content": "half"}}]}\n\ndata: {"error": {"message": "lost"}}\n\n'),
        say(b""),
        say(b"", 204),
        say(b"accepted", 202),
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


def test_a_server_that_asks_to_wait_is_waited_for(script: Script) -> None:
    script.answers = [say({}, 429, Retry_After="0.4"), say(complete())]
    ask(script.server())
    assert script.times[1] - script.times[0] >= 0.39
    script.answers = [say({}, 429, Retry_After="3600")]
    start = time.monotonic()
    with pytest.raises(EngineFault, match="overloaded"):
        ask(script.server())
    assert time.monotonic() - start < 60


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
        (401, {"error": {"message": "no key"}}, "set OPENAI_API_KEY"),
        (404, {"error": {"message": "no such model"}}, "--model"),
        (400, {"error": {"message": "temperature must lie between 0 and 2"}}, "must lie between 0 and 2"),
        (400, {"error": {"message": "'messages' must not be empty", "param": "messages"}}, "must not be empty"),
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


@pytest.mark.parametrize("code", ["²", "4²9", "9" * 5_000, "４２９"])
def test_a_code_that_is_no_status_is_a_fault_of_the_server(script: Script, code: str) -> None:
    script.answers = [say({"error": {"message": "the model broke", "code": code}})]
    with pytest.raises(EngineFault, match="the model broke"):
        ask(script.server(tries=1))


def test_a_huge_refusal_is_read_in_time(script: Script) -> None:
    script.answers = [say({"error": {"message": "max" * 100_000}}, 400)]
    start = time.process_time()
    with pytest.raises(SpearError, match="maxmax"):
        ask(script.server())
    assert time.process_time() - start < 10, "seconds; each 'max' was once searched to the end"


def test_a_fault_is_told_once(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.answers = [say({}, 500)]

    with pytest.raises(EngineFault):
        ask(script.server(tries=1), calls=3)
    # A call that the end of the others cuts off is a fault of another kind.
    assert sum(record.message.count("answered 500") for record in caplog.records) == 1


def refuse(message: Any, status: int = 400, **more: Any) -> Answer:
    return say({"error": {"message": message, "type": "invalid_request_error"} | more}, status)


@pytest.mark.parametrize(
    "refusal",
    [
        refuse("This model's maximum context length is 8 tokens"),
        refuse("The decoder prompt (length 10127) is longer than the maximum model length of 8192."),
        refuse(
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4488 in the "
            "messages, 512 in the completion). Please reduce the length of the messages or completion."
        ),
        say({"error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 2345"}, 422),
        say([{"error": {"code": 400, "message": "The input token count (12) exceeds the maximum number"}}], 400),
        refuse("Input is too long for requested model."),
        refuse("Provider error", metadata={"raw": '{"error": {"message": "' + "x " * 300 + 'context length is 8"}}'}),
        refuse("This endpoint's maximum context length is 32768 tokens. However, you requested about 40000 tokens."),
        refuse("the request exceeds the available context size, try increasing it", type="exceed_context_size_error"),
        refuse("Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 context"),
        refuse("Range of input length should be [1, 30720]"),
        refuse("Invalid request: Your request exceeded model token limit: 8192"),
        refuse("Requested token count exceeds the configured limit of 8192"),
        refuse("This model's maximum prompt length is 131072 but the request contains 200000 tokens."),
        refuse("too many tokens: total number of tokens in the prompt cannot exceed 4081"),
        refuse("the request exceeds the available context size", 500),
        say({"detail": [{"loc": ["body"], "msg": "prompt is too long: 210000 tokens > 200000 maximum"}]}, 422),
        say(b"Request Entity Too Large", 413),
    ],
)
def test_a_prompt_that_is_too_long_ends_its_episode_only(script: Script, refusal: Answer) -> None:
    script.answers = [say(complete()), refusal]
    found = play(script.server())
    assert (found.stop, len(found.turns)) == (StopReason.CONTEXT_LIMIT, 1)


_LIMITS = [
    ("'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is 4096 "
     "tokens and your request has 227 input tokens ({asked} > 4096 - 227).", 3869),
    ("This model's maximum context length is 4096 tokens. However, you requested {total} tokens (227 in the messages, "
     "{asked} in the completion). Please reduce the length of the messages or completion.", 3869),
    ("max_tokens is too large: {asked}. This model supports at most 4096 completion tokens.", 4096),
    ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 227 `inputs` tokens and {asked} `max_new_tokens`",
     3869),
    ("max_tokens: {asked} > 4096, which is the maximum allowed number of output tokens for model-3-5-20241022", 4096),
    ("input length and `max_tokens` exceed context limit: 227 + {asked} > 4096, decrease either", 3869),
    ("Invalid max_tokens value, the valid range of max_tokens is [1, 4096]", 4096),
    ("The maximum tokens you requested exceeds the model limit of 4096. Try again with a lower value.", 4096),
    ("Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
     "{total} tokens: 227 tokens from the input messages and {asked} tokens for the completion.", 3869),
]  # fmt: skip


@pytest.mark.parametrize(("words", "room"), _LIMITS)
def test_a_response_limit_that_never_fits_stops_before_the_first_episode(script: Script, words: str, room: int) -> None:
    script.answers = [refuse(words.format(asked=5120, total=5120 + 227))]
    with pytest.raises(SpearError, match="--max-tokens") as found:
        ask(script.server(), max_tokens=5120)
    assert not isinstance(found.value, ContextExceededError) and len(script.requests) == 1
    # When others were answered, it asks for what is left.
    script.answers = [say(complete()), *script.answers, say(complete())]
    script.requests.clear()
    ask(script.server(limit=1), calls=2, max_tokens=5120)
    assert [request["max_tokens"] for request in script.requests] == [5120, 5120, room]


def test_a_response_gets_the_room_that_is_left(script: Script) -> None:
    words = "your prompt contains {} input tokens and you requested 512 output tokens, the maximum is 4096 tokens"
    script.answers = [refuse(words.format(4000)), say(complete())]
    (found,) = ask(script.server())
    assert [request["max_tokens"] for request in script.requests] == [512, 96]
    assert found.served is not None and found.served.tries == 2
    counted = (
        "This model's maximum context length is 256 tokens. However, you requested 1 output tokens and your prompt "
        "contains at least 256 input tokens, for a total of at least 257 tokens. (parameter=input_tokens, value=256)"
    )
    for text, asked in ((words.format(4096), 512), (counted, 1)):
        script.answers = [refuse(text)]
        with pytest.raises(ContextExceededError):
            ask(script.server(), max_tokens=asked)


@pytest.mark.parametrize(
    ("refusal", "field"),
    [
        (say({"message": {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra"}]}}, 422),
         "seed"),
        (say([{"error": {"message": "Invalid JSON payload received. Unknown name \"seed\": Cannot find field."}}], 400),
         "seed"),
        (refuse("Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is "
                "supported.", param="temperature", code="unsupported_value"), "temperature"),
        (refuse("`temperature` and `top_p` cannot both be specified for this model. Please use only one."), "top_p"),
        (refuse("invalid temperature: only 1 is allowed for this model"), "temperature"),
        (refuse("property 'seed' is unsupported"), "seed"),
        (refuse("litellm.UnsupportedParamsError: does not support parameters: ['top_p']"), "top_p"),
        (refuse("Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
                "instead.", param="max_tokens"), "max_tokens"),
    ],
)  # fmt: skip
def test_a_field_that_is_refused_is_left_out_from_then_on(script: Script, refusal: Answer, field: str) -> None:
    script.answers = [refusal, say(complete())]
    found = ask(script.server(limit=1), calls=3, seed=1, temperature=0.5)
    assert [field in request for request in script.requests] == [True, False, False, False]
    assert {answer.served.dropped for answer in found if answer.served} == {(field,)}
    assert ("max_completion_tokens" in script.requests[-1]) is (field == "max_tokens")


@pytest.mark.parametrize("begin", ["", ": a sign of life\n\n", "id: 1\nretry: 9\n", "\n:\n\nevent: message\n"])
def test_a_stream_is_asked_for_where_it_is_demanded(script: Script, begin: str) -> None:
    pieces = [
        {"model": "m", "choices": [{"delta": {"role": "assistant", "reasoning_content": "h"}}]},
        {"choices": [{"delta": {"reasoning_content": "m"}}]},
        {"choices": [{"delta": {"content": "u"}}]},
        {"choices": [{"delta": {"content": "p"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
    ]
    stream = begin + "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    script.answers = [refuse("Requests with max_tokens > 4096 must have stream=true"), say(stream.encode())]
    (found, _) = ask(script.server(limit=1), calls=2)
    assert (text_of(found), found.finish) == ("<think>hm</think>up", Finish.LENGTH)
    assert found.served is not None and (found.served.prompt_tokens, found.served.model) == (7, "m")
    assert [request.get("stream") for request in script.requests] == [None, True, True]


@pytest.mark.parametrize(
    "answer",
    [
        b'data: {"choices": {"a": 1}}\n\n',
        b'data: {"choices": ["x"]}\n\n',
        b'data: {"choices": [{"delta": "x", "finish_reason": "stop"}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": ["x"]}, "finish_reason": "stop"}]}\n\n',
        json.dumps(complete(choice={"message": {"content": [{"type": []}]}})).encode(),
        json.dumps(complete(choice={"message": {"content": "x"}}))[:-20].encode(),
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": [{"message": null}]}',
    ],
)
def test_an_answer_with_values_of_other_types_is_a_bad_reply(script: Script, answer: bytes) -> None:
    script.answers = [say(answer)]
    with pytest.raises(EngineFault) as caught:
        ask(script.server(tries=1))
    assert caught.value.kind is EngineFaultKind.BAD_REPLY


def test_a_long_stream_is_joined_in_linear_time(script: Script) -> None:
    piece = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    pieces = [piece] * 30_000 + [end]
    script.answers = [say("".join(f"data: {json.dumps(each)}\n\n" for each in pieces).encode())]
    start = time.process_time()
    (found,) = ask(script.server(tries=1))
    assert text_of(found) == "a" * 30_000 and found.served is not None and len(found.served.log_probs or ()) == 30_000
    assert time.process_time() - start < 3, "seconds; each log-probability copied those before it"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("word", ["max", "stream", "tokens ", "exceed", "max_tokens or "])
def test_a_long_refusal_is_read_in_no_time(script: Script, word: str) -> None:
    script.answers = [refuse(word * 500_000)]
    start = time.process_time()
    with pytest.raises((SpearError, ContextExceededError)):
        ask(script.server(tries=1))
    assert time.process_time() - start < 4, "seconds; 'exceed' took 14 where each word was searched to its end"


def test_numbers_that_a_record_cannot_hold_are_no_token_ids(script: Script) -> None:
    script.answers = [say(complete(choice={"token_ids": [True], "logprobs": None}))]
    found = play(script.server())
    assert found.turns[0].served is not None and found.turns[0].served.token_ids is None
    assert Trajectory.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "u"}, {"type": "text", "text": "p"}], "up"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "up"}],
         "<think>hm</think>up"),
        ([{"type": "thinking", "thinking": "a</think>b", "signature": "s"}, {"type": "text", "text": "up"}],
         "<think>a< /think>b</think>up"),
    ],
)  # fmt: skip
def test_a_content_of_parts_is_read(script: Script, content: Any, text: str) -> None:
    script.answers = [say(complete(choice={"message": {"content": content}}))]
    assert text_of(ask(script.server())[0]) == text


@pytest.mark.parametrize(
    ("answer", "ending", "note"),
    [
        (complete("", choice={"finish_reason": "content_filter"}), Ending.FILTER, "content_filter"),
        (complete("", choice={"finish_reason": "content_filter: PROHIBITED_CONTENT"}), Ending.FILTER, "prohibited"),
        (complete(choice={"finish_reason": "tool_calls",
                          "message": {"content": None, "tool_calls": [{"function": {"name": "code_interpreter"}}]}}),
         Ending.TOOL_CALL, "code_interpreter"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_counted_apart(script: Script, answer: Any, ending: Ending, note: str) -> None:
    script.answers = [say(answer)]
    found = play(script.server())
    served = found.turns[0].served
    assert served is not None and served.ending is ending and note in served.note
    assert Trajectory.from_json(found.to_json()) == found
    usage = sum_usage([found])
    assert (usage.filtered, usage.tool_calls)[ending is Ending.TOOL_CALL] == len(found.turns)


def test_a_prompt_that_a_filter_refuses_is_a_response_withheld(script: Script) -> None:
    text = "The response was filtered due to the prompt triggering the content management policy."
    script.answers = [refuse(text, code="content_filter")]
    (found,) = ask(script.server())
    assert found.served is not None and (found.served.ending, found.served.note) == (Ending.FILTER, text)


def test_the_sentence_of_a_fault_is_kept(script: Script) -> None:
    down = say({"error": {"message": "upstream is down"}}, 502, Retry_After="3600")
    script.answers = [say(complete()), down]
    found = play(script.server())
    assert (found.stop, found.fault, found.reward) == (StopReason.FAULT, "engine_server_error", 0.0)
    assert len(found.turns) == 1 and "upstream is down" in found.detail and "3600 s" in found.detail
    assert Trajectory.from_json(found.to_json()) == found


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


def test_pictures_are_sent_in_their_places(script: Script) -> None:
    script.answers = [say(complete())]
    picture = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)

    async def run() -> None:
        engine = OpenAIEngine(script.server())
        ids = engine.tokenizer.encode("\ufdd0user\ufdd1before <image> after\ufdd0assistant\ufdd1")
        await engine.generate(ids, Sampling(), request_id="1", images=[picture])
        await engine.aclose()

    asyncio.run(run())
    parts = script.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    head, _, data = parts[1]["image_url"]["url"].partition(",")
    shown = np.asarray(Image.open(BytesIO(b64decode(data))))
    assert head == "data:image/png;base64" and shown.shape == (210, 315, 3), "as large as models need it"
    assert np.array_equal(shown[::105, ::105], picture)


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


def test_a_variable_that_is_named_and_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(SpearError, match="A_KEY is not set"):
        OpenAIEngine(Server("http://127.0.0.1/v1", "name", key_variable="A_KEY"))


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
