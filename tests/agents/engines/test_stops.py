"""What every engine is made of: stop strings, sampling settings, seeds, batches, and scripted policies."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import (
    ByteTokenizer,
    Finish,
    Generation,
    Request,
    Sampling,
    StopFinder,
    cut_at_stop,
    derive_seed,
)
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy
from spear_agents.engines.tensors import RequestBatcher
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.corridor import CorridorEnv

CLOSING = ("</search>", "</answer>")


class Pieces:
    """A tokenizer whose ids are places in a list of texts."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.calls = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return "".join(self.pieces[i] for i in token_ids)


@given(st.lists(st.sampled_from(["</search>", "</answer>", "<", "/", "search", ">", " x", "é", "</", "rch>"])))
def test_the_first_stop_string_is_found_at_its_last_byte(parts: list[str]) -> None:
    text = "".join(parts)
    ids = ByteTokenizer().encode(text)
    finder = StopFinder(ByteTokenizer(), CLOSING)
    reached = next((n for n in range(1, len(ids) + 1) if finder.is_reached(ids[:n])), None)
    kept, cut = cut_at_stop(text, CLOSING)
    assert cut == (reached is not None)
    assert kept == (text if reached is None else ByteTokenizer().decode(ids[:reached]))


def test_a_token_may_hold_more_than_the_end_of_the_string() -> None:
    tokenizer = Pieces("<search>q", "</", "search", ">\n", "")
    finder = StopFinder(tokenizer, CLOSING)
    assert [finder.is_reached(range(n)) for n in range(5)] == [False] * 4 + [True]
    assert finder.is_reached([0, 1, 4, 2, 4, 3]), "tokens without a text in between"


def test_tokens_that_cannot_end_a_string_cost_nothing() -> None:
    tokenizer = Pieces("word", ">")
    finder = StopFinder(tokenizer, CLOSING)
    for n in range(1, 1000):
        assert not finder.is_reached([0] * n)
    assert tokenizer.calls == 1


class BytePieces:
    """Shows a run of bytes as U+FFFD throughout if any of it is broken, as tokenizers with byte fallback do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)


@given(st.lists(st.sampled_from(["。終", "わり", "é", "😀", "x"])))
def test_a_stop_string_beyond_ascii_is_found(parts: list[str]) -> None:
    text = "".join([*parts, "。終わり"])
    ids = list(text.encode())
    finder = StopFinder(BytePieces(), ("。終わり",))
    reached = next(n for n in range(1, len(ids) + 1) if finder.is_reached(ids[:n]))
    assert bytes(ids[:reached]).decode() == cut_at_stop(text, ("。終わり",))[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"stop_strings": ("</search>", "")},
    ],
)
def test_sampling_refuses_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_strings")):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_derived_seeds_are_the_same_in_every_process() -> None:
    assert derive_seed("sokoban/x", 3, 1) == 6_547_709_584_453_238_800


def test_derived_seeds_tell_their_parts_apart() -> None:
    seeds = {derive_seed(*parts) for parts in [("a", 1, 2), ("a", 12), ("a1", 2), ("a", 2, 1), ("a\ud800", 1)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


FOREVER = 3600.0


class Recorder:
    """Answers each request with its own prompt and remembers the batches."""

    def __init__(self, delay: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self.delay = delay

    async def __call__(self, requests: list[Request]) -> list[Generation]:
        self.batches.append([request.request_id for request in requests])
        await asyncio.sleep(self.delay)
        if any(request.prompt_ids == (666,) for request in requests):
            raise ZeroDivisionError("a bad batch")
        return [Generation(tuple(request.prompt_ids), (0.0,), Finish.STOP) for request in requests]


async def ask(engine: RequestBatcher, name: str, *prompt: int) -> Generation:
    return await engine.generate(prompt or (1,), Sampling(), request_id=name)


def test_a_batch_goes_at_once_when_every_announced_caller_waits() -> None:
    recorder = Recorder()
    engine = RequestBatcher(recorder, max_wait_s=FOREVER)

    async def play(name: str, turns: int) -> None:
        with engine.session():
            for turn in range(turns):
                answer = await ask(engine, f"{name}{turn}", turn)
                assert answer.token_ids == (turn,)

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(play("a", 3), play("b", 1), play("c", 2)), 5)

    asyncio.run(main())
    assert recorder.batches == [["a0", "b0", "c0"], ["a1", "c1"], ["a2"]]
    assert engine.live == 0


def test_without_sessions_the_timer_and_the_full_batch_send() -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = RequestBatcher(recorder, max_batch=2, max_wait_s=0.01)
        await asyncio.wait_for(asyncio.gather(*(ask(engine, str(i)) for i in range(5))), 5)
        await asyncio.wait_for(ask(engine, "late"), 5)

    asyncio.run(main())
    assert recorder.batches == [["0", "1"], ["2", "3"], ["4"], ["late"]]


def test_a_caller_that_does_something_else_is_waited_for_no_longer_than_the_timer() -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = RequestBatcher(recorder, max_wait_s=0.01)
        with engine.session(), engine.session():
            await asyncio.wait_for(ask(engine, "quick"), 5)

    asyncio.run(main())
    assert recorder.batches == [["quick"]]


@pytest.mark.parametrize("trial", range(4))
def test_deterministic_batches_do_not_depend_on_timing(trial: int) -> None:
    recorder = Recorder(delay=0.001)
    dice = random.Random(trial)

    async def main() -> None:
        engine = RequestBatcher(recorder, max_batch=3, max_wait_s=0.0, deterministic=True)

        async def play(name: str, turns: int) -> None:
            with engine.session():
                for turn in range(turns):
                    await asyncio.sleep(dice.random() / 200)
                    await ask(engine, f"{name}{turn}")

        names = ["d", "b", "a", "c"]
        dice.shuffle(names)
        await asyncio.wait_for(asyncio.gather(*(play(name, 1 + "abcd".index(name)) for name in names)), 10)

    asyncio.run(main())
    assert recorder.batches == [["a0", "b0", "c0"], ["d0"], ["b1", "c1", "d1"], ["c2", "d2"], ["d3"]]


def test_a_failing_batch_gives_its_callers_the_error_and_the_batcher_lives_on() -> None:
    recorder = Recorder()

    async def main() -> list[object]:
        engine = RequestBatcher(recorder, max_wait_s=0.0)
        failed = await asyncio.gather(ask(engine, "a", 666), ask(engine, "b"), return_exceptions=True)
        return [*failed, await ask(engine, "c", 7)]

    first, second, third = asyncio.run(main())
    assert isinstance(first, ZeroDivisionError) and isinstance(second, ZeroDivisionError)
    assert isinstance(third, Generation) and third.token_ids == (7,)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cancelled_caller_is_not_waited_for(deterministic: bool) -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = RequestBatcher(recorder, max_wait_s=FOREVER, deterministic=deterministic)

        async def play(name: str, sleep: float) -> None:
            with engine.session():
                await asyncio.sleep(sleep)
                await ask(engine, name)

        leaver, stayer = asyncio.create_task(play("leaver", 0)), asyncio.create_task(play("stayer", 0.02))
        await asyncio.sleep(0.01)
        leaver.cancel()
        await asyncio.wait_for(stayer, 5)
        assert leaver.cancelled()

    asyncio.run(main())
    assert recorder.batches == [["stayer"]]


TEMPLATE = CorridorEnv.templates["compact"]


def play(env: InfoWatch, engine: ScriptedEngine, task: int = 2, seed: int = 0) -> Trajectory:
    return asyncio.run(
        play_episode(
            env,
            engine,
            PromptBuilder(ByteTokenizer(), TEMPLATE),
            task_id=f"corridor/test/{task:03d}",
            sampling=Sampling(),
            seed=seed,
            env_id="corridor",
        )
    )


@given(st.text(st.characters()))
def test_bytes_give_back_any_text(text: str) -> None:
    codec = ByteTokenizer()
    assert codec.decode([*codec.encode(text), 256]) == text


def test_a_policy_sees_the_prompt_and_a_stream_of_its_own() -> None:
    seen = []

    def policy(prompt: str, dice: random.Random) -> str:
        seen.append((prompt, dice.random()))
        return "élan"

    engine = ScriptedEngine(policy)
    prompt = ByteTokenizer().encode("où?")
    answer = asyncio.run(engine.generate(prompt, Sampling(seed=4, max_tokens=1), request_id="x"))
    assert ByteTokenizer().decode(answer.token_ids) == "élan"
    assert answer.log_probs == (0.0,) * len(answer.token_ids)
    assert seen == [("où?", random.Random(4).random())]


def test_a_noisy_expert_errs_and_plans_anew() -> None:
    env = InfoWatch(CorridorEnv(max_turns=40))
    engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, noise=0.5))
    played = [play(env, engine, seed=seed) for seed in range(40)]
    assert all(trajectory.won for trajectory in played)
    actions = Counter(turn.action for trajectory in played for turn in trajectory.turns)
    # Half of the turns are random and half of those go back.
    assert 0.15 < actions["back"] / actions.total() < 0.35


def test_errors_can_be_actions_that_were_possible_before() -> None:
    class Doors(CorridorEnv):
        def _admissible(self) -> list[str]:
            return ["go", f"open {self.place}"]

    env = InfoWatch(Doors(lengths=(4,), max_turns=60))
    played = {}
    for share in (0.0, 1.0):
        engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, noise=0.5, inadmissible=share))
        turns = [turn for seed in range(30) for turn in play(env, engine, task=0, seed=seed).turns]
        # The door of another cell than the one that the observation shows.
        played[share] = sum(
            turn.action.startswith("open") and turn.action != f"open {turn.observation.index('P')}" for turn in turns
        ) / len(turns)
    assert played[0.0] == 0
    assert 0.15 < played[1.0] < 0.5  # in the first cell there is no other door yet


def test_the_expert_says_what_it_would_have_done() -> None:
    env = InfoWatch(CorridorEnv(max_turns=40))
    expert = NoisyExpert(env, TEMPLATE, noise=0.9)
    assert expert.advice is None
    for seed in range(3):
        play(env, ScriptedEngine(expert), seed=seed)
        assert expert.advice == TEMPLATE.respond("go")


def test_an_expert_can_write_down_its_thoughts() -> None:
    class Talking(CorridorEnv):
        def expert_thought(self, plan: Sequence[str]) -> str:
            return f"{len(plan)} to go"

    env = InfoWatch(Talking(lengths=(3,), max_turns=40))

    def think(**options: Any) -> list[tuple[str, str]]:
        engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, **options))
        return [(turn.action, turn.response.partition("</think>")[0]) for turn in play(env, engine, task=0).turns]

    assert think(thoughts=True) == [("go", "<think>3 to go"), ("go", "<think>2 to go"), ("go", "<think>1 to go")]
    assert {thought for _, thought in think()} == {"<think>"}
    strayed = think(thoughts=True, noise=0.9)
    assert {"<think>"} == {thought for action, thought in strayed if action == "back"}, "an error has no reason"


def test_the_random_policy_is_uniform_and_well_formed() -> None:
    env = InfoWatch(CorridorEnv(max_turns=30))
    engine = ScriptedEngine(random_policy(env, TEMPLATE))
    played = [play(env, engine, seed=seed) for seed in range(60)]
    actions = Counter(turn.action for trajectory in played for turn in trajectory.turns)
    assert set(actions) == {"go", "back"}
    assert abs(actions["go"] / actions.total() - 0.5) < 0.06
    assert all(trajectory.format_ok for trajectory in played)
    assert play(env, engine, seed=3) == played[3]


def test_no_listed_actions_no_random_policy() -> None:
    env = InfoWatch(CorridorEnv())
    env.info = {"admissible_actions": None}
    with pytest.raises(SpearError, match=r"^CorridorEnv does not list .*: take the engine expert"):
        env.admissible_actions()


def test_deterministic_mode_without_a_session_names_the_mend() -> None:
    engine = RequestBatcher(Recorder(), deterministic=True)
    with pytest.raises(SpearError, match="session"):
        asyncio.run(ask(engine, "x"))


def test_a_runner_that_loses_answers_is_told_apart() -> None:
    async def run_batch(requests: list[Request]) -> list[Generation]:
        return []

    with pytest.raises(SpearError, match="0 answers to 1 requests"):
        asyncio.run(ask(RequestBatcher(run_batch, max_wait_s=0.0), "x"))
