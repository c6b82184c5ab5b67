"""Turns that one process drives with an engine that costs nothing.

Every response is as long as a policy's: thoughts that fill it up, and one of a few actions. What is counted is what a
rollout worker does for a turn: the environment's step, rendering and tokenising the prompt, decoding the response,
looking for stop strings, the record of the episode and the columns of its rows. CPU time, so that other work on the
machine costs little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.parts.agents_workload import CHAT_TEMPLATE, PIECES
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_agents.engines.base import Finish, Generation, Sampling, StopFinder
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, play_many
from spear_training.run.launch import MOST_EPISODES

BARS = (
    Bar("ALFWorld", "turns per CPU-second", at_least=1400.0),
    Bar("WebShop", "turns per CPU-second", at_least=800.0),
)
VOCABULARY = 16_000
FILLER = "I look at what I have seen so far and think about where the thing could be, then I walk there and see. "
COLORS = ("red", "blue", "black", "green", "white")
THINGS = ("shoes", "shirt", "lamp", "sofa", "headphones", "coffee", "jacket", "table")


@dataclass(frozen=True)
class Load:
    """An environment, and how its responses look."""

    name: str
    env_id: str
    actions: tuple[str, ...]
    tokens: int = 128
    layout: str = "per_turn"
    kwargs: dict[str, Any] = field(default_factory=dict)


LOADS = (
    Load("ALFWorld", "spear/ALFWorld-v0", ("look", "inventory", "go to shelf 1", "go to desk 1")),
    Load("WebShop", "spear/WebShop-v0", tuple(f"search[{color} {thing}]" for color in COLORS for thing in THINGS)),
    Load("Sokoban", "spear/Sokoban-v1", ("up", "down", "left", "right"), kwargs={"modality": "text"}),
)


class Instant:
    """An engine that has its responses ready."""

    def __init__(self, tokenizer: Any, responses: Sequence[tuple[int, ...]]) -> None:
        self._tokenizer, self._responses, self.turns = tokenizer, responses, 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[Any] = ()
    ) -> Generation:
        """The next response, as a server's client looks at it."""
        self.turns += 1
        ids = self._responses[self.turns % len(self._responses)]
        list(prompt_ids)
        StopFinder(self._tokenizer, sampling.stop_strings).is_reached(ids)
        await asyncio.sleep(0)
        return Generation(ids, (-0.5,) * len(ids), Finish.STOP)


def make_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level tokenizer learnt on prompts, cut into pieces as Qwen2.5's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=marks, initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@dataclass
class Stage:
    """All that episodes of a load need: prompts, responses that a policy might have given, and environments."""

    load: Load
    settings: Any
    tokenizer: Any
    prompts: PromptBuilder
    responses: list[tuple[int, ...]]
    tasks: list[str]
    idle: list[Any]
    """Environments that nobody plays in."""

    def play(self, engine: Any, episodes: int, concurrency: int) -> list[Any]:
        """Episodes to their ends, so many at a time."""
        from spear_training.run.environments import make_environment

        jobs = [Job(self.tasks[number % len(self.tasks)], number) for number in range(episodes)]
        return asyncio.run(
            play_many(
                jobs,
                make_env=lambda: self.idle.pop() if self.idle else make_environment(self.settings, split="train"),
                release_env=self.idle.append,
                engine_for=lambda env: engine,
                prompts=self.prompts,
                sampling=Sampling(max_tokens=512),
                env_id=self.load.env_id,
                concurrency=concurrency,
            )
        )


def open_load(load: Load, tasks: int) -> Stage:
    """The stage of a load, with one environment; a tokenizer is learnt for it."""
    from spear_training.run.config import EnvironmentSettings
    from spear_training.run.environments import make_environment

    settings = EnvironmentSettings.from_mapping({"id": load.env_id, "kwargs": load.kwargs, "layout": load.layout})
    env = make_environment(settings, split="train")
    core: Any = env.unwrapped
    tokenizer = make_tokenizer([FILLER, *_read_texts(env)])
    thoughts = tokenizer.decode((tokenizer.encode(FILLER) * 60)[: load.tokens - 24])
    # No two responses of a policy are the same, so that no cache may answer them.
    responses = [
        (*tokenizer.encode(f"<think>{number} {thoughts}</think><action>{action}</action>"), tokenizer.eos_token_id)
        for number, action in zip(range(4096), itertools.cycle(load.actions), strict=False)
    ]
    prompts = PromptBuilder(
        tokenizer, core.templates["default"], layout=settings.layout, history=2, max_prompt_tokens=4096,
        stop_token_ids=[tokenizer.eos_token_id],
    )  # fmt: skip
    return Stage(load, settings, tokenizer, prompts, responses, [core.tasks[i].id for i in range(tasks)], [env])


def make_rows(trajectories: Sequence[Any]) -> None:
    """Make what a worker makes of its episodes: records, and the columns of their rows."""
    from spear_training.step.records import record_episode, tabulate
    from spear_training.verl_plugin.queue import build_columns

    records = [record_episode(episode, "g", number) for number, episode in enumerate(trajectories)]
    build_columns(tabulate(trajectories, records))


def measure_load(load: Load, episodes: int) -> tuple[float, int]:
    """Turns per CPU-second, and how many turns were played."""
    stage = open_load(load, max(1, episodes // 8))
    # Makes the environments and imports what rows need, as a training's first step does.
    make_rows(stage.play(Instant(stage.tokenizer, stage.responses), episodes, MOST_EPISODES))
    engine = Instant(stage.tokenizer, stage.responses[::-1])
    start = time.process_time()
    make_rows(stage.play(engine, episodes, MOST_EPISODES))
    spent = time.process_time() - start
    for one in stage.idle:
        one.close()
    return engine.turns / spent, engine.turns


def _read_texts(env: Any) -> Iterator[str]:
    for seed in range(8):
        observation, info = env.reset(seed=seed)
        yield f"{observation} {info['instruction']} {info['admissible_actions']}"


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    episodes = 64 if options.size is Size.QUICK else 256
    for load in LOADS:
        rate, turns = measure_load(load, episodes)
        yield Figure(load.name, rate, "turns per CPU-second", note=f"{turns:,} turns, {load.tokens} tokens a response")


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    packages = ("tokenizers", "transformers", "numpy")
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, packages=packages)


if __name__ == "__main__":
    raise SystemExit(main())
