"""Episodes of a training: verl's servers as an engine, batches of a player, and the manager of the workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from verl.workers.rollout.replica import TokenOutput

from spear_agents.engines.base import ByteTokenizer, EngineFault, EngineFaultKind, Finish, Generation, Request, Sampling
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.engines.tensors import RequestBatcher
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.registration import register_env
from spear_training.algorithms.settings import SpearSettings
from spear_training.run.config import RunConfig
from spear_training.step.plan import reward_episode
from spear_training.step.records import Rollout
from spear_training.verl_plugin import rollout_worker
from spear_training.verl_plugin.queue import PARTITION
from spear_training.verl_plugin.rollout_worker import (
    TOKENS,
    BatchPlayer,
    EpisodeOrder,
    RolloutManager,
    ServerEngine,
    Servers,
    Share,
)
from tests.spear_envs.corridor import CorridorEnv as CORRIDOR
from tests.training.episodes import make_episode, play

END, STOP = 2, 9


# ---- verl's servers as an engine -------------------------------------------------------------------------------------
class FakeClient:
    """verl's client as the engine sees it: remembers the call, gives a set answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []

    async def generate(self, request_id: str, **call: Any) -> Any:
        self.calls.append({"request_id": request_id, **call})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def answer(ids: Sequence[int], reason: str = "completed") -> TokenOutput:
    return TokenOutput(token_ids=list(ids), log_probs=[-0.5] * len(ids), stop_reason=reason)


def ask(client: FakeClient, sampling: Sampling | None = None, **options: Any) -> Generation:
    engine = ServerEngine(client, [END], ByteTokenizer(), **options)
    return asyncio.run(engine.generate((5, 6), sampling or Sampling(), request_id="task#7#0003"))


def test_a_request_reaches_the_server_in_its_own_terms() -> None:
    extra = {"global_steps": 4, "num_cached_tokens": 1}
    text = TokenOutput(token_ids=[7, END], log_probs=[-0.5] * 2, stop_reason="", extra_fields=extra)
    client = FakeClient(text)
    sampling = Sampling(temperature=0.4, top_p=0.6, top_k=5, max_tokens=8, stop_token_ids=(STOP,), seed=2**40 + 3)
    generation = ask(client, sampling, image_token_id=41)
    (call,) = client.calls
    assert call["request_id"] == "task#7", "the same for all turns: the load balancer keeps an episode in its place"
    assert call["prompt_ids"] == [5, 6] and call["image_data"] is None
    assert call["sampling_params"] == {
        "temperature": 0.4,
        "top_p": 0.6,
        "top_k": 5,
        "max_tokens": 8,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "logit_bias": {41: -100.0},  # the place of a picture
        "seed": 2**40 + 3,
        "stop_token_ids": sorted([END, STOP]),
    }
    assert generation == Generation((7, END), (-0.5, -0.5), Finish.STOP, version=4)
    assert generation.cached_tokens == 1
    for seed, seeded in ((None, True), (5, False)):
        ask(client, Sampling(seed=seed), seeded=seeded)
        parameters = client.calls[-1]["sampling_params"]
        assert parameters["top_k"] == -1 and parameters["stop_token_ids"] == [END]
        assert not parameters.keys() & {"seed", "logit_bias"}


@pytest.mark.parametrize("reason", ["completed", "stop", "length"])
def test_a_response_at_its_limit_is_not_taken_for_a_finished_one(reason: str) -> None:
    # verl's vLLM server says "completed" for both; sglang tells them apart.
    sampling = Sampling(max_tokens=3)
    assert ask(FakeClient(answer([7, 7, 7], reason)), sampling).finish is Finish.LENGTH
    assert ask(FakeClient(answer([7, 7, END], reason)), sampling).finish is Finish.STOP
    assert ask(FakeClient(answer([7, 7], "length")), sampling).finish is Finish.LENGTH, "the context was full"
    assert ask(FakeClient(TokenOutput(token_ids=[], stop_reason="aborted"))) == Generation((), (), Finish.LENGTH)


def test_stop_strings_stay_part_of_the_response() -> None:
    written = list(b"<search>q</search>")
    sampling = Sampling(stop_strings=("</search>", "</answer>"))
    client = FakeClient(answer(written))
    generation = ask(client, sampling)
    parameters = client.calls[0]["sampling_params"]
    assert parameters["stop"] == ["</search>", "</answer>"] and parameters["include_stop_str_in_output"] is True
    assert generation.token_ids == tuple(written) and generation.finish is Finish.STRING
    assert ask(FakeClient(answer(written[:-1])), sampling).finish is Finish.LENGTH
    assert ask(FakeClient(answer([*written, END])), sampling).finish is Finish.STOP


@pytest.mark.parametrize("kind", [EngineFaultKind.DEAD, EngineFaultKind.OUT_OF_MEMORY])
def test_a_dead_engine_ends_the_training(kind: EngineFaultKind) -> None:
    import ray

    death = EngineFault(kind, "vLLM's process has ended: killed from outside")
    # As it comes out of the server's process.
    arrived = ray.exceptions.RayTaskError.from_bytes(
        ray.exceptions.RayTaskError("generate", "a traceback", death).to_bytes()
    ).as_instanceof_cause()
    for error in (death, arrived):
        with pytest.raises(SpearError, match="resumes") as text:
            ask(FakeClient(error))
        assert not isinstance(text.value, EngineFault)
    with pytest.raises(EngineFault):  # which ends an episode, not the training
        ask(FakeClient(EngineFault(EngineFaultKind.SERVER_ERROR, "a hiccup")))


# ---- a worker --------------------------------------------------------------------------------------------------------
class FakeQueue:
    """TransferQueue as a worker writes to it."""

    def __init__(self) -> None:
        self.writes: list[dict[str, Any]] = []

    async def async_kv_batch_put(self, **write: Any) -> None:
        self.writes.append(write)

    def rows(self) -> dict[str, Any]:
        return {key: write["fields"][n] for write in self.writes for n, key in enumerate(write["keys"])}


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


def open_player(
    queue: FakeQueue,
    policy: Any,
    *,
    wrap: Any = None,
    servers: Servers | None = None,
    workers: int = 1,
    template_kwargs: Any = None,
    **nodes: Any,
) -> BatchPlayer:
    """A player of the corridor without Ray or a model; ``wrap`` is put around its engine."""
    env = {"id": "tests/Corridor-v0", "template": "compact", **nodes.pop("env", {})}
    run = RunConfig.from_mapping({"env": env, "rollout": {"tries": 1, **nodes.pop("rollout", {})}, **nodes})
    tokenizer = ByteTokenizer()
    engine: Any = ScriptedEngine(policy, tokenizer)
    return BatchPlayer(
        run,
        wrap(engine) if wrap else engine,
        tokenizer,
        (tokenizer.eos_token_id,),
        max_prompt_tokens=4096,
        max_row_tokens=4096,
        template_kwargs=template_kwargs,
        servers=servers,
        workers=workers,
        store=queue,
    )


def play_batch(player: BatchPlayer, orders: list[EpisodeOrder], split: str = "train", *, keep: bool = True) -> Rollout:
    return asyncio.run(player.play(orders, Sampling(max_tokens=64), split, keep=keep))


CONVERSATION = {"layout": "conversation"}


def order_episodes(split: str, count: int = 4, samples: int = 2) -> list[EpisodeOrder]:
    ids = [task.id for task in CORRIDOR(split=split).tasks][:count]
    return [
        EpisodeOrder(f"1-{number:05d}", sample, task_id, 10 * number + sample)
        for number, task_id in enumerate(ids)
        for sample in range(samples)
    ]


def respond(word: str) -> str:
    return CORRIDOR.templates["compact"].respond(word)


def walk(prompt: str, dice: Any) -> str:
    """Walk towards the door, so that episodes are won after as many turns as the door is away."""
    last = prompt.rpartition("\n")[2] if "P" in prompt.rpartition("\n")[2] else prompt
    return respond("right" if last.rindex("P") < last.rindex("D") else "left")


def wander(prompt: str, dice: Any) -> str:
    return respond(dice.choice(["left", "right"]))


@pytest.mark.parametrize("layout", Layout)
def test_rows_and_records_of_played_episodes_fit_together(queue: FakeQueue, layout: Layout) -> None:
    orders = order_episodes("train")
    rollout = play_batch(open_player(queue, wander, env={"layout": layout.value}), orders)
    records = rollout.records
    assert rollout.generations == sum(record.turns for record in records), "nothing is generated in vain"
    assert [(r.group, r.sample, r.task_id) for r in records] == [(o.group, o.sample, o.task_id) for o in orders]
    written, rows = queue.rows(), rollout.rows
    assert list(written) == rows.key.tolist()
    assert rows.key.tolist() == [f"{record.trajectory}_{n}" for record in records for n in range(record.rows)]
    assert [r.rows for r in records] == [1 if layout is Layout.CONVERSATION else r.turns for r in records]
    assert not set(TOKENS) & set(rows.columns), "tokens travel through the queue alone"
    for key, prompt, response, own in zip(
        rows.key, rows.prompt_length, rows.response_length, rows.loss_tokens, strict=True
    ):
        columns = written[key]
        assert len(columns["loss_mask"]) == len(columns["rollout_log_probs"]) == response
        assert int(columns["loss_mask"].sum()) == own
        assert len(columns["input_ids"]) == prompt + response
    assert {write["partition_id"] for write in queue.writes} == {PARTITION}
    # Episodes do not depend on what is played beside them, and a validation writes nothing.
    alone = FakeQueue()
    again = play_batch(open_player(alone, wander, env={"layout": layout.value}), orders[:2], keep=False)
    assert again.records == tuple(replace(record, rows=again.records[n].rows) for n, record in enumerate(records[:2]))
    assert not len(again.rows) and alone.writes == []


def test_a_user_s_function_pays_instead_of_the_environment(queue: FakeQueue, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    return {'score': scale * extra_info['num_turns'] + solution_str.count('action')}\n"
    )
    reward = {"function": f"{path}:compute_score", "function_options": {"scale": 100}}
    orders = [replace(order, recorded=True) for order in order_episodes("train")]
    rollout = play_batch(open_player(queue, walk, reward=reward), orders)
    for record, episode in zip(rollout.records, rollout.episodes, strict=True):
        expected = 100 * record.turns + sum(turn.response.count("action") for turn in episode.turns)
        assert record.terms["custom"] == episode.reward_terms["custom"] == expected
        assert reward_episode(record, SpearSettings().reward, 0.0).terms["outcome"] == expected
        assert record.won and record.terms["outcome"] == 1.0, "success stays the environment's"


def test_the_chat_template_gets_its_keywords(queue: FakeQueue) -> None:
    player = open_player(queue, walk, template_kwargs={"enable_thinking": False})
    with pytest.raises(SpearError, match="enable_thinking"):
        play_batch(player, order_episodes("train"))


def test_a_program_plays_batch_after_batch_what_our_own_loop_plays(queue: FakeQueue) -> None:
    pytest.importorskip("fastapi")
    orders = order_episodes("train")
    play_batch(open_player(queue, walk, env=CONVERSATION), orders)
    program = {"agent": "spear_agents.gateway.programs:play"}
    player = open_player(queue, walk, env=CONVERSATION, rollout=program)

    async def play_twice() -> None:
        for _ in range(2):
            rollout = await player.play(orders, Sampling(), "train", keep=True)
            assert {record.stop for record in rollout.records} == {"won"}
        await player.close()

    asyncio.run(play_twice())
    own, first, second = [
        {
            key: {name: value.tolist() for name, value in write["fields"][n].items()}
            for n, key in enumerate(write["keys"])
        }
        for write in queue.writes
    ]
    assert len(own) == len(orders) and own == first == second


class Versioned:
    """An engine whose weights change with its ninth response."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, 0

    async def generate(self, *asked: Any, **named: Any) -> Generation:
        self.calls += 1
        version = 5 if self.calls <= 8 else 6
        await asyncio.sleep(0)
        return replace(await self.engine.generate(*asked, **named), version=version)


@pytest.mark.parametrize("layout", Layout)
def test_two_batches_are_played_at_a_time_and_each_counts_its_own(queue: FakeQueue, layout: Layout) -> None:
    orders = order_episodes("train")
    player = open_player(queue, walk, wrap=Versioned, env={"layout": layout.value})
    first, second = orders[:2], [replace(order, group=f"2{order.group[1:]}") for order in orders[2:]]

    async def play_both() -> list[Any]:
        return await asyncio.gather(*(player.play(each, Sampling(), "train", keep=True) for each in (first, second)))

    rollouts = asyncio.run(play_both())
    for asked, rollout in zip((first, second), rollouts, strict=True):
        assert [record.trajectory for record in rollout.records] == [f"{o.group}_{o.sample}" for o in asked]
        assert rollout.generations == sum(record.turns for record in rollout.records), "not those of the other batch"
        for record in rollout.records:
            mine = set(rollout.rows.version[rollout.rows.trajectory == record.trajectory].tolist())
            oldest = {min(record.versions)} if layout is Layout.CONVERSATION else set(record.versions)
            assert mine == oldest, "a row is as old as its oldest response"
    assert {record.versions for rollout in rollouts for record in rollout.records} >= {(5, 6)}


def test_tokens_of_a_faulted_episode_are_not_written(queue: FakeQueue) -> None:
    orders = order_episodes("train")
    wanted = orders[0].task_id
    env = {"id": f"{__name__}:tests/Broken-v0", "kwargs": {"broken": wanted}}
    rollout = play_batch(open_player(queue, wander, env=env), orders)
    broken = [record for record in rollout.records if record.fault is not None]
    assert [(record.fault, record.turns, record.rows) for record in broken] == [("backend", 1, 0)] * 2
    assert rollout.rows.key.tolist() == list(queue.rows())
    assert not set(rollout.rows.trajectory) & {record.trajectory for record in broken}


class BrokenCorridor(CORRIDOR):  # type: ignore[misc, valid-type]
    """A corridor whose task ``broken`` fails at the first move."""

    def __init__(self, broken: str = "", **keywords: Any) -> None:
        super().__init__(**keywords)
        self._broken = broken

    def _act(self, action: str) -> Any:
        if self.task.id == self._broken:
            raise EnvFault("backend", "the door is gone")
        return super()._act(action)


register_env("tests/Broken-v0", f"{__name__}:BrokenCorridor")


# ---- batches to the servers ------------------------------------------------------------------------------------------
class FakeBalancer:
    """The two private calls of verl's client that a batch makes."""

    def __init__(self, generate: Any) -> None:
        async def get_cache_tokens() -> int:
            return 900

        self.log: list[str] = []
        self._server = SimpleNamespace(
            generate_batch=SimpleNamespace(remote=generate), get_cache_tokens=SimpleNamespace(remote=get_cache_tokens)
        )

    async def _acquire_server(self, request_id: str) -> tuple[str, Any]:
        self.log.append(f"acquire {request_id}")
        return "server-0", self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.log.append(f"release {server_id} {request_id}")


def test_a_batch_is_shared_evenly_between_replicas() -> None:
    sizes: list[int] = []

    async def echo(requests: list[Request]) -> list[Generation]:
        sizes.append(len(requests))
        return [Generation(tuple(request.prompt_ids), (), Finish.STOP) for request in requests]

    balancer = FakeBalancer(echo)
    requests = [Request((n,), Sampling(), f"r{n}") for n in range(7)]
    answers = asyncio.run(Servers(balancer, 3).generate_batch(requests))
    assert [answer.token_ids for answer in answers] == [(n,) for n in range(7)]
    assert sorted(sizes) == [1, 3, 3] and len(balancer.log) == 6

    async def ask_both() -> list[Generation]:
        engine = RequestBatcher(Servers(balancer, 1).generate_batch, max_batch=8, deterministic=True)
        with engine.session(), engine.session():
            calls = [engine.generate((n,), Sampling(), request_id=f"r{n}") for n in (1, 0)]
            return list(await asyncio.gather(*calls))

    assert [generation.token_ids for generation in asyncio.run(ask_both())] == [(1,), (0,)]
    assert balancer.log[6:] == ["acquire r0", "release server-0 r0"]


def test_the_place_is_given_back_when_a_server_dies() -> None:
    async def die(requests: list[Request]) -> list[Generation]:
        raise RuntimeError("the actor died")

    balancer = FakeBalancer(die)
    with pytest.raises(RuntimeError, match="died"):
        asyncio.run(Servers(balancer, 1).generate_batch([Request((1,), Sampling(), "r")]))
    assert balancer.log[-1] == "release server-0 r"


@pytest.mark.parametrize(("staleness", "share"), [(0, 600), (2, 200)])
def test_a_batch_has_its_share_of_the_caches(queue: FakeQueue, staleness: int, share: int) -> None:
    """Of 900 tokens at each of two replicas, for three workers and the batches that each plays at a time."""
    balancer = FakeBalancer(None)
    player = open_player(queue, walk, servers=Servers(balancer, 2), workers=3, rollout={"staleness": staleness})
    for _ in range(2):
        play_batch(player, order_episodes("train"))
    assert player.cache_tokens == share
    assert balancer.log == ["acquire cache", "release server-0 cache"], "it is measured once"


# ---- the manager -----------------------------------------------------------------------------------------------------
def open_manager(workers: int) -> tuple[RolloutManager, list[list[EpisodeOrder]]]:
    manager, shares = object.__new__(RolloutManager), [[] for _ in range(workers)]

    def make_worker(share: list[EpisodeOrder]) -> Any:
        def play(orders: list[EpisodeOrder], sampling: Sampling, split: str, keep: bool) -> Any:
            share.extend(orders)
            return orders

        return SimpleNamespace(play=SimpleNamespace(remote=play))

    manager.agent_loop_workers = [make_worker(share) for share in shares]
    return manager, shares


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_groups_are_dealt_evenly_and_stay_together(workers: int) -> None:
    manager, shares = open_manager(workers)
    orders = [EpisodeOrder(f"g{n:02d}", sample, "t", 0) for sample in range(3) for n in range(8)]
    futures = manager.start(orders, Sampling(), "train", keep=True)
    assert sorted(repr(order) for share in shares for order in share) == sorted(map(repr, orders))
    for group in {order.group for order in orders}:
        assert sum(any(order.group == group for order in share) for share in shares) == 1
    sizes = [len({order.group for order in share}) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert len(futures) == sum(bool(share) for share in shares), "an idle worker is not called"


def test_records_come_back_in_one_order_whichever_worker_played(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [make_episode(group, sample) for group in ("1-00000", "1-00001") for sample in range(3)]
    monkeypatch.setattr(rollout_worker.ray, "get", lambda futures: futures)
    shares = [Share(None, (), played) for played in (play(episodes[3:]), play(episodes[:3][::-1]))]
    found, wanted = open_manager(2)[0].collect(shares), play(episodes)
    assert found.records == wanted.records and found.generations == wanted.generations
    assert found.rows.key.tolist() == wanted.rows.key.tolist()


def test_the_share_of_a_dead_worker_goes_to_another_one_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    error = rollout_worker.ray.exceptions.RayActorError
    manager, _ = open_manager(3)

    def make_worker(number: int) -> Any:
        return SimpleNamespace(play=SimpleNamespace(remote=lambda orders, *_: (number, orders)))

    everyone = manager.agent_loop_workers = [make_worker(number) for number in range(3)]
    answered: list[EpisodeOrder] = []

    def get(future: Any) -> Any:
        number, orders = future
        if number < dead:
            raise error()
        answered.extend(orders)
        return play([make_episode(order.group, order.sample) for order in orders])

    monkeypatch.setattr(rollout_worker.ray, "get", get)
    orders, dead = order_episodes("train"), 2
    manager.collect(manager.start(orders, Sampling(), "train", keep=True))
    assert sorted(map(repr, answered)) == sorted(map(repr, orders))
    assert manager.agent_loop_workers == everyone[2:]
    dead = 3
    with pytest.raises(error):
        manager.collect(manager.start(orders, Sampling(), "train", keep=True))
