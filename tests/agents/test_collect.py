import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from spear_agents.engines.openai import Server
from spear_agents.evaluation import collect
from spear_agents.evaluation.collect import collect_episodes
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Layout, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.registration import register_env
from tests.agents.chat_server import Script, complete, say
from tests.agents.test_evaluation import SplitCorridor

GO = "<think></think><action>go</action>"


@pytest.fixture
def settings(corridor_id: str) -> EvalSettings:
    register_env(corridor_id, SplitCorridor)
    return EvalSettings(corridor_id, EngineKind.EXPERT, split="test")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_turn_of_the_expert_is_a_sample(settings: EvalSettings, tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    found = collect_episodes(settings, out)
    lines = read_lines(out)
    assert (found.episodes, found.kept, found.samples, found.unrepeatable) == (3, 3, 9, 0)
    assert [line["turn"] for line in lines] == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert lines[1]["messages"] == [{"role": "user", "content": "_P_"}, {"role": "assistant", "content": GO}]
    assert {"env_id", "task_id", "subtask", "fingerprint", "seed", "won", "score"} <= set(lines[0])
    assert "input_ids" not in lines[0]


@pytest.mark.parametrize("layout", list(Layout))
def test_tokens_are_those_of_the_messages_and_the_mask_is_on_the_responses(
    settings: EvalSettings, tmp_path: Path, tiny_model: Path, layout: Layout
) -> None:
    from spear_agents.engines.hf import load_tokenizer

    out = tmp_path / "data.jsonl"
    collect_episodes(replace(settings, layout=layout), out, tokenizer=str(tiny_model))
    tokenizer = load_tokenizer(tiny_model)
    for line in read_lines(out):
        ids, mask = line["input_ids"], line["loss_mask"]
        assert len(ids) == len(mask)
        text = tokenizer.apply_chat_template(line["messages"], tokenize=False)
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert whole[: len(ids)] == ids
        learned = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
        answers = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        assert learned.replace(" ", "") == "".join(answer + tokenizer.eos_token for answer in answers)


def test_a_template_that_drops_thoughts_makes_a_line_of_each_turn(settings: EvalSettings, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.agents.test_transcript import make_tokenizer

    tokenizer = make_tokenizer("Qwen3")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "data.jsonl"
    found = collect_episodes(replace(settings, layout=Layout.CONVERSATION), out, tokenizer=str(tmp_path / "model"))
    lines = read_lines(out)
    assert found.samples == len(lines) == 9
    assert [len(line["messages"]) for line in lines] == [2, 4, 2, 4, 6, 2, 4, 6, 8]
    for line in lines:
        prompt = tokenizer.apply_chat_template(line["messages"][:-1], tokenize=False, add_generation_prompt=True)
        learned = [*tokenizer.encode(GO), tokenizer.eos_token_id]
        assert line["input_ids"] == [*tokenizer.encode(prompt, add_special_tokens=False), *learned]
        assert sum(line["loss_mask"]) == len(learned)


def test_a_model_behind_a_server_gives_its_won_episodes(settings: EvalSettings, tmp_path: Path, script: Script) -> None:
    lost = say(complete("<think>x</think><action>fail</action>"))
    script.answers = [lost, say(complete(GO))]
    model = replace(settings, engine=EngineKind.OPENAI, model="name", server=script.server(limit=1))
    out = tmp_path / "data.jsonl"
    found = collect_episodes(model, out, concurrency=1)
    assert (found.episodes, found.kept, found.samples) == (3, 2, 7)
    assert {line["task_id"] for line in read_lines(out)} == {"corridor/test/001", "corridor/test/002"}


def test_the_file_is_the_same_however_it_was_interrupted(settings: EvalSettings, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_early(done: int, total: int, trajectory: object) -> None:
        if done == 5:
            raise Stop

    many = replace(settings, episodes_per_task=4)
    collect_episodes(many, tmp_path / "whole.jsonl", concurrency=1)
    out = tmp_path / "cut.jsonl"
    with pytest.raises(Stop):
        collect_episodes(many, out, observer=stop_early)
    assert not out.exists()
    collect_episodes(many, out, concurrency=7)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_the_environment_does_not_repeat_is_left_out(
    settings: EvalSettings, tmp_path: Path, tiny_model: Path
) -> None:
    def make_other(env_id: str, split: str, keywords: Any) -> Any:
        return make_env(env_id, split, {"lengths": [2, 3, 1]})

    with mock.patch.object(collect, "make_env", make_other):
        found = collect_episodes(settings, tmp_path / "data.jsonl", tokenizer=str(tiny_model))
    assert (found.kept, found.unrepeatable) == (2, 1)


def test_an_endless_split_is_collected_from_its_first_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spear_agents.evaluation.collect.ENDLESS_TASKS", 3)
    settings = EvalSettings("spear/Sokoban-v1", EngineKind.EXPERT, env_kwargs={"modality": "text"})
    assert collect_episodes(settings, tmp_path / "data.jsonl").episodes == 3


def test_what_cannot_be_collected_is_said(settings: EvalSettings, tmp_path: Path) -> None:
    hopeless = replace(settings, env_kwargs={"max_turns": 1})
    with pytest.raises(SpearError, match="none of 3 episodes was won"):
        collect_episodes(hopeless, tmp_path / "none.jsonl")
    pictures = EvalSettings("spear/Sokoban-v1", EngineKind.EXPERT, split="test", tasks="1")
    with pytest.raises(SpearError, match="modality=text"):
        collect_episodes(pictures, tmp_path / "pictures.jsonl")
    assert not (tmp_path / "pictures.jsonl.episodes").exists(), "told before an episode is played and paid"
    with pytest.raises(SpearError, match="cannot be written"):
        collect_episodes(settings, Path("/proc/nowhere/data.jsonl"))
    with pytest.raises(SpearError, match="is a folder"):
        collect_episodes(settings, tmp_path)
    gone = replace(settings, engine=EngineKind.OPENAI, model="m", server=Server("http://127.0.0.1:9", "m", tries=1))
    with pytest.raises(SpearError, match=r"127\.0\.0\.1:9 cannot be reached"):
        collect_episodes(gone, tmp_path / "gone.jsonl")


def test_a_model_of_transformers_gives_its_own_tokens(settings: EvalSettings, tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "data.jsonl"
    model = replace(settings, engine=EngineKind.HF, model=str(tiny_model), episodes_per_task=2)
    found = collect_episodes(model, out, keep_lost=True)
    lines = read_lines(out)
    assert found.kept == 6 and len(lines) == found.samples and found.unrepeatable == 0
    folder = Path(f"{out}{collect.FOLDER_SUFFIX}")
    records = [Trajectory.from_json(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    sampled = {(t.task_id, t.seed, i): turn for t in records for i, turn in enumerate(t.turns)}
    for line in lines:
        turn = sampled[line["task_id"], line["seed"], line["turn"]]
        assert line["input_ids"] == [*turn.prompt_ids, *turn.response_ids]
        assert sum(line["loss_mask"]) == len(turn.response_ids)
        assert line["messages"][-1]["content"] == turn.response


@pytest.mark.parametrize("layout", list(Layout))
def test_a_response_that_writes_of_a_picture_shows_none(
    settings: EvalSettings, tmp_path: Path, script: Script, layout: Layout
) -> None:
    words = "<think>an <image>?</think><action>go</action>"
    script.answers = [say(complete(words))]
    model = replace(settings, engine=EngineKind.OPENAI, model="name", server=script.server(limit=1), layout=layout)
    collect_episodes(model, tmp_path / "data.jsonl", concurrency=1)
    assert {line["messages"][1]["content"] for line in read_lines(tmp_path / "data.jsonl")} == {words}
