"""Policies for a warm start: tokenizers, rows, training, and those that see."""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import spear_envs.sokoban.prompts as sokoban  # noqa: E402
from spear_agents.engines.base import Finish, Request, Sampling  # noqa: E402
from spear_agents.engines.hf import HFModel, load_tokenizer  # noqa: E402
from spear_agents.engines.vision import ImageReader, has_vision  # noqa: E402
from spear_agents.evaluation.run import choose_template  # noqa: E402
from spear_agents.play.prompting import PromptBuilder  # noqa: E402
from spear_agents.play.trajectory import Layout  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402
from spear_envs.core.making import make_env  # noqa: E402
from spear_training.cli import warmstart  # noqa: E402
from spear_training.run.compose import compose  # noqa: E402
from spear_training.warmstart import (  # noqa: E402
    RECIPES,
    Answers,
    PolicyShape,
    WarmStartReport,
    WarmStartSettings,
    collect_expert_rows,
    make_tokenizer,
    train_policy,
)
from spear_training.warmstart.policy import (  # noqa: E402
    IGNORED,
    POOL,
    draw_batches,
    encode_rows,
    fit,
    make_model,
    measure_loss,
    rename_words,
)
from spear_training.warmstart.rows import ExpertRow  # noqa: E402
from spear_training.warmstart.vision import TinyVisionSettings, make_tiny_vision_policy  # noqa: E402

ENV, KEYWORDS = "spear/Sokoban-v1", {"modality": "text"}
BOARD = sokoban.CompactBoardTemplate()
BOARD_WORDS = ["<think></think><action>", "</action>", "up", "down", "left", "right", *"#_O√XPS"]
SMALL = WarmStartSettings(
    ENV,
    KEYWORDS,
    episodes=12,
    epochs=1,
    batch=16,
    shape=PolicyShape(hidden=24, layers=1, heads=2, mlp=32),
    panel_tasks=2,
    panel_samples=1,
    target=0.0,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WarmStartReport]:
    out = tmp_path_factory.mktemp("warm") / "policy"
    return out, train_policy(SMALL, out)


# ---------------------------------------------------------------- tokenizer


@given(st.lists(st.sampled_from(BOARD_WORDS), max_size=40))
def test_every_text_of_known_words_comes_back(words: list[str]) -> None:
    tokenizer = make_tokenizer(BOARD, ["".join(BOARD_WORDS)])
    text = "".join(words)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(words)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# ---------------------------------------------------------------- rows


def test_rows_are_boards_and_well_formed_words_of_won_episodes() -> None:
    ended: list[bool] = []
    rows = collect_expert_rows(ENV, KEYWORDS, episodes=30, noise=0.5, on_episode=ended.append)
    assert len(ended) == 30 and 15 < sum(ended) < 30  # some are lost to the noise
    for row in rows:
        assert re.fullmatch("[#_O√XPS]{16}", row.prompts[0])
        assert re.fullmatch("<think></think><action>(up|down|left|right)</action>", row.responses[0])
        assert len(row.prompts) == len(row.responses) == 1
    assert rows == collect_expert_rows(ENV, KEYWORDS, episodes=30, noise=0.5)
    assert rows != collect_expert_rows(ENV, KEYWORDS, episodes=30, noise=0.5, seed=1)


def test_the_experts_answers_are_its_own_in_every_state() -> None:
    played = collect_expert_rows(ENV, KEYWORDS, episodes=20, noise=0.5)
    advised = collect_expert_rows(ENV, KEYWORDS, episodes=20, noise=0.5, answers=Answers.EXPERT)
    assert len(advised) > len(played)  # those of lost episodes too, as long as they could be won
    by_board: dict[str, set[str]] = {}
    for row in advised:
        by_board.setdefault(row.prompts[0], set()).add(row.responses[0])
    same = [row.responses[0] in by_board[row.prompts[0]] for row in played if row.prompts[0] in by_board]
    assert 0.4 < sum(same) / len(same) < 0.9  # half of what was played is random, a quarter of that is right
    with pytest.raises(SpearError, match="per_turn"):
        collect_expert_rows(ENV, KEYWORDS, episodes=1, noise=0, answers=Answers.EXPERT, layout=Layout.CONVERSATION)


def test_only_responses_are_learnt() -> None:
    tokenizer = make_tokenizer(BOARD, ["".join(BOARD_WORDS)])
    ids, labels = encode_rows(tokenizer, [ExpertRow(("#_", "O"), ("up", "down")), ExpertRow(("#",), ("up",))])
    name = tokenizer.convert_ids_to_tokens
    assert name(ids[0].tolist()) == ["<bos>", "#", "_", "up", "<eos>", "O", "down", "<eos>"]
    assert name(ids[1].tolist()) == ["<bos>", "#", "up", "<eos>", "<pad>", "<pad>", "<pad>", "<pad>"]
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        learnt = [token if token in ("up", "down", "<eos>") else None for token in name(row)]
        assert learnt == [None if x == IGNORED else name(x) for x in label]


@given(st.lists(st.integers(4, 90), min_size=1, max_size=300), st.integers(1, 16))
def test_batches_hold_every_row_once_and_rows_of_similar_length(lengths: list[int], batch: int) -> None:
    sizes = torch.tensor(lengths)
    batches = draw_batches(sizes, batch, torch.Generator().manual_seed(1))
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // batch)
    again = draw_batches(sizes, batch, torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    if len(lengths) <= POOL * batch:  # one pool: no two batches overlap in length
        spans = sorted((int(sizes[part].min()), int(sizes[part].max())) for part in batches)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(st.lists(st.lists(st.integers(0, 11), min_size=6, max_size=6), min_size=1, max_size=9), st.integers(0, 99))
def test_renaming_swaps_names_and_nothing_else(rows: list[list[int]], seed: int) -> None:
    ids, names = torch.tensor(rows), torch.tensor([3, 5, 8, 9, 11])
    for share in (0.0, 0.5, 1.0):
        renamed = rename_words(ids, names, share, torch.Generator().manual_seed(seed))
        for before, after in zip(rows, renamed.tolist(), strict=True):
            pairs = set(zip(before, after, strict=True))
            assert len(pairs) == len(set(before)) == len(set(after))  # one to one in the whole row
            assert all((old in names) == (new in names) for old, new in pairs)
            assert all(old == new for old, new in pairs if old not in names or not share)
    assert ids.tolist() == rows


def test_short_rows_come_first_then_long_ones_and_then_all() -> None:
    tokenizer = make_tokenizer(BOARD, ["".join(BOARD_WORDS)])
    rows = [ExpertRow(("#_X" * (1 + 9 * (n % 4 == 0)),), ("up",)) for n in range(16)]
    ids, labels = encode_rows(tokenizer, rows)
    plan = replace(SMALL, batch=4, epochs=1, short_epochs=2, long_epochs=3)
    model = make_model(plan.shape, tokenizer, ids.shape[1], 0)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    seen: list[tuple[int, int]] = []
    losses = fit(model, ids, labels, plan, lambda done, total: seen.append((done, total)))
    assert shapes[: 2 * 3] == [(4, 5)] * 6, "twice the 12 short rows"
    assert shapes[6:9] == [(4, 32)] * 3, "three times the 4 long ones"
    assert len(losses) == 6 + 3 + 4, "then all 16"
    assert seen == [(n, 13) for n in range(1, 14)]


def test_padding_changes_no_loss(small: tuple[Path, WarmStartReport]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small[0])
    tokenizer = load_tokenizer(small[0])
    rows = [ExpertRow(("#_X" * n,), ("<think></think><action>up</action>",)) for n in (1, 5)]
    ids, labels = encode_rows(tokenizer, rows)
    alone, padded = (measure_loss(model, ids[:1, :n], labels[:1, :n], 0.0).item() for n in (8, ids.shape[1]))
    assert alone == pytest.approx(padded, abs=1e-5)


# ---------------------------------------------------------------- policy


def test_the_folder_is_an_ordinary_one(small: tuple[Path, WarmStartReport]) -> None:
    out, report = small
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    # transformers gives the folders of some architectures its own tokenizer, whatever lies in them.
    assert tokenizer.tokenize("<think></think><action>up</action>") == ["<think></think><action>", "up", "</action>"]
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == report.parameters
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    assert model.generation_config.max_new_tokens == 6
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "#_X#" * 4}], tokenize=False)
    batch = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    assert batch["input_ids"].shape == (1, 17)
    assert model.generate(**batch, do_sample=False).shape[1] <= 23


def test_the_engine_agrees_with_the_saved_model(small: tuple[Path, WarmStartReport]) -> None:
    out, _ = small
    engine, tokenizer = HFModel(out), load_tokenizer(out)
    ids = tuple(tokenizer.encode("<bos>" + "#_X#" * 4, add_special_tokens=False))
    answers = engine.generate_batch([Request(ids, Sampling(max_tokens=6, seed=i), str(i)) for i in range(8)])
    for answer in answers:
        assert answer.log_probs == pytest.approx(engine.log_probs(ids, answer.token_ids), abs=1e-5)


def test_the_same_seed_gives_the_same_weights(small: tuple[Path, WarmStartReport], tmp_path: Path) -> None:
    out, _ = small
    train_policy(replace(SMALL, panel_tasks=0), tmp_path / "again")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_below_the_target_it_trains_on(small: tuple[Path, WarmStartReport], tmp_path: Path) -> None:
    out, base = small
    seen: list[str] = []
    more = replace(SMALL, target=1.0, extra_epochs=2)
    report = train_policy(more, tmp_path / "more", observer=lambda stage, done, total: seen.append(stage))
    assert report.steps == 3 * base.steps
    stages = [stage for stage, before in zip(seen, ["", *seen], strict=False) if stage != before]
    assert stages == ["expert episodes", *["training steps", "valid panel"] * 3]
    name = "model.safetensors"
    assert (tmp_path / "more" / name).read_bytes() != (out / name).read_bytes()


def test_an_existing_folder_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "policy"
    out.mkdir()
    (out / "precious").write_text("")
    with pytest.raises(SpearError, match="exists: choose another folder, or replace it by --overwrite"):
        train_policy(SMALL, out)
    assert os.listdir(out) == ["precious"]
    train_policy(replace(SMALL, panel_tasks=0, episodes=4), out, overwrite=True)
    assert "config.json" in os.listdir(out) and "precious" not in os.listdir(out)


def test_a_failure_leaves_nothing_half_written(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="compact"):
        train_policy(replace(SMALL, template="default"), tmp_path / "policy")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match="cannot be written"):
        train_policy(SMALL, tmp_path / "file" / "policy")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", 1.0),
        ("episodes", 0),
        ("target", 1.5),
        ("renamed", -0.1),
        ("short_epochs", -1),
        ("long_epochs", -1),
        ("shape", PolicyShape(hidden=10, heads=3)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(SpearError, match="heads" if name == "shape" else name):
        replace(SMALL, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["demo", "alfworld_tiny", "code_tiny", "search_tiny", "webshop_tiny"])
def test_a_recipe_is_made_for_the_environment_of_its_training(name: str) -> None:
    env = compose((f"preset={name}",)).config.env
    recipe = RECIPES[env.id]
    assert dict(env.kwargs) == recipe.env_kwargs
    assert (env.template, env.layout, env.history) == (recipe.template, recipe.layout, recipe.history)
    tried = make_env(env.id, env.train_split, env.kwargs)
    second = tried.splits[1]  # type: ignore[attr-defined]
    assert (env.valid_split or second) == (recipe.valid_split or second)


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


def test_a_picture_has_as_many_tokens_as_merged_patches(model: HFModel) -> None:
    reader = model.reader
    assert reader is not None
    for shape in ((96, 96, 3), (128, 160, 3)):
        picture = np.zeros(shape, np.uint8)
        grid = reader.read([picture])["image_grid_thw"]
        assert reader.count_tokens(picture) == int(grid.prod()) // 4
        ids = load_tokenizer(model.path).encode(reader.mark(picture), add_special_tokens=False)
        assert ids.count(reader.image_token_id) == reader.count_tokens(picture) == len(ids) - 2
    assert reader.count_tokens(np.zeros((96, 96, 3), np.uint8)) == 100, "a board of Sokoban, 288 pixels a side"


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


def test_a_vision_policy_that_is_cut_short_leaves_no_folder(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny_vision_policy(TinyVisionSettings(episodes=4, steps=2, batch=2), tmp_path / "policy", stop)
    assert not list(tmp_path.iterdir()), "a resumed training would take it for a trained one"


def test_another_vision_family_and_a_folder_without_a_processor_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(SpearError, match="llava"):
        has_vision(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(SpearError, match="image processor"):
        ImageReader(tmp_path)


def test_without_noise_every_episode_is_won_and_a_conversation_is_one_row() -> None:
    rows = collect_expert_rows(ENV, KEYWORDS, episodes=8, noise=0.0, layout=Layout.CONVERSATION)
    assert len(rows) == 8
    assert all(3 <= len(row.prompts) == len(row.responses) <= 12 for row in rows)


def test_the_command_makes_a_policy(tmp_path: Path) -> None:
    sizes = "--episodes 8 --epochs 1 --hidden 24 --layers 1 --heads 2 --mlp 32 --panel-tasks 2 --target 0"
    arguments = [ENV, "--out", str(tmp_path / "p"), "--env", "modality=text", *sizes.split()]
    result = CliRunner().invoke(warmstart, arguments)
    assert result.exit_code == 0 and "valid panel" in result.output, result.output
    assert load_tokenizer(tmp_path / "p").eos_token == "<eos>"
