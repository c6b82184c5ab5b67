"""The order of a step, with fakes for rollouts and updates: what is drawn, trained, stored, cleared and saved when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerSync

from spear_agents.trajectory import read_trajectories
from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import cosine_decay, cosine_warmup
from spear_training.algorithms import Estimator, SpearSettings
from spear_training.checkpoints import BEST, STATE, read_best
from spear_training.environments import EnvironmentSettings
from spear_training.recording import VALIDATIONS, EpisodeRecorder, RecordSettings
from spear_training.verl_plugin.plan import PlannedRow
from spear_training.verl_plugin.rollout_worker import PARTITION, EpisodeOrder, Rollout
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.trainer import SpearTrainer
from spear_training.verl_plugin.update import FreshRows, Replay
from tests.agents.test_metrics import train, write_launch
from tests.training.test_recording import make_episode


class FakeRollouts:
    """verl's agent-loop manager: remembers orders, gives back what it was told to."""

    def __init__(self) -> None:
        self.orders: list[EpisodeOrder] = []
        self.calls: list[dict[str, Any]] = []
        self.records: list[Any] = []
        self.episodes: list[Any] = []

    def start(self, orders: Sequence[EpisodeOrder], sampling: Any, split: str, *, keep: bool) -> list[Any]:
        self.orders = list(orders)
        self.calls.append({"sampling": sampling, "split": split, "keep": keep})
        return ["future"]

    def collect(self, futures: Sequence[Any]) -> Rollout:
        return Rollout(self.records, sum(record.turns for record in self.records), self.episodes)


class FakeUpdater:
    """The two calls on actor workers: remembers with what it was called and what the buffers held then."""

    def __init__(self, state: SpearState) -> None:
        self.state = state
        self.log: list[Any] = []

    def collect_rows(self, rows: Sequence[PlannedRow], metrics: dict[str, Any]) -> FreshRows:
        lengths = tuple(planned.row.response_length for planned in rows)
        total = sum(lengths)
        tokens = tuple((np.ones(2, np.int32), np.full(n, 7, np.int32)) for n in lengths)
        return FreshRows(tuple(rows), lengths, np.ones(total, bool), np.full(total, -0.5, np.float32), tokens)

    def update(self, fresh: FreshRows, replay: Replay, gamma: float, metrics: dict[str, Any]) -> None:
        baseline = None if self.state.baseline is None else len(self.state.baseline)
        self.log.append(
            SimpleNamespace(fresh=fresh, replay=replay, gamma=gamma, stored=len(self.state.replay), baseline=baseline)
        )

    def take_replay_seconds(self) -> float:
        return 0.25


class FakeQueue:
    """The step's rows in TransferQueue."""

    def take_keys(self, keys: Sequence[str]) -> list[str]:
        return [*keys, "own"]


class FakeCritic:
    """Says that every row was worth its number in the step, and remembers when it was trained."""

    def __init__(self, updater: FakeUpdater) -> None:
        self.updater = updater
        self.trained_before: list[int] = []

    def estimate(self, fresh: FreshRows, metrics: dict[str, Any]) -> tuple[FreshRows, str]:
        rows = tuple(replace(row, advantage=float(n)) for n, row in enumerate(fresh.rows))
        return replace(fresh, rows=rows, advantages=np.ones(len(fresh.mask), np.float32)), "targets"

    def update(self, fresh: FreshRows, targets: str, metrics: dict[str, Any]) -> None:
        assert targets == "targets" and fresh.advantages is not None
        self.trained_before.append(len(self.updater.log))


def open_trainer(tmp_path: Path, **nodes: Any) -> SpearTrainer:
    """A trainer as it is after ``init``, without Ray."""
    trainer: Any = object.__new__(SpearTrainer)
    small = {"replay": {"capacity": 4}, "filter": {"groups": 1.0}, "reward": {"mu": "none"}}
    trainer.settings = SpearSettings.from_mapping(small | nodes)
    trainer.state = SpearState(trainer.settings, seed=0)
    trainer.environment = EnvironmentSettings("tests/Corridor-v0")
    trainer.seed = 3
    trainer.record = RecordSettings(every=2, episodes=3)
    trainer.recorder = EpisodeRecorder(tmp_path, {})
    trainer.validations = EpisodeRecorder(tmp_path, {}, VALIDATIONS)
    trainer.global_steps = 1
    trainer._pending, trainer._train_iterator = ["future"], None
    trainer.parameter_sync_step, trainer.steps_per_epoch = 1, 4
    trainer._metrics, trainer._step_start, trainer._saved = {}, 0.0, None
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "n": 2,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "response_length": 8,
                    "val_kwargs": {"temperature": 0.4, "top_p": 0.6, "top_k": 5, "n": 3},
                },
                "model": {"path": str(tmp_path / "model")},
            },
            "data": {"max_response_length": 8, "train_batch_size": 1},
            "trainer": {
                "default_local_dir": str(tmp_path / "checkpoints"),
                "test_freq": 2,
                "val_before_train": True,
                "log_val_generations": 0,
            },
            "spear": {"keep_best": "success/all"},
        }
    )
    trainer.agent_loop_manager = FakeRollouts()
    trainer.updater, trainer.queue = FakeUpdater(trainer.state), FakeQueue()
    trainer.use_critic = trainer.settings.advantage.estimator is Estimator.GAE
    trainer.critic = FakeCritic(trainer.updater)
    trainer.asleep = 0

    def sleep_replicas() -> None:
        trainer.asleep += 1

    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=sleep_replicas)
    trainer.curr_step_profile = False
    return trainer


def make_group(make: Any, name: str = "1-00000", wins: int = 1, count: int = 2, turns: int = 2) -> list[Any]:
    return [make.episode(name, n, won=n < wins, turns=turns, tool_calls=turns) for n in range(count)]


def take_step(trainer: Any, records: list[Any], t: int) -> tuple[dict[str, Any], Any]:
    trainer.global_steps = t
    trainer.rollouts.records = records
    metrics: dict[str, Any] = {}
    return metrics, trainer._step_once(metrics, {}, 2)


# ---- a step ----------------------------------------------------------------------------------------------------------
def test_a_step_trains_on_its_rows_and_names_their_keys(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    records = make_group(make)
    metrics, batch = take_step(trainer, records, 1)
    (call,) = trainer.updater.log
    assert [planned.row.key for planned in call.fresh.rows] == [row.key for r in records for row in r.rows]
    assert batch.keys == [*(row.key for r in records for row in r.rows), "own"]
    assert batch.partition_id == PARTITION and len(batch.tags) == len(batch.keys)
    assert trainer.asleep == 1, "rollout engines give the device back before training"
    assert metrics["rollout/wasted_generations"] == 0 and metrics["rollout/generations"] == 4
    assert metrics["perf/spear_driver_seconds"] > 0.25
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("t", [1, 7, 40])
def test_weights_of_a_step_are_those_of_the_schedules(tmp_path: Path, make: Any, t: int) -> None:
    trainer: Any = open_trainer(tmp_path, sil={"warmup_steps": 20}, reward={"decay_steps": 10})
    metrics, _ = take_step(trainer, make_group(make), t)
    assert metrics["spear/gamma"] == trainer.updater.log[0].gamma == cosine_warmup(t, 20)
    assert metrics["spear/mu"] == cosine_decay(t, 10)
    assert metrics["reward/tool_call"] == pytest.approx(0.2)
    assert metrics["reward/total"] == pytest.approx(0.1 + 0.2 * cosine_decay(t, 10))


def test_what_is_replayed_is_always_older(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    for t in range(1, 7):
        metrics, _ = take_step(trainer, make_group(make, f"{t}-00000"), t)
        call = trainer.updater.log[-1]
        # Each step stores its two winning rows; at four the next step replays them and begins anew.
        assert call.baseline == t, "the step's own mean is in the baseline before the draw"
        if t in (3, 5):
            assert metrics["replay/drawn"] == len(call.replay.entries) == 4
            assert metrics["replay/considered"] == 4 and metrics["replay/discarded"] == 0
            assert {entry.step for entry in call.replay.entries} == {t - 2, t - 1}
            assert call.stored == 0 and metrics["replay/size"] == 2
            # Reward 1.1 against a baseline whose median is the mean of one win and one loss.
            assert call.replay.advantages == pytest.approx([1.0] * 4)
        else:
            assert call.replay.entries == ()
            assert "replay/drawn" not in metrics
        assert metrics["replay/kept"] == 2 and metrics["replay/dropped_nonpositive"] == 2
        assert metrics["baseline/size"] == t and metrics["baseline/p50"] == pytest.approx(0.1)


def test_a_replay_step_may_store_nothing(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, sil={"always_add": False})
    sizes = [take_step(trainer, make_group(make, f"{t}-00000"), t)[0]["replay/size"] for t in range(1, 6)]
    assert sizes == [2, 4, 0, 2, 4]


def test_old_rows_leave_the_buffer(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, replay={"capacity": 100, "max_age": 1})
    evicted = [take_step(trainer, make_group(make, f"{t}-00000"), t)[0]["replay/evicted_age"] for t in range(1, 5)]
    assert evicted == [0, 0, 2, 2]


def test_without_self_imitation_nothing_is_stored_or_drawn(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, sil={"enabled": False})
    for t in range(1, 5):
        metrics, _ = take_step(trainer, make_group(make, f"{t}-00000"), t)
        assert trainer.updater.log[-1].replay.entries == ()
        assert metrics["replay/size"] == 0 and metrics["spear/gamma"] == 0
        assert "replay/kept" not in metrics


def test_without_a_baseline_the_stored_advantages_are_replayed(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, baseline={"capacity": 0})
    for t in range(1, 4):
        metrics, _ = take_step(trainer, make_group(make, f"{t}-00000", count=4), t)
    assert "baseline/size" not in metrics
    assert trainer.updater.log[-1].replay.advantages == pytest.approx([1.5] * 4)


def test_a_step_of_faults_alone_changes_nothing(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    take_step(trainer, make_group(make), 1)
    records = [make.episode("2-00000", n, fault="backend", stop="fault") for n in range(2)]
    metrics, batch = take_step(trainer, records, 2)
    assert len(trainer.updater.log) == 1
    assert batch.keys == ["own"], "rows of a faulted episode were never written"
    assert metrics["fault/backend"] == 2 and metrics["rows/trained"] == 0
    assert metrics["replay/size"] == 2 and metrics["baseline/size"] == 1


def test_a_step_whose_rows_are_all_masked_still_tells_the_baseline(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    records = [make.episode("1-00000", n, won=n == 0, rows=[{"void": True}]) for n in range(2)]
    metrics, batch = take_step(trainer, records, 1)
    assert trainer.updater.log == [] and metrics["baseline/size"] == 1
    assert len(batch.keys) == 5, "written rows are cleared all the same"


def test_with_ppo_the_critics_advantages_are_trained_on_and_gate_the_buffer(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, advantage={"estimator": "gae"}, replay={"capacity": 100})
    metrics, _ = take_step(trainer, make_group(make), 1)
    (call,) = trainer.updater.log
    assert trainer.critic.trained_before == [0], "the critic learns before the actor"
    assert [row.advantage for row in call.fresh.rows] == [0, 1, 2, 3] and call.fresh.advantages is not None
    assert metrics["replay/kept"] == 3 and metrics["replay/dropped_nonpositive"] == 1
    assert metrics["advantage/mean"] == 1.5


def test_the_critic_may_learn_alone_at_first(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path, advantage={"estimator": "gae"}, critic={"warmup": 2})
    for t in range(1, 5):
        take_step(trainer, make_group(make, f"{t}-00000"), t)
    assert trainer.critic.trained_before == [0, 0, 0, 1] and len(trainer.updater.log) == 2


# ---- tasks -----------------------------------------------------------------------------------------------------------
def test_each_task_of_a_step_is_played_as_a_group(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.train_dataloader = [{"task_id": ["a", "b"]}, {"task_id": ["c", "d"]}]
    seen = []
    for t in range(1, 4):
        trainer.global_steps = t
        assert trainer.prepare_step() == {}
        seen.append([(order.group, order.sample, order.task_id) for order in trainer.rollouts.orders])
        assert trainer._pending == ["future"]
    assert seen[0] == [("1-00000", 0, "a"), ("1-00000", 1, "a"), ("1-00001", 0, "b"), ("1-00001", 1, "b")]
    assert [row[2] for row in seen[1]] == ["c", "c", "d", "d"]
    assert [row[2] for row in seen[2]] == ["a", "a", "b", "b"], "and the next epoch begins"
    (call,) = {(c["split"], c["keep"], c["sampling"]) for c in trainer.rollouts.calls}
    assert call[:2] == ("train", True)
    assert (call[2].temperature, call[2].top_p, call[2].top_k, call[2].max_tokens) == (1.0, 1.0, 0, 8)


def test_recorded_episodes_are_of_as_many_tasks_as_there_are(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.train_dataloader = [{"task_id": ["a", "b"]}]
    found = []
    for t in (1, 2, 3):
        trainer.global_steps = t
        trainer.prepare_step()
        found.append([(o.task_id, o.sample) for o in trainer.rollouts.orders if o.recorded])
    assert found == [[("a", 0), ("a", 1), ("b", 0)], [], [("a", 0), ("a", 1), ("b", 0)]]
    trainer.rollouts.episodes = [make_episode(5), make_episode(6)]
    metrics, _ = take_step(trainer, make_group(make), 3)
    assert metrics["rollout/recorded"] == 2.0
    path = tmp_path / "rollouts" / "episodes.jsonl"
    assert [(t.step, t.seed) for t in read_trajectories(path)] == [(3, 5), (3, 6)]


def test_seeds_differ_between_episodes_and_steps_and_come_from_the_runs_own(tmp_path: Path) -> None:
    def draw(seed: int) -> list[int]:
        trainer: Any = open_trainer(tmp_path)
        trainer.seed = seed
        trainer.train_dataloader = [{"task_id": ["a", "a"]}]
        seeds = []
        for t in (1, 2):
            trainer.global_steps = t
            trainer.prepare_step()
            seeds += [order.seed for order in trainer.rollouts.orders]
        return seeds

    assert len(set(draw(3))) == 8
    assert draw(3) == draw(3)
    assert not set(draw(3)) & set(draw(4))


def test_validation_plays_the_whole_panel_the_same_way_each_time(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(4)]
    trainer.rollouts.records = make_group(make, wins=1, count=4)
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


def test_a_sample_of_each_validation_is_recorded(tmp_path: Path, make: Any) -> None:
    trainer: Any = open_trainer(tmp_path)
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(2)]
    trainer.rollouts.records = make_group(make, wins=1, count=4)
    trainer.config.trainer.log_val_generations = 3
    for t in (0, 10, 10):  # a training that is resumed validates the step of its checkpoint again
        trainer.global_steps = t
        trainer.rollouts.episodes = [make_episode(t), make_episode(t + 1)]
        trainer._validate()
        asked = [(o.task_id, o.sample) for o in trainer.rollouts.orders if o.recorded]
        assert asked == [("v0", 0), ("v0", 1), ("v1", 0)]
    recorded = read_trajectories(tmp_path / "validations" / "episodes.jsonl")
    assert [(episode.step, episode.seed) for episode in recorded] == [(0, 0), (0, 1), (10, 10), (10, 11)]
    assert not (tmp_path / "rollouts").exists(), "episodes of the training are others"


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def test_the_state_is_saved_before_verl_calls_the_checkpoint_the_latest(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    seen: list[bool] = []

    def save(self: Any) -> None:
        folder = checkpoints / f"global_step_{self.global_steps}"
        seen.append((folder / STATE).is_file())
        (folder / "actor").mkdir()
        old = checkpoints / "global_step_1" / "actor"
        if self.global_steps == 3 and old.is_dir():
            old.rmdir()  # max_actor_ckpt_to_keep

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    trainer: Any = open_trainer(tmp_path)
    for t in (1, 2, 3):
        take_step(trainer, make_group(make, f"{t}-00000"), t)
        trainer._save_checkpoint()
    assert seen == [True, True, True]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step_2", "global_step_3"]

    EpisodeRecorder(tmp_path, {}).write(2, [make_episode(2)])
    EpisodeRecorder(tmp_path, {}).write(3, [make_episode(3)])

    def load(self: Any) -> None:
        self.global_steps = 2

    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", load)
    resumed: Any = open_trainer(tmp_path)
    resumed._load_checkpoint()
    recorded = read_trajectories(tmp_path / "rollouts" / "episodes.jsonl")
    assert [t.step for t in recorded] == [2], "step 3 is about to be played again"
    assert len(resumed.state.replay) == 4 and resumed.state.baseline.values == pytest.approx([0.1, 0.1])


def test_the_best_checkpoint_of_the_panel_is_kept(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Any) -> None:
        (self._checkpoint_folder() / "actor").mkdir()
        (self._checkpoint_folder() / "actor" / "weights").write_text(str(self.global_steps))

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    trainer: Any = open_trainer(tmp_path)
    trainer.val_dataset = [{"task_id": f"v{n}"} for n in range(4)]
    checkpoints = tmp_path / "checkpoints"
    for t, wins in ((0, 4), (1, 1), (2, 3), (3, 3), (4, 2)):
        trainer.global_steps = t
        if t:
            trainer._save_checkpoint()
        trainer.rollouts.records = make_group(make, wins=wins, count=4)
        trainer._validate()
    # Before the first step there is nothing to keep; an equal value later is no better.
    assert read_best(checkpoints) == {"step": 2, "metric": "success/all", "value": 0.75}
    assert (checkpoints / BEST / "actor" / "weights").read_text() == "2"
    trainer.config.spear.keep_best = "success/al"
    with pytest.raises(SpearError, match=r"keep_best=success/al is no metric.*val/success/all"):
        trainer._validate()


def test_a_step_that_was_saved_and_not_logged_is_logged_on_resuming(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: (self._checkpoint_folder() / "actor").mkdir())
    monkeypatch.setattr(PPOTrainerSync, "on_train_begin", lambda self: None)
    trainer: Any = open_trainer(tmp_path)
    trainer.prepare_step = dict
    trainer.rollouts.records = make_group(make, count=3)
    trainer.global_steps = 5
    metrics: dict[str, Any] = {}
    trainer.step(metrics, {})
    trainer._save_checkpoint()
    trainer._compute_metrics(None, metrics, {"step": 1.0}, 5, epoch=1)
    resumed: Any = open_trainer(tmp_path)
    resumed._saved = resumed.state.load(trainer._checkpoint_folder())
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


def test_a_new_run_loads_nothing_and_a_foreign_checkpoint_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = open_trainer(tmp_path)
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 0))
    trainer._load_checkpoint()
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 5))
    with pytest.raises(SpearError, match=r"has no spear\.json"):
        trainer._load_checkpoint()


# ---- the rest --------------------------------------------------------------------------------------------------------
def test_times_are_added_to_the_metrics(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path)
    metrics = {"perf/spear_driver_seconds": 0.5}
    trainer._compute_metrics(None, metrics, {"step": 10.0, "gen": 4.0}, global_steps=3, epoch=1)
    assert metrics["timing_s/gen"] == 4.0 and metrics["perf/step_seconds"] == 10.0
    assert metrics["perf/spear_driver_share"] == 0.05
    assert (metrics["training/global_step"], metrics["training/epoch"]) == (3, 1)


def test_verl_takes_the_trainer_for_a_synchronous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # A registered name other than "sync" would put verl on its asynchronous branches.
    def construct(self: Any, config: Any) -> None:
        self.config, self.trainer_mode = config, config.trainer.v1.trainer_mode

    monkeypatch.setattr(PPOTrainerSync, "__init__", construct)
    config = OmegaConf.create(
        {
            "spear": {
                "seed": 5,
                "env": {"id": "spear/Sokoban-v0"},
                "sil": {"warmup_steps": 9},
                "record": {"every": 7},
            },
            "actor_rollout_ref": {"model": {"path": "runs/policy"}},
            "trainer": {"v1": {"trainer_mode": "spear"}, "default_local_dir": "runs/x/checkpoints"},
        }
    )
    trainer: Any = SpearTrainer(config)
    assert trainer.trainer_mode == "sync"
    assert trainer.record == RecordSettings(every=7)
    assert trainer.seed == 5 and trainer.settings.sil.warmup_steps == 9 and trainer.environment.valid_split == "valid"
