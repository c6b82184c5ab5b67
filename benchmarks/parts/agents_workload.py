"""Workload of ``agents.py``: recorded episodes of experts, and a tokenizer and a tiny model made for their texts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from spear_agents.engines.base import ByteTokenizer, Engine, Sampling
from spear_agents.engines.hf import quiet_transformers
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine
from spear_agents.evaluation.run import choose_tasks, choose_template
from spear_agents.play.episode import name_request
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, play_many
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.making import make_env
from spear_envs.core.prompts import PromptTemplate
from spear_training.warmstart.policy import PolicyShape, make_model

__all__ = ["WORKLOADS", "Recording", "Workload", "make_policy", "record_experts", "write_responses"]

VOCABULARY = 8_192
CONTEXT = 16_384
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2.5's tokenizer cuts a text before it merges bytes."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_THOUGHT = "<think></think>"


@dataclass(frozen=True)
class Workload:
    """An environment and the expert that plays it.

    Attributes:
        noise: share of the expert's turns that are errors, so that episodes are of many lengths, as a policy's are.
        episodes: how many are played, enough for a thousand turns or so.
        repeats: how often the first action is played before the others.
        tokens: length of a response that the paper's policies come near; ``max_response_length`` of
            ``tab:hyperparams_value`` bounds it.
    """

    name: str
    env_id: str
    split: str
    noise: float
    episodes: int
    tokens: int = 128
    repeats: int = 1
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def make_env(self) -> gym.Env[Any, Any]:
        """One environment."""
        return make_env(self.env_id, self.split, self.env_kwargs)


WORKLOADS = (
    Workload("Sokoban", "spear/Sokoban-v1", "test", 0.5, 160, env_kwargs={"modality": "text"}),
    Workload("ALFWorld", "spear/ALFWorld-v0", "valid_unseen", 0.5, 128),
    Workload("WebShop", "spear/WebShop-v0", "test", 0.5, 160),
    # The paper's policy writes 4,855 tokens in 7.18 turns (`tab:contextbudget`, Qwen2.5-32B): 676 a turn, six programs.
    Workload("CodeInterpreter", "spear/CodeInterpreter-v0", "test", 0.0, 96, tokens=512, repeats=6),
    Workload("SearchR1", "spear/SearchR1-v0", "test", 0.0, 320),
)


@dataclass(frozen=True)
class Recording:
    """Episodes of an expert, whose responses are byte ids, and the template that its prompts were written with."""

    workload: Workload
    template: PromptTemplate
    trajectories: Sequence[Trajectory]

    @property
    def jobs(self) -> list[Job]:
        """The episodes, to be played again."""
        return [Job(trajectory.task_id, trajectory.seed) for trajectory in self.trajectories]

    @property
    def texts(self) -> list[str]:
        """All prompts and responses."""
        codec = ByteTokenizer()
        turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]
        return [codec.decode(turn.prompt_ids) + turn.response for turn in turns]


def record_experts(workload: Workload, episodes: int) -> Recording:
    """Lets the noisy expert play the leading tasks of the split, and again with other seeds where there are too few."""
    env = workload.make_env()
    template = choose_template(env, "default")
    tasks = choose_tasks(env, "all")
    env.close()

    def engine_for(env: Any) -> Engine:
        expert = NoisyExpert(env, template, workload.noise)
        first = ""

        def respond(prompt: str, dice: random.Random) -> str:
            nonlocal first
            if not 0 < env.unwrapped.turn < workload.repeats:
                response = expert(prompt, dice)
                first = first if env.unwrapped.turn else response
                return response
            return first

        return ScriptedEngine(respond)

    trajectories = asyncio.run(
        play_many(
            [Job(tasks[i % len(tasks)], i // len(tasks)) for i in range(episodes)],
            make_env=lambda: InfoWatch(workload.make_env()),
            engine_for=engine_for,
            prompts=PromptBuilder(ByteTokenizer(), template),
            sampling=Sampling(),
            env_id=workload.env_id,
            concurrency=8,
        )
    )
    return Recording(workload, template, trajectories)


def make_policy(recordings: Sequence[Recording], folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Writes a Hugging Face folder: a tokenizer learnt on the recordings and a model of random weights.

    The model has the shape of a warm start's (4 layers of 96, Qwen3), knows no end token, so that a response is as long
    as it is asked to be, and reads 16,384 tokens.
    """
    tokenizer = _make_tokenizer([text for recording in recordings for text in recording.texts])
    model = make_model(PolicyShape(), tokenizer, CONTEXT // 8, seed)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(do_sample=True)
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that cuts texts into pieces as Qwen2.5's, with ChatML's marks and chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_responses(
    recording: Recording, tokenizer: PreTrainedTokenizerFast, tokens: int
) -> Mapping[str, tuple[int, ...]]:
    """Ids of the expert's responses by request id, each with thoughts that fill it up to ``tokens`` tokens.

    The thoughts are words of the environment's own prompts in random order. An action longer than that stays whole.
    """
    dice = random.Random(0)
    words = [word for text in recording.texts[:256] for word in text.split() if word.isalpha()]
    responses = {}
    for trajectory in recording.trajectories:
        for number, turn in zip(count(1), trajectory.turns, strict=False):
            name = name_request(trajectory.task_id, trajectory.seed, number)
            thoughts = dice.choices(words, k=tokens)
            ids = _encode_with(tokenizer, turn.response, thoughts)
            while len(ids) > tokens and thoughts:
                del thoughts[-max(1, (len(ids) - tokens) // 2) :]
                ids = _encode_with(tokenizer, turn.response, thoughts)
            responses[name] = ids
    return responses


def _encode_with(tokenizer: PreTrainedTokenizerFast, response: str, thoughts: Sequence[str]) -> tuple[int, ...]:
    thought = " ".join(thoughts)
    if NO_THOUGHT in response:
        text = response.replace(NO_THOUGHT, f"<think>{thought}</think>", 1)
    else:
        text = f"{thought}\n{response}"
    return tuple(tokenizer.encode(text, add_special_tokens=False))
