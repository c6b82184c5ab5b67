"""Measurements of ``spear prove-gpu`` on one device: ``python -m spear_training.verl_plugin.proofs PROOF DEVICE SIZE``.

The last line of the output is JSON. Each proof has a process of its own, so that one that dies takes no other along.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import Qwen2Config, Qwen2ForCausalLM

from spear_training.planning.memory import Architecture, Trainer
from spear_training.run.computing import FLASH, find_flash_fault
from spear_training.verl_plugin import attention
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.scoring import Learnt, Question, ScoringHead

CLOSE = 0.03
"""How far bfloat16 may be from float32, as a share of the size of what is compared."""
SHAPES = {"full": (896, 14, 2, 4, (700, 1, 3000, 1200)), "small": (64, 4, 2, 2, (20, 1, 33))}
"""Width, heads, key heads, layers, and lengths of the rows of the network that attention is compared in."""
LOSS = {"full": (18_432, 151_936, 1536), "small": (600, 4_096, 64)}
"""Tokens, vocabulary and width of the log-probs whose memory is measured."""


def make_network(size: str) -> Qwen2ForCausalLM:
    """Return a network with weights drawn from a fixed seed."""
    width, heads, groups, layers, _ = SHAPES[size]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=width, num_attention_heads=heads, num_key_value_heads=groups, num_hidden_layers=layers,
            intermediate_size=2 * width, vocab_size=1000, max_position_embeddings=8192, attn_implementation="sdpa",
        )
    )  # fmt: skip


def make_rows(size: str) -> list[torch.Tensor]:
    """Return the ids of the rows."""
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(1000, (length,), generator=dice) for length in SHAPES[size][-1]]


def run_packed(network: Qwen2ForCausalLM, rows: list[torch.Tensor], kind: str) -> torch.Tensor:
    """Return the hidden states [L, width] of rows without padding, by the attention ``kind``."""
    network.set_attn_implementation(kind)
    lengths = torch.tensor([len(row) for row in rows])
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(network.device)
    feed: dict[str, Any] = {"input_ids": torch.cat(rows)[None].to(network.device)}
    feed["position_ids"] = torch.cat([torch.arange(len(row)) for row in rows])[None].to(network.device)
    if kind == PACKED:
        feed |= {"cu_seq_lens_q": bounds, "max_length_q": int(lengths.max())}
    return network.model(**feed, use_cache=False).last_hidden_state[0]


def compare_attention(device: str, size: str) -> dict[str, Any]:
    """Compare each available attention, forwards and backwards, with single rows in float32 on the CPU."""
    network, rows = make_network(size), make_rows(size)
    with torch.no_grad():
        wanted = torch.cat([network.model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    scale = float(wanted.abs().mean())
    network.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    query = torch.empty(1, 1, 1, 8, device=device, dtype=network.dtype)
    figures: dict[str, Any] = {"torch's kernel": attention.has_kernel(query)}
    kinds = [PACKED, "sdpa", *([FLASH] if device == "cuda" and find_flash_fault() is None else [])]
    for kind in kinds:
        network.zero_grad()
        run_packed(network, rows, kind)  # the first call compiles
        with _timed(device, figures, f"{kind} s"):
            found = run_packed(network, rows, kind)
            found.float().square().mean().backward()
        figures[f"{kind} error"] = float((found.detach().cpu().float() - wanted).abs().mean()) / scale
        norm = torch.stack([weight.grad.float().norm() for weight in network.parameters() if weight.grad is not None])
        figures[f"{kind} gradient"] = float(norm.norm())
        _require(figures[f"{kind} error"] < CLOSE, f"{kind} differs from rows alone by {figures[f'{kind} error']:.2%}")
    first = figures[f"{PACKED} gradient"]
    for kind in kinds:
        apart = abs(figures[f"{kind} gradient"] / first - 1)
        _require(apart < CLOSE, f"the gradient by {kind} differs from that by {PACKED} by {apart:.1%}")
    return figures


def compare_log_probs(device: str, size: str) -> dict[str, Any]:
    """Compare log-probs and entropy of all tokens on the device, in its own type, with float32 on the CPU."""
    network, rows = make_network(size), make_rows(size)
    tokens = sum(len(row) for row in rows)
    places = torch.arange(tokens)
    labels = torch.cat([row.roll(-1) for row in rows])
    values = []
    for where, dtype in (("cpu", torch.float32), (device, torch.bfloat16)):
        network.to(where, dtype)
        learnt = Learnt(*(column.to(where) for column in (places, places, labels, places)))
        head = ScoringHead(network.lm_head.forward, network.config.vocab_size)
        head.question = Question(learnt, None, True, None)
        with torch.no_grad():
            values.append(head(run_packed(network, rows, PACKED))[0].cpu())
    difference = (values[0] - values[1]).abs()
    figures = {"mean difference": float(difference[:, 0].mean()), "largest": float(difference[:, 0].max())}
    figures["mean difference of entropy"] = float(difference[:, 1].mean())
    _require(figures["mean difference"] < CLOSE, f"log-probs are {figures['mean difference']:.3f} nats apart")
    return figures


def measure_loss(device: str, size: str) -> dict[str, Any]:
    """Compare the peak of memory of log-probs and their gradient with the formula of ``spear plan``."""
    tokens, vocabulary, width = LOSS[size]
    shape = Architecture(0, 0, vocabulary, width, width, 1, 0)
    planned = next(item.bytes for item in Trainer(shape, 2).size_update(tokens, checkpointing=True)
                   if item.name == "log-probs")  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    hidden = torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()
    places, labels = torch.arange(tokens, device=device), torch.randint(vocabulary, (tokens,), device=device)
    figures: dict[str, Any] = {"tokens": tokens, "vocabulary": vocabulary, "planned GiB": planned / 2**30}
    head = ScoringHead(lambda states: linear(states, weight), vocabulary)
    peaks = []
    for update in (True, False):
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        head.question = Question(Learnt(places, places, labels, places), None, not update, None)
        with _timed(device, figures, "update s" if update else "with entropy s"), torch.set_grad_enabled(update):
            scores = head(hidden)
            if update:
                scores.sum().backward()
        if device == "cuda":
            peaks.append(torch.cuda.max_memory_allocated() - before)
        weight.grad = hidden.grad = None
    with torch.no_grad():
        dense = torch.log_softmax(linear(hidden[0, :8].float(), weight.float()), -1)
    apart = float((scores[0, :8, 0] - dense.gather(1, labels[:8, None])[:, 0]).abs().max())
    figures["error"] = apart
    _require(apart < 0.1, f"log-probs in parts differ from those at once by {apart:.3f}")
    if peaks:
        figures["peak GiB"] = max(peaks) / 2**30
        _require(abs(max(peaks) / planned - 1) < 0.2, f"the peak is {max(peaks) / planned:.0%} of what was planned")
    return figures


@contextmanager
def _timed(device: str, figures: dict[str, Any], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if device == "cuda":
        torch.cuda.synchronize()
    figures[name] = time.perf_counter() - start


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise SystemExit(fault)


PROOFS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "attention": compare_attention,
    "log-probs": compare_log_probs,
    "loss": measure_loss,
}

if __name__ == "__main__":
    if sys.argv[2] == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: see `spear doctor`")
    sys.stdout.write(json.dumps(PROOFS[sys.argv[1]](*sys.argv[2:])) + "\n")
