"""Micro-batches that fit: the arithmetic of the choice, who has the last word, and what a resumed run keeps."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.planning import fitting
from spear_training.planning.fitting import (
    BUCKET,
    ENOUGH,
    GPU_SHARE,
    TRAINING_KEYS,
    Fit,
    Requirement,
    find_room,
    fit_training,
    fit_tuning,
    fit_update,
)
from spear_training.planning.memory import GIB, Architecture, Item, Trainer
from spear_training.run.compose import compose as compose_words
from spear_training.run.config import RolloutType, RunConfig
from spear_training.run.to_verl import to_verl

SMOLLM = Architecture(134_515_008, 28_311_552, 49_152, 576, 1536, 30, 11_520)
TRAINER = Trainer(SMOLLM, width=2)
WISH = Requirement(tokens=32_768, checkpointing=False, longest=2048, share=10**6)


def sum_update(tokens: int, *, checkpointing: bool, trainer: Trainer = TRAINER) -> float:
    return sum(item.bytes for item in trainer.size_update(tokens, checkpointing=checkpointing))


def test_less_room_gives_smaller_micro_batches_and_then_checkpointing() -> None:
    seen = []
    for gib in (30, 16, 8, 6, 4.5, 4.2):
        fit = fit_update(TRAINER, WISH, gib * GIB)
        assert fit.needed <= fit.room == gib * GIB
        assert fit.needed == sum_update(fit.tokens, checkpointing=fit.checkpointing)
        assert fit.tokens >= WISH.longest and fit.tokens & (fit.tokens - 1) == 0, "a power of two"
        seen.append((fit.tokens, fit.checkpointing))
    assert seen == [(32_768, False), (16_384, False), (8192, False), (4096, False), (2048, False), (16_384, True)]
    text = fit_update(TRAINER, WISH, 8 * GIB).describe()
    assert text.startswith("micro-batches of 8,192 tokens without gradient checkpointing: about ") and "8.0 GiB" in text


def test_a_row_that_does_not_fit_is_refused_with_the_number() -> None:
    with pytest.raises(SpearError, match=r"one row of 2,048 tokens takes about 3\.2 GiB to update, and 3\.0 GiB are"):
        fit_update(TRAINER, WISH, 3 * GIB)
    beside = Item("engine", 2 * GIB)
    fit = fit_update(TRAINER, WISH, 5 * GIB, [beside])
    assert (fit.tokens, fit.checkpointing) == (2048, True), "estimates of what else lies there refuse nothing"
    assert "may not fit: about 5.2 GiB of the 5.0 GiB" in fit.describe()


def test_what_is_estimated_or_asked_for_is_warned_of_and_not_refused() -> None:
    (activations,) = [item.bytes for item in TRAINER.size_update(2048, checkpointing=True) if item.estimated]
    room = sum_update(2048, checkpointing=True) - activations / 2
    assert "may not fit" in fit_update(TRAINER, WISH, room).describe()
    with pytest.raises(SpearError, match=r"set train\.tokens_per_gpu=2048"):
        fit_update(TRAINER, WISH, room - activations)
    asked = replace(WISH, tokens=2048, given_tokens=True)
    assert "may not fit" in fit_update(TRAINER, asked, GIB).describe()


def test_an_adapter_has_gradients_and_moments_of_its_own_only() -> None:
    model = replace(SMOLLM, edges=10**6)
    items = {item.name: item.bytes for item in Trainer(model, 2, rank=8, stored=2).size_update(9, checkpointing=True)}
    assert items["weights"] == 2 * model.parameters
    assert items["adapter"] == items["gradients"] == 2 * 8 * 10**6 == items["Adam"] / 2
    host = Trainer(model, 2, on_host=True)
    names = {item.name for item in host.size_update(9, checkpointing=True)}
    assert names.isdisjoint({"weights", "gradients", "Adam"}) and "in transit" in names
    assert host.measure(1) >= host.loading == 4 * model.parameters, "verl builds the weights on the device first"


def test_the_user_has_the_last_word() -> None:
    fixed = Requirement(tokens=16_384, checkpointing=False, longest=2048, share=10**6, given_tokens=True)
    fit = fit_update(TRAINER, fixed, 8 * GIB)
    assert (fit.tokens, fit.checkpointing) == (16_384, True), "only what is open is chosen"
    both = Requirement(16_384, False, 2048, 10**6, given_tokens=True, given_checkpointing=True)
    fit = fit_update(TRAINER, both, 8 * GIB)
    assert (fit.tokens, fit.checkpointing, fit.chosen) == (16_384, False, False)
    assert "may not fit" in fit.describe()
    without = Requirement(32_768, False, 2048, 10**6, given_checkpointing=True)
    assert fit_update(TRAINER, without, 6 * GIB) == fit_update(TRAINER, without, 6 * GIB)
    assert not fit_update(TRAINER, without, 6 * GIB).checkpointing


def test_what_an_update_takes() -> None:
    items = {item.name: item.bytes for item in TRAINER.size_update(1000, checkpointing=False)}
    parameters = SMOLLM.parameters
    assert (items["weights"], items["gradients"], items["Adam"]) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert items["activations"] == 1000 * (10 * 576 + 3 * 1536) * 30 * 2
    assert items["log-probs"] == 16 * 1000 * 49_152 + 4 * 1000 * 576, "their entropy takes more than their gradient"
    many = {item.name: item.bytes for item in TRAINER.size_update(100_000, checkpointing=True)}
    assert many["log-probs"] == 16 * 2**26 + 4 * 100_000 * 576, "only a part of the logits exists at a time"
    assert many["activations"] < 100 * items["activations"] / 10
    beside = Trainer(SMOLLM, width=2, reference=True)
    assert sum_update(9, checkpointing=True, trainer=beside) - sum_update(9, checkpointing=True) == 4 * parameters
    wide = Trainer(SMOLLM, width=4, shards=2, networks=2)
    assert sum_update(10, checkpointing=True, trainer=wide) > 0
    assert {item.name: item.bytes for item in wide.size_update(10, checkpointing=True)}["weights"] == 4 * parameters


LONG = ("rollout.max_response_length=3000", "env.layout=conversation")


def compose(*words: str, dtype: str = "float32") -> RunConfig:
    config = compose_words(("preset=demo", "model=smollm2-135m", *words)).config
    return config.change("rollout", dtype=RolloutType(dtype))


def fit(
    config: RunConfig, room: float | None = 100 * GIB, *given: str, earlier: RunConfig | None = None
) -> tuple[RunConfig, Fit | None]:
    return fit_training(config, to_verl(config, Path("x")), given, room, earlier)


def read(config: RunConfig) -> tuple[int, bool]:
    return config.train.tokens_per_gpu, config.model.gradient_checkpointing


def test_a_training_is_fitted_and_a_resumed_one_stays_as_it_was() -> None:
    config, found = fit(compose(*LONG), 9 * GIB)
    assert found is not None and found.chosen and read(config) == (found.tokens, found.checkpointing) != (32_768, False)
    again, _ = fit(compose(*LONG), earlier=config)
    assert read(again) == read(config), "more memory makes it no other run"
    own, _ = fit(compose("train.tokens_per_gpu=20000"), 100 * GIB, "train.tokens_per_gpu", earlier=config)
    assert read(own)[0] == 20_000, "the check of the run's settings is to see it"
    assert fit(compose(), None) == (compose(), None)


def test_on_a_cpu_a_large_policy_takes_little_memory_unless_the_user_says_otherwise() -> None:
    config, found = fit(compose())
    assert read(config) == (ENOUGH, False) and found is not None
    assert found.describe().startswith("micro-batches of 2,048 tokens without gradient checkpointing")
    assert read(fit(compose(), 4.5 * GIB)[0])[1], "where memory is short"
    longer, _ = fit(compose(*LONG))
    assert read(longer) == (longer.rollout.max_prompt_length + 3000, False), "a micro-batch holds a row"
    for key, value, taken in (
        (TRAINING_KEYS.tokens, "20000", (20_000, False)),
        (TRAINING_KEYS.checkpointing, "true", (ENOUGH, True)),
    ):
        own, _ = fit(compose(f"{key}={value}"), 100 * GIB, key)
        assert read(own) == taken


def test_on_a_cpu_micro_batches_of_a_large_policy_have_few_shapes() -> None:
    assert fit(compose())[0].train.pad_tokens_to is None, "in float32 torch keeps nothing of a shape"
    half = compose(dtype="bfloat16")
    assert fit(half)[0].train.pad_tokens_to == BUCKET
    padded = to_verl(fit(half)[0], Path("x")).actor_rollout_ref.actor.fsdp_config
    assert (padded.pad_to_length, padded.pad_to_length_bucket) == (True, BUCKET)
    assert fit(half, 100 * GIB, TRAINING_KEYS.pad)[0].train.pad_tokens_to is None
    assert fit(half, earlier=half)[0].train.pad_tokens_to is None, "a run that began without goes on without"


def test_ranks_of_a_cpu_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "find_free_memory", lambda: 10 * GIB)
    assert find_room("cpu") == pytest.approx(8 * GIB)
    assert find_room("cpu", 4) == pytest.approx(2 * GIB)


def test_an_engine_that_stays_on_a_gpu_has_its_share_of_the_whole_card() -> None:
    words = ("preset=alfworld_qwen2.5_1.5b", "cluster=1gpu", "rollout.gpu_memory=0.25")
    stays = "verl.actor_rollout_ref.rollout.free_cache_engine=false"
    needed = []
    for each in (words, (*words, stays)):
        _, found = fit(compose_words(each).config, GPU_SHARE * 80 * GIB)
        assert found is not None and not found.chosen
        needed.append(found.needed)
    assert needed[1] - needed[0] == pytest.approx(0.25 * 80 * GIB)


def test_ranks_that_share_a_sample_hold_a_part_of_it() -> None:
    settings = {
        "model": {"path": "smollm2-135m", "enable_gradient_checkpointing": False},
        "data": {"max_token_len_per_gpu": 2048, "train_batch_size": 32},
        "engine": {"fsdp_size": -1, "ulysses_sequence_parallel_size": 4},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 4, "device": "cuda"},
    }
    config = OmegaConf.create(settings)
    found = fit_tuning(config, (), 100 * GIB, 9000, None)
    assert found is not None and config.data.max_token_len_per_gpu == found.tokens == 2250


def test_a_fine_tuning_is_fitted() -> None:
    settings = {
        "model": {"path": "smollm2-135m", "enable_gradient_checkpointing": False},
        "data": {"max_token_len_per_gpu": 16_384, "train_batch_size": 32},
        "engine": {"fsdp_size": -1, "mixed_precision": {"param_dtype": "bf16"}},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},
    }
    config = OmegaConf.create(settings)
    found = fit_tuning(config, (), 7 * GIB, 1600, None)
    assert found is not None and config.data.max_token_len_per_gpu == found.tokens < 16_384
    assert (config.engine.pad_to_length, config.engine.pad_to_length_bucket) == (True, BUCKET)
    with pytest.raises(SpearError, match="one row of 9,000 tokens"):
        fit_tuning(OmegaConf.create(settings), (), 3 * GIB, 9000, None)
    adapter = OmegaConf.merge(settings, {"model": {"lora_rank": 8}, "engine": {"model_dtype": "bfloat16"}})
    assert isinstance(adapter, DictConfig)
    smaller = fit_tuning(adapter, (), 3 * GIB, 9000, None)
    assert smaller is not None and smaller.needed < 3 * GIB
    with pytest.raises(SpearError, match=r"what would fit is .*model\.lora_rank=32") as caught:
        fit_tuning(OmegaConf.create(settings), (), 2.9 * GIB, 2000, None)
    assert "data.max_token_len_per_gpu=2000" in str(caught.value) and "train." not in str(caught.value)
    again = OmegaConf.create(settings)
    fit_tuning(again, (), 100 * GIB, 1600, config)
    assert again.data.max_token_len_per_gpu == config.data.max_token_len_per_gpu, "as it began"
