import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils as tu

from spear_envs.core.errors import SpearError
from spear_training.algorithms import RowTable
from spear_training.planning.memory import Architecture, Trainer
from spear_training.verl_plugin import scoring
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.queue import build_columns, nest_flat
from spear_training.verl_plugin.scoring import find_learnt
from spear_training.verl_plugin.workers import count_saved_ranks
from tests.training.verl_plugin.engines import ask, open_engine, run_engine, run_verl
from tests.training.verl_plugin.real_engine import run_alone

VOCABULARY = 31
PROMPTS, RESPONSES = (3, 1, 5, 2), (9, 1, 2, 6)
LENGTHS = np.add(PROMPTS, RESPONSES)


def make_model(attention: str = PACKED, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=48, attn_implementation=attention, **{**sizes, **settings}
    )
    return LlamaForCausalLM(config)


def make_batch(share: float = 0.5) -> TensorDict:
    """Rows of unequal length in which some tokens of the responses are the environment's."""
    dice = np.random.default_rng(2)
    return build_columns(
        RowTable(
            prompt_length=PROMPTS,
            response_length=RESPONSES,
            ids=dice.integers(VOCABULARY, size=int(LENGTHS.sum())),
            mask=dice.random(sum(RESPONSES)) < share,
        )
    )


def find_where(batch: TensorDict) -> torch.Tensor:
    """The same positions as :func:`find_learnt`, one by one."""
    where, start, first = [], 0, 0
    mask = batch["loss_mask"].values()
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        where += [start + prompt + place - 1 for place in range(response) if mask[first + place]]
        start, first = start + prompt + response, first + response
    return torch.tensor(where, dtype=torch.long)


def score_alone(model: LlamaForCausalLM, batch: TensorDict, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy at all positions of concatenated rows, each row in a pass of its own."""
    log_probs, entropies = [], []
    for ids in batch["input_ids"].values().split(LENGTHS.tolist()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        log_softmax = torch.log_softmax(logits, -1)
        log_probs.append(log_softmax.gather(-1, ids.roll(-1)[:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("attention", [PACKED, "sdpa", "eager"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_rows_alone_and_of_verl(
    attention: str, packed: bool, temperature: float
) -> None:
    if attention == PACKED and not packed:
        pytest.skip("it reads no padding")
    model, plain = make_model(attention), make_model("sdpa")
    verls, batch = copy.deepcopy(plain), ask(make_batch(), packed=packed, temperature=temperature, entropy=True)
    where = find_where(batch)
    found = run_engine(open_engine(model, at_once=4 * VOCABULARY), model, batch)  # three chunks
    wanted = dict(zip(("log_probs", "entropy"), score_alone(plain, batch, temperature), strict=True))
    other = run_verl(verls, batch)
    weights = torch.randn(len(where), generator=torch.Generator().manual_seed(1))
    for name in ("log_probs", "entropy"):
        values = found[name].values()
        torch.testing.assert_close(values[where], wanted[name][where], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(values[where], other[name].values()[where], atol=1e-6, rtol=1e-6)
        assert not np.delete(values.detach().numpy(), where).any(), "0 where nothing is learnt"
        assert torch.equal(found[name].offsets(), other[name].offsets())
    for values in (found["log_probs"].values(), wanted["log_probs"], other["log_probs"].values()):
        (values[where] * weights).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients(model), gradients(verls), atol=1e-6, rtol=1e-5)


def test_fine_tuning_masks_whole_rows_and_its_first_tokens_are_passed_over() -> None:
    batch = make_batch()
    mask = torch.ones(int(LENGTHS.sum()), dtype=torch.long)
    batch["loss_mask"] = nest_flat(mask, LENGTHS)
    learnt = find_learnt(batch, padded=False)
    ends = set((LENGTHS.cumsum() - 1).tolist())
    assert learnt.places.tolist() == [place for place in range(len(mask)) if place not in ends]
    assert torch.equal(learnt.labels, batch["input_ids"].values()[learnt.places + 1])
    padded = find_learnt(batch, padded=True)
    assert padded.hidden.max() < len(LENGTHS) * LENGTHS.max() and padded.hidden[LENGTHS[0] - 1] == LENGTHS.max()


def test_a_micro_batch_of_padding_alone_has_a_gradient_of_zero() -> None:
    model, batch = make_model(), ask(make_batch(share=0), packed=True)
    found = run_engine(open_engine(model), model, batch)["log_probs"]
    assert not found.values().any()
    found.values().sum().backward()  # every rank must take part in the backward pass
    assert not gradients(model).any() and len(gradients(model))


def test_checkpointed_layers_change_nothing() -> None:
    model, batch = make_model(), ask(make_batch(), packed=True)
    other = copy.deepcopy(model).train()
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (model, other):
        run_engine(open_engine(each), each, batch)["log_probs"].values().sum().backward()
    torch.testing.assert_close(gradients(other), gradients(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reason", ["use_fused_kernels", "calculate_sum_pi_squared", "model"])
def test_what_needs_logits_elsewhere_stays_verls(reason: str) -> None:
    model = make_model("sdpa", **({"logit_scale": 2.0} if reason == "model" else {}))
    engine, batch = open_engine(model), ask(make_batch(), packed=False)
    if reason != "model":
        tu.assign_non_tensor(batch, **{reason: True})
    _, arguments = engine.prepare_model_inputs(batch)
    assert "learnt" not in arguments


def measure_peak(tokens: int, shape: Architecture, *, update: bool) -> float:
    """Most bytes that scoring takes on a GPU beside head and hidden states, by shapes alone: nothing is allocated."""
    with FakeTensorMode():
        weight = torch.empty(shape.vocabulary, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        hidden = torch.empty(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        places = torch.empty(tokens, dtype=torch.long)
        head = scoring.ScoringHead(lambda states: torch.nn.functional.linear(states, weight), shape.vocabulary)
        head.question = scoring.Question(scoring.Learnt(places, places, places, places), None, not update, None)
        tracker = MemTracker()
        tracker.track_external(weight, hidden)
        with tracker, torch.set_grad_enabled(update):
            scores = head(hidden)
            assert scores.dtype is torch.float32
            if update:
                scores.sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    (total,) = (size for kind, size in peak.items() if str(kind).endswith("Total"))
    return total - 2 * (weight.numel() + hidden.numel())


@pytest.mark.parametrize("tokens", [18_432, 36_864])
def test_a_step_s_log_probs_take_what_the_plan_says(tokens: int) -> None:
    shape = Architecture(
        1_543_714_304, 0, vocabulary=151_936, hidden=1536, intermediate=8960, layers=28, cache_values=0
    )
    planned = {item.name: item.bytes for item in Trainer(shape, 2).size_update(tokens, checkpointing=True)}["log-probs"]
    peak = max(measure_peak(tokens, shape, update=update) for update in (True, False))
    assert planned == pytest.approx(peak, rel=0.2)
    assert planned < 0.4 * 2 * tokens * shape.vocabulary, "all logits at once, in bfloat16, would be more"


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_weights_optimiser_and_schedule() -> None:
    found = run_alone("reshard")
    assert set(found) == {"1 to 2", "2 to 1", "2x2 to 1"}
    for name, measured in found.items():
        assert measured["loaded"] == 0.0, name
        assert measured["learnt"] > 1e-3, name  # the step below moves what is compared
        assert measured["step"] < 1e-5, name  # sums of gradients in another order
        assert measured["drawn"], name  # rank 0 goes on with its random state


def test_a_folder_without_shards_or_with_two_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="the shards of no ranks"):
        count_saved_ranks(tmp_path)
    for ranks in (2, 16):
        (tmp_path / f"model_world_size_{ranks}_rank_0.pt").touch()
    with pytest.raises(SpearError, match=r"the shards of \[2, 16\] ranks"):
        count_saved_ranks(tmp_path)
