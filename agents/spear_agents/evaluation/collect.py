"""``spear collect``: episodes of an expert or a model as data to fine-tune on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
import gymnasium as gym
import numpy as np

from spear_agents.comparison.tables import watch_episodes
from spear_agents.engines.base import (
    ChatByteTokenizer,
    ContextExceededError,
    Finish,
    Generation,
    Sampling,
    require_end_ids,
)
from spear_agents.evaluation.baselines import FormTemplate, Method, make_form, wrap_reader
from spear_agents.evaluation.options import SectionedCommand, add_playing_options, make_settings
from spear_agents.evaluation.run import Observer, choose_template, run_evaluation
from spear_agents.evaluation.settings import EvalSettings
from spear_agents.model_files import resolve_model
from spear_agents.play.chat import Tokenizer
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder, shows_picture
from spear_agents.play.rollout import run_blocking
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_agents.viewer.episodes import open_measure
from spear_envs.completion import ENV
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env
from spear_envs.core.prompts import IMAGE, RunningTemplate
from spear_envs.data.files import draft_file, require_replaceable
from spear_sandbox.console import FilePath
from spear_sandbox.terminal import Console


@click.command(cls=SectionedCommand)
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--out", type=FilePath(), required=True, help="File of JSON lines to write.")
@click.option("--tokenizer", help="Folder or name of a model: also write input_ids and loss_mask of its tokenizer.")
@click.option("--keep-lost", is_flag=True, help="Keep lost episodes too.")
@add_playing_options(engine="expert", split="the first, such as train", template="default")
def collect(
    env_id: str, out: Path, tokenizer: str | None, keep_lost: bool, concurrency: int | None, **options: Any
) -> None:
    """Write episodes of ENV as fine-tuning data: won episodes of the expert, unless options say otherwise.

    A line has the messages of a turn (layout per_turn) or of an episode (conversation). Interrupted, the same command
    resumes; the same settings give the same file.

    \b
      spear collect spear/ALFWorld-v0 --tasks 160 --thoughts --out runs/expert.jsonl
      spear collect spear/WebShop-v0 --engine openai --base-url URL --model NAME --out runs/won.jsonl
    """
    settings = make_settings(env_id, options)
    console = Console()
    with watch_episodes(settings.engine.value, Console(stderr=True)) as bar:
        found = collect_episodes(
            settings,
            out,
            tokenizer=tokenizer,
            keep_lost=keep_lost,
            concurrency=concurrency,
            observer=bar.observe,
            on_response=bar.on_response,
        )
    left_out = f", {found.unrepeatable} left out because they could not be repeated" if found.unrepeatable else ""
    text = f"{found.samples:,} samples of {found.kept:,} episodes ({found.episodes:,} played{left_out}): {out}"
    console.print(f"{text}\nepisodes: {out}{FOLDER_SUFFIX}", soft_wrap=True)


ENDLESS_TASKS = 1000
"""Number of tasks played of a split that makes them on demand."""
FOLDER_SUFFIX = ".episodes"
"""Suffix of the file's name: the folder of its episodes."""

Message = dict[str, str]


@dataclass(frozen=True)
class Collection:
    """Numbers of episodes played and kept, and of samples (lines of the file).

    ``unrepeatable`` episodes were left out because the environment answered otherwise when they were played again.
    """

    episodes: int
    kept: int
    samples: int
    unrepeatable: int


def collect_episodes(
    settings: EvalSettings,
    out: Path,
    *,
    tokenizer: str | None = None,
    keep_lost: bool = False,
    concurrency: int | None = None,
    observer: Observer | None = None,
    on_response: Callable[[Generation], None] | None = None,
) -> Collection:
    """Play the tasks of ``settings`` (by default of the first split) and write the won episodes to ``out``.

    The episodes are kept in a folder next to the file, so that an interrupted run resumes. The file is written at the
    end, in the order of the tasks: the same settings give the same bytes. A line is a turn (``per_turn``) or an episode
    (``conversation``), with ``messages`` and, of a local model or with ``tokenizer`` (a model's folder or name),
    ``input_ids`` and ``loss_mask``, which is 1 on tokens of the policy. Of a split that makes tasks on demand the first
    1,000 are played, unless ``settings.tasks`` says otherwise. With ``keep_lost`` lost episodes are written, too, but
    never those that a fault cut short.

    Raises SpearError as :func:`~spear_agents.evaluation.run.run_evaluation`, for observations that are pictures, and if
    nothing was won.
    """
    require_replaceable(out)  # now, not after the episodes
    split = settings.split or find_splits(settings.env_id)[0]
    tasks = settings.tasks
    with closing(make_env(settings.env_id, split, settings.env_kwargs)) as env:
        if tasks == "all" and not env.tasks.bounded:
            tasks = str(min(len(env.tasks), ENDLESS_TASKS))
        settings = replace(settings, tasks=tasks).resolve(split, env.templates)
        if shows_picture(env, choose_template(env, settings.template or "")):
            raise _refuse_pictures(settings.env_id)
    tokenizer = None if tokenizer is None else resolve_model(tokenizer)
    folder = out.with_name(out.name + FOLDER_SUFFIX)
    evaluation = run_evaluation(settings, folder, concurrency=concurrency, observer=observer, on_response=on_response)
    settings = evaluation.settings
    kept = [t for t in evaluation.trajectories if t.stop is not StopReason.FAULT and (t.won or keep_lost)]
    if not kept:
        raise SpearError(f"none of {len(evaluation.trajectories)} episodes was won: nothing to write to {out}")
    with closing(make_env(settings.env_id, settings.split or "", settings.env_kwargs)) as env:
        is_native = settings.server is not None and settings.server.tools
        measure = open_measure(settings.to_json(), folder)
        writer = SampleMaker(env, settings, tokenizer, measure, is_native)
        samples = write_lines(out, writer.make_samples(kept))
    return Collection(len(evaluation.trajectories), len(kept) - writer.unrepeatable, samples, writer.unrepeatable)


class SampleMaker:
    """Turns episodes into lines; replays them if their record lacks messages or the wanted tokens."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        settings: EvalSettings,
        tokenizer: str | None = None,
        measure: Callable[[str], int] | None = None,
        is_native: bool = False,
    ) -> None:
        """Make it for the episodes of ``settings``; ``measure`` counted the tokens of a text when they were played.

        ``is_native``: their prompts asked for calls of tools, which the responses of the record are not.
        """
        self._env = wrap_reader(settings.method, env)
        self._settings = settings
        core: Any = env.unwrapped
        template = choose_template(env, "default" if is_native else settings.template or "")
        words = template if settings.method is Method.PLAIN else make_form(settings.method, template, core.parser)
        self._bytes = ChatByteTokenizer()
        self._messages = self._make_builder(self._bytes, words).with_measure(measure)
        self._tokens: PromptBuilder | None = None
        self.is_sampled = settings.engine.has_folder and tokenizer in (None, settings.model)
        """Whether the record has the wanted tokens."""
        if tokenizer is not None and not self.is_sampled:
            from spear_agents.engines.hf import load_tokenizer

            codec = load_tokenizer(tokenizer)
            self._tokens = self._make_builder(codec, words, require_end_ids(tokenizer, codec))
        self.joined = isinstance(words, RunningTemplate) and settings.layout is Layout.CONVERSATION
        self._is_native = is_native
        self.unrepeatable = 0

    def _make_builder(self, tokenizer: Tokenizer, words: Any, end_ids: Sequence[int] = ()) -> PromptBuilder:
        settings = self._settings
        return PromptBuilder(
            tokenizer,
            words,
            settings.layout or Layout.PER_TURN,
            settings.history,
            stop_token_ids=end_ids,
            template_kwargs=None if tokenizer is self._bytes else settings.template_kwargs,
        )

    def make_samples(self, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
        """Return the lines of all episodes."""
        for trajectory in trajectories:
            text = trajectory if self.has_messages(trajectory) else self.rephrase(trajectory)
            tokens = trajectory if self.is_sampled else None
            if self._tokens is not None:
                tokens = self.rephrase(trajectory, self._tokens)
            if text is None or (tokens is None and self._tokens is not None):
                self.unrepeatable += 1
                continue
            chains = (tokens or text).chains()
            yield from _join_samples(read_messages(text, chains), tokens, trajectory, self.joined)

    def has_messages(self, trajectory: Trajectory) -> bool:
        """Return whether the record holds the messages that fit its responses."""
        return trajectory.tokens is TokenKind.BYTES and not self._is_native

    def rephrase(self, trajectory: Trajectory, prompts: PromptBuilder | None = None) -> Trajectory | None:
        """Play an episode again with messages or other tokens; None if the environment answers differently."""
        prompts = prompts or self._messages
        if isinstance(prompts.template, FormTemplate):
            prompts = prompts.with_template(prompts.template.remember(trajectory.memory))
        prompts = prompts.with_drops([turn.dropped_turns for turn in trajectory.turns])
        again = run_blocking(
            play_episode(
                self._env,
                _Player(trajectory, prompts),
                prompts,
                task_id=trajectory.task_id,
                sampling=Sampling(),
                seed=trajectory.seed,
                env_id=trajectory.env_id,
            )
        )
        seen, shown = ([turn.observation for turn in t.turns] for t in (trajectory, again))
        return again if seen == shown and again.won == trajectory.won else None


class _Player:
    """An engine that repeats the responses of an episode."""

    def __init__(self, trajectory: Trajectory, prompts: PromptBuilder) -> None:
        self._turns = iter(trajectory.turns)
        self._tokenizer = prompts.tokenizer
        self._end_id = prompts.chat.end_id

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        turn = next(self._turns, None)
        if turn is None:
            raise ContextExceededError("the record ends here")
        ids = list(self._tokenizer.encode(turn.response, add_special_tokens=False))
        if turn.finish is Finish.STOP and self._end_id is not None:
            ids.append(self._end_id)
        return Generation(tuple(ids), (0.0,) * len(ids), turn.finish)


def read_messages(trajectory: Trajectory, chains: Sequence[Sequence[int]]) -> list[list[Message]]:
    """Return the messages of an episode whose ids are bytes with roles: a list for each of ``chains``.

    A chain has the turns of one training row; its list is the conversation up to the last of them, which the policy
    wrote. Where the environment's words stand within the assistant's message, as in Search-R1, that stays one message;
    only its ``loss_mask`` distinguishes them.
    """
    codec = ChatByteTokenizer()
    if trajectory.layout is Layout.PER_TURN:
        return [
            [*codec.read_messages(turn.prompt_ids), {"role": "assistant", "content": turn.response}]
            for turn in trajectory.turns
        ]
    spoken = [(*turn.prompt_ids, *turn.response_ids) for turn in trajectory.turns]
    return [codec.read_messages([*chain.from_iterable(spoken[: places[-1] + 1])]) for places in chains]


def _refuse_pictures(env_id: str) -> SpearError:
    return SpearError(f"{env_id} shows pictures, which messages cannot hold: use --env modality=text")


def _join_samples(
    dialogues: list[list[Message]], tokens: Trajectory | None, trajectory: Trajectory, joined: bool
) -> Iterator[dict[str, Any]]:
    rows = tokens.rows() if tokens is not None else [None] * len(dialogues)
    for number, (messages, row) in enumerate(zip(dialogues, rows, strict=True)):
        if any(IMAGE in message["content"] for message in messages if message["role"] != "assistant"):
            raise _refuse_pictures(trajectory.env_id)
        sample: dict[str, Any] = {
            "env_id": trajectory.env_id,
            "task_id": trajectory.task_id,
            "subtask": trajectory.subtask,
            "fingerprint": trajectory.fingerprint,
            "seed": trajectory.seed,
            "turn": number if trajectory.layout is Layout.PER_TURN else None,
            "won": trajectory.won,
            "score": trajectory.score,
            "messages": messages,
        }
        if joined:  # the policy's one message includes the environment's words; only a mask distinguishes them
            sample["joined"] = True
        if row is not None:
            sample["input_ids"] = [*row.prompt_ids, *row.response_ids]
            sample["loss_mask"] = [0] * len(row.prompt_ids) + list(row.response_mask)
        yield sample


def write_lines(path: Path, samples: Iterator[dict[str, Any]]) -> int:
    """Write JSON lines under a temporary name and rename the file; returns their number."""
    count = 0
    with draft_file(path) as draft, draft.open("w", encoding="ascii") as file:
        for sample in samples:
            file.write(json.dumps(sample, separators=(",", ":")) + "\n")
            count += 1
    return count
