"""CPU time that the gateway adds to a call.

64 episodes of ALFWorld's small rooms at a time, played by the expert, whose responses cost next to nothing, as one
conversation each: once by ``play_episode``, once by the same loop as a program (``spear_agents.gateway.programs``),
over HTTP. What the program's own threads take (its HTTP client, mostly) is a figure of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.runner.figures import Bar, Figure, make_parser, run_benchmark
from spear_agents.engines.base import Finish, Generation, Sampling
from spear_agents.engines.scripted import InfoWatch, NoisyExpert
from spear_agents.gateway import programs as loop
from spear_agents.gateway.programs import AgentTask, ProgramPlayer
from spear_agents.gateway.server import Gateway
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, Play, play_many
from spear_agents.play.trajectory import Layout, Trajectory
from spear_envs.core.making import make_env

ENV_ID = "spear/ALFWorld-v0"
PLACES = 64
BARS = (
    Bar("CPU that the gateway adds to a call", "ms", at_most=2.0),
    Bar("episodes that differ", at_most=0.0),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens behind a chat template that jinja renders, as a model's own has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = CHAT_TEMPLATE
    return made


class QuickEngine:
    """An engine that does not look at the prompt, which takes longer to decode than all that is measured here."""

    def __init__(self, expert: NoisyExpert, tokenizer: PreTrainedTokenizerFast) -> None:
        self._expert = expert
        self._tokenizer = tokenizer

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        """The expert's response."""
        response = self._expert("", random.Random(sampling.seed))
        ids = (*self._tokenizer.encode(response, add_special_tokens=False), self._tokenizer.eos_token_id)
        return Generation(ids, (0.0,) * len(ids), Finish.STOP)


class Watch:
    """Our loop as a program that measures the CPU time of its own threads."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __call__(self, task: AgentTask) -> None:
        """Play, then add up."""
        start = time.thread_time()
        await loop.play(task)
        self.seconds += time.thread_time() - start


async def play_all(episodes: int, play: Play) -> list[Trajectory]:
    """The episodes, 64 at a time."""
    tokenizer = make_tokenizer()
    env = make_env(ENV_ID, keywords={"rooms": "small"})
    core: Any = env.unwrapped
    prompts = PromptBuilder(tokenizer, core.templates["default"], Layout.CONVERSATION)
    return await play_many(
        [Job(core.tasks[i].id, i) for i in range(episodes)],
        make_env=lambda: InfoWatch(make_env(ENV_ID, keywords={"rooms": "small"})),
        engine_for=lambda env: QuickEngine(NoisyExpert(env, prompts.template, noise=0.2), tokenizer),
        prompts=prompts,
        sampling=Sampling(),
        env_id=ENV_ID,
        concurrency=PLACES,
        play=play,
    )


async def play_through(episodes: int, watch: Watch) -> list[Trajectory]:
    """The same by a program."""
    gateway = Gateway()
    await gateway.start()
    try:
        return await play_all(episodes, ProgramPlayer(watch, gateway))
    finally:
        await gateway.aclose()


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    episodes = PLACES if options.size == "quick" else 4 * PLACES
    asyncio.run(play_all(PLACES, play_episode))  # makes the games, which are kept
    start = time.process_time()
    direct = asyncio.run(play_all(episodes, play_episode))
    plain = time.process_time() - start
    watch = Watch()
    start = time.process_time()
    through = asyncio.run(play_through(episodes, watch))
    served = time.process_time() - start
    calls = sum(len(one.turns) for one in direct)
    note = f"{calls:,} calls, {PLACES} episodes at a time"
    yield Figure("CPU of a turn of our own loop", 1e3 * plain / calls, "ms", note=note)
    yield Figure("CPU of the program's own threads in a call", 1e3 * watch.seconds / calls, "ms")
    yield Figure("CPU that the gateway adds to a call", 1e3 * (served - watch.seconds - plain) / calls, "ms")
    yield Figure("episodes that differ", sum(a != replace(b, steps=None) for a, b in zip(direct, through, strict=True)))


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, packages=("fastapi", "httpx", "uvicorn"))


if __name__ == "__main__":
    raise SystemExit(main())
