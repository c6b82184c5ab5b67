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
from spear_agents.engines.tensors import MicroBatcher
from spear_agents.engines.vision import ImageReader, has_vision
from spear_agents.evaluation.records import sum_usage
from spear_agents.gateway.programs import open_program
from spear_agents.play.episode import Snapshot, play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, Play, Retrying, open_session, play_many
from spear_training.algorithms import RowTable
from spear_training.run.custom_reward import load_custom_reward
from spear_training.run.environments import make_environment
from spear_training.run.launch import MOST_EPISODES
from spear_training.run.to_verl import HF, VLLM_CPU, read_node
from spear_training.step.branching import list_walks
from spear_training.step.records import Rollout, record_episode, tabulate
from spear_training.verl_plugin.queue import PARTITION, build_columns
from spear_training.verl_plugin.rollout_servers import stop_if_dead

_log = logging.getLogger(__name__)
TOKENS = ("ids", "mask", "rollout_log_probs", "picture_bytes", "pictures")
"""Columns that stay in TransferQueue."""
ROWS_PER_WRITE = 4096


@dataclass(frozen=True)
class EpisodeOrder:
    """One episode to play: member ``sample`` of ``group``, on ``task_id``, with its own seed.

    With ``recorded`` the full episode is returned, to be recorded. ``begin`` is the snapshot that it begins in,
    where not at the start of the task.
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
        """The engine's own session."""
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
                image_data=[Image.fromarray(image) for image in images] or None,
            )
        except EngineFault as fault:
            stop_if_dead(fault)
            raise
        # verl's vLLM server calls every response "completed", also one that ran into the limit: the last token tells.
        finish = Finish.LENGTH
        if output.token_ids and output.token_ids[-1] in ends:
            finish = Finish.STOP
        elif StopFinder(self.tokenizer, sampling.stop_strings).is_reached(output.token_ids):
            finish = Finish.STRING
        cached = output.extra_fields.get("cached_tokens")
        version = output.extra_fields.get("global_steps")
        log_probs = tuple(output.log_probs or ())
        return Generation(tuple(output.token_ids), log_probs, finish, cached_tokens=cached, version=version)


class RolloutWorker(AgentLoopWorker):
    """Plays many episodes concurrently, each in a coroutine of its own, over a pool of environments."""

    def __init__(self, config: DictConfig, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        tq.init()
        run = read_node(config)
        self._settings = run.env
        self._find_repetition = run.filter.repetition
        self._branch = run.branch
        self._reward = load_custom_reward(run.reward)
        self._agent, self._agent_timeout = run.rollout.agent, run.rollout.agent_timeout
        self._tries = run.rollout.tries
        self._player: Play | None = None
        self._programs = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._idle: dict[str, list[gym.Env]] = {}
        self._prompts: PromptBuilder | None = None
        path = self.model_config.local_path
        self._reader = ImageReader(path) if has_vision(path) else None
        self._end_ids = require_end_ids(path, self.tokenizer)
        rollout = config.actor_rollout_ref.rollout
        self._engine: Engine
        if rollout.name == HF:
            batch = rollout.max_num_seqs
            self._engine = MicroBatcher(self._generate_batch, max_batch=batch, deterministic=run.repeats)
        else:
            image = self._reader.image_token_id if self._reader is not None else None
            self._engine = ServerEngine(
                llm_client, self._end_ids, self.tokenizer, seeded=run.deterministic, image_token_id=image
            )
        self._cache_tokens: int | None = None
        self._batches = 1 + run.rollout.staleness
        """That are played at a time."""
        self._shares_cache = rollout.name == VLLM_CPU
        self._workers = rollout.agent.num_workers
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        self._replicas = max(1, ranks // rollout.tensor_model_parallel_size)

    async def _generate_batch(self, requests: list[Request]) -> list[Generation]:
        """Answer a batch, an even share of it on each replica."""
        share = -(-len(requests) // self._replicas)
        parts = [requests[start : start + share] for start in range(0, len(requests), share)]
        return [answer for part in await asyncio.gather(*map(self._ask_server, parts)) for answer in part]

    async def _ask_server(self, requests: list[Request]) -> list[Generation]:
        async with self._use_server(requests[0].request_id) as server:
            answers: list[Generation] = await server.generate_batch.remote(requests)
        return answers

    @asynccontextmanager
    async def _use_server(self, request_id: str) -> AsyncIterator[Any]:
        server_id, server = await self.llm_client._acquire_server(request_id)
        try:
            yield server
        finally:
            self.llm_client._release_server(server_id, request_id=request_id)

    def _build_prompts(self, env: gym.Env) -> PromptBuilder:
        core: Any = env.unwrapped
        keywords = self.config.data.apply_chat_template_kwargs
        return PromptBuilder(
            self.tokenizer,
            core.templates[self._settings.template],
            layout=self._settings.layout,
            history=self._settings.history,
            max_prompt_tokens=self.rollout_config.prompt_length,
            max_row_tokens=self.rollout_config.response_length,
            stop_token_ids=self._end_ids,
            mark_image=self._reader.mark if self._reader is not None else None,
            template_kwargs=OmegaConf.to_container(keywords, resolve=True) if keywords else None,
        )

    def _take_environment(self, split: str) -> gym.Env:
        idle = self._idle.setdefault(split, [])
        return idle.pop() if idle else make_environment(self._settings, split=split)

    async def _open(self, split: str) -> tuple[Play, PromptBuilder]:
        """What all batches share, made by the first of them."""
        async with self._opening:
            if self._shares_cache and self._cache_tokens is None:
                async with self._use_server("cache") as server:
                    tokens = await server.get_cache_tokens.remote()
                if tokens is not None:
                    self._cache_tokens = tokens * self._replicas // (self._workers * self._batches)
            if self._player is None:
                self._player = play_episode
                if self._agent is not None:  # its gateway serves as long as this worker lives
                    program = open_program(self._agent, self._agent_timeout)
                    self._player = await self._programs.enter_async_context(program)
            if self._prompts is None:
                env = self._take_environment(split)
                self._prompts = self._build_prompts(env)
                self._idle[split].append(env)
            return self._player, self._prompts

    async def play(self, orders: list[EpisodeOrder], sampling: Sampling, split: str, keep: bool) -> Rollout:
        """Play ``orders``; write the rows to TransferQueue, under the keys in the records, if ``keep``.

        Other batches may be played meanwhile; they share the engine and the environments.
        """
        player, prompts = await self._open(split)
        branches = keep and self._branch.share > 0
        engine = CountingEngine(self._engine, self._cache_tokens)
        play = Retrying(partial(play_episode, snapshots=True) if branches else player, self._tries)
        trajectories = await play_many(
            [Job(order.task_id, order.seed, order.begin) for order in orders],
            make_env=lambda: self._take_environment(split),
            release_env=self._idle.setdefault(split, []).append,
            engine_for=lambda env: engine,
            prompts=prompts,
            sampling=sampling,
            env_id=self._settings.id,
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
        rows = tabulate(*kept, find_repetition=self._find_repetition, pictures=self._reader is not None)
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
            list_walks(trajectories, records, self._branch) if branches else {},
        )

    async def _write_rows(self, rows: RowTable) -> None:
        for start in range(0, len(rows), ROWS_PER_WRITE):
            part = rows.take(np.arange(start, min(start + ROWS_PER_WRITE, len(rows))))
            await tq.async_kv_batch_put(
                keys=part.key.tolist(), partition_id=PARTITION, fields=build_columns(part), tags=[{} for _ in part.key]
            )


@dataclass(frozen=True)
class Share:
    """What one worker plays in a step, and its Ray future."""

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
