from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'train'")

from spear_agents.engines.base import Finish, Request, Sampling
from spear_agents.engines.hf import HFModel, load_tokenizer
from spear_agents.engines.vision import ImageReader, has_vision, pack_pictures, unpack_pictures
from spear_agents.evaluation import choose_template
from spear_agents.prompting import PromptBuilder
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env


@pytest.fixture(scope="module")
def model(tiny_vision_policy: Path) -> HFModel:
    return HFModel(tiny_vision_policy)


def show(model: HFModel, seeds: range, *, lengthen: bool = False) -> list[Request]:
    """First prompts of some levels, each with its picture."""
    env: Any = make_env("spear/Sokoban-v1", "train", {"modality": "image"})
    builder = PromptBuilder(load_tokenizer(model.path), choose_template(env, "default"), mark_image=model.reader.mark)
    requests = []
    for seed in seeds:
        observation, info = env.reset(seed=seed)
        prompt = builder.begin().next(
            instruction=info["instruction"] + " please" * (seed if lengthen else 0),
            observation="",
            admissible_actions=None,
            turn=1,
            max_turns=15,
            picture=observation["image"],
        )
        assert prompt is not None and prompt.shows_image
        requests.append(Request(prompt.ids, Sampling(max_tokens=12, seed=seed), f"r{seed}", (observation["image"],)))
    env.close()
    return requests


def test_the_policy_is_tiny_and_is_a_vision_model(model: HFModel) -> None:
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    assert 200_000 < parameters < 500_000
    assert has_vision(model.path) and model.reader is not None
    assert type(model.model).__name__ == "Qwen2_5_VLForConditionalGeneration"


def test_a_picture_has_as_many_tokens_as_merged_patches(model: HFModel) -> None:
    reader = model.reader
    assert reader is not None
    for shape in ((96, 96, 3), (128, 160, 3)):
        picture = np.zeros(shape, np.uint8)
        grid = reader.read([picture])["image_grid_thw"]
        assert reader.count_tokens(picture) == int(grid.prod()) // 4
        ids = load_tokenizer(model.path).encode(reader.mark(picture), add_special_tokens=False)
        assert ids.count(reader.image_token_id) == reader.count_tokens(picture) == len(ids) - 2


@pytest.mark.parametrize("lengthen", [False, True])
def test_generation_and_one_forward_pass_agree(model: HFModel, lengthen: bool) -> None:
    # Prompts of unequal length are padded; the same prompt twice is computed once.
    requests = show(model, range(4), lengthen=lengthen)
    requests.append(requests[1])
    answers = model.generate_batch(requests)
    assert answers[4] == answers[1]
    for request, answer in zip(requests, answers, strict=True):
        again = model.log_probs(request.prompt_ids, answer.token_ids, images=request.images)
        assert again == pytest.approx(answer.log_probs, abs=1e-4)
        assert answer.finish in (Finish.STOP, Finish.LENGTH)
    alone = model.generate_batch(requests[2:3])[0]
    assert alone.token_ids == answers[2].token_ids


def test_a_response_holds_no_picture_s_place(model: HFModel) -> None:
    requests = show(model, range(3))
    plain = model.generate_batch(requests)
    head = model.model.get_output_embeddings()
    place = model.reader.image_token_id

    def favour(module: Any, inputs: Any, logits: Any) -> None:
        logits[..., place] += 100.0

    hook = head.register_forward_hook(favour)
    try:
        assert model.generate_batch(requests) == plain
        assert model.log_probs(requests[0].prompt_ids, (place,), images=requests[0].images)[0] < -1e8
    finally:
        hook.remove()


def test_the_picture_decides_too(model: HFModel) -> None:
    first, second = show(model, range(2))
    response = model.generate_batch([first])[0].token_ids
    seen, other = (model.log_probs(first.prompt_ids, response, images=r.images) for r in (first, second))
    assert seen != other


def test_pictures_survive_packing() -> None:
    dice = np.random.default_rng(0)
    pictures = [dice.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((5, 7), (96, 96))]
    packed = pack_pictures(pictures)
    assert packed.dtype == np.uint8 and packed.ndim == 1
    assert all(np.array_equal(a, b) for a, b in zip(unpack_pictures(packed), pictures, strict=True))
    assert unpack_pictures(pack_pictures([])) == []


def test_another_vision_family_and_a_folder_without_a_processor_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(SpearError, match="llava"):
        has_vision(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(SpearError, match="image processor"):
        ImageReader(tmp_path)
