"""Games that a person plays, by calls and in a terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from spear_agents.play.trajectory import StopReason, TokenKind, read_trajectories
from spear_agents.viewer.play import Game, Stage, play_in_terminal
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import play
from spear_envs.core.errors import SpearError
from tests.agents.replay.conftest import play_expert

ENVIRONMENTS = ("Sokoban-v1", "ALFWorld-v0", "WebShop-v0", "SearchR1-v0", "CodeInterpreter-v0")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_environment_can_be_played_taken_back_and_recorded(name: str, tmp_path: Path) -> None:
    game = Game(f"spear/{name}", tmp_path)
    try:
        before = (game.describe(), game.hint())
        hint = game.hint()
        assert hint is not None
        game.act(hint, thought="let me see")
        if not game.done:
            game.undo()
            assert (game.describe(), game.hint()) == before
        play_expert(game)
        assert game.info["won"] and game.recorded == 1
    finally:
        game.close()
    (trajectory,) = read_trajectories(tmp_path / "episodes.jsonl")
    assert trajectory.stop is StopReason.WON and trajectory.tokens is TokenKind.BYTES
    assert trajectory.reward == pytest.approx(game.reward)
    assert len(trajectory.turns) == len(game.moves), "what was taken back is not in the record"
    assert [turn.response for turn in trajectory.turns] == [move.response for move in game.moves]
    body = Run(tmp_path).read_episode(0)
    assert body["notes"] == [] and bool(body["final_image"]) == (name == "Sokoban-v1")


def test_only_what_came_to_its_end_is_recorded(corridor_id: str, tmp_path: Path) -> None:
    game = Game(corridor_id, tmp_path, template="compact")
    game.act("go")
    game.restart()
    game.act("fail")
    with pytest.raises(SpearError, match="has ended"):
        game.act("go")
    with pytest.raises(SpearError, match="recorded"):
        game.undo()
    assert game.hint() is None
    game.start_next()
    with pytest.raises(SpearError, match="nothing to take back"):
        game.undo()
    game.act("break")
    assert game.done and game.describe()["fault"] == "collapse", "shown, and not recorded"
    game.close()
    (trajectory,) = read_trajectories(tmp_path / "episodes.jsonl")
    assert (trajectory.task_id, trajectory.stop) == ("corridor/test/000", StopReason.FAILED)
    assert trajectory.final_observation == "P__"


def test_a_stage_does_what_the_page_asks_for(corridor_id: str, tmp_path: Path) -> None:
    stage = Stage(lambda: Game(corridor_id, tmp_path, template="compact"))
    try:
        assert stage.perform("look", {})["actions"] == ["go", "back"]
        assert stage.perform("hint", {})["hint"] == "go"
        assert stage.perform("act", {"action": "go", "thought": "on"})["turns"][0]["thought"] == "on"
        assert stage.perform("undo", {})["turns"] == []
        stage.perform("act", {"action": "go"})
        end = stage.perform("act", {"action": "go"})
        assert end["done"] and end["won"] and end["recorded"] == 1
        assert stage.perform("next", {})["task"] == "corridor/test/001"
        assert stage.perform("restart", {})["task"] == "corridor/test/001"
        with pytest.raises(LookupError):
            stage.perform("close", {})
        with pytest.raises(SpearError, match="must be text"):
            stage.perform("act", {"action": 7})
    finally:
        stage.close()


@pytest.fixture
def corridor(corridor_id: str, tmp_path: Path) -> Iterator[Game]:
    game = Game(corridor_id, tmp_path, template="compact")
    yield game
    game.close()


def run(game: Game, *lines: str) -> str:
    """What the terminal shows while a person types ``lines`` and then ends the input."""
    said: list[str] = []
    typed = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    play_in_terminal(game, said.append, ask)
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(said))


def test_a_game_from_hint_to_record(corridor: Game) -> None:
    shown = run(corridor, "/hint", "b", "/undo", "g", "go", "/next", "/quit", "go")
    assert "go" in shown and "_P_" in shown
    assert "The end: won. Score 1, reward 1.1" in shown and "Recorded." in shown
    assert "corridor/test/001" in shown
    assert corridor.recorded == 1 and corridor.info["turn"] == 0, "nothing is played after /quit"


def test_mistakes_are_answered_and_the_game_goes_on(corridor: Game) -> None:
    shown = run(corridor, "/undo", "/dance", "", "/help", "/actions", "go", "go", "go", "/undo", "/hint")
    for words in (
        "nothing to take back",
        "no command /dance",
        "what the expert",
        "go\nback",
        "has ended: begin",
        "over",
    ):
        assert words in shown


def test_code_is_typed_on_several_lines(tmp_path: Path) -> None:
    game = Game("spear/CodeInterpreter-v0", tmp_path)
    shown = run(game, "```python", "for i in range(2):", "    print(i + 40)", "```", "/quit")
    game.close()
    assert game.moves[0].shown["action"] == "```python\nfor i in range(2):\n    print(i + 40)\n```"
    assert "40\n41" in shown


def test_tab_completes_in_a_real_terminal(tmp_path: Path, root: Path) -> None:
    pytest.importorskip("readline")
    code = "from spear_agents.viewer.server import play; play()"
    arguments = [sys.executable, "-c", code, "spear/ALFWorld-v0", "--out", str(tmp_path / "out")]
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
    process = subprocess.Popen(arguments, stdin=follower, stdout=follower, stderr=follower, cwd=root, env=environment)
    os.close(follower)
    try:
        read_until(leader, "(turn 1 of")
        os.write(leader, b"go to sink\t")
        read_until(leader, "go to sinkbasin 1")
        os.write(leader, b"\n")
        read_until(leader, "You arrive at sinkbasin 1")
        os.write(leader, b"/un\t\n")
        read_until(leader, "(turn 1 of")
        os.write(leader, b"/q\t\n")
        read_until(leader, "Nothing was recorded")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def read_until(descriptor: int, words: str, seconds: float = 60) -> None:
    seen = ""
    end = time.monotonic() + seconds
    while words not in seen:
        assert time.monotonic() < end and select.select([descriptor], [], [], seconds)[0], f"no {words!r} in {seen!r}"
        seen += os.read(descriptor, 4096).decode("utf-8", "replace")


def test_the_command_plays_what_is_piped_into_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["spear/Sokoban-v1", "--split", "test", "--out", str(out)]
    first = CliRunner().invoke(play, arguments, input="/hint\n/quit\n")
    assert first.exit_code == 0, first.output
    assert "Nothing was recorded: only episodes that end are" in first.output
    game = Game("spear/Sokoban-v1", tmp_path / "other", split="test")
    plan = game.core.expert_plan()
    game.close()
    done = CliRunner().invoke(play, arguments, input="\n".join(plan))
    assert done.exit_code == 0, done.output
    assert f"1 recorded in {out}: spear view {out}" in done.output
    assert next(iter(read_trajectories(out / "episodes.jsonl"))).won


def test_a_byte_that_is_no_text_costs_a_turn_and_not_the_game(tmp_path: Path) -> None:
    arguments = ["spear/ALFWorld-v0", "--out", str(tmp_path / "my run")]
    done = CliRunner().invoke(play, arguments, input=b"look\n\xff\nlook\n/quit\n")
    assert done.exit_code == 0 and "(turn 4 of" in done.output


@pytest.mark.parametrize(("option", "word"), [("--split", "empty"), ("--task", "Unknown task")])
def test_an_empty_text_is_not_the_default(option: str, word: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(play, ["spear/ALFWorld-v0", option, "", "--out", str(tmp_path)], input="/quit\n")
    assert done.exit_code and word in f"{done.output} {done.exception}"


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(play, ["spear/ALFWorld-v0", "--out=~/played"], input="/quit\n")
    assert done.exit_code == 0 and (tmp_path / "home" / "played").is_dir() and not (tmp_path / "~").exists()


def test_undo_takes_the_reward_back(corridor_id: str, tmp_path: Path) -> None:
    game = Game(corridor_id, tmp_path, template="compact", env_kwargs={"reward": "native"})
    game.act("back")
    assert game.reward == pytest.approx(-0.1)
    game.undo()
    assert game.reward == 0 and game.describe()["turns"] == []
    game.close()


def test_games_of_other_settings_are_not_mixed(corridor_id: str, tmp_path: Path) -> None:
    for _ in range(2):
        game = Game(corridor_id, tmp_path, template="compact")
        play_expert(game)
        game.close()
    assert len(list(read_trajectories(tmp_path / "episodes.jsonl"))) == 2
    with pytest.raises(SpearError, match="choose another folder"):
        Game(corridor_id, tmp_path, template="compact", env_kwargs={"max_turns": 3})


def test_two_games_do_not_write_one_file(corridor_id: str, tmp_path: Path) -> None:
    game = Game(corridor_id, tmp_path, template="compact")
    with pytest.raises(SpearError, match="another process"):
        Game(corridor_id, tmp_path, template="compact")
    game.close()
    Game(corridor_id, tmp_path, template="compact").close()
