"""Trainings of the lab, those of trees included."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lab.comparison import Arm, TrainingSettings
from benchmarks.lab.playing import Beginning, Played, play_groups, tabulate_play
from benchmarks.lab.policy import BoardPolicy, Examiner
from benchmarks.lab.rooms import Rooms
from benchmarks.lab.training import Training
from benchmarks.lab.tree import TreeSettings, estimate_tree
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.tasks import make_task_set
from spear_training.algorithms import RowTable, SettingsError, SpearSettings
from spear_training.algorithms.estimators import estimate_grpo
from spear_training.step.plan import reward_episode

SETTINGS = TrainingSettings(
    levels=16, tasks=4, group=4, turns=8, minibatch=64, budget=900, spear={"replay": {"capacity": 8}}
)


@pytest.fixture(scope="module")
def rooms() -> Rooms:
    tasks = make_task_set(Recipe(shortest=2, longest=7), "train")
    return Rooms.build([tasks[number] for number in range(16)])


def make(rooms: Rooms, seed: int = 0, rate: float = 2e-3, **arm: Any) -> Training:
    return Training(rooms, BoardPolicy(rooms.cells, 16), Arm.from_mapping(arm), SETTINGS, rate=rate, seed=seed)


def weights(training: Training) -> torch.Tensor:
    return torch.cat([value.flatten() for value in training.policy.state_dict().values()])


def steps(training: Training, count: int) -> list[Any]:
    return [training.step() for _ in range(count)]


EVERYTHING = {
    "algorithm": "grpo_spear",
    "branch": {"share": 0.5, "mode": "success", "target": 0.25},
    "curriculum": {"choice": "thompson"},
    "spear": {"sampling": {"enabled": True, "max_rounds": 2}},
}


def test_a_saved_training_goes_on_exactly(rooms: Rooms) -> None:
    whole = make(rooms, **EVERYTHING)
    first = steps(whole, 3)
    saved = copy.deepcopy(whole.state_dict())
    rest = steps(whole, 3)
    resumed = make(rooms, seed=99, **EVERYTHING)
    resumed.load_state_dict(saved)
    assert steps(resumed, 3) == rest and torch.equal(weights(resumed), weights(whole))
    assert whole.restored > 0 and any("replay/drawn" in line.metrics for line in [*first, *rest])
    assert steps(make(rooms, **EVERYTHING), 3) == first, "the same seed, the same run"
    assert steps(make(rooms, seed=1, **EVERYTHING), 3) != first


def test_spear_with_a_decay_of_no_steps_is_self_imitation_alone(rooms: Rooms) -> None:
    imitation = make(rooms, algorithm="grpo_sil")
    none, some = (make(rooms, algorithm="grpo_spear", spear={"reward": {"decay_steps": decay}}) for decay in (0, 100))
    for training in (imitation, none, some):
        steps(training, 4)
    assert torch.equal(weights(none), weights(imitation)) and not torch.equal(weights(some), weights(imitation))


# ---- where a group begins --------------------------------------------------------------------------------------------


Segment = tuple[Any, ...]
TURNS, MEMBERS = 10, 16
TREE = TreeSettings(turns=(2, 3, 6))
TREE_SETTINGS = TrainingSettings(
    levels=16, tasks=4, group=8, turns=8, minibatch=64, budget=900, spear={"replay": {"capacity": 8}}
)


def begin(rooms: Rooms, levels: np.ndarray) -> Beginning:
    none = np.full(len(levels), -1)
    return Beginning(levels, rooms.start[levels], np.full(len(levels), TURNS), none)


def play(rooms: Rooms, tree: TreeSettings | None, members: int = MEMBERS) -> tuple[Played, tuple[Any, ...], RowTable]:
    """Groups of two trees, or of one, with the rewards that the step gives them at mu = 0.5."""
    begun = begin(rooms, np.arange(len(rooms)))
    played = play_groups(rooms, BoardPolicy(rooms.cells), begun, members, np.random.default_rng(3), tree)
    records, rows = tabulate_play(rooms, begun, played, [f"1-{n:05d}" for n in range(len(rooms))], members)
    reward = {record.trajectory: reward_episode(record, SpearSettings().reward, 0.5).total for record in records}
    return played, records, rows.add(reward=[reward[name] for name in rows.trajectory.tolist()])


def name_segments(rows: RowTable, tree: TreeSettings) -> list[Segment]:
    """Of each row the continuation that it is in: its group, its tree, and which way was taken at each split so far."""
    found = []
    for group, name, turn in zip(rows.group.tolist(), rows.trajectory.tolist(), rows.turn.tolist(), strict=True):
        root, place = divmod(int(name.rpartition("_")[2]), tree.leaves)
        ways = []
        for split in range(len(tree.turns)):
            way, place = divmod(place, tree.width ** (len(tree.turns) - split - 1))
            ways.append(way)
        found.append((group, root, *ways[: sum(turn >= at for at in tree.turns)]))
    return found


def grow(segments: list[Segment], values: np.ndarray) -> tuple[dict[Segment, set[Segment]], Callable[[Segment], float]]:
    """The continuations of each one, and its mean value; ``values`` are those of the episodes that rows belong to."""
    children: dict[Segment, set[Segment]] = {}
    ends: dict[Segment, float] = {}
    for segment, value in zip(segments, values.tolist(), strict=True):
        children.setdefault(segment[:-1], set()).add(segment)
        ends[segment] = value  # of the episode that ends in it, if one does

    def expect(segment: Segment) -> float:
        return float(np.mean([expect(part) for part in children[segment]])) if segment in children else ends[segment]

    return children, expect


@pytest.mark.parametrize("divided", [False, True])
def test_the_advantage_is_that_of_the_tree_written_out(rooms: Rooms, divided: bool) -> None:
    played, _, rows = play(rooms, TREE)
    segments = name_segments(rows, TREE)
    children, expect = grow(segments, rows.reward)
    settings = SpearSettings().override({"advantage": {"normalize_std": divided}})
    wanted = []
    for segment in segments:
        siblings = [expect(one) for one in children[segment[:-1]]]
        assert len(siblings) == 2, "two trees of a group, two ways at a split"
        scale = np.std(siblings, ddof=1) + 1e-6 if divided else 1.0
        wanted.append((expect(segment) - np.mean(siblings)) / scale)
    found = estimate_tree(rows, settings)
    assert found == pytest.approx(np.asarray(wanted), abs=1e-9) and len(set(np.round(found, 6))) > 5
    assert {len(segment) for segment in segments} == {2, 3, 4, 5} and 0 < played.won.sum() < len(played.won)


def test_a_group_without_a_split_has_the_advantages_of_grpo(rooms: Rooms) -> None:
    _, _, rows = play(rooms, None)
    settings = SpearSettings().override({"advantage": {"normalize_std": True}})
    assert estimate_tree(rows, settings) == pytest.approx(estimate_grpo(rows, settings).numpy(), abs=1e-12)


def test_parts_go_on_from_the_very_state_by_the_policy_itself(rooms: Rooms) -> None:
    """Each row's log-prob is the policy's, and each episode walks from the start through the environment's states."""
    played, records, rows = play(rooms, TREE)
    policy = BoardPolicy(rooms.cells)
    with torch.no_grad():
        again = policy.score(policy.encode(rows)).numpy()[:, 0]
    assert again == pytest.approx(rows.rollout_log_probs, abs=1e-6)
    segments = name_segments(rows, TREE)
    at = {(segment, turn): number for number, (segment, turn) in enumerate(zip(segments, rows.turn, strict=True))}
    for record in records:
        own = [n for n, name in enumerate(rows.trajectory.tolist()) if name == record.trajectory]
        assert len(own) == record.rows > 0
        last = segments[own[-1]]
        level, calls = int(record.group[2:]), 0
        state, fresh = rooms.start[level], [False]
        for turn in range(record.turns):
            number = at[last[: 2 + sum(turn >= split for split in TREE.turns)], turn]
            assert rows.anchor[number] == f"{level}.{state}"
            move = rows.ids.reshape(len(rows), -1)[number, -1]
            calls += rooms.moved[level, state, move]
            state = rooms.after[level, state, move]
            fresh.append(number in own)
        assert fresh == sorted(fresh) and fresh.count(True) == record.rows, "turns that are shared belong to another"
        assert (rooms.won[level, state], calls) == (record.won, record.tool_calls)
        assert record.won or record.turns == TURNS
    assert len({record.turns for record in records}) > 3 and played.calls.max() > 0


def test_shares_of_a_tree_estimate_its_success_without_bias(rooms: Rooms) -> None:
    policy, trees = BoardPolicy(rooms.cells, seed=4), 400
    exact = Examiner(rooms, TURNS).examine(policy)
    begun = begin(rooms, np.repeat(np.arange(len(rooms)), trees))
    played = play_groups(rooms, policy, begun, TREE.leaves, np.random.default_rng(0), TREE)
    share = played.share.reshape(-1, TREE.leaves)
    assert share.sum(1) == pytest.approx(1.0) and (played.share == 0).any(), "who won before a split is not split"
    found = (played.share * played.won).reshape(len(rooms), trees, -1).sum(2)
    assert (np.abs(found.mean(1) - exact) < 4 * found.std(1) / np.sqrt(trees) + 1e-9).all()


def make_tree(rooms: Rooms, seed: int = 0, **arm: Any) -> Training:
    return Training(rooms, BoardPolicy(rooms.cells, 16), Arm.from_mapping(arm), TREE_SETTINGS, rate=2e-3, seed=seed)


def test_each_token_is_paid_once(rooms: Rooms) -> None:
    """The budget counts what was generated: the turns of the trees, of which several episodes share the first ones."""
    training = make_tree(rooms, tree={"turns": [2, 4]})
    seen: list[Any] = []
    hold = training._actor.hold
    training._actor.hold = lambda rows: seen.append(rows) or hold(rows)  # type: ignore[func-returns-value,method-assign]
    training.step()
    (rows,) = seen
    tree = TreeSettings(turns=(2, 4))
    turns = len({(segment, turn) for segment, turn in zip(name_segments(rows, tree), rows.turn.tolist(), strict=True)})
    full = 2 * (2 + 2 * 2 + 4 * 4)  # of a group of two trees whose leaves all last eight turns
    assert training.tokens == turns == len(rows) <= 4 * full < 4 * 8 * 8
    plain = make_tree(rooms)
    plain.step()
    assert plain.tokens > training.tokens


def test_a_saved_training_of_trees_goes_on_exactly(rooms: Rooms) -> None:
    arm: dict[str, Any] = {"tree": {"turns": [2, 4]}, "curriculum": {"choice": "thompson"}}
    whole = make_tree(rooms, **arm)
    whole.step()
    resumed = make_tree(rooms, seed=9, **arm)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert [whole.step() for _ in range(2)] == [resumed.step() for _ in range(2)]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"tree": {}}, "tree.turns is missing"),
        ({"tree": {"turns": [4, 4]}}, "tree.turns must be ascending"),
        ({"tree": {"turns": [0]}}, "tree.turns must be ascending"),
        ({"tree": {"turns": [4], "width": 1}}, "tree.width"),
        ({"tree": {"turns": [2, 4], "width": 3}}, "must be a multiple of the leaves"),
        ({"tree": {"turns": [8]}}, "training.turns (8) above the turn"),
        ({"tree": {"turns": [4]}, "branch": {"share": 0.5}}, "leave out branch, or tree"),
        ({"tree": {"turns": [4]}, "algorithm": "gigpo"}, "take an algorithm of estimator grpo, not gigpo"),
    ],
)
def test_a_tree_that_cannot_be_played_is_refused(arm: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Arm.from_mapping(arm).compose(TREE_SETTINGS)
    assert message in str(raised.value) and "\n" not in str(raised.value)
