"""verl's loop around a step, with stand-ins for rollouts and workers: tasks, keys, metrics and checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from verl.trainer.ppo.v1 import PPOTrainerSync

from spear_agents.play.trajectory import read_trajectories
from spear_envs.core.errors import SpearError
from spear_training.run.checkpoints import BEST, STATE, read_best
from spear_training.run.config import RunConfig
from spear_training.run.to_verl import to_verl
from spear_training.step.records import EpisodeRecorder, Rollout
from spear_training.step.step import SpearStep
from spear_training.step.update import UpdateSizes
from spear_training.verl_plugin.queue import PARTITION, StepQueue
from spear_training.verl_plugin.rollout_servers import OneServerClient
from spear_training.verl_plugin.rollout_worker import EpisodeOrder
from spear_training.verl_plugin.trainer import SpearTrainer
from tests.agents.test_cli import train, write_launch
from tests.training.episodes import Episode, make_episode, play
from tests.training.step.actors import TableActor
from tests.training.test_review import make_episode as make_trajectory
from tests.training.verl_plugin.fakes import FakeQueue


class FakeRollouts:
    """verl's agent-loop manager: records orders, and returns the episodes in ``played``."""

    def __init__(self, actor: TableActor) -> None:
        self.actor = actor
        self.orders: list[EpisodeOrder] = []
        self.calls: list[dict[str, Any]] = []
        self.played: list[Episode] = []
        self.episodes: list[Any] = []
        self.versions: list[int] = []
        self.collected: list[int] = []

    def start(self, orders: Sequence[EpisodeOrder], sampling: Any, split: str, *, keep: bool) -> list[Any]:
        self.orders = list(orders)
        step = int(orders[0].group.partition("-")[0])
        begun = f"{step} {orders[0].task_id}"
        self.calls.append({"sampling": sampling, "split": split, "keep": keep, "orders": self.orders, "begun": begun})
        return [step]

    def collect(self, futures: Sequence[Any]) -> Rollout:
        self.collected += futures
        made = self.actor.play(play(self.played))
        if self.versions:
            made = replace(made, rows=made.rows.add(version=self.versions))
        return replace(made, episodes=tuple(self.episodes))


def open_trainer(tmp_path: Path, **nodes: Any) -> SpearTrainer:
    """A trainer of two episodes of a task a step, with stand-ins for what verl's set-up makes with Ray."""
    node: dict[str, dict[str, Any] | int] = {
        "env": {"id": "tests/Corridor-v0"},
        "model": {"path": str(tmp_path / "model")},
        "seed": 3,
        "record": {"every": 2, "episodes": 3},
        "replay": {"capacity": 4},
        "filter": {"groups": 1.0},
        "reward": {"mu": "none"},
        "rollout": {"group_size": 2, "max_response_length": 8},
        "train": {"batch_size": 1},
        "validation": {"every": 2, "samples": 3, "temperature": 0.4, "top_p": 0.6, "top_k": 5},
    }
    for name, values in nodes.items():
        before = node.get(name)
        node[name] = {**before, **values} if isinstance(before, dict) else values
    run = RunConfig.from_mapping(node)
    trainer: Any = SpearTrainer(to_verl(run, tmp_path))
    trainer.actor = TableActor(run.algorithm)
    trainer.queue = StepQueue(SimpleNamespace(pad_token_id=0), store=FakeQueue())
    trainer.agent_loop_manager = FakeRollouts(trainer.actor)
    trainer.spear_step = SpearStep(
        run.algorithm, trainer.state, trainer.actor, None, max_response_length=8, sizes=UpdateSizes(100, 8.0)
    )
    trainer.global_steps, trainer.total_training_steps, trainer.steps_per_epoch = 1, 9, 4
    trainer.train_dataloader = [{"task_id": ["t"]}]
    trainer.asleep = 0

    def sleep_replicas() -> None:
        trainer.asleep += 1

    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=sleep_replicas)
    trainer.curr_step_profile = False
    return trainer


def make_group(name: str = "1-00000", wins: int = 1, count: int = 2) -> list[Episode]:
    return [make_episode(name, n, won=n < wins, tool_calls=2) for n in range(count)]


def take_step(trainer: Any, episodes: list[Episode], t: int) -> tuple[dict[str, Any], Any]:
    trainer.global_steps = t
    trainer.rollouts.played = episodes
    trainer.prepare_step()
    metrics: dict[str, Any] = {}
    return metrics, trainer._step_once(metrics, {}, 2)


# ---- a step ----------------------------------------------------------------------------------------------------------
def test_a_step_names_the_keys_of_its_rows_and_takes_its_times(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.rollouts.played = make_group()
    trainer.prepare_step()
    metrics: dict[str, Any] = {}
    times: dict[str, float] = {}
    batch = trainer._step_once(metrics, times, 2)
    keys = [f"1-00000_{sample}_{row}" for sample in (0, 1) for row in (0, 1)]
    assert trainer.actor.passes[0].rows.key.tolist() == keys
    assert batch.keys == keys
    assert batch.partition_id == PARTITION and len(batch.tags) == len(batch.keys)
    assert trainer.asleep == 1, "rollout engines give the device back before training"
    assert {"gen", "old_log_prob", "update_actor"} <= times.keys() and metrics["perf/spear_driver_seconds"] > 0


def test_rows_that_no_update_reads_are_cleared_all_the_same(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    faults = [make_episode("2-00000", n, fault="backend", stop="fault") for n in range(2)]
    (key,) = take_step(trainer, faults, 2)[1].keys
    assert key.startswith("padding"), "rows of a faulted episode were never written, and verl needs a key"
    masked = [make_episode("1-00000", n, won=n == 0, rows=[{"void": True}]) for n in range(2)]
    assert len(take_step(trainer, masked, 3)[1].keys) == 4
    assert trainer.actor.passes == []


def test_further_batches_of_a_step_are_of_further_tasks(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.train_dataloader = [{"task_id": ["a", "b"]}, {"task_id": ["c", "d"]}]
    trainer.prepare_step()
    trainer.play(0)
    trainer.play(1)
    orders = trainer.rollouts.orders
    assert [(o.group, o.task_id) for o in orders if o.sample == 0] == [("1-00002", "c"), ("1-00003", "d")]
    assert not any(order.recorded for order in orders), "the first batch has as many as are asked for"


# ---- tasks -----------------------------------------------------------------------------------------------------------
def test_each_task_of_a_step_is_played_as_a_group(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.train_dataloader = [{"task_id": ["a", "b"]}, {"task_id": ["c", "d"]}]
    seen = []
    for t in range(1, 4):
        trainer.global_steps = t
        assert trainer.prepare_step() == {}
        seen.append([(order.group, order.sample, order.task_id) for order in trainer.rollouts.orders])
        trainer.play(0)
    assert seen[0] == [("1-00000", 0, "a"), ("1-00000", 1, "a"), ("1-00001", 0, "b"), ("1-00001", 1, "b")]
    assert [row[2] for row in seen[1]] == ["c", "c", "d", "d"]
    assert [row[2] for row in seen[2]] == ["a", "a", "b", "b"], "and the next epoch begins"
    (call,) = {(c["split"], c["keep"], c["sampling"]) for c in trainer.rollouts.calls}
    assert call[:2] == ("train", True)
    assert (call[2].temperature, call[2].top_p, call[2].top_k, call[2].max_tokens) == (1.0, 1.0, 0, 8)


@pytest.mark.parametrize(("limit", "most"), [(None, 8), (5, 5), (100, 8)])
def test_a_response_is_limited_by_its_turn_and_by_the_row(tmp_path: Path, limit: int | None, most: int) -> None:
    trainer: Any = open_trainer(tmp_path, env={"max_turn_tokens": limit})
    trainer.prepare_step()
    assert trainer.rollouts.calls[0]["sampling"].max_tokens == most


def test_recorded_episodes_are_of_as_many_tasks_as_there_are(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.train_dataloader = [{"task_id": ["a", "b"]}]
    found = []
    for t in (1, 2, 3):
        trainer.global_steps = t
        trainer.prepare_step()
        found.append([(o.task_id, o.sample) for o in trainer.rollouts.orders if o.recorded])
        trainer.play(0)
    assert found == [[("a", 0), ("a", 1), ("b", 0)], [], [("a", 0), ("a", 1), ("b", 0)]]
    trainer.rollouts.episodes = [make_trajectory(5), make_trajectory(6)]
    metrics, _ = take_step(trainer, make_group(), 3)
    assert metrics["rollout/recorded"] == 2.0
    path = tmp_path / "rollouts" / "episodes.jsonl"
    assert [(t.step, t.seed) for t in read_trajectories(path)] == [(3, 5), (3, 6)]


def test_seeds_differ_between_episodes_and_steps_and_come_from_the_runs_own(tmp_path: Path) -> None:
    def draw(seed: int) -> list[int]:
        trainer: Any = open_trainer(tmp_path, seed=seed)
        trainer.train_dataloader = [{"task_id": ["a", "a"]}]
        seeds = []
        for t in (1, 2):
            trainer.global_steps = t
            trainer.prepare_step()
            trainer.play(0)
            seeds += [order.seed for order in trainer.rollouts.orders]
        return seeds

    assert len(set(draw(3))) == 8
    assert draw(3) == draw(3)
    assert not set(draw(3)) & set(draw(4))


def test_validation_plays_the_whole_panel_the_same_way_each_time(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(4)]
    trainer.rollouts.played = make_group(wins=1, count=4)
    found = []
    for t in (0, 10):
        trainer.global_steps = t
        metrics = trainer._validate()
        found.append(trainer.rollouts.orders)
    assert found[0] == found[1]
    assert [(order.task_id, order.sample) for order in found[0]] == [(f"v{n}", k) for n in range(4) for k in range(3)]
    assert len({order.seed for order in found[0]}) == 12
    assert metrics["val/success/all"] == 0.25 and metrics["val/seconds"] >= 0
    call = trainer.rollouts.calls[-1]
    assert (call["split"], call["keep"]) == ("valid", False)
    assert (call["sampling"].temperature, call["sampling"].top_p, call["sampling"].top_k) == (0.4, 0.6, 5)


def test_a_sample_of_each_validation_is_recorded(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path, validation={"record": 3})
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(2)]
    trainer.rollouts.played = make_group(wins=1, count=4)
    for t in (0, 10, 10):  # a training that is resumed validates the step of its checkpoint again
        trainer.global_steps = t
        trainer.rollouts.episodes = [make_trajectory(t), make_trajectory(t + 1)]
        trainer._validate()
        asked = [(o.task_id, o.sample) for o in trainer.rollouts.orders if o.recorded]
        assert asked == [("v0", 0), ("v0", 1), ("v1", 0)]
    recorded = read_trajectories(tmp_path / "validations" / "episodes.jsonl")
    assert [(episode.step, episode.seed) for episode in recorded] == [(0, 0), (0, 1), (10, 10), (10, 11)]
    assert not (tmp_path / "rollouts").exists(), "episodes of the training are others"


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def test_the_state_is_saved_before_verl_calls_the_checkpoint_the_latest(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def save(self: Any) -> None:
        folder = checkpoints / f"global_step_{self.global_steps}"
        seen.append((folder / STATE).is_file())
        (folder / "actor").mkdir()
        old = checkpoints / "global_step_1" / "actor"
        if self.global_steps == 3 and old.is_dir():
            old.rmdir()  # as max_actor_ckpt_to_keep does

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    trainer: Any = open_trainer(tmp_path)
    for t in (1, 2, 3):
        take_step(trainer, make_group(f"{t}-00000"), t)
        trainer._save_checkpoint()
    assert seen == [True, True, True]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step_2", "global_step_3"]

    for step in (2, 3, 4):
        EpisodeRecorder(tmp_path, {}).write(step, [make_trajectory(step)])
    resumed: Any = open_trainer(tmp_path)
    resumed._load_checkpoint()
    recorded = read_trajectories(tmp_path / "rollouts" / "episodes.jsonl")
    assert [t.step for t in recorded] == [2, 3], "step 4 is about to be played again"
    assert len(resumed.state.replay) == len(trainer.state.replay) > 0
    assert resumed.state.baseline.values == pytest.approx([0.1] * 3)


def test_the_best_checkpoint_of_the_panel_is_kept(tmp_path: Path, checkpoints: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(4)]
    for t, wins in ((0, 4), (1, 1), (2, 3), (3, 3), (4, 2)):
        trainer.global_steps = t
        if t:
            trainer._save_checkpoint()
        trainer.rollouts.played = make_group(wins=wins, count=4)
        trainer._validate()
    # Before the first step there is nothing to keep; an equal value later is no better.
    assert read_best(checkpoints) == {"step": 2, "metric": "success/all", "value": 0.75}
    assert (checkpoints / BEST / "actor").is_dir()
    trainer.rollouts.played = [make_episode("g", n, fault="backend") for n in range(4)]
    assert trainer._validate()["val/fault/backend"] == 4, "a service that is down for a while ends no training"
    trainer.run = trainer.run.change("validation", keep_best="success/other")
    trainer.rollouts.played = [*make_group(count=3), make_episode("g", 3, subtask="other", fault="backend")]
    assert trainer._validate()["val/fault/backend"] == 1, "nor does one that has all tasks of a kind"
    trainer.rollouts.played = make_group(wins=1, count=4)
    trainer.run = trainer.run.change("validation", keep_best="success/al")
    with pytest.raises(SpearError, match="success/al"):
        trainer._validate()


def test_a_step_that_was_saved_and_not_logged_is_logged_on_resuming(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PPOTrainerSync, "on_train_begin", lambda self: None)
    trainer: Any = open_trainer(tmp_path, validation={"at_start": True})
    trainer.rollouts.played = make_group(count=3)
    trainer.global_steps = 5
    metrics: dict[str, Any] = {}
    trainer.step(metrics, {})
    trainer._save_checkpoint()
    trainer._compute_metrics(None, metrics, {"step": 1.0}, 5, epoch=1)
    resumed: Any = open_trainer(tmp_path, validation={"at_start": True})
    resumed._load_checkpoint()
    logged: list[Any] = []
    resumed.logger = SimpleNamespace(log=lambda data, step: logged.append((step, data)))
    resumed.on_train_begin()
    ((step, data),) = logged
    assert step == 5 and data["perf/step_seconds"] > 0
    timed = {name for name in metrics if name.startswith(("perf/", "timing_s/"))}
    assert {name: data.get(name) for name in metrics.keys() - timed} == {
        name: metrics[name] for name in metrics.keys() - timed
    }, "to the last bit"

    write_launch(tmp_path, 0, train(5))
    resumed.on_train_begin()
    assert len(logged) == 1, "a step that was logged is not logged again"


@pytest.mark.parametrize(("steps", "validated"), [(5, 1), (9, 0)])
def test_a_last_step_that_was_not_logged_is_validated(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, steps: int, validated: int
) -> None:
    monkeypatch.setattr(PPOTrainerSync, "on_train_begin", lambda self: None)
    trainer: Any = open_trainer(tmp_path, validation={"every": 4, "at_start": False})
    trainer.rollouts.played = make_group(count=3)
    trainer.global_steps = 5
    trainer.step({}, {})
    trainer._save_checkpoint()
    resumed: Any = open_trainer(tmp_path, validation={"every": 4, "at_start": False})
    resumed._load_checkpoint()
    resumed.total_training_steps = steps
    resumed.logger = SimpleNamespace(log=lambda data, step: None)
    calls: list[int] = []
    monkeypatch.setattr(resumed, "_validate", lambda: calls.append(1) or {})
    resumed.on_train_begin()
    assert len(calls) == validated


def test_a_new_run_loads_nothing_and_a_checkpoint_without_our_state_is_refused(
    tmp_path: Path, checkpoints: Path
) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer._load_checkpoint()
    assert trainer.global_steps == 0
    (checkpoints / "global_step_5").mkdir(parents=True)
    with pytest.raises(SpearError, match="lacks"):
        trainer._load_checkpoint()


# ---- workers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("servers", [1, 2])
def test_one_server_is_asked_without_a_load_balancer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    trainer: Any = open_trainer(tmp_path)
    ended: list[Any] = []
    monkeypatch.setattr("spear_training.verl_plugin.trainer.ray.kill", ended.append)
    trainer.llm_server_manager = SimpleNamespace(
        global_load_balancer="balancer",
        server_addresses=["a", "b"][:servers],
        server_handles=[object(), object()][:servers],
        get_client=lambda: "verl's own",
    )
    client = trainer.get_llm_client()
    assert (client == "verl's own", isinstance(client, OneServerClient)) == (servers == 2, servers == 1)
    assert ended == ["balancer"][: 2 - servers]


def test_the_workers_get_the_losses_and_the_step_its_sizes(tmp_path: Path) -> None:
    train = {"mini_batch_size": 5, "epochs": 3, "batch_size": 8}
    trainer: Any = open_trainer(tmp_path, train=train, advantage={"estimator": "gae"}, seed=5)
    assert trainer.trainer_mode == "sync", "another registered name would be an asynchronous mode of verl"
    assert trainer.use_critic and trainer.seed == 5 and trainer.environment.valid_split == "valid"
    installed: dict[str, Any] = {}
    for name in ("actor_rollout_wg", "critic_wg"):
        group = SimpleNamespace(set_loss_fn=lambda function, name=name: installed.update({name: function}))
        setattr(trainer, name, group)
    trainer.ref_in_actor, trainer.tokenizer = False, SimpleNamespace(pad_token_id=0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    trainer.install_algorithm()
    assert trainer.spear_step.sizes == UpdateSizes(rows_per_minibatch=10, scale_factor=8.0, epochs=3)
    assert installed["actor_rollout_wg"].args == (trainer.settings,)
    assert installed["critic_wg"].args == (trainer.settings.critic,) and not trainer.queue.vision
