"""Log-probs and entropy of the tokens that are learnt, without logits anywhere else.

In a conversation nine tokens of ten are the environment's, and a token's logits take more memory than all else that is
kept of it. So the head picks the positions that predict a token with mask 1, and makes logits for some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.checkpoint import checkpoint
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank

LOGITS = 2**26
"""Maximum number of logits that exist at a time: 256 MiB in float32."""
SPECIAL = ("use_fused_kernels", "distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")
"""Modes of verl that need logits everywhere, or make none."""
AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that change logits after the head has made them (Gemma 2, Cohere, Granite, Falcon H1)."""

Forbid = Callable[[torch.Tensor], None]
"""Takes what a policy cannot write out of logits [..., V], in place."""


@dataclass(frozen=True)
class Learnt:
    """Places of the K learnt tokens of a micro-batch.

    Attributes:
        places: positions that predict them [K], in concatenated rows.
        hidden: the same positions in the model's hidden states, flat, where rows may be padded [K].
        labels: the tokens [K].
        rows: of each token [K].
    """

    places: torch.Tensor
    hidden: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor

    def take_share(self, rank: int, width: int) -> Learnt:
        """Return the positions of one rank, where ranks have ``width`` each."""
        first = rank * width
        mine = (self.places >= first) & (self.places < first + width)
        places = self.places[mine]
        return Learnt(places, places - first, self.labels[mine], self.rows[mine])


def find_learnt(micro_batch: TensorDict, *, padded: bool) -> Learnt:
    """Find the tokens with mask 1 in ``input_ids`` and ``loss_mask``, of which the mask is as long as the response.

    The first token of a row is predicted by nothing, and passed over. The model reads ``padded`` or concatenated rows.
    """
    ids, mask = micro_batch["input_ids"], micro_batch["loss_mask"]
    lengths, responses = ids.offsets().diff(), mask.offsets().diff()
    tokens = mask.values().bool().nonzero()[:, 0]
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), responses)[tokens]
    inside = tokens - mask.offsets()[rows] + (lengths - responses)[rows] - 1
    predicted = inside >= 0
    rows, inside = rows[predicted], inside[predicted]
    places = ids.offsets()[rows] + inside
    hidden = rows * int(lengths.max()) + inside if padded else places
    return Learnt(places, hidden, ids.values()[places + 1], rows)


@dataclass(frozen=True)
class Question:
    """Request to a head for the pass to come: log-probs of ``learnt``, at a temperature of each of them or 1."""

    learnt: Learnt
    temperature: torch.Tensor | None
    entropy: bool
    forbid: Forbid | None


class ScoringHead:
    """A model's head, as its ``forward``; when :attr:`question` is set it answers that once instead of giving logits.

    ``make_logits`` is the head's own forward, from hidden states [..., H] to logits [..., V] of the ``vocabulary``.
    """

    def __init__(
        self, make_logits: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, at_once: int = LOGITS
    ) -> None:
        self.question: Question | None = None
        self._make_logits = make_logits
        self._rows = max(1, at_once // vocabulary)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V], or float32 log-probs and entropy [1, K, 2] of what was asked; 0 for an entropy
        unasked.
        """
        question, self.question = self.question, None
        if question is None:
            return self._make_logits(hidden)
        learnt = question.learnt
        columns = [hidden.reshape(-1, hidden.shape[-1])[learnt.hidden], learnt.labels]
        columns += [] if question.temperature is None else [question.temperature]
        # Not kept for the backward pass but made again: logits are the largest thing there is.
        parts = [
            checkpoint(self._score, question, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(column.split(self._rows) for column in columns), strict=True)
        ]
        return torch.cat(parts)[None]

    def _score(
        self, question: Question, hidden: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self._make_logits(hidden).float()
        if question.forbid is not None:
            question.forbid(logits)
        if temperature is not None:
            logits = logits / temperature[:, None]
        log_softmax = torch.log_softmax(logits, dim=-1)
        picked = log_softmax.gather(-1, labels[:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1) if question.entropy else torch.zeros_like(picked)
        return torch.stack([picked, entropy], dim=-1)


def make_exact(head: torch.nn.Module) -> None:
    """Have the head of a model give float32 logits on a CPU, in rollouts and trainer alike."""
    if type(head) is torch.nn.Linear:
        head.forward = partial(_make_logits, head, head.forward)


def _make_logits(head: torch.nn.Linear, forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [..., V], in float32 on a CPU whatever a pass computes in: bfloat16 rounds one of 20 by up to 0.06.

    Few tokens are learnt, so that it costs a CPU little; a GPU is much slower in float32.
    """
    if hidden.device.type != "cpu":
        return forward(hidden)
    with torch.autocast("cpu", enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)


class ScoresLearnt:
    """A mixin of verl's FSDP engines of a policy: log-probs and entropy of learnt tokens, 0 at all other positions.

    Where ranks share a sequence, each scores its part. Where verl needs logits elsewhere (:data:`SPECIAL`, a model of
    :data:`AFTER_HEAD`) its own way stays.
    """

    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    find_forbidden: Callable[[TensorDict], Forbid | None]
    _gather_and_unpad_packed: Callable[[torch.Tensor, int], torch.Tensor]
    _head: ScoringHead | None = None

    def _build_fsdp_module(self, module: Any) -> Any:
        self.find_head(module)
        return super()._build_fsdp_module(module)  # type: ignore[misc]

    def find_head(self, module: Any, at_once: int = LOGITS) -> None:
        """Replace the head of a model of transformers by a :class:`ScoringHead` of ``at_once`` logits."""
        config, head = module.config.get_text_config(), module.get_output_embeddings()
        if head is not None and not any(getattr(config, name, None) for name in AFTER_HEAD):
            make_exact(head)
            self._head = head.forward = ScoringHead(head.forward, config.vocab_size, at_once)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Return verl's model inputs; the head is asked for what the micro-batch needs."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._head is None or any(_get(micro_batch, key) for key in SPECIAL):
            return inputs, arguments
        packed = _get(micro_batch, "use_remove_padding", True)
        learnt, width = find_learnt(micro_batch, padded=not packed), len(micro_batch["input_ids"].values())
        if packed:
            width += arguments["pad_size"]
            if self.use_ulysses_sp:
                width //= self.ulysses_sequence_parallel_size
                learnt = learnt.take_share(get_ulysses_sequence_parallel_rank(), width)
        temperature = None
        if not arguments["temperature_is_one"]:
            given = torch.as_tensor(micro_batch["temperature"], dtype=torch.float32, device=learnt.rows.device)
            temperature = given.expand(len(micro_batch))[learnt.rows]
        entropy = bool(_get(micro_batch, "calculate_entropy"))
        self._head.question = Question(learnt, temperature, entropy, self.find_forbidden(micro_batch))
        return inputs, arguments | {"learnt": learnt, "width": width}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Return log-probs, and the entropy if asked for, as jagged tensors [B, *] over sequences."""
        learnt: Learnt | None = output_args.get("learnt")
        if learnt is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]
        ids = micro_batch["input_ids"]
        names = ("log_probs", "entropy") if _get(micro_batch, "calculate_entropy") else ("log_probs",)
        packed = _get(micro_batch, "use_remove_padding", True)
        places, nowhere = learnt.places, torch.zeros(output_args["width"], device=learnt.places.device)
        if packed:
            places = learnt.hidden  # in this rank's share
        scored = {
            name: nowhere.index_copy(0, places, values)
            for name, values in zip(names, output.logits[0].unbind(-1), strict=False)
        }
        if packed:
            scored = {
                name: self._gather_and_unpad_packed(values, output_args["pad_size"]) for name, values in scored.items()
            }
        return {name: torch.nested.nested_tensor_from_jagged(values, ids.offsets()) for name, values in scored.items()}


def _get(micro_batch: TensorDict, key: str, default: Any = False) -> Any:
    return tu.get_non_tensor_data(data=micro_batch, key=key, default=default)
