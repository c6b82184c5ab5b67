"""Groups that begin in snapshots: which, what is learnt of them and measured, and going on from a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task
from spear_training.algorithms.curriculum import BranchSettings, CurriculumSettings
from spear_training.run.checkpoints import FORMAT, read_state, write_state
from spear_training.step.records import Rollout, Walk
from spear_training.step.step import summarize_episodes
from spear_training.step.tasks import Branching, Curriculum, check_branching
from tests.training.episodes import Episode, make_episode, play

GROUPS = ("1-00000", "1-00001", "1-00002", "1-00003")
TASKS = ("a", "b", "c", "d")


def open_branching(seed: int = 0, **settings: Any) -> Branching:
    return Branching(BranchSettings.from_mapping({"share": 0.5, "target": 0.5, **settings}), seed)


def make_walk(name: str, turns: int = 3) -> Walk:
    moments = tuple(Snapshot(n, f"{name}{n}".encode() * n, (("seen", f"{name}{n}"),) * min(n, 2)) for n in range(turns))
    return Walk(tuple(f"{name}{n}" for n in range(turns)), moments)


def end(begun: Sequence[tuple[str, Snapshot | None]], wins: Sequence[int], faults: int = 0) -> Rollout:
    """Four episodes of each group, the first of which won, the last of which broke; those from tasks leave walks."""
    episodes: list[Episode] = []
    walks = {}
    for group, (task, snapshot), won in zip(GROUPS, begun, wins, strict=True):
        began = None if snapshot is None else snapshot.turn
        for n in range(4):
            fault = "backend" if n >= 4 - faults else None
            made = make_episode(group, n, won=n < won, task_id=task, began=began, fault=fault)
            episodes.append(made)
            if n < won and began is None:
                walks[made.record.trajectory] = make_walk(task)
    rollout = play(episodes)
    return Rollout(rollout.records, rollout.rows, walks=walks)


@pytest.mark.parametrize("share", [0.25, 0.1])
def test_snapshots_take_the_places_of_the_last_tasks_and_walk_back(share: float) -> None:
    branching = open_branching(share=share)
    begun = branching.begin(GROUPS, TASKS)
    assert begun == [(task, None) for task in TASKS], "nothing is known yet"
    branching.update(end(begun, (0, 1, 0, 0)))
    for turn, won in ((2, 1), (2, 2), (1, 2), (0, 4)):
        begun = branching.begin(GROUPS, TASKS)
        # A curriculum's first tasks are its best.
        assert begun == [("b", make_walk("b").snapshots[turn]), *((task, None) for task in TASKS[:3])]
        branching.update(end(begun, (won, 0, 0, 0)))
    assert branching.begin(GROUPS, TASKS)[0] == ("a", None), "it wins from the start: nothing is left to learn"


@pytest.mark.parametrize(("wins", "turn"), [((2, 2, 4, 0), 1), ((4, 1, 1, 1), 2)])
def test_an_episode_moves_one_turn_back_however_many_groups_began_in_it(wins: tuple[int, ...], turn: int) -> None:
    branching = open_branching(share=1.0)
    branching.update(end(branching.begin(GROUPS, TASKS), (1, 0, 0, 0)))
    begun = branching.begin(GROUPS, TASKS)
    assert begun == [("a", make_walk("a").snapshots[2])] * 4, "there is one episode"
    branching.update(end(begun, wins))
    assert branching.begin(GROUPS, TASKS)[0] == ("a", make_walk("a").snapshots[turn])


def test_a_resumed_archive_begins_where_it_would_have_begun(tmp_path: Path) -> None:
    whole = open_branching()

    def go_on(branching: Branching, steps: int) -> list[Any]:
        found = []
        for step in range(steps):
            found.append(branching.begin(GROUPS, TASKS))
            rollout = end(found[-1], (1 + step % 3, 2, 1, step % 2))
            branching.update(rollout)
            found.append(branching.summarize(rollout.records))
        return found

    go_on(whole, 4)
    write_state(tmp_path, {"format": FORMAT, "branch": whole.state_dict()})
    resumed = open_branching(seed=9)
    resumed.load_state_dict(read_state(tmp_path)["branch"])
    assert go_on(resumed, 6) == go_on(whole, 6)
    one, other = open_branching(), open_branching(seed=1)
    assert go_on(one, 6) != go_on(other, 6), "a run's own seed"
    with pytest.raises(SpearError, match=r"written without branches: start a new run folder"):
        resumed.load_state_dict(None)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("archive", {"episodes": 5}),
        ("episode", {"evil": 5}),
        ("episode", {"back": 0}),
        ("episode", {"back": "x"}),
        ("episode", {"anchors": ["a0"]}),
        ("states", {"sizes": [-1, 2, 5]}),
        ("states", {"sizes": [0, 2]}),
        ("states", {"sizes": [0, 2, 5]}),
        ("states", {"sizes": ["a", "b", "c"]}),
        ("states", {"bytes": "abc"}),
        ("states", {"histories": [[1], [2], [3]]}),
        ("state", {"rng": {}}),
        ("state", {"archive": {}}),
    ],
)
def test_a_tampered_archive_is_said_to_be_damaged(part: str, change: dict[str, Any]) -> None:
    branching = open_branching()
    branching.update(end(branching.begin(GROUPS, TASKS), (1, 0, 0, 0)))
    state = branching.state_dict()
    (episode,) = state["archive"]["episodes"]
    open_branching().load_state_dict(state)
    parts = {"state": state, "archive": state["archive"], "episode": episode, "states": episode["states"]}
    parts[part].update(change)
    with pytest.raises(SpearError, match="in the checkpoint are damaged"):
        open_branching().load_state_dict(state)


def test_a_near_miss_keeps_names_of_wins_alone(tmp_path: Path) -> None:
    branching = open_branching(mode="near_miss", share=0.25)
    lost, won = make_walk("b"), Walk(("b0", "b1"), ())
    episodes = [make_episode("1-00000", 0, won=True, task_id="b"), make_episode("1-00000", 1, task_id="b")]
    rollout = play(episodes)
    walks = {"1-00000_0": won, "1-00000_1": lost}
    branching.update(Rollout(rollout.records, rollout.rows, walks=walks))
    write_state(tmp_path, {"format": FORMAT, "branch": branching.state_dict()})
    branching.load_state_dict(read_state(tmp_path)["branch"])
    assert branching.begin(GROUPS, TASKS)[0] == ("b", lost.snapshots[1])


def test_success_and_the_curriculum_are_of_whole_episodes() -> None:
    records = [
        make_episode("a", 0, won=True, turns=5, tool_calls=3).record,
        make_episode("a", 1, turns=7, tool_calls=5).record,
        *(make_episode("b", n, won=True, turns=1, tool_calls=9, began=6).record for n in range(2)),
        make_episode("b", 2, turns=3, tool_calls=9, began=6, fault="backend", stop="fault").record,
    ]
    metrics = summarize_episodes(records)
    assert (metrics["success/all"], metrics["success/s"], metrics["score/mean"]) == (0.5, 0.5, 0.5)
    assert (metrics["turns/mean"], metrics["tool_calls/mean"]) == (6.0, 4.0)
    assert metrics["stop/won"] == 0.6 and metrics["turns/well_formed"] == 1.0
    found = open_branching().summarize(records)
    assert found == {
        "branch/share": 0.5, "branch/kept": 0.0, "branch/success": 1.0, "branch/turns_before": 6.0, "branch/turns": 1.0
    }  # fmt: skip
    assert open_branching().summarize(records[:2]) == {"branch/share": 0.0, "branch/kept": 0.0}
    alone = summarize_episodes(records[2:])
    assert "success/all" not in alone and alone["turns/valid_action"] == 1.0
    curriculum = Curriculum([Task("t", "train", "s", "", {})], CurriculumSettings(), 2, 0)
    curriculum.update(records)
    state = curriculum.state_dict()["source"]
    assert (np.asarray(state["wins"]), np.asarray(state["losses"])) == (1, 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"program": "agent.py:play"}, "cannot start agent.py:play in mid-episode: leave out rollout.agent"),
        ({"layout": Layout.CONVERSATION}, "env.layout=per_turn"),
        ({"staleness": 2}, "rollout.staleness=0"),
        ({"obstacle": "it has a server"}, "states of this environment: it has a server. Change it"),
    ],
)
def test_what_cannot_branch_is_told_with_the_mend(change: dict[str, Any], expected: str) -> None:
    fine: dict[str, Any] = {"layout": Layout.PER_TURN, "program": None, "staleness": 0, "obstacle": None}
    check_branching(**fine)
    with pytest.raises(SpearError) as caught:
        check_branching(**(fine | change))
    assert expected in str(caught.value) and str(caught.value).endswith("or set branch.share=0")
