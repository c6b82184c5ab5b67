"""``spear eval`` of a model behind a server, and ``spear compare`` of what it left."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spear_agents.cli import evaluate
from spear_agents.comparison.significance import compare
from spear_agents.engines.base import ChatByteTokenizer
from spear_agents.evaluation.records import EPISODES
from spear_agents.evaluation.rescoring import rescore_run
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import read_trajectories
from spear_agents.viewer.episodes import describe_episode
from spear_envs.core.errors import SpearError
from tests.agents.chat_server import Handler, Script, complete, say

SOKOBAN = ["spear/Sokoban-v1", "--engine", "openai", "--env", "modality=text", "--tasks", "3", "--concurrency", "2"]


def run(script: Script, *options: str) -> Result:
    address = ["--base-url", script.url, "--model", "name", "--tries", "2"]
    return CliRunner().invoke(evaluate, [*SOKOBAN, *address, *options])


def read_summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def test_a_server_is_evaluated_with_its_tokens_and_costs(script: Script, tmp_path: Path) -> None:
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    result = run(script, "--out", str(tmp_path / "out"), "--price", "2,4")
    assert result.exit_code == 0, result.exception
    summary = read_summary(tmp_path / "out")
    usage = summary["usage"]
    turns = len(script.requests)
    assert (usage["models"], usage["requests"], usage["responses"]) == (["served-name"], turns, turns)
    assert usage["prompt_tokens"] == 1000 * turns and usage["cached_tokens"] == 400 * turns
    assert usage["cost"] == pytest.approx(turns * (1000 * 2 + 100 * 4) / 1e6)
    assert f"{turns:,} requests" in result.output and "cost" in result.output
    assert summary["settings"]["template"] == "default"
    assert "Write <think>" in script.requests[0]["messages"][0]["content"]


def test_a_server_that_may_move_but_not_change_its_model(script: Script, tmp_path: Path) -> None:
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    out = ["--out", str(tmp_path / "out")]
    assert run(script, *out).exit_code == 0
    asked = len(script.requests)
    moved = script.url.replace("127.0.0.1", "localhost")
    again = CliRunner().invoke(evaluate, [*SOKOBAN, "--base-url", moved, "--model", "name", *out])
    assert again.exit_code == 0 and len(script.requests) == asked
    other = CliRunner().invoke(evaluate, [*SOKOBAN, "--base-url", moved, "--model", "other", *out])
    assert isinstance(other.exception, SpearError) and "model=" in str(other.exception)


def test_a_server_that_dies_leaves_what_was_played(script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out"
    up = say(complete("<think>x</think><action>up</action>"))
    script.answers = [*[up] * 20, say({}, 500)]
    result = run(script, "--episodes-per-task", "4", "--out", str(out), "--concurrency", "1", "--tries", "1")
    assert isinstance(result.exception, SpearError) and "engine_server_error" in str(result.exception)
    kept = sum(t.fault is None for t in read_trajectories(out / EPISODES))
    assert kept == 1
    script.answers = [up]
    asked = len(script.requests)
    assert run(script, "--episodes-per-task", "4", "--out", str(out), "--concurrency", "1").exit_code == 0
    summary = read_summary(out)
    assert (summary["overall"]["episodes"], summary["overall"]["faults"]) == (12, 0)
    assert len(script.requests) - asked == 11 * 15


@pytest.mark.parametrize(("method", "form"), [("io", "{}"), ("react", "Thought: so\nAction: {}")])
def test_an_episode_of_another_form_is_played_again_in_it(
    script: Script, tmp_path: Path, method: str, form: str
) -> None:
    script.answers = [say(complete(form.format(word))) for word in ("up", "left", "down", "right") * 12]
    out = tmp_path / "out"
    assert run(script, "--method", method, "--out", str(out), "--concurrency", "1").exit_code == 0
    assert not rescore_run(out).differences
    settings, pictures = json.loads((out / "settings.json").read_text()), set()
    for trajectory in read_trajectories(out / EPISODES):
        shown = describe_episode(trajectory, settings, lambda: ChatByteTokenizer())
        pictures |= {shown["final_image"], *(turn["image"] for turn in shown["turns"])}
    assert len(pictures) > 3  # moves change the pictures of three tasks


@pytest.mark.parametrize("method", ["io", "react", "reflexion"])
def test_methods_are_played_over_a_server(script: Script, tmp_path: Path, method: str) -> None:
    text = "up" if method == "io" else "Thought: hm\nAction: up"
    script.answers = [say(complete(text))]
    result = run(script, "--method", method, "--out", str(tmp_path / "out"), "--tasks", "1")
    assert result.exit_code == 0, result.exception
    played = list(read_trajectories(tmp_path / "out" / EPISODES))
    assert all(turn.format_ok for t in played for turn in t.turns)
    assert [t.trial for t in played] == ([1, 2, 3] if method == "reflexion" else [1])
    summary = read_summary(tmp_path / "out")
    assert summary["by_trial"] == [0] * len(played)
    assert f"name {method}" in summary["latex"]
    # Earlier trials and the notes after them cost as much.
    assert summary["usage"]["requests"] == len(script.requests)
    assert summary["usage"]["prompt_tokens"] == 1000 * len(script.requests)


def test_prompts_that_are_too_long_drop_their_history_and_say_so(script: Script, tmp_path: Path) -> None:
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    run(script, "--tasks", "1", "--history", "8")
    lengths = [len(request["messages"][0]["content"]) for request in script.requests]
    limit = str(lengths[0] + 200)
    script.requests.clear()
    ended = run(script, "--tasks", "1", "--history", "8", "--max-prompt-tokens", limit, "--out", str(tmp_path / "a"))
    assert ended.exit_code == 0
    assert read_summary(tmp_path / "a")["overall"]["stops"] == {"context_limit": 1}
    options = ["--overlong", "drop-history", "--out", str(tmp_path / "b")]
    dropped = run(script, "--tasks", "1", "--history", "8", "--max-prompt-tokens", limit, *options)
    assert "left out a part of the history" in dropped.output
    (played,) = read_trajectories(tmp_path / "b" / EPISODES)
    assert len(played.turns) == 15
    assert [turn.dropped_turns for turn in played.turns[:2]] == [0, 0] and played.turns[-1].dropped_turns > 0
    in_conversation = run(script, "--overlong", "drop-history", "--layout", "conversation")
    assert isinstance(in_conversation.exception, SpearError)


def test_the_report_names_what_the_server_refused_and_withheld(script: Script, tmp_path: Path) -> None:
    withheld = complete("", choice={"finish_reason": "content_filter"})
    script.answers = [say({"error": {"message": "Unsupported parameter: 'seed'"}}, 400), say(withheld)]
    result = run(script, "--tasks", "1", "--out", str(tmp_path / "out"))
    assert "The server refused seed" in result.output and "15 responses were withheld" in result.output
    assert "malformed" not in result.output
    usage = read_summary(tmp_path / "out")["usage"]
    assert (usage["dropped_fields"], usage["filtered"]) == (["seed"], 15)
    script.requests.clear()
    run(script, "--tasks", "1", "--no-seed")
    assert not any("seed" in request for request in script.requests)
    assert "top_k" in str(run(script, "--top-k", "3").exception)


def test_two_folders_are_compared_in_words_and_figures(script: Script, tmp_path: Path) -> None:
    def win(handler: Handler) -> None:
        say(complete("<think>x</think><action>up</action>"))(handler)

    script.answers = [win]
    assert run(script, "--out", str(tmp_path / "a"), "--temperature", "0.4").exit_code == 0
    expert = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "12"]
    assert CliRunner().invoke(evaluate, [*expert, "--out", str(tmp_path / "b")]).exit_code == 0
    shown = CliRunner().invoke(compare, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0, shown.exception
    for words in ("sign test, exact", "permutation test", "temperature: 0.4 -> 1.0", "engine: 'openai' -> 'expert'",
                  "9 tasks were left out"):  # fmt: skip
        assert words in shown.output
    found = json.loads(CliRunner().invoke(compare, [str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert found["judgement"]["exact"] and found["difference"]["tasks"] == 3
    assert found["settings"]["engine"] == ["openai", "expert"]
    wrong = CliRunner().invoke(compare, [str(tmp_path / "a"), str(tmp_path / "absent")])
    assert isinstance(wrong.exception, SpearError)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    pairs = [str(tmp_path / name) for name in ("a", "b", "a", "c")]
    pairs = [*pairs[:2], "--pair", *pairs[2:]]
    shown = CliRunner().invoke(compare, pairs)
    assert shown.exit_code == 0, shown.exception
    assert "2 seeds × 3 tasks" in shown.output and "over these runs' tasks alone" in shown.output
    found = json.loads(CliRunner().invoke(compare, [*pairs, "--json"]).output)
    assert found["by_seed"][1] == 0.0 and len(found["pairs"]) == 2
    twice = CliRunner().invoke(compare, [*pairs[:3], *pairs[:2]]).exception
    assert isinstance(twice, SpearError) and "a pair is given twice" in str(twice)
    for name in ("a", "b"):  # of models, and copied
        path = tmp_path / name / "settings.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_digest": name}))
        shutil.copytree(tmp_path / name, tmp_path / f"{name}2")
    copied = [*pairs[:3], str(tmp_path / "a2"), str(tmp_path / "b2")]
    assert "a pair is given twice" in str(CliRunner().invoke(compare, copied).exception)
    assert "x>=0" in CliRunner().invoke(compare, [*pairs[:2], "--seed", "-1"]).output


def test_episodes_at_a_time_are_as_many_as_requests(script: Script) -> None:
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    asked: list[list[Any]] = []
    server = script.server(limit=2)
    settings = EvalSettings(
        "spear/Sokoban-v1", EngineKind.OPENAI, "name", {"modality": "text"}, tasks="6", server=server, max_tokens=8
    )
    run_evaluation(settings, observer=lambda done, *rest: asked.append([done, len(script.requests)]))
    # With all six at a time the first would end only after five sixths of the requests.
    assert asked[1][0] == 1 and asked[1][1] <= 2 * 15
    with pytest.raises(SpearError, match="concurrency=0: play 1 or more"):
        run_evaluation(settings, concurrency=0)


def test_responses_that_never_reached_the_environment_are_told(script: Script) -> None:
    script.answers = [say(complete("", choice={"finish_reason": "length", "message": {"content": None}}))]
    result = run(script)
    assert "45 of 45 responses were cut off at 512 tokens: give --max-tokens more" in result.output
    assert "45 of 45 responses were malformed, the first one ''" in result.output
    script.answers = [say(complete("<think>x</think><action>up</action>"))]
    assert "malformed" not in (text := run(script).output) and "cut off" not in text


def test_a_server_that_never_answers_is_an_error_and_no_figure(script: Script, tmp_path: Path) -> None:
    script.answers = [say({}, 500)]
    result = run(script, "--tries", "1", "--out", str(tmp_path / "out"))
    assert isinstance(result.exception, SpearError) and "no episode could be played" in str(result.exception)
    assert "engine_server_error" in str(result.exception)
    assert not (tmp_path / "out" / "summary.json").exists()


def test_reflexion_resumes_between_its_trials(script: Script, tmp_path: Path) -> None:
    answer = say(complete("Thought: hm\nAction: up"))
    options = ["--method", "reflexion", "--tasks", "1", "--out", str(tmp_path / "out")]
    # Trial 1 and its note; within trial 2 the key is refused.
    script.answers = [*[answer] * 20, say({"error": {"message": "expired"}}, 401)]
    result = run(script, *options)
    assert isinstance(result.exception, SpearError) and "expired" in str(result.exception)
    script.answers = [answer]
    asked = len(script.requests)
    assert run(script, *options).exit_code == 0
    assert len(script.requests) - asked == 15 + 1 + 15
    assert [t.trial for t in read_trajectories(tmp_path / "out" / EPISODES)] == [1, 2, 3]


def test_prompts_that_never_fit_are_no_figure(script: Script) -> None:
    script.answers = [say({"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, 400)]
    result = run(script)
    assert result.exit_code == 1 and "every prompt was too long" in str(result.exception)
