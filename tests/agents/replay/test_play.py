from __future__ import annotations

from pathlib import Path

import pytest

from spear_agents.replay.play import Game, Stage
from spear_agents.replay.runs import Run
from spear_agents.trajectory import StopReason, TokenKind, read_trajectories
from spear_envs.core.errors import SpearError
from spear_envs.core.faults import EnvFault
from tests.agents.corridor import CorridorEnv
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
    game.act("back")
    game.close()
    (trajectory,) = read_trajectories(tmp_path / "episodes.jsonl")
    assert (trajectory.task_id, trajectory.stop) == ("corridor/test/000", StopReason.FAILED)
    assert trajectory.final_observation == "P__"


def test_undo_takes_the_reward_back(corridor_id: str, tmp_path: Path) -> None:
    game = Game(corridor_id, tmp_path, template="compact", env_kwargs={"reward": "native"})
    game.act("back")
    assert game.reward == pytest.approx(-0.1)
    game.undo()
    assert game.reward == 0 and game.describe()["turns"] == []
    game.close()


def test_a_fault_is_shown_and_not_recorded(corridor_id: str, tmp_path: Path) -> None:
    game = Game(corridor_id, tmp_path, template="compact")
    game.act("break")
    assert game.done and game.describe()["fault"] == "collapse"
    game.close()
    assert list(read_trajectories(tmp_path / "episodes.jsonl")) == []


def test_a_game_that_cannot_be_repeated_is_not_recorded(
    corridor_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = Game(corridor_id, tmp_path, template="compact")
    game.act("go")
    monkeypatch.setattr(CorridorEnv, "_admissible", lambda self: [])
    original = CorridorEnv._start

    def start_elsewhere(self: CorridorEnv, task: object) -> None:
        original(self, task)  # type: ignore[arg-type]
        self.length += 1

    monkeypatch.setattr(CorridorEnv, "_start", start_elsewhere)
    with pytest.raises(SpearError, match="differently"):
        game.act("go")
    game.close()
    assert list(read_trajectories(tmp_path / "episodes.jsonl")) == []


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


def test_a_stage_that_cannot_open_says_why(tmp_path: Path) -> None:
    def fail() -> Game:
        raise EnvFault("down", "the service is down")

    with pytest.raises(EnvFault):
        Stage(fail)
