import pickle
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.tasks import Problem, ProblemTaskSet
from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.tasks import (
    GeneratedTaskSet,
    ListTaskSet,
    Task,
    TaskSet,
    canonical_json,
    check_disjoint,
    check_split,
    choose_subset,
)
from spear_envs.search.tasks import Question, QuestionTaskSet

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
contents = st.dictionaries(st.text(), json_values, max_size=4)


def make_task(index: int, split: str = "train", content: Any = None) -> Task:
    return Task(f"toy/{split}/{index:08d}", split, "all", "Do it.", {"n": index} if content is None else content)


def make_generated(length: int = 1000, parameters: Any = None, **more: Any) -> GeneratedTaskSet:
    return GeneratedTaskSet("toy", "train", length, make_task, parameters or {"size": 1}, **more)


@given(contents)
def test_canonical_json_ignores_the_order_of_keys(content: dict[str, Any]) -> None:
    assert canonical_json(content) == canonical_json(dict(reversed(content.items())))
    assert canonical_json(content).isascii()


@given(st.lists(contents, min_size=1, max_size=5), st.data())
def test_fingerprint_tells_task_sets_apart(some: list[dict[str, Any]], data: st.DataObject) -> None:
    tasks = ListTaskSet(make_task(i, content=content) for i, content in enumerate(some))
    same = ListTaskSet(make_task(i, content=dict(reversed(content.items()))) for i, content in enumerate(some))
    assert tasks.fingerprint == same.fingerprint
    assert len(tasks.fingerprint) == 64
    place = data.draw(st.integers(0, len(some) - 1))
    changed = [dict(content) for content in some]
    changed[place]["a new key"] = 1
    other = ListTaskSet(make_task(i, content=content) for i, content in enumerate(changed))
    assert (tasks.fingerprint == other.fingerprint) == (some == changed)


def make_mixture(counts: dict[str, int]) -> list[Task]:
    """Tasks of several subtasks, one subtask after another, as files of games by path are."""
    return [
        Task(f"toy/train/{name}-{number}", "train", name, "Do it.", {"n": [name, number]})
        for name, count in counts.items()
        for number in range(count)
    ]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 30), min_size=1, max_size=5), st.data())
def test_a_subset_has_each_subtask_in_its_share(counts: dict[str, int], data: st.DataObject) -> None:
    made = make_mixture(counts)
    size = data.draw(st.integers(0, len(made)))
    tasks = ListTaskSet(made)
    positions = list(choose_subset(tasks, size))
    assert len(positions) == size and positions == sorted(set(positions))
    found = Counter(tasks[position].subtask for position in positions)
    assert all(abs(found[name] - size * count / len(made)) < 1 for name, count in counts.items())
    shuffled = ListTaskSet(data.draw(st.permutations(made)))
    assert {shuffled[i].id for i in choose_subset(shuffled, size)} == {tasks[i].id for i in positions}


@given(st.integers(1, 2000), st.data())
def test_ids_lead_to_tasks(length: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, length - 1))
    for tasks in (make_generated(length), ListTaskSet(map(make_task, range(length)))):
        task = tasks[index]
        assert tasks.get(task.id) == task
        assert tasks.index_of(task.id) == index
        assert task in tasks and task.id in tasks
        assert tasks[index - length] == task


@pytest.mark.parametrize("tasks", [make_generated(), ListTaskSet(map(make_task, range(1000)))])
@pytest.mark.parametrize(
    "task_id", ["", "toy", "toy/train/1", "toy/test/00000001", "toy/train/00001000", "toy/train/-0000001",
                "toy/train/٠٠٠٠٠٠٠١", "x/train/00000001", "toy/train/" + "9" * 5000, "toy/train/00000001\n", "\0"],
)  # fmt: skip
def test_unknown_ids_name_the_mend(tasks: TaskSet, task_id: str) -> None:
    with pytest.raises(UnknownTaskError) as caught:
        tasks.get(task_id)
    assert isinstance(caught.value, SpearError) and isinstance(caught.value, KeyError)
    assert "'toy/train/00000000' to 'toy/train/00000999'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert task_id not in tasks


def test_generated_tasks_are_cached_and_the_cache_is_bounded() -> None:
    made: list[int] = []

    def make(index: int) -> Task:
        made.append(index)
        return make_task(index)

    tasks = GeneratedTaskSet("toy", "train", 1_000_000, make, {}, cache_size=10)
    assert tasks[5] is tasks[5]
    assert made == [5]
    for index in range(100):
        _ = tasks[index]
    _ = [tasks[index] for index in range(90, 100)]
    assert len(made) == 100, "the ten used last are kept"
    _ = tasks[5]
    assert made.count(5) == 2
    assert not tasks.bounded


def test_threads_share_a_set() -> None:
    tasks = make_generated(1_800, cache_size=10)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda i: tasks[i * 7 % len(tasks)], range(4_000)))
    finally:
        sys.setswitchinterval(before)
    assert [task.content["n"] for task in made] == [i * 7 % len(tasks) for i in range(4_000)]


def test_generated_fingerprint_covers_parameters_length_and_tasks() -> None:
    first = make_generated(1000, {"size": 1})
    assert first.fingerprint == make_generated(1000, {"size": 1}).fingerprint
    assert first.fingerprint != make_generated(1000, {"size": 2}).fingerprint
    assert first.fingerprint != make_generated(1001, {"size": 1}).fingerprint
    other = GeneratedTaskSet("toy", "train", 1000, lambda i: make_task(i, content={"n": -i}), {"size": 1})
    assert first.fingerprint != other.fingerprint


def test_drawing_is_one_call_of_the_generator() -> None:
    tasks = make_generated(1000)
    assert tasks.draw(np.random.default_rng(3)) == tasks[int(np.random.default_rng(3).integers(1000))]


def test_task_sets_survive_pickling() -> None:
    problems = ProblemTaskSet("toy", "train", [Problem("1 + 1", "2", "sums")])
    questions = QuestionTaskSet("toy", "train", [Question("Who?", ("Ada",), "1hop")])
    for tasks in (make_generated(), ListTaskSet([make_task(0)]), problems, questions):
        again = pickle.loads(pickle.dumps(tasks))
        assert (again.fingerprint, again[0], again.digest(0)) == (tasks.fingerprint, tasks[0], tasks.digest(0))
    for unknown in (None, 3, ["a"], b"toy"):
        assert unknown not in tasks
        with pytest.raises(UnknownTaskError):
            tasks.get(unknown)  # type: ignore[arg-type]


def test_a_generator_that_gives_a_wrong_id_is_refused() -> None:
    tasks = GeneratedTaskSet("toy", "train", 5, lambda i: make_task(i + 1), {})
    with pytest.raises(SpearError, match="00000003' instead of 'toy/train/00000002'"):
        _ = tasks[2]


def test_task_sets_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SpearError, match="no tasks"):
        ListTaskSet([], name="toy")
    with pytest.raises(SpearError, match="'toy/train/00000000' occurs twice"):
        ListTaskSet([make_task(0), make_task(1), make_task(0)])
    with pytest.raises(SpearError, match="several splits"):
        ListTaskSet([make_task(0), make_task(1, "test")])
    with pytest.raises(SpearError, match="at least 1"):
        make_generated(0)


def test_disjoint_splits() -> None:
    train = ListTaskSet(make_task(i) for i in range(5))
    test = ListTaskSet(make_task(i, "test", {"n": 100 + i}) for i in range(5))
    assert check_disjoint(train, test) == 10
    leak = ListTaskSet([make_task(9, "valid", {"n": 3})])
    with pytest.raises(SpearError, match="'toy/train/00000003' and 'toy/valid/00000009'"):
        check_disjoint(train, test, leak)
    twice = ListTaskSet([make_task(0), make_task(1, content={"n": 0})])
    assert check_disjoint(twice, test) == 7  # the same content twice in one split is not a leak


def test_only_a_sample_of_a_generated_set_is_compared() -> None:
    assert check_disjoint(make_generated(10_000), ListTaskSet([make_task(0, "test", {"n": -1})]), sample=50) == 51


def test_check_split() -> None:
    assert check_split("test", ("train", "test")) == "test"
    with pytest.raises(SpearError, match=r"choose one of 'train', 'test'\. Did you mean 'train'\?"):
        check_split("trian", ("train", "test"))
