"""Supervised examples from episodes of a noisy expert."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spear_agents.engines.base import ByteTokenizer, Generation, Sampling
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine
from spear_agents.evaluation.run import choose_template
from spear_agents.play.episode import name_request
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, play_many
from spear_agents.play.trajectory import Layout, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.prompts import IMAGE, PromptTemplate


class Answers(str, Enum):
    """Kind of turns that rows of a noisy expert's episodes teach."""

    PLAYED = "played"
    """Responses of won episodes, including errors: the policy keeps some entropy."""
    EXPERT = "expert"
    """The expert's response in each state of an episode, won or not."""


@dataclass(frozen=True)
class ExpertRow:
    """One supervised sequence: alternating texts to read and to write, starting with one to read.

    ``per_turn`` rows have one of each, a ``conversation`` one for each turn. ``pictures`` are those of the places
    marked ``<image>`` in the prompts, uint8 [height, width, 3].
    """

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    pictures: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)


def collect_expert_rows(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    *,
    episodes: int,
    noise: float,
    seed: int = 0,
    template: str = "compact",
    layout: Layout = Layout.PER_TURN,
    history: int = 2,
    split: str = "train",
    inadmissible: float = 0.0,
    answers: Answers = Answers.PLAYED,
    on_episode: Callable[[bool], None] | None = None,
) -> list[ExpertRow]:
    """Play ``episodes`` training tasks with a :class:`spear_agents.engines.scripted.NoisyExpert`.

    A share ``noise`` of its turns are errors, which lead to states off the shortest path, and a share ``inadmissible``
    of these has no effect. ``on_episode`` is called after each episode with whether it was won. Raises SpearError for
    an unknown environment, keyword or template, if no episode was won, or for answers that a conversation lacks.
    """
    if layout is Layout.CONVERSATION and answers is not Answers.PLAYED:
        raise SpearError(f"answers={answers.value!r} needs layout per_turn: a conversation has the played responses")
    env = make_env(env_id, split, env_kwargs)
    tasks: Any = env.tasks
    words = choose_template(env, template)
    dice = np.random.Generator(np.random.Philox(seed))
    # Distinct tasks as long as there are enough; then repetitions with other seeds.
    picks = np.concatenate(
        [dice.choice(len(tasks), size=min(len(tasks), episodes - i), replace=False, shuffle=False)
         for i in range(0, episodes, len(tasks))]
    )  # fmt: skip
    jobs = [Job(tasks[int(index)].id, seed * 1_000_003 + number) for number, index in enumerate(picks)]
    env.close()
    codec = ByteTokenizer()
    advice: dict[str, str | None] = {}

    def engine_for(env: Any) -> _Teacher:
        return _Teacher(NoisyExpert(env, words, noise, inadmissible), codec, advice)

    trajectories = asyncio.run(
        play_many(
            jobs,
            make_env=lambda: InfoWatch(make_env(env_id, split, env_kwargs)),
            engine_for=engine_for,
            prompts=PromptBuilder(codec, words, layout, history=history, mark_image=lambda _: IMAGE),
            sampling=Sampling(),
            env_id=env_id,
            concurrency=16,
            on_done=(lambda trajectory: on_episode(trajectory.won)) if on_episode else None,
        )
    )
    if answers is Answers.EXPERT:
        rows = [row for trajectory in trajectories for row in _make_advised_rows(trajectory, codec, advice)]
    else:
        rows = [row for trajectory in trajectories if trajectory.won for row in make_rows(trajectory, codec)]
    if not rows:
        raise SpearError(f"the expert won none of {episodes} episodes: lower noise={noise} or raise max_turns")
    return rows


class _Teacher(ScriptedEngine):
    """A noisy expert that records its response without noise."""

    def __init__(self, expert: NoisyExpert, codec: ByteTokenizer, advice: dict[str, str | None]) -> None:
        super().__init__(expert, codec)
        self._expert = expert
        self._advice = advice

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Return the response to play; record the expert's own."""
        generation = await super().generate(prompt_ids, sampling, request_id=request_id, images=images)
        self._advice[request_id] = self._expert.advice
        return generation


def make_rows(trajectory: Trajectory, codec: ByteTokenizer) -> list[ExpertRow]:
    """Return the rows of an episode recorded with ``codec``."""
    prompts = tuple(codec.decode(turn.prompt_ids) for turn in trajectory.turns)
    responses = tuple(turn.response for turn in trajectory.turns)
    pictures = [row.pictures for row in trajectory.rows()]
    if trajectory.layout is Layout.CONVERSATION:
        return [ExpertRow(prompts, responses, pictures[0])]
    return [
        ExpertRow((prompt,), (response,), seen)
        for prompt, response, seen in zip(prompts, responses, pictures, strict=True)
    ]


def _make_advised_rows(
    trajectory: Trajectory, codec: ByteTokenizer, advice: Mapping[str, str | None]
) -> Iterator[ExpertRow]:
    for number, (turn, row) in enumerate(zip(trajectory.turns, trajectory.rows(), strict=True), 1):
        advised = advice[name_request(trajectory.task_id, trajectory.seed, number)]
        if advised is not None:
            yield ExpertRow((codec.decode(turn.prompt_ids),), (advised,), row.pictures)


PAD, BOS, EOS, UNK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template that joins the contents; a response ends with the end token, which the model learns."""


def make_tokenizer(template: PromptTemplate, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose words are the pieces of ``texts``, split by ``template.token_pattern``.

    Text between two matches (blanks, say) is a word too, so that decoding is exact if all pieces are known; an unknown
    piece becomes ``<unk>``. Ids do not depend on the order of ``texts``. Raises SpearError if the template is not for
    tiny models.
    """
    if template.token_pattern is None:
        raise SpearError(f"tiny models need a template with a token_pattern, such as 'compact', not {template.name!r}")
    cut = pre_tokenizers.Split(Regex(template.token_pattern), behavior="isolated")
    words = {piece for text in set(texts) for piece, _ in cut.pre_tokenize_str(text)}
    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *sorted(words - set(SPECIALS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = cut
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
