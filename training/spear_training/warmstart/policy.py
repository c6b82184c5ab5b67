"""Training of a tiny policy on the rows of a noisy expert."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic.dataclasses import dataclass as checked
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from spear_agents.comparison.statistics import Part
from spear_agents.engines.hf import quiet_transformers, save_weights
from spear_agents.evaluation.run import choose_template, run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env
from spear_envs.data.files import draft_folder, write_json
from spear_training.algorithms.schema import STRICT, Record, SettingsError, number
from spear_training.warmstart.rows import Answers, ExpertRow, collect_expert_rows, make_tokenizer

REPORT = "warmstart.json"
IGNORED = -100
"""Label of tokens that are not learnt, as in transformers."""
POOL = 32
"""Number of batches whose rows are sorted by length together."""
RARE = 0.1
"""A word in at most this share of the rows is rare, see :func:`find_names`."""


@checked(frozen=True, config=STRICT)
class PolicyShape(Record, path="model.warm_start.shape"):
    """Size of the model (tied embeddings, no grouped heads). The default has 0.45 M parameters.

    The architecture is Qwen3, since transformers replaces the tokenizer of every Qwen2 folder by Qwen2's own.
    """

    hidden: int = number(96, at_least=1)
    layers: int = number(4, at_least=1)
    heads: int = number(3, at_least=1)
    mlp: int = number(256, at_least=1)
    initializer_range: float = number(0.05, above=0)


@checked(frozen=True, config=STRICT)
class WarmStartSettings(Record, path="model.warm_start"):
    """Settings of a warm start: the ``model.warm_start`` node.

    Attributes:
        episodes: training tasks that the expert plays; won ones give rows.
        noise: share of turns that are errors of the expert, see
            :func:`spear_training.warmstart.rows.collect_expert_rows`.
        inadmissible: share of its errors without effect.
        answers: what the rows teach.
        prompt_weight: weight of the loss on the tokens of prompts, relative to responses. A small weight teaches a
            policy with a large vocabulary which words belong together.
        renamed: share of rows, drawn each time, in which rare words are permuted: there they can only be copied and
            compared, and tasks cannot be memorised.
        short_epochs: epochs over the rows no longer than the mean, before all others. They teach copying too, at a
            fraction of the cost.
        long_epochs: epochs over the rows longer than the mean, between ``short_epochs`` and ``epochs`` over all.
        warmup_steps: optimiser steps over which the learning rate rises; then it falls linearly to ``floor`` times its
            maximum at the last step.
        valid_split: on which the result is measured; None for the second of the environment's splits.
        panel_tasks: number of its leading tasks to play; 0 for none.
        target: while the success on the panel is below it, another epoch follows at half the learning rate, at most
            ``extra_epochs``. The same recipe ends between 16 and 36 % depending on the seed; this reduces the spread.
    """

    env_id: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: str = "compact"
    layout: Layout = Layout.PER_TURN
    history: int = number(2, at_least=0)
    episodes: int = number(2500, at_least=1)
    noise: float = number(0.5, at_least=0, below=1)
    inadmissible: float = number(0.0, at_least=0, at_most=1)
    answers: Answers = Answers.PLAYED
    prompt_weight: float = number(0.0, at_least=0)
    renamed: float = number(0.0, at_least=0, at_most=1)
    short_epochs: int = number(0, at_least=0)
    long_epochs: int = number(0, at_least=0)
    epochs: int = number(2, at_least=1)
    batch: int = number(32, at_least=1)
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    shape: PolicyShape = field(default_factory=PolicyShape)
    valid_split: str | None = None
    panel_tasks: int = number(256, at_least=0)
    panel_samples: int = number(2, at_least=1)
    target: float = number(0.3, at_least=0, at_most=1)
    extra_epochs: int = number(4, at_least=0)
    seed: int = 0

    def check(self) -> None:
        hidden, heads = self.shape.hidden, self.shape.heads
        if hidden % heads or (hidden // heads) % 2:
            raise SettingsError(f"hidden={hidden} over heads={heads} must give an even whole number per head")


@dataclass(frozen=True)
class WarmStartReport:
    """Result of a warm start.

    ``loss`` is the mean over the last tenth of the steps, in nats per response token; ``steps`` and ``train_cpu_s``
    include extra epochs.
    """

    rows: int
    steps: int
    parameters: int
    vocabulary: int
    loss: float
    collect_cpu_s: float
    train_cpu_s: float
    valid: Part | None


Observer = Callable[[str, int, int], None]
"""Called with the stage, its progress and its total."""


def train_policy(
    settings: WarmStartSettings,
    out: str | Path,
    *,
    threads: int = 1,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> WarmStartReport:
    """Collect rows, train, save a Hugging Face folder with ``warmstart.json`` under ``out``, and measure it.

    The folder is complete or absent: it is written under a temporary name next to ``out`` and renamed. Raises
    SpearError for an invalid setting, or if ``out`` exists (unless ``overwrite``) or cannot be written.
    """
    folder = Path(out)
    if folder.exists() and not overwrite:
        raise SpearError(f"{folder} exists: choose another folder, or replace it by --overwrite")
    with draft_folder(folder) as draft:
        report = _build(settings, draft, threads, observer or (lambda stage, done, total: None))
        if folder.exists():
            shutil.rmtree(folder)
    return report


def _build(settings: WarmStartSettings, draft: Path, threads: int, observe: Observer) -> WarmStartReport:
    start = time.process_time()
    numbers = count(1)
    rows = collect_expert_rows(
        settings.env_id,
        settings.env_kwargs,
        episodes=settings.episodes,
        noise=settings.noise,
        seed=settings.seed,
        template=settings.template,
        layout=settings.layout,
        history=settings.history,
        inadmissible=settings.inadmissible,
        answers=settings.answers,
        on_episode=lambda won: observe("expert episodes", next(numbers), settings.episodes),
    )
    env = make_env(settings.env_id, "train", settings.env_kwargs)
    template = choose_template(env, settings.template)
    lexicon = env.lexicon()
    env.close()
    texts = (text for row in rows for text in (*row.prompts, *row.responses))
    tokenizer = make_tokenizer(template, chain(lexicon, texts))
    ids, labels = encode_rows(tokenizer, rows)
    collected = time.process_time()
    torch.set_num_threads(threads)
    longest = max(len(tokenizer.encode(text)) for row in rows for text in set(row.responses)) + 1
    model = make_model(settings.shape, tokenizer, ids.shape[1], settings.seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        # Room for two stray tokens: a confused policy should end soon, not fill the context.
        max_new_tokens=longest + 2,
    )
    tokenizer.save_pretrained(draft)
    names = find_names(tokenizer, ids) if settings.renamed else None
    losses, train_s, valid = _train_to_target(model, ids, labels, names, settings, draft, observe)
    tail = losses[-max(1, len(losses) // 10) :]
    report = WarmStartReport(
        rows=len(rows),
        steps=len(losses),
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=len(tokenizer),
        loss=sum(tail) / len(tail),
        collect_cpu_s=round(collected - start, 1),
        train_cpu_s=round(train_s, 1),
        valid=valid,
    )
    result = vars(report) | {"valid": report.valid.to_json() if report.valid else None}
    write_json(draft / REPORT, {"settings": asdict(settings), "result": result})
    return report


def _train_to_target(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    names: torch.Tensor | None,
    settings: WarmStartSettings,
    draft: Path,
    observe: Observer,
) -> tuple[list[float], float, Part | None]:
    """Train, save and measure until the target is met; return losses, CPU seconds of training and the last figures."""
    losses: list[float] = []
    train_s, valid, plan = 0.0, None, settings
    for extra in range(settings.extra_epochs + 1):
        begun = time.process_time()
        losses += fit(model, ids, labels, plan, lambda done, total: observe("training steps", done, total), names)
        train_s += time.process_time() - begun
        with quiet_transformers():
            save_weights(model, draft)
        if not settings.panel_tasks:
            break
        valid = _measure(settings, draft, observe)
        if valid.success is None or valid.success.mean >= settings.target:
            break
        # Another seed, for another order of rows.
        plan = replace(
            settings,
            epochs=1,
            short_epochs=0,
            long_epochs=0,
            learning_rate=settings.learning_rate / 2,
            seed=settings.seed + 1 + extra,
        )
    return losses, train_s, valid


def encode_rows(tokenizer: PreTrainedTokenizerFast, rows: Sequence[ExpertRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and labels, both int64 [N, L], padded on the right; only responses and their end tokens are
    learnt.
    """

    @cache
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    end = tokenizer.eos_token_id
    every_ids, every_labels = [], []
    for row in rows:
        ids, labels = [tokenizer.bos_token_id], [IGNORED]
        for prompt, response in zip(row.prompts, row.responses, strict=True):
            read, written = encode(prompt), [*encode(response), end]
            ids += [*read, *written]
            labels += [*[IGNORED] * len(read), *written]
        every_ids.append(ids)
        every_labels.append(labels)
    width = max(map(len, every_ids))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (width - len(ids)) for ids in every_ids]),
        torch.tensor([labels + [IGNORED] * (width - len(labels)) for labels in every_labels]),
    )


def make_model(shape: PolicyShape, tokenizer: PreTrainedTokenizerFast, longest: int, seed: int) -> Qwen3ForCausalLM:
    """Return a new float32 model with room for sequences of eight times ``longest`` tokens, at least 1,024.

    ``longest`` is an expert's; a confused policy's conversation continues to the last turn. Room is free, since
    positions are rotary.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=max(1024, 2 ** math.ceil(math.log2(8 * longest))),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=shape.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # transformers initialises from torch's global stream: restore it
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def fit(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    settings: WarmStartSettings,
    observe: Callable[[int, int], None],
    names: torch.Tensor | None = None,
) -> list[float]:
    """Train in place on the rows of :func:`encode_rows`; return the loss of each optimiser
    step.

    ``names`` are ids of the words permuted by ``settings.renamed``, see :func:`find_names`.
    """
    dice = torch.Generator().manual_seed(settings.seed)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    # Padding is on the right, and the end of a row is always learnt.
    lengths = (labels != IGNORED).int().cumsum(1).argmax(1) + 1
    brief = lengths <= lengths.float().mean()
    parts: list[torch.Tensor] = []
    for kept, epochs in (
        (brief, settings.short_epochs),
        (~brief, settings.long_epochs if not brief.all() else 0),
        (torch.ones_like(brief), settings.epochs),
    ):
        rows = kept.nonzero()[:, 0]
        for _ in range(epochs):
            parts += [rows[part] for part in draw_batches(lengths[rows], settings.batch, dice)]
    losses: list[float] = []
    model.train()
    for step, part in enumerate(parts, 1):
        rate = min(1.0, step / max(1, settings.warmup_steps)) * max(settings.floor, 1 - step / len(parts))
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * rate
        longest = int(lengths[part].max())
        read, learnt = ids[part, :longest], labels[part, :longest]
        if names is not None and settings.renamed:
            read = rename_words(read, names, settings.renamed, dice)
            learnt = torch.where(learnt == IGNORED, IGNORED, read)
        loss = measure_loss(model, read, learnt, settings.prompt_weight)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()
        losses.append(float(loss.detach()))
        observe(step, len(parts))
    model.eval()
    return losses


def find_names(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> torch.Tensor:
    """Return the ids of rare words, int64 [K]: those in at most ``RARE`` of the rows and without a digit.

    More frequent words belong to the form of a prompt, and numbers are compared by value.
    """
    held = torch.zeros(len(tokenizer))
    for row in ids:
        held[row.unique()] += 1
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    return torch.tensor(
        [
            number
            for number, word in enumerate(words)
            if number not in special and held[number] <= RARE * len(ids) and not any(map(str.isdigit, word))
        ],
        dtype=torch.int64,
    )


def rename_words(ids: torch.Tensor, names: torch.Tensor, share: float, dice: torch.Generator) -> torch.Tensor:
    """Permute the words ``names`` [K] in a ``share`` of the rows of ``ids`` [N, L], differently in each row."""
    renamed = ids.clone()
    for row in (torch.rand(len(ids), generator=dice) < share).nonzero()[:, 0]:
        places = torch.arange(int(max(ids.max(), names.max())) + 1)
        places[names] = names[torch.randperm(len(names), generator=dice)]
        renamed[row] = places[ids[row]]
    return renamed


def draw_batches(lengths: torch.Tensor, batch: int, dice: torch.Generator) -> list[torch.Tensor]:
    """Return all rows in random order, in batches of indices; if lengths differ, a batch has rows of similar length.

    Rows are sorted within pools of ``POOL`` batches, and the batches are shuffled again.
    """
    order = torch.randperm(len(lengths), generator=dice)
    if int(lengths.min()) == int(lengths.max()):
        return list(order.split(batch))
    batches = [
        part for pool in order.split(POOL * batch) for part in pool[lengths[pool].argsort(stable=True)].split(batch)
    ]
    return [batches[i] for i in torch.randperm(len(batches), generator=dice).tolist()]


def measure_loss(
    model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor, prompt_weight: float
) -> torch.Tensor:
    """Return the mean loss over the response tokens, plus ``prompt_weight`` times that over the prompts' tokens."""
    learnt = labels != IGNORED
    # Positions before the first learnt one do not enter the loss, so their logits are not computed.
    first = 1 if prompt_weight else int(learnt.nonzero()[:, 1].min())
    kept = ids.shape[1] - first
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, -kept:].flatten(), ignore_index=IGNORED)
    if prompt_weight:
        read = ids.masked_fill(learnt | (ids == model.config.pad_token_id), IGNORED)[:, -kept:]
        loss = loss + prompt_weight * torch.nn.functional.cross_entropy(logits, read.flatten(), ignore_index=IGNORED)
    return loss


def _measure(settings: WarmStartSettings, folder: Path, observe: Observer) -> Part:
    """Return the success rate at temperature 1 on the panel."""
    splits = find_splits(settings.env_id)
    evaluation = run_evaluation(
        EvalSettings(
            env_id=settings.env_id,
            engine=EngineKind.HF,
            model=str(folder),
            env_kwargs=settings.env_kwargs,
            split=settings.valid_split or (splits[1:] or splits)[0],
            tasks=str(settings.panel_tasks),
            episodes_per_task=settings.panel_samples,
            template=settings.template,
            layout=settings.layout,
            history=settings.history,
            seed=settings.seed,
        ),
        observer=lambda done, total, trajectory: observe("valid panel", done, total),
    )
    return evaluation.overall


RECIPES: Mapping[str, WarmStartSettings] = MappingProxyType(
    {
        recipe.env_id: recipe
        for recipe in (
            # `spear train preset=demo`
            WarmStartSettings("spear/Sokoban-v1", {"modality": "text"}, history=0),
            # `spear train preset=alfworld_tiny`
            WarmStartSettings(
                "spear/ALFWorld-v0",
                {"dataset": "embedded", "rooms": "small", "max_turns": 20},
                history=4,
                episodes=800,
                noise=0.3,
                inadmissible=0.3,
                answers=Answers.EXPERT,
                epochs=6,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.15,
            ),
            # `spear train preset=webshop_tiny`; rare words are permuted, so options and codes can only be copied.
            WarmStartSettings(
                "spear/WebShop-v0",
                {"catalog": "mini", "split_scheme": "product", "observation_mode": "text_rich", "max_turns": 8},
                history=0,
                episodes=2000,
                noise=0.1,
                answers=Answers.EXPERT,
                prompt_weight=0.1,
                renamed=1.0,
                short_epochs=4,
                long_epochs=5,
                learning_rate=2e-3,
                shape=PolicyShape(layers=3),
                panel_tasks=100,
                target=0.15,
                extra_epochs=8,
            ),
            # `spear train preset=code_tiny`
            WarmStartSettings(
                "spear/CodeInterpreter-v0",
                {"dataset": "mini-small", "prelude": "none", "max_turns": 4, "time_limit": 5, "observation_chars": 64},
                layout=Layout.CONVERSATION,
                episodes=720,
                noise=0.0,
                epochs=16,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.1,
            ),
            # `spear train preset=search_tiny`
            WarmStartSettings(
                "spear/SearchR1-v0",
                {"dataset": "mini-small", "retriever": "bm25", "topk": 1, "max_turns": 6},
                layout=Layout.CONVERSATION,
                episodes=1440,
                noise=0.0,
                prompt_weight=0.2,
                renamed=1.0,
                epochs=24,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.0,
            ),
        )
    }
)
"""Settings by environment id."""


def choose_recipe(env_id: str) -> WarmStartSettings:
    """Return the recipe of an environment, or the defaults."""
    return RECIPES.get(env_id) or WarmStartSettings(env_id)
