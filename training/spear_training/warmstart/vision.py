"""A tiny vision-language policy: Qwen2.5-VL's architecture at 0.3 M parameters, taught the form of a response.

It is for testing the path of pictures on a CPU (processor, image tokens, vision tower, trainer), not for winning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

from spear_agents.engines.hf import quiet_transformers, save_weights
from spear_agents.engines.vision import ImageReader, read_rows
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import IMAGE
from spear_envs.data.files import draft_folder
from spear_training.algorithms.schema import STRICT, Record, SettingsError, number
from spear_training.warmstart.policy import IGNORED
from spear_training.warmstart.rows import ExpertRow, collect_expert_rows

END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIALS = (
    PAD,
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, config=STRICT)
class TinyVisionSettings(Record, path="model.vision_start"):
    """Settings of a tiny vision-language policy: the ``model.vision_start`` node.

    Attributes:
        episodes: training tasks that the noisy expert plays; won ones give rows.
        steps: optimiser steps; about 100 teach the form of a response, 0 leaves the model random.
        vocabulary: maximum tokens of the byte-level BPE.
        hidden: width of the text model and of the vision tower.
    """

    env_id: str = "spear/Sokoban-v1"
    env_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"modality": "image"})
    template: str = "default"
    episodes: int = number(100, at_least=1)
    noise: float = number(0.3, at_least=0, below=1)
    steps: int = number(120, at_least=0)
    batch: int = number(16, at_least=1)
    learning_rate: float = number(3e-3, above=0)
    vocabulary: int = 1024
    hidden: int = 64
    layers: int = 2
    context: int = 4096
    seed: int = 0

    def check(self) -> None:
        if self.hidden % 32:
            raise SettingsError(f"hidden={self.hidden} must be a multiple of 32: two heads of 16 for each")


def make_tiny_vision_policy(
    settings: TinyVisionSettings, out: Path, observe: Callable[[int, int], None] = lambda done, total: None
) -> list[float]:
    """Write the policy's Hugging Face folder, for transformers, verl and vLLM; return the losses of its steps.

    ``observe`` is called after each optimiser step with its number and the total. Raises SpearError if ``out`` exists,
    the environment does not show pictures, or the expert won nothing.
    """
    if out.exists():
        raise SpearError(f"{out} exists: choose another folder")
    rows = collect_expert_rows(
        settings.env_id,
        settings.env_kwargs,
        episodes=settings.episodes,
        noise=settings.noise,
        seed=settings.seed,
        template=settings.template,
        layout=Layout.PER_TURN,
        history=0,
    )
    if not all(row.pictures for row in rows):
        raise SpearError(f"{settings.env_id} with {dict(settings.env_kwargs)} shows no pictures: set modality=image")
    tokenizer = make_bpe_tokenizer(
        (text for row in rows for text in (*row.prompts, *row.responses)), settings.vocabulary
    )
    model = make_vision_model(settings, tokenizer)
    with draft_folder(out) as draft:  # a training that is resumed takes what has the name for a whole policy
        tokenizer.save_pretrained(draft)
        Qwen2VLImageProcessorPil().save_pretrained(draft)
        with quiet_transformers():
            save_weights(model, draft)  # the reader of pictures asks for its configuration
        losses = _fit(model, tokenizer, ImageReader(draft), rows, settings, observe)
        with quiet_transformers():
            save_weights(model, draft)
    return losses


def make_bpe_tokenizer(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """Make a byte-level BPE in Qwen2's form, the class that transformers uses for every Qwen2.5-VL folder."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sorted(set(texts)), trainer)
    learnt = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        eos_token=END,
        pad_token=PAD,
        unk_token=None,
        extra_special_tokens=list(SPECIALS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_vision_model(settings: TinyVisionSettings, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Make a random float32 model of Qwen2.5-VL's architecture, with the patches of the published models."""
    heads = settings.hidden // 16
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(list(SPECIALS)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=2 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=settings.context,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=ids[END],
            pad_token_id=ids[PAD],
        ),
        vision_config=dict(
            depth=2,
            hidden_size=settings.hidden,
            intermediate_size=2 * settings.hidden,
            num_heads=heads,
            out_hidden_size=settings.hidden,
            fullatt_block_indexes=[1],
            initializer_range=0.05,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=ids[END], pad_token_id=ids[PAD], do_sample=True, max_new_tokens=32
    )
    return model


def encode_vision_row(tokenizer: Qwen2Tokenizer, reader: ImageReader, row: ExpertRow) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, with its picture's image tokens, and of the response with its end token."""
    message = row.prompts[0].replace(IMAGE, reader.mark(row.pictures[0]), 1)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return prompt, tokenizer.encode(row.responses[0] + END, add_special_tokens=False)


def _fit(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    reader: ImageReader,
    rows: Sequence[ExpertRow],
    settings: TinyVisionSettings,
    observe: Callable[[int, int], None],
) -> list[float]:
    """Take supervised steps on the responses; return the losses, in nats per token."""
    encoded = [encode_vision_row(tokenizer, reader, row) for row in rows]
    features = read_rows(reader, [row.pictures for row in rows])
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    dice = random.Random(settings.seed)
    losses = []
    for step in range(settings.steps):
        picked = dice.sample(range(len(rows)), min(settings.batch, len(rows)))
        width = max(len(encoded[i][0]) + len(encoded[i][1]) for i in picked)
        ids = torch.full((len(picked), width), int(tokenizer.pad_token_id))
        labels = torch.full_like(ids, IGNORED)
        mask = torch.zeros_like(ids)
        positions = torch.zeros((3, *ids.shape), dtype=torch.long)
        for place, i in enumerate(picked):
            prompt, response = encoded[i]
            end = len(prompt) + len(response)
            ids[place, :end] = torch.tensor([*prompt, *response])
            labels[place, len(prompt) : end] = torch.tensor(response)
            mask[place, :end] = 1
            positions[:, place, :end] = reader.find_positions(ids[place, :end], features[i]["image_grid_thw"])
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            labels=labels,
            pixel_values=torch.cat([features[i]["pixel_values"] for i in picked]),
            image_grid_thw=torch.cat([features[i]["image_grid_thw"] for i in picked]),
        )
        optimiser.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(output.loss.detach()))
        observe(step + 1, settings.steps)
    return losses
