"""Transformers models as engines: sampling with a key-value cache on the model's device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from spear_agents.engines.base import Finish, Generation, Request, StopFinder, find_end_ids
from spear_agents.engines.tensors import RequestBatcher, draw_tokens, uniform_at
from spear_agents.engines.vision import ImageReader, has_vision, key_pictures, read_rows
from spear_agents.engines.vllm_options import read_dtype
from spear_agents.models import explain_other, require_model_file
from spear_envs.core.errors import SpearError, one_line

_COMPACT_BELOW = 0.75
"""Finished rows leave the batch once less than this share runs: copying the cache costs more than a few idle rows."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder. Raises SpearError if it cannot be read."""
    folder = require_model_file(path, "tokenizer_config.json").parent
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its files are third-party data, and transformers may raise anything
        raise SpearError(f"the tokenizer in {folder} cannot be read ({one_line(error)})") from error


def read_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of a Hugging Face folder, which may lack a tokenizer."""
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return find_end_ids(folder, load_tokenizer(folder) if has_tokenizer else None)


class HFModel:
    """A causal language model that answers batches of requests; with a vision tower (Qwen2.5-VL) also about pictures.

    ``reader`` is the image side of a vision model, else None. ``threads`` are torch's for the whole process; None
    leaves them. ``dtype`` is that of weights and computation; None for that in ``config.json``. Tokens are sampled in
    float64 from its logits. ``seed`` is for requests without one. Raises SpearError if the folder is missing or cannot
    be loaded.
    """

    def __init__(
        self, path: str | Path, threads: int | None = 1, dtype: torch.dtype | str | None = None, seed: int = 0
    ) -> None:
        folder = require_model_file(path, "config.json").parent
        if threads is not None:
            torch.set_num_threads(threads)
        self.reader = ImageReader(folder) if has_vision(folder) else None
        dtype = dtype or read_dtype(folder)
        if not any(folder.glob("*.safetensors")):
            raise SpearError(f"{folder} holds no weights in safetensors, the only ones read: take a model that has")
        loader = AutoModelForImageTextToText if self.reader is not None else AutoModelForCausalLM
        try:
            with quiet_transformers():
                # Explicit: transformers would ask at a terminal, and weights may be pickles.
                model, found = loader.from_pretrained(
                    folder,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except Exception as error:  # a configuration is third-party data, and transformers may raise anything
            raise SpearError(f"the model in {folder} cannot be loaded ({one_line(error)})") from error
        if drawn := find_drawn(found):
            raise explain_other(folder, f"{drawn[0]} is missing or of another shape")
        self.path = folder
        self.model = model.eval()
        self._rows = int(model.get_input_embeddings().weight.shape[0])
        self._seeds = np.random.Generator(np.random.Philox(seed))
        self._finders: dict[tuple[str, ...], StopFinder] = {}

    def _find_stops(self, strings: tuple[str, ...]) -> StopFinder | None:
        """Return a finder of these stop strings, or None. Only this needs the folder's tokenizer."""
        if strings and strings not in self._finders:
            self._finders[strings] = StopFinder(load_tokenizer(self.path), strings)
        return self._finders.get(strings)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response by themselves (:func:`~spear_agents.engines.base.find_end_ids`)."""
        return read_end_ids(self.path)

    @property
    def max_new_tokens(self) -> int | None:
        """The folder's own limit of a response (``generation_config.max_new_tokens``), or None."""
        return self.model.generation_config.max_new_tokens

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and response together."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0)) or 2**31

    def load_state(self, state: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights in; tied ones may be left out. Raises SpearError if names are missing or unknown."""
        with torch.no_grad():
            result = self.model.load_state_dict(dict(state), strict=False)
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ()) | {"lm_head.weight"}
        if not self.model.config.get_text_config().tie_word_embeddings:
            tied = set()
        missing, unknown = set(result.missing_keys) - tied, set(result.unexpected_keys)
        if missing or unknown:
            raise SpearError(
                f"{self.path} has other weights: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
            )

    @torch.inference_mode()
    def log_probs(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        temperature: float = 1.0,
        images: Sequence[np.ndarray] = (),
    ) -> tuple[float, ...]:
        """Return the natural-log probability of each response token, from one forward pass without a cache."""
        if not response_ids:
            return ()
        ids = torch.tensor([[*prompt_ids, *response_ids]], device=self.model.device)
        count = len(response_ids)
        feed = self._look(ids[:, :-1], None, [images]) if self.reader is not None else {}
        output = self.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=count, **feed)
        logits = self._read_logits(output)[0]
        logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        return tuple(logp.gather(-1, ids[0, -count:, None])[:, 0].tolist())

    @torch.inference_mode()
    def generate_batch(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer requests in order, in one batch.

        Equal prompts are computed once. Prompts of unequal length are padded on the left; if all are equal, no mask is
        built. A row stops at a stop token, at a stop string or at its own ``max_tokens``. Raises SpearError for
        pictures that the model cannot read or that do not match its image tokens, an empty prompt, or one beyond the
        model's context.
        """
        if not requests:
            return []
        self._check(requests)
        finders = [self._find_stops(request.sampling.stop_strings) for request in requests]
        batch = _Batch(requests, self.stop_token_ids, self._seeds, finders)
        prompts: dict[tuple[tuple[int, ...], bytes], int] = {}
        source = [
            prompts.setdefault((tuple(request.prompt_ids), key_pictures(request.images)), len(prompts))
            for request in requests
        ]
        ids, mask = _pad_left([prompt for prompt, _ in prompts], self.model.device)
        feed: dict[str, Any] = {"input_ids": ids}
        position = None
        if self.reader is not None:
            shown = {place: request.images for place, request in zip(source, requests, strict=True)}
            seen = self._look(ids, mask, [shown[place] for place in range(len(prompts))])
            position = seen["position_ids"]
            feed |= seen if mask is None else {**seen, "attention_mask": mask}
        elif mask is not None:
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            feed |= {"attention_mask": mask, "position_ids": position}
        output = self.model(**feed, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, self._read_logits(output)[:, -1]
        if len(prompts) < len(requests):
            rows = torch.tensor(source, device=logits.device)
            cache.batch_select_indices(rows)
            logits = logits[rows]
            mask = mask[rows] if mask is not None else None
            position = position[..., rows, :] if position is not None else None
        while True:
            tokens, keep = batch.draw(logits.cpu())
            if batch.finished:
                return batch.results()
            tokens = tokens.to(ids.device)
            if keep is not None:
                kept = keep.to(ids.device)
                cache.batch_select_indices(kept)
                tokens = tokens[kept]
                mask = mask[kept] if mask is not None else None
                position = position[..., kept, :] if position is not None else None
            feed = {"input_ids": tokens[:, None]}
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones((len(mask), 1))], 1)
                feed["attention_mask"] = mask
            if position is not None:
                position = position[..., -1:] + 1
                feed["position_ids"] = position
            output = self.model(**feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = self._read_logits(output)[:, -1]

    def _read_logits(self, output: Any) -> torch.Tensor:
        """Return the logits [N, L, V] of a pass, without tokens that a response cannot contain."""
        if self.reader is not None:
            self.reader.forbid_places(output.logits)
        return output.logits

    def _look(
        self, ids: torch.Tensor, mask: torch.Tensor | None, images: Sequence[Sequence[np.ndarray]]
    ) -> dict[str, Any]:
        """Return what a model with a vision tower reads besides ids [N, L]: patches of pictures, positions [3, N, L].

        The last position of a prompt is the same in all three; those of its response continue from there.
        """
        assert self.reader is not None
        features = read_rows(self.reader, images)
        positions = torch.ones((3, *ids.shape), dtype=torch.long, device=ids.device)
        for row, feature in enumerate(features):
            on = mask[row].bool() if mask is not None else torch.ones_like(ids[row], dtype=torch.bool)
            grids = feature.get("image_grid_thw")
            positions[:, row, on] = self.reader.find_positions(ids[row, on].cpu(), grids).to(ids.device)
        feed: dict[str, Any] = {"position_ids": positions}
        for name in ("pixel_values", "image_grid_thw"):
            parts = [feature[name] for feature in features if name in feature]
            if parts:
                feed[name] = torch.cat(parts).to(ids.device)
        return feed

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if len(request.images) and self.reader is None:
                raise SpearError(
                    f"{request.request_id}: {self.path} is a text model and cannot read pictures; "
                    'make the environment with modality="text", or take a vision-language model'
                )
            if not len(request.prompt_ids):
                raise SpearError(f"{request.request_id}: the prompt is empty")
            if max(request.prompt_ids) >= self._rows:
                raise SpearError(
                    f"{request.request_id}: token {max(request.prompt_ids)} is outside the vocabulary of {self.path}, "
                    f"{self._rows:,} tokens: its tokenizer is another model's; fetch or copy the model again"
                )
            total = len(request.prompt_ids) + request.sampling.max_tokens
            if total > self.context_length:
                raise SpearError(
                    f"{request.request_id}: {len(request.prompt_ids)} prompt and {request.sampling.max_tokens} new "
                    f"tokens exceed the context of {self.context_length}: lower max_tokens or max_prompt_tokens"
                )


class HFEngine(RequestBatcher):
    """A :class:`RequestBatcher` over an :class:`HFModel`, which computes in its own thread."""

    def __init__(
        self, model: HFModel, *, max_batch: int = 128, max_wait_s: float = 0.005, deterministic: bool = False
    ) -> None:
        self.model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")

        async def run_batch(requests: list[Request]) -> list[Generation]:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, model.generate_batch, requests)
            except (MemoryError, RuntimeError) as error:
                # torch's CPU allocator raises a plain RuntimeError.
                is_out = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
                if not is_out:
                    raise
                raise SpearError(
                    f"out of memory with {len(requests)} responses at a time: play fewer (--concurrency), or shorter "
                    "ones (--max-tokens, --max-prompt-tokens)"
                ) from error

        super().__init__(run_batch, max_batch=max_batch, max_wait_s=max_wait_s, deterministic=deterministic)

    def close(self) -> None:
        """Wait for the running batch and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class _Batch:
    """Sampling of one batch: limits and results of each row, on the CPU."""

    def __init__(
        self,
        requests: Sequence[Request],
        end_ids: tuple[int, ...],
        seeds: np.random.Generator,
        finders: Sequence[StopFinder | None],
    ) -> None:
        samplings = [request.sampling for request in requests]
        count = len(samplings)
        self.temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64)
        self.top_k = torch.tensor([s.top_k for s in samplings])
        self.top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64)
        self.filters = any(s.top_k or s.top_p < 1 for s in samplings)
        self.limit = torch.tensor([s.max_tokens for s in samplings])
        stops = [torch.tensor([*end_ids, *s.stop_token_ids], dtype=torch.long) for s in samplings]
        self.stops = pad_sequence(stops, batch_first=True, padding_value=-1)
        """Stop ids of each row [N, S], padded with -1."""
        self.seeds = np.array(
            [s.seed & (2**64 - 1) if s.seed is not None else int(seeds.integers(2**63)) for s in samplings],
            dtype=np.uint64,
        )
        self.rows = torch.arange(count)
        """Rows in the running batch, as indices into ``requests``."""
        self.running = torch.ones(count, dtype=torch.bool)
        self.length = torch.zeros(count, dtype=torch.long)
        self.stopped = torch.zeros(count, dtype=torch.bool)
        self.finders = {i: finder for i, finder in enumerate(finders) if finder is not None}
        self.written: dict[int, list[int]] = {i: [] for i in self.finders}
        self.at_string: set[int] = set()
        self.tokens: list[torch.Tensor] = []
        self.log_probs: list[torch.Tensor] = []
        self.count = count
        self.position = 0
        self.finished = False

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token for each row; return them and, if rows should leave, the indices of those that stay."""
        uniform = torch.from_numpy(uniform_at(self.seeds, self.position))
        filters = (self.top_k, self.top_p) if self.filters else (None, None)
        tokens, log_probs = draw_tokens(logits, uniform, self.temperature, *filters)
        whole = tokens, log_probs
        if len(self.rows) < self.count:
            whole = tuple(torch.zeros(self.count, dtype=v.dtype).index_copy_(0, self.rows, v) for v in whole)
        self.tokens.append(whole[0])
        self.log_probs.append(whole[1])
        self.position += 1
        stop = (tokens[:, None] == self.stops).any(-1) & self.running
        end = (stop | (self.limit <= self.position)) & self.running
        if self.finders:
            end |= self._find_strings(tokens) & self.running & ~stop
        left = len(end)
        if bool(end.any()):
            gone = self.rows[end]
            self.length[gone] = self.position
            self.stopped[gone] = stop[end]
            self.running = self.running & ~end
            left = int(self.running.sum())
        self.finished = left == 0
        if self.finished or left > _COMPACT_BELOW * len(self.rows):
            return tokens, None
        keep = self.running.nonzero()[:, 0]
        for name in ("temperature", "top_k", "top_p", "limit", "stops", "rows", "running"):
            setattr(self, name, getattr(self, name)[keep])
        self.seeds = self.seeds[keep.numpy()]
        return tokens, keep

    def _find_strings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the running batch that reached a stop string with their newest token."""
        reached = torch.zeros(len(self.rows), dtype=torch.bool)
        for place, (row, token) in enumerate(zip(self.rows.tolist(), tokens.tolist(), strict=True)):
            finder = self.finders.get(row)
            if finder is None or not self.running[place]:
                continue
            self.written[row].append(token)
            if finder.is_reached(self.written[row]):
                self.at_string.add(row)
                reached[place] = True
        return reached

    def results(self) -> list[Generation]:
        tokens = torch.stack(self.tokens, 1).tolist()
        log_probs = torch.stack(self.log_probs, 1).tolist()
        finishes = [
            Finish.STOP if stopped else Finish.STRING if row in self.at_string else Finish.LENGTH
            for row, stopped in enumerate(self.stopped.tolist())
        ]
        rows = zip(tokens, log_probs, self.length.tolist(), finishes, strict=True)
        return [Generation(tuple(t[:n]), tuple(p[:n]), finish) for t, p, n, finish in rows]


def _pad_left(prompts: list[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad prompts to token ids [N, L] with their mask [N, L], None if no prompt needs padding."""
    if len(set(map(len, prompts))) == 1:
        return torch.tensor(prompts, device=device), None
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def find_drawn(loading: Mapping[str, Any]) -> list[str]:
    """Return the weights that transformers drew at random, by the ``loading_info`` of ``from_pretrained``, sorted."""
    return sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])})


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's weights and configuration. Raises SpearError if they cannot be written."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise SpearError(f"{folder} cannot be written ({one_line(error)})") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and warnings of transformers, which would break a command's own display."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()
