"""vLLM itself, on a CPU, beside transformers on the same weights. One engine for all tests, since it starts slowly."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import psutil
import torch

from spear_agents.engines.base import (
    ContextExceededError,
    EngineFault,
    EngineFaultKind,
    Finish,
    Generation,
    Request,
    Sampling,
)
from spear_agents.engines.hf import HFModel, load_tokenizer
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, play_many
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.corridor import CorridorEnv
from tests.agents.leftovers import expect_nothing_left, find_processes

pytestmark = pytest.mark.slow
BLOCK = 128
"""Tokens of a block of the prefix cache on a CPU."""


@pytest.fixture(scope="module")
def engine(wide_model: Path) -> Iterator[VLLMEngine]:
    mark = f"test-vllm-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch, expect_nothing_left(mark):
        patch.setenv("SPEAR_TEST_MARK", mark)
        # vLLM's processes name themselves, which would overwrite their environment.
        patch.setenv("SPT_NOENV", "1")
        engine = VLLMEngine(wide_model, max_batch=16)
        patch.undo()
        yield engine
        engine.close()
        assert engine.log.path is not None and engine.log.path.exists()
        shutil.rmtree(engine.log.path.parent)  # kept, since the last test kills vLLM


@pytest.fixture(scope="module")
def model(wide_model: Path) -> HFModel:
    return HFModel(wide_model)


def make_requests(model: HFModel, count: int, *, lengths: Sequence[int] = (9, 5), **sampling: Any) -> list[Request]:
    dice = random.Random(count)
    size = model.model.config.vocab_size
    options = {"max_tokens": 12} | sampling
    return [
        Request(
            tuple(dice.randrange(3, size) for _ in range(lengths[i % len(lengths)])),
            Sampling(seed=1000 + i, **options),
            f"r{i:03d}",
        )
        for i in range(count)
    ]


def ask(engine: VLLMEngine, request: Request) -> Awaitable[Generation]:
    return engine.generate(request.prompt_ids, request.sampling, request_id=request.request_id, images=request.images)


def answer(engine: VLLMEngine, requests: Sequence[Request]) -> list[Generation]:
    """All at the same time, in an event loop of their own."""

    async def run() -> list[Generation]:
        return list(await asyncio.gather(*(ask(engine, request) for request in requests)))

    return asyncio.run(run())


async def wait_until(condition: Callable[[], bool]) -> None:
    """Looks often: an answer of a model this small is over in milliseconds."""
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about in time")


def test_an_answer_does_not_depend_on_its_company(engine: VLLMEngine, model: HFModel) -> None:
    requests = make_requests(model, 24)
    together = answer(engine, requests)
    mixed = list(range(len(requests)))
    random.Random(1).shuffle(mixed)
    shuffled = dict(zip(mixed, answer(engine, [requests[i] for i in mixed]), strict=True))
    for i, request in enumerate(requests):
        alone = answer(engine, [request])[0] if i < 6 else shuffled[i]
        assert together[i].token_ids == shuffled[i].token_ids == alone.token_ids
    twins = [replace(requests[0], sampling=Sampling(max_tokens=12), request_id=str(i)) for i in range(6)]
    assert len({given.token_ids for given in answer(engine, twins)}) > 1


def test_what_vllm_cannot_do_is_said(engine: VLLMEngine, model: HFModel) -> None:
    request = make_requests(model, 1)[0]
    length = engine.context_length
    full = replace(request, prompt_ids=(3,) * (length - 4))
    # Where the context ends, the answer ends.
    given = answer(engine, [replace(full, sampling=Sampling(max_tokens=500, temperature=0.0))])[0]
    assert len(given.token_ids) <= 4
    bad: list[tuple[Request, type[Exception], str]] = [
        (replace(request, prompt_ids=(3,) * length), ContextExceededError, "fill the context"),
        (replace(request, prompt_ids=()), SpearError, "empty"),
        (replace(request, prompt_ids=(10**6,)), SpearError, "out of vocabulary"),
        (replace(request, sampling=Sampling(temperature=0.001)), SpearError, "temperature 0 or from"),
        (replace(request, images=(np.zeros((4, 4, 3), np.uint8),)), SpearError, "modality"),
    ]
    for wrong, kind, words in bad:
        with pytest.raises(kind, match=words):
            answer(engine, [wrong])
    assert answer(engine, [request])


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.4}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.5, "top_p": 0.6}]
)
def test_log_probs_are_those_of_transformers_before_the_filters(
    engine: VLLMEngine, model: HFModel, sampling: dict[str, Any]
) -> None:
    requests = make_requests(model, 24, **sampling)
    for request, given in zip(requests, answer(engine, requests), strict=True):
        wanted = model.log_probs(request.prompt_ids, given.token_ids, request.sampling.temperature)
        assert given.log_probs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.5, "top_p": 0.6}])
def test_equal_seeds_draw_what_transformers_draws(engine: VLLMEngine, model: HFModel, sampling: dict[str, Any]) -> None:
    requests = [*make_requests(model, 24, **sampling), *make_requests(model, 8, temperature=0.0)]
    requests = [replace(request, request_id=str(number)) for number, request in enumerate(requests)]
    pairs = list(zip(answer(engine, requests), model.generate_batch(requests), strict=True))
    # A draw within rounding of the edge between two tokens may fall on either side.
    assert sum(given.token_ids == wanted.token_ids for given, wanted in pairs) >= len(pairs) - 1
    assert len({given.token_ids for given, _ in pairs[:24]}) > 12


def test_answers_end_as_those_of_transformers(engine: VLLMEngine, model: HFModel) -> None:
    (end,) = engine.stop_token_ids
    assert (engine.stop_token_ids, engine.max_new_tokens) == (model.stop_token_ids, model.max_new_tokens)
    assert engine.context_length == model.context_length
    requests = make_requests(model, 32)
    answers = answer(engine, requests)
    assert {given.finish for given in answers} == {Finish.STOP, Finish.LENGTH}
    for given in answers:
        assert len(given.token_ids) == len(given.log_probs)
        assert (given.token_ids[-1] == end) == (given.finish is Finish.STOP)
        assert given.finish is Finish.STOP or len(given.token_ids) == 12
    extra = answers[0].token_ids[0]
    stopping = [replace(r, sampling=replace(r.sampling, stop_token_ids=(extra,))) for r in requests]
    for before, after in zip(answers, answer(engine, stopping), strict=True):
        length = before.token_ids.index(extra) + 1 if extra in before.token_ids else len(before.token_ids)
        assert after.token_ids == before.token_ids[:length]
        assert after.finish is (Finish.STOP if extra in before.token_ids else before.finish)


def test_answers_end_at_stop_strings_and_keep_them(engine: VLLMEngine, model: HFModel, wide_model: Path) -> None:
    tokenizer = load_tokenizer(wide_model)
    requests = make_requests(model, 32)
    strings = ("go", "</action>")
    stopping = [replace(r, sampling=replace(r.sampling, stop_strings=strings)) for r in requests]
    ended = 0
    for plain, given in zip(answer(engine, requests), answer(engine, stopping), strict=True):
        texts = [tokenizer.decode(list(plain.token_ids[:n])) for n in range(len(plain.token_ids) + 1)]
        length = next((n for n, text in enumerate(texts) if any(string in text for string in strings)), None)
        ended += length is not None
        assert given.token_ids == plain.token_ids[:length]
        assert given.finish is (plain.finish if length is None else Finish.STRING)
    assert 3 < ended < 30


def test_prompts_seen_before_are_not_computed_again(engine: VLLMEngine, model: HFModel) -> None:
    first, second = make_requests(model, 2, lengths=(2 * BLOCK + 5,), temperature=0.0)
    longer = replace(first, prompt_ids=(*first.prompt_ids, *second.prompt_ids), request_id="longer")
    answer(engine, [first])
    cached = engine.counts.cached_prompt_tokens
    given = answer(engine, [longer])[0]
    assert engine.counts.cached_prompt_tokens == cached + 2 * BLOCK
    assert given.cached_tokens == 2 * BLOCK and engine.cache_tokens is not None and engine.cache_tokens > 10 * BLOCK
    assert given.log_probs == pytest.approx(model.log_probs(longer.prompt_ids, given.token_ids), abs=1e-4)


def test_more_prompts_at_once_than_a_step_takes_are_answered(engine: VLLMEngine, model: HFModel) -> None:
    """On a CPU vLLM 0.31 dies of a seeded prompt that it computes in pieces; it is not let to."""
    requests = make_requests(model, 24, lengths=(700, 900), max_tokens=2)
    for request, given in zip(requests, answer(engine, requests), strict=True):
        wanted = model.log_probs(request.prompt_ids, given.token_ids)
        assert given.log_probs == pytest.approx(wanted, abs=1e-4)


def test_requests_that_nobody_waits_for_are_aborted(engine: VLLMEngine, model: HFModel) -> None:
    length = engine.context_length
    long = [
        replace(r, sampling=replace(r.sampling, max_tokens=length)) for r in make_requests(model, 8, temperature=0.0)
    ]
    # Greedy answers of a random model may stop at once: those that would go on to the end of the context are wanted.
    endless = [r for r, given in zip(long, answer(engine, long), strict=True) if given.finish is Finish.LENGTH]
    assert endless

    async def run() -> int:
        start = engine.counts.generated_tokens
        tasks = [asyncio.ensure_future(ask(engine, request)) for request in endless]
        await wait_until(lambda: engine.counts.generated_tokens > start + len(endless))
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await wait_until(lambda: engine._llm.get_num_unfinished_requests() == 0)
        # A further request is computed alone: nothing of the others is left in vLLM's schedule.
        await ask(engine, replace(make_requests(model, 1)[0], request_id="after"))
        assert engine.counts.running <= 1
        return engine.counts.generated_tokens - start

    assert asyncio.run(run()) < len(endless) * length / 2


def test_nothing_is_generated_for_episodes_that_have_ended(engine: VLLMEngine, wide_model: Path) -> None:
    prompts = PromptBuilder(load_tokenizer(wide_model), CorridorEnv.templates["compact"])
    jobs = [Job(f"corridor/test/{i % 3:03d}", i) for i in range(24)]

    def play(concurrency: int) -> list[Trajectory]:
        return asyncio.run(
            play_many(
                jobs,
                make_env=CorridorEnv,
                engine_for=lambda env: engine,
                prompts=prompts,
                sampling=Sampling(max_tokens=8),
                env_id="corridor",
                concurrency=concurrency,
            )
        )

    before = engine.counts.generated_tokens
    trajectories = play(8)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert engine.counts.generated_tokens - before == sum(len(turn.response_ids) for turn in turns)
    again = play(3)
    assert [[t.response_ids for t in trajectory.turns] for trajectory in again] == [
        [t.response_ids for t in trajectory.turns] for trajectory in trajectories
    ]


def change(state: dict[str, Any], *parts: str) -> dict[str, Any]:
    """The weights whose names hold one of ``parts`` are others."""
    dice = torch.Generator().manual_seed(len(parts[0]))
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=dice)
        if any(part in name for part in parts)
        else tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(
    "parts", [("embed_tokens", "lm_head"), ("norm",), ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("mlp",), ("",)]
)
def test_replaced_weights_are_computed_with(
    engine: VLLMEngine, model: HFModel, wide_model: Path, parts: tuple[str, ...]
) -> None:
    """One part at a time: vLLM keeps each in its own order, the output layer that is tied to the embedding too."""
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    after = change(before, *parts)
    after["lm_head.weight"] = after["model.embed_tokens.weight"]
    requests = make_requests(model, 6, lengths=(2 * BLOCK + 5, 9))
    other = HFModel(wide_model)
    other.load_state(after)
    try:
        for state, reference in ((after, other), (before, model)):
            answer(engine, requests)  # its prompts are cached, under the weights of before
            engine.load_state(state)
            for request, given in zip(requests, answer(engine, requests), strict=True):
                wanted = reference.log_probs(request.prompt_ids, given.token_ids)
                assert given.log_probs == pytest.approx(wanted, abs=1e-4)
    finally:
        engine.load_state(before)
    first = requests[0]
    moved = max(
        abs(a - b)
        for a, b in zip(
            model.log_probs(first.prompt_ids, (3, 4, 5)), other.log_probs(first.prompt_ids, (3, 4, 5)), strict=True
        )
    )
    assert moved > 1e-2, "the change shows"


def test_memory_of_the_cache_is_given_back_and_answers_stay_the_same(engine: VLLMEngine, model: HFModel) -> None:
    requests = make_requests(model, 6, lengths=(2 * BLOCK + 5, 9))
    before = answer(engine, requests)
    worker = psutil.Process(engine._processes[1])
    used = worker.memory_full_info().uss
    cached = engine.counts.cached_prompt_tokens
    engine.release_memory()
    assert worker.memory_full_info().uss < used
    assert answer(engine, requests) == before
    assert engine.counts.cached_prompt_tokens == cached, "the prompts were computed again"


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine: VLLMEngine, model: HFModel) -> None:
    state = dict(model.model.state_dict())
    request = make_requests(model, 1)[0]
    before = answer(engine, [request])
    with pytest.raises(SpearError, match=r"missing \['model.norm.weight'\]"):
        engine.load_state({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    with pytest.raises(SpearError, match=r"norm\.weight is .*, there it is"):
        engine.load_state(state | {"model.norm.weight": torch.ones(3)})
    assert answer(engine, [request]) == before

    async def load() -> None:
        # Sixteen, for each ends where its model says so, most of them soon.
        tasks = [asyncio.ensure_future(ask(engine, one)) for one in make_requests(model, 16, max_tokens=900)]
        await wait_until(lambda: engine._llm.get_num_unfinished_requests() > 0)
        with pytest.raises(SpearError, match="answers are under way"):
            engine.load_state(state)
        await asyncio.gather(*tasks)

    asyncio.run(load())


def test_a_death_is_a_fault_and_leaves_nothing(engine: VLLMEngine, model: HFModel) -> None:
    """The last one: the fixture then finds nothing left, though vLLM was killed."""
    requests = [replace(r, sampling=Sampling(max_tokens=900, seed=1)) for r in make_requests(model, 4)]
    workers = [
        number
        for number, command in find_processes(f"test-vllm-{os.getpid()}").items()
        if number != os.getpid() and "Worker" in command
    ]
    assert workers

    async def run() -> list[Any]:
        tasks = [asyncio.ensure_future(ask(engine, request)) for request in requests]
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for result in asyncio.run(run()):
        assert isinstance(result, EngineFault)
        assert result.kind is EngineFaultKind.DEAD
    with pytest.raises(EngineFault, match="has ended"):
        answer(engine, requests[:1])
    engine.close()
    with pytest.raises(SpearError, match="closed"):
        answer(engine, requests[:1])
