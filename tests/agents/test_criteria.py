"""What a task asked for, point by point, in the records of all environments."""

import json
from dataclasses import replace

import pytest

from spear_agents import evaluate
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.rewards import Criterion

PLAYERS = {
    "spear/WebShop-v0": ("expert", "script"),
    "spear/ALFWorld-v0": ("expert", "random"),
    "spear/Sokoban-v1": ("expert", "random"),
    "spear/SearchR1-v0": ("expert",),
    "spear/CodeInterpreter-v0": ("expert",),
}


@pytest.mark.parametrize("env_id", PLAYERS)
def test_an_episode_is_won_where_all_is_met(env_id: str) -> None:
    tasks = 2 if "Code" in env_id else 5
    for engine in PLAYERS[env_id]:
        for trajectory in evaluate(env_id, engine=engine, tasks=tasks, progress=False).trajectories:
            assert trajectory.criteria
            assert all(criterion.met for criterion in trajectory.criteria) == trajectory.won, trajectory.criteria
            assert Trajectory.from_json(trajectory.to_json()) == trajectory


def test_a_purchase_says_what_was_wrong_with_it() -> None:
    played = evaluate("spear/WebShop-v0", engine="script", tasks=80, progress=False).trajectories
    missed = [c for trajectory in played if 0 < trajectory.score < 1 for c in trajectory.criteria if not c.met]
    assert {"price", "option"} <= {criterion.name for criterion in missed}
    price = next(criterion for criterion in missed if criterion.name == "price")
    assert float(price.found.strip("$")) > float(price.wanted.removeprefix("at most $"))


@pytest.mark.parametrize(
    "written", [[["answer", 1, "a", "b"]], [["answer", True, "a"]], [["answer", True, 3, "b"]], [3], 3]
)
def test_a_record_with_other_criteria_is_refused(written: object) -> None:
    trajectory = evaluate("spear/Sokoban-v1", engine="random", tasks=1, progress=False).trajectories[0]
    record = json.loads(replace(trajectory, criteria=(Criterion("a", True, "b", "c"),)).to_json())
    with pytest.raises((TypeError, ValueError)):
        Trajectory.from_json(json.dumps({**record, "criteria": written}))
