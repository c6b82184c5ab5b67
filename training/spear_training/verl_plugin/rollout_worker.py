"""Rollouts: workers that play episodes with ``spear_agents.play.episode`` and leave the rows in TransferQueue.

A drop-in for verl's agent-loop manager (``rollout.agent.agent_loop_manager_class``), which makes one TransferQueue
write an episode and polls for the end; here each worker writes the rows of many episodes at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker

from spear_agents.engines.base import (
    Decoder,
    Engine,
    EngineFault,
    Finish,
    Generation,
    Request,
    Sampling,
    StopFinder,
    require_end_ids,
)
from spear_agents.engines.tensors import RequestBatcher
from spear_agents.engines.vision import ImageReader, enlarge, has_vision
from spear_agents.evaluation.records import sum_usage
from spear_agents.gateway.programs import open_program
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, Play, Retrying, open_session, play_many
from spear_agents.play.snapshots import Snapshot
from spear_training.algorithms import RowTable
from spear_training.run.config import RunConfig
from spear_training.run.custom_reward import load_custom_reward
from spear_training.run.environments import make_environment
from spear_training.run.launch import MOST_EPISODES
from spear_training.run.to_verl import HF, VLLM_CPU, read_node
from spear_training.step.records import Rollout, record_episode, tabulate
from spear_training.step.tasks import list_walks
from spear_training.verl_plugin.queue import PARTITION, build_columns
from spear_training.verl_plugin.rollout_servers import stop_if_dead

_log = logging.getLogger(__name__)
TOKENS = ("ids", "mask", "rollout_log_probs", "picture_bytes", "pictures")
"""Columns that stay in TransferQueue."""
ROWS_PER_WRITE = 4096
"""Rows of one write, so that a step of any size is never copied into a single message."""


@dataclass(frozen=True)
class EpisodeOrder:
    """An episode to play: member ``sample`` of ``group``, on ``task_id``, with its own seed.

    With ``recorded`` the whole trajectory is returned, too. ``begin`` is the snapshot in which it starts; None: at the
    start of the task.
    """

    group: str
    sample: int
    task_id: str
    seed: int
    recorded: bool = False
    begin: Snapshot | None = None


@dataclass(eq=False)
class CountingEngine:
    """Passes the calls of a batch on to an engine and counts them.

    They may fill ``cache_tokens`` of the engine's key-value cache together; None where that is not known.
    """

    engine: Engine
    cache_tokens: int | None
    calls: int = 0

    def session(self) -> AbstractContextManager[None]:
        """Return the engine's own session."""
        return open_session(self.engine)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Count, then ask the engine."""
        self.calls += 1
        return await self.engine.generate(prompt_ids, sampling, request_id=request_id, images=images)


@dataclass(eq=False)
class ServerEngine:
    """An :class:`~spear_agents.engines.base.Engine` over verl's rollout servers, request by request (vLLM batches
    inside).

    An engine that has died ends the training: no further episode would be played.

    Attributes:
        end_ids: ids that end a response by themselves.
        tokenizer: the policy's, to see whether a response ends with a stop string.
        seeded: send the seed of each request, so that runs repeat; vLLM then samples row by row, which is slower.
        image_token_id: of a model that reads pictures; no response may hold it
            (:meth:`spear_agents.engines.vision.ImageReader.forbid_places`).
    """

    client: Any
    end_ids: Iterable[int]
    tokenizer: Decoder
    _: KW_ONLY
    seeded: bool = True
    image_token_id: int | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Ask the server that verl's load balancer assigns to ``request_id``."""
        ends = {*self.end_ids, *sampling.stop_token_ids}
        parameters: dict[str, Any] = dict(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            max_tokens=sampling.max_tokens,
            repetition_penalty=1.0,
            logprobs=True,
            # vLLM reads some of the files that name end tokens, not all.
            stop_token_ids=sorted(ends),
        )
        if self.seeded and sampling.seed is not None:
            parameters["seed"] = sampling.seed % 2**63
        if self.image_token_id is not None:
            parameters["logit_bias"] = {self.image_token_id: -100.0}
        if sampling.stop_strings:
            # A closing tag belongs to its action: without it every action would be unclosed.
            parameters |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
        try:
            output = await self.client.generate(
                request_id.rpartition("#")[0],  # without the turn: an episode stays on one server and its prefix cache
                prompt_ids=list(prompt_ids),
                sampling_params=parameters,
                image_data=[Image.fromarray(enlarge(image)) for image in images] or None,
            )
        except EngineFault as fault:
            stop_if_dead(fault)
            raise
        # verl's vLLM server calls every response "completed", also one that ran into the limit: the last token decides.
        finish = Finish.LENGTH
        if output.token_ids and output.token_ids[-1] in ends:
            finish = Finish.STOP
        elif StopFinder(self.tokenizer, sampling.stop_strings).is_reached(output.token_ids):
            finish = Finish.STRING
        cached = output.extra_fields.get("num_cached_tokens")
        version = output.extra_fields.get("global_steps")
        log_probs = tuple(output.log_probs or ())
        return Generation(tuple(output.token_ids), log_probs, finish, cached_tokens=cached, version=version)


@dataclass(eq=False)
class Servers:
    """The rollout servers behind verl's ``client``, for requests that go past its own interface."""

    client: Any
    replicas: int

    async def generate_batch(self, requests: list[Request]) -> list[Generation]:
        """Answer a batch, an even share of it on each replica; answers keep the order of the requests."""
        share = -(-len(requests) // self.replicas)
        parts = [requests[start : start + share] for start in range(0, len(requests), share)]
        return [answer for part in await asyncio.gather(*map(self._ask, parts)) for answer in part]

    async def measure_caches(self) -> int | None:
        """Return the tokens that the key-value caches of all replicas hold; None if the engine does not say."""
        async with self._use("cache") as server:
            tokens = await server.get_cache_tokens.remote()
        return None if tokens is None else tokens * self.replicas

    async def _ask(self, requests: list[Request]) -> list[Generation]:
        async with self._use(requests[0].request_id) as server:
            answers: list[Generation] = await server.generate_batch.remote(requests)
        return answers

    @asynccontextmanager
    async def _use(self, request_id: str) -> AsyncIterator[Any]:
        server_id, server = await self.client._acquire_server(request_id)
        try:
            yield server
        finally:
            self.client._release_server(server_id, request_id=request_id)


@dataclass(eq=False)
class BatchPlayer:
    """Plays batches of episodes, each episode in a coroutine of its own, over a pool of environments.

    Attributes:
        run: the configuration of the training.
        engine: answers the prompts of all batches.
        tokenizer: of the policy, whose responses end with one of ``end_ids``.
        max_prompt_tokens, max_row_tokens: limits of a prompt and of the response of a row.
        template_kwargs: keywords of the chat template.
        reader: of pictures, if the model has a vision tower.
        servers: whose key-value caches the batches of all ``workers`` share; None if they are not measured.
        store: TransferQueue, or what stands for it.
    """

    run: RunConfig
    engine: Engine
    tokenizer: Any
    end_ids: Sequence[int]
    _: KW_ONLY
    max_prompt_tokens: int
    max_row_tokens: int
    template_kwargs: Any = None
    reader: ImageReader | None = None
    servers: Servers | None = None
    workers: int = 1
    store: Any = tq

    def __post_init__(self) -> None:
        self._reward = load_custom_reward(self.run.reward)
        self._idle: dict[str, list[gym.Env]] = {}
        self._opening = asyncio.Lock()
        self._programs = AsyncExitStack()
        self._play: Play | None = None
        self._prompts: PromptBuilder | None = None
        self.cache_tokens: int | None = None
        """Tokens of the key-value caches that a batch may fill; None until measured, or where it is not known."""

    async def play(self, orders: list[EpisodeOrder], sampling: Sampling, split: str, keep: bool) -> Rollout:
        """Play ``orders``; write the rows to TransferQueue, under the keys in the records, if ``keep``.

        Other batches may be played meanwhile; they share the engine and the environments.
        """
        player, prompts = await self._open(split)
        branches = keep and self.run.branch.share > 0
        engine = CountingEngine(self.engine, self.cache_tokens)
        play = Retrying(partial(play_episode, snapshots=True) if branches else player, self.run.rollout.tries)
        trajectories = await play_many(
            [Job(order.task_id, order.seed, order.begin) for order in orders],
            make_env=lambda: self._take_environment(split),
            release_env=self._idle.setdefault(split, []).append,
            engine_for=lambda env: engine,
            prompts=prompts,
            sampling=sampling,
            env_id=self.run.env.id,
            concurrency=MOST_EPISODES,
            play=play,
        )
        if self._reward is not None:
            core: Any = self._idle[split][0].unwrapped
            trajectories = await self._reward.score_all(trajectories, core.tasks, split)
        records = [
            record_episode(trajectory, order.group, order.sample)
            for order, trajectory in zip(orders, trajectories, strict=True)
        ]
        kept = (trajectories, records) if keep else ((), ())
        rows = tabulate(*kept, find_repetition=self.run.filter.repetition, pictures=self.reader is not None)
        await self._write_rows(rows)
        episodes = tuple(trajectory for order, trajectory in zip(orders, trajectories, strict=True) if order.recorded)
        usage = sum_usage(trajectories)
        return Rollout(
            tuple(records),
            rows.drop(*TOKENS),
            engine.calls - play.discarded,
            play.retried,
            episodes,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.cacheable_tokens,
            list_walks(trajectories, records, self.run.branch) if branches else {},
        )

    async def close(self) -> None:
        """End the gateway of an agent program."""
        await self._programs.aclose()

    async def _open(self, split: str) -> tuple[Play, PromptBuilder]:
        """Return what all batches share, which the first of them makes."""
        rollout = self.run.rollout
        async with self._opening:
            if self.servers is not None and self.cache_tokens is None:
                tokens = await self.servers.measure_caches()
                if tokens is not None:  # batches ahead of their step are played at the same time
                    self.cache_tokens = tokens // (self.workers * (1 + rollout.staleness))
            if self._play is None:
                self._play = play_episode
                if rollout.agent is not None:  # its gateway serves as long as this player lives
                    program = open_program(rollout.agent, rollout.agent_timeout)
                    self._play = await self._programs.enter_async_context(program)
            if self._prompts is None:
                env = self._take_environment(split)
                self._prompts = self._build_prompts(env)
                self._idle[split].append(env)
            return self._play, self._prompts

    def _build_prompts(self, env: gym.Env) -> PromptBuilder:
        core: Any = env.unwrapped
        return PromptBuilder(
            self.tokenizer,
            core.templates[self.run.env.template],
            layout=self.run.env.layout,
            history=self.run.env.history,
            max_prompt_tokens=self.max_prompt_tokens,
            max_row_tokens=self.max_row_tokens,
            stop_token_ids=self.end_ids,
            mark_image=self.reader.mark if self.reader is not None else None,
            template_kwargs=self.template_kwargs,
        )

    def _take_environment(self, split: str) -> gym.Env:
        idle = self._idle.setdefault(split, [])
        return idle.pop() if idle else make_environment(self.run.env, split=split)

    async def _write_rows(self, rows: RowTable) -> None:
        for start in range(0, len(rows), ROWS_PER_WRITE):
            part = rows.take(np.arange(start, min(start + ROWS_PER_WRITE, len(rows))))
            await self.store.async_kv_batch_put(
                keys=part.key.tolist(), partition_id=PARTITION, fields=build_columns(part), tags=[{} for _ in part.key]
            )


class RolloutWorker(AgentLoopWorker):
    """verl's worker process around a :class:`BatchPlayer`."""

    def __init__(self, config: DictConfig, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        tq.init()
        run, rollout, path = read_node(config), config.actor_rollout_ref.rollout, self.model_config.local_path
        reader = ImageReader(path) if has_vision(path) else None
        end_ids = require_end_ids(path, self.tokenizer)
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        servers = Servers(llm_client, max(1, ranks // rollout.tensor_model_parallel_size))
        engine: Engine
        if rollout.name == HF:
            batch = rollout.max_num_seqs
            engine = RequestBatcher(servers.generate_batch, max_batch=batch, deterministic=run.repeats)
        else:
            image = reader.image_token_id if reader is not None else None
            engine = ServerEngine(llm_client, end_ids, self.tokenizer, seeded=run.deterministic, image_token_id=image)
        keywords = config.data.apply_chat_template_kwargs
        self._player = BatchPlayer(
            run,
            engine,
            self.tokenizer,
            end_ids,
            max_prompt_tokens=self.rollout_config.prompt_length,
            max_row_tokens=self.rollout_config.response_length,
            template_kwargs=OmegaConf.to_container(keywords, resolve=True) if keywords else None,
            reader=reader,
            servers=servers if rollout.name == VLLM_CPU else None,
            workers=rollout.agent.num_workers,
        )

    async def play(self, orders: list[EpisodeOrder], sampling: Sampling, split: str, keep: bool) -> Rollout:
        """Play a batch (:meth:`BatchPlayer.play`)."""
        return await self._player.play(orders, sampling, split, keep)


@dataclass(frozen=True)
class Share:
    """Episodes that one worker plays in a step, and their Ray future."""

    worker: Any
    asked: tuple[Any, ...]
    """Arguments of :meth:`RolloutWorker.play`."""
    future: Any


class RolloutManager(AgentLoopManager):
    """Deals episodes to the workers and collects their records."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(num_cpus=0)(RolloutWorker)
        super().__init__(*args, **kwargs)

    def start(self, orders: Sequence[EpisodeOrder], sampling: Sampling, split: str, *, keep: bool) -> list[Share]:
        """Begin to play; returns a share for each worker. Groups stay on one worker where there are enough of them."""
        shares: list[list[EpisodeOrder]] = [[] for _ in self.agent_loop_workers]
        numbers: dict[str, int] = {}
        for order in orders:
            shares[numbers.setdefault(order.group, len(numbers)) % len(shares)].append(order)
        workers = zip(self.agent_loop_workers, shares, strict=True)
        return [self._give(worker, (share, sampling, split, keep)) for worker, share in workers if share]

    def collect(self, shares: Sequence[Share]) -> Rollout:
        """Wait for all workers. A worker's error is raised here.

        The share of one that has died goes to another one, which plays it again: with the same seeds, and its rows have
        the same keys. A dead worker gets no more, so a training outlives all but one.
        """
        return Rollout.join([self._wait(share) for share in shares])

    @staticmethod
    def _give(worker: Any, asked: tuple[Any, ...]) -> Share:
        return Share(worker, asked, worker.play.remote(*asked))

    def _wait(self, share: Share) -> Rollout:
        while True:
            try:
                return ray.get(share.future)
            except ray.exceptions.RayActorError:
                left = [worker for worker in self.agent_loop_workers if worker is not share.worker]
                if not left:
                    raise
                _log.warning("a rollout worker has died: another one of %d plays its episodes again", len(left))
                self.agent_loop_workers = left
                share = self._give(left[0], share.asked)
