"""Pairs and data sets of recorded episodes: of a scripted player, a local model, and programs."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_agents.cli import evaluate
from spear_agents.engines.base import ChatByteTokenizer, Sampling
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.evaluation.exports import export_data, open_recorded
from spear_agents.evaluation.records import EPISODES, SETTINGS, read_last
from spear_agents.evaluation.run import choose_template
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory, TrajectoryWriter
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.registration import register_env
from tests.agents.test_evaluation import SplitCorridor
from tests.commands import call

PROGRAM = """
async def play(task):
    import httpx
    key = {"Authorization": f"Bearer {task.api_key}"}
    async with httpx.AsyncClient(headers=key, timeout=20) as client:
        messages = [{"role": "user", "content": task.prompt}]
        while not task.done:
            body = {"model": task.model, "messages": messages, "max_tokens": 8}
            reply = await client.post(f"{task.base_url}/chat/completions", json=body)
            text = reply.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": await task.step(text)}]
"""


@pytest.fixture(scope="module")
def corridor() -> str:
    register_env("tests/ExportCorridor-v0", SplitCorridor)
    return "tests/ExportCorridor-v0"


@pytest.fixture(scope="module")
def scripted(corridor: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve episodes of the random player on each of three corridors, as conversations."""
    run = tmp_path_factory.mktemp("runs") / "random"
    options = ("--engine", "random", "--layout", "conversation", "--episodes-per-task", 12, "--out", run)
    call(evaluate, corridor, *options)
    return run


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, str]]]]:
    """A program that continues its first call twice, with a model that sees messages; and what it sent."""
    pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
    from tests.agents.gateway.programs import KeepingEngine, play_program
    from tests.agents.gateway.test_programs import ask

    sent: list[list[dict[str, str]]] = []

    def say(task: Any, messages: list[dict[str, str]]) -> str:
        sent.append(messages)
        return str(ask(task, messages).json()["choices"][0]["message"]["content"])

    def play(task: Any) -> None:
        task.step("go")
        opening = [{"role": "system", "content": "Walk."}, {"role": "user", "content": task.prompt}]
        first = say(task, opening)
        said = {"role": "assistant", "content": first}
        answers = [say(task, [*opening, said, {"role": "user", "content": words}]) for words in ("on", "or back?")]
        task.step(answers[0])

    run = tmp_path_factory.mktemp("runs") / "branched"
    with TrajectoryWriter(run / EPISODES) as writer:
        for seed, text in enumerate(("go", "back")):
            (played,) = play_program(play, KeepingEngine("hm", text), seed=seed)
            writer.write(played)
    (run / SETTINGS).write_text(json.dumps({"engine": "openai", "model": "m", "split": "test"}))
    return run, sent


@pytest.fixture(scope="module")
def local(corridor: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A local model by our own loop in both layouts, and through a program."""
    pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
    folder = tmp_path_factory.mktemp("local")
    (folder / "program.py").write_text(PROGRAM)
    ways = {name: ("--layout", name) for name in ("per_turn", "conversation")}
    ways["program"] = ("--agent", f"{folder / 'program.py'}:play", "--env", "response_format=plain")
    model = ("--model", tiny_model, "--max-tokens", 8, "--episodes-per-task", 3)
    for name, options in ways.items():
        call(evaluate, corridor, *model, *options, "--out", folder / name)
    return {name: folder / name for name in ways}


def read_pairs(run: Path, out: Path, *options: Any) -> list[dict[str, Any]]:
    call(export_data, run, "--form", "pairs", "--out", out, *options)
    return [json.loads(line) for line in out.read_text().splitlines()]


def find_answers(run: Path, won: bool) -> set[tuple[str, str, str]]:
    """Task, prompt and response of every turn of the won or lost episodes, read off the recorded ids."""
    codec, found = ChatByteTokenizer(), set()
    for episode in read_last(run / EPISODES):
        for chain in episode.chains() if episode.won == won else ():
            ids: tuple[int, ...] = ()
            for place in chain:
                turn = episode.turns[place]
                ids += turn.prompt_ids
                found.add((episode.task_id, json.dumps(codec.read_messages(ids)), turn.response))
                ids += turn.response_ids
    return found


def test_a_pair_is_two_answers_to_one_prompt(scripted: Path, tmp_path: Path) -> None:
    pairs = read_pairs(scripted, tmp_path / "pairs.jsonl")
    won, lost = find_answers(scripted, won=True), find_answers(scripted, won=False)
    assert len(pairs) > 3 and len({json.dumps(pair) for pair in pairs}) == len(pairs)
    for pair in pairs:
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["role"] == rejected["role"] == "assistant" and pair["prompt"][-1]["role"] == "user"
        assert chosen["content"] != rejected["content"]
        prompt = json.dumps(pair["prompt"])
        assert (pair["task_id"], prompt, chosen["content"]) in won
        assert (pair["task_id"], prompt, rejected["content"]) in lost
    assert any(len(pair["prompt"]) > 1 for pair in pairs), "some part later than at the first turn"
    fewer = read_pairs(scripted, tmp_path / "fewer.jsonl", "--per-task", 1)
    assert len(fewer) == len({pair["task_id"] for pair in pairs}) < len(pairs)


def test_a_program_that_branches_is_told_as_it_asked(branched: tuple[Path, list[Any]], tmp_path: Path) -> None:
    run, sent = branched
    lines = []
    with open_recorded(run) as recorded:
        for episode in recorded.episodes:
            said = recorded.report(episode)
            assert said is not None and [each.response for each in said] == [turn.response for turn in episode.turns]
            lines += [each.prompt for each in said]
        assert [turn.follows for turn in recorded.episodes[0].turns] == [None, 0, None], "the second branch is a row"
    assert lines == sent
    (pair,) = read_pairs(run, tmp_path / "pairs.jsonl")
    assert pair["prompt"] == sent[1] and [pair[key][0]["content"] for key in ("chosen", "rejected")] == ["go", "back"]


@pytest.mark.slow
def test_a_local_model_s_episodes_are_told(local: dict[str, Path], tmp_path: Path) -> None:
    """As messages where the environment gives them back, and as the model's text where a program asked."""
    from spear_agents.engines.hf import load_tokenizer

    for name, run in local.items():
        with open_recorded(run) as recorded:
            tokenizer = load_tokenizer(recorded.settings["model"])
            for episode in recorded.episodes:
                said = recorded.report(episode)
                assert said is not None and len(said) == len(episode.turns)
                for place, each in enumerate(said):
                    turn = episode.turns[place]
                    (chain,) = (chain for chain in episode.chains() if place in chain)
                    before = [episode.turns[earlier] for earlier in chain[: chain.index(place)]]
                    if isinstance(each.prompt, str):
                        ids = [i for earlier in before for i in (*earlier.prompt_ids, *earlier.response_ids)]
                        whole = tokenizer.decode([*ids, *turn.prompt_ids], skip_special_tokens=False)
                        assert each.prompt.split() == whole.split() and each.response.startswith(turn.response)
                        continue
                    assert name != "program" and each.response == turn.response
                    said_before = [message["content"] for message in each.prompt if message["role"] == "assistant"]
                    assert said_before == [earlier.response for earlier in before]
                    assert turn.observation in each.prompt[-1]["content"]
                    if not before:
                        text = tokenizer.apply_chat_template(each.prompt, tokenize=False, add_generation_prompt=True)
                        assert tuple(tokenizer.encode(text, add_special_tokens=False)) == turn.prompt_ids
            assert max(len(episode.turns) for episode in recorded.episodes) > 1 and recorded.unrepeatable == 0
        check_dataset(run, tmp_path / "sets" / name)


def check_dataset(run: Path, folder: Path) -> None:
    """Write the run as a data set and read it with the library that others read it with."""
    datasets = pytest.importorskip("datasets")
    call(export_data, run, "--form", "dataset", "--out", folder)
    rows = datasets.load_dataset(str(folder), cache_dir=f"{folder}.cache")["test"]
    recorded = {(each.task_id, each.seed): each for each in read_last(run / EPISODES)}
    assert len(rows) == len(recorded)
    for row in rows:
        episode: Trajectory = recorded[row["task_id"], row["seed"]]
        assert (row["won"], row["reward"], row["stop"]) == (episode.won, episode.reward, episode.stop.value)
        assert [(step["turn"], step["response"]) for step in row["steps"]] == list(episode.list_steps())
        assert [turn["follows"] for turn in row["turns"]] == [turn.follows for turn in episode.turns]
        assert [turn["response"] for turn in row["turns"]] == [turn.response for turn in episode.turns]
        assert all((turn["prompt"] is None) != (turn["prompt_text"] is None) for turn in row["turns"])


def test_a_data_set_opens_with_the_real_library(scripted: Path, branched: Any, tmp_path: Path) -> None:
    for run in (scripted, branched[0]):
        check_dataset(run, tmp_path / run.name)
    with pytest.raises(SpearError, match="exists: choose another folder"):
        call(export_data, run, "--form", "dataset", "--out", tmp_path / run.name)


def test_what_cannot_be_exported_is_told_in_a_line(corridor: str, tmp_path: Path) -> None:
    run = tmp_path / "expert"
    call(evaluate, corridor, "--engine", "expert", "--out", run)
    for folder, text in ((run, "has a won and a lost episode that differ"), (tmp_path, "does not contain settings")):
        with pytest.raises(SpearError, match=text):
            call(export_data, folder, "--form", "pairs", "--out", tmp_path / "pairs.jsonl")
    assert not (tmp_path / "pairs.jsonl").exists()


def test_the_record_itself_is_never_replaced(scripted: Path) -> None:
    before = (scripted / "episodes.jsonl").read_bytes()
    with pytest.raises(SpearError, match="is the record itself: name another file"):
        call(export_data, scripted, "--form", "pairs", "--out", scripted / "episodes.jsonl")
    assert (scripted / "episodes.jsonl").read_bytes() == before


@pytest.mark.parametrize("split", ["/tmp/elsewhere", "../elsewhere", "a/b", "test\n"])
def test_a_data_set_lies_in_its_folder(scripted: Path, tmp_path: Path, split: str) -> None:
    shutil.copytree(scripted, tmp_path / "run")
    path = tmp_path / "run" / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split": split}))
    out = tmp_path / "folder" / "set"
    with pytest.raises(SpearError, match="split"):
        call(export_data, tmp_path / "run", "--form", "dataset", "--out", out)
    assert not out.exists() and not list(tmp_path.rglob("*.parquet"))


def play_as_a_model(out: Path, layout: Layout, **limits: Any) -> Trajectory:
    """An episode of Sokoban whose record says that a model's tokens were played, so that it is played again."""
    env = make_env("spear/Sokoban-v1", "test", {"modality": "text"})
    template = choose_template(env, "default")
    prompts = PromptBuilder(ChatByteTokenizer(), template, layout, 2, **limits)
    played = asyncio.run(
        play_episode(
            env,
            ScriptedEngine(lambda prompt, dice: template.respond("up"), ChatByteTokenizer()),
            prompts,
            task_id=env.tasks[0].id,
            sampling=Sampling(),
            seed=0,
            env_id="spear/Sokoban-v1",
        )
    )
    episode = replace(played, tokens=TokenKind.MODEL)
    with TrajectoryWriter(out / EPISODES) as writer:
        writer.write(episode)
    settings = {"env_id": "spear/Sokoban-v1", "engine": "hf", "model": "x", "env_kwargs": {"modality": "text"}}
    settings |= {"split": "test", "template": "default", "template_kwargs": {}, "layout": layout.value, "history": 2}
    settings |= {"method": "plain", "fingerprint": episode.fingerprint, "overlong": str(limits.get("overlong", "end"))}
    (out / SETTINGS).write_text(json.dumps(settings))
    return episode


def test_an_episode_that_outgrew_the_context_is_told_as_it_was(tmp_path: Path) -> None:
    episode = play_as_a_model(tmp_path, Layout.CONVERSATION, max_prompt_tokens=2500)
    assert episode.stop is StopReason.CONTEXT_LIMIT
    with open_recorded(tmp_path) as recorded:
        said = recorded.report(recorded.episodes[0])
        assert said is not None and len(said) == len(episode.turns) and recorded.unrepeatable == 0


def test_history_that_was_dropped_is_not_told(tmp_path: Path) -> None:
    episode = play_as_a_model(tmp_path, Layout.PER_TURN, max_prompt_tokens=1050, overlong="drop-history")
    assert any(turn.dropped_turns for turn in episode.turns)
    codec = ChatByteTokenizer()
    with open_recorded(tmp_path) as recorded:
        said = recorded.report(recorded.episodes[0])
    assert said is not None
    assert [each.prompt for each in said] == [codec.read_messages(turn.prompt_ids) for turn in episode.turns]
