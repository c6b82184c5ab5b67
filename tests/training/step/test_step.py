"""The order of a step: what is drawn, trained and stored when, and which advantages the rows have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spear_envs.core.rewards import cosine_decay, cosine_warmup
from spear_training.algorithms import SpearSettings, gae_advantages
from spear_training.algorithms.estimators import needs_critic
from spear_training.step.state import SpearState
from spear_training.step.step import SpearStep, StepReport
from spear_training.step.update import UpdateSizes
from tests.training.episodes import Episode, make_episode
from tests.training.step.fakes import BOUNDS, FakeActor, FakeCritic, FakeRollouts


class Run:
    """Steps of a training."""

    def __init__(self, *, values: float = 0.5, **nodes: Any) -> None:
        small = {"replay": {"capacity": 4}, "filter": {"groups": 1.0}, "reward": {"mu": "none"}}
        self.settings = SpearSettings.from_mapping(small | nodes)
        self.state = SpearState(self.settings, seed=0)
        self.actor = FakeActor(self.state)
        self.critic = FakeCritic(self.actor, values) if self.settings.advantage.needs_critic else None
        sizes = UpdateSizes(rows_per_minibatch=100, scale_factor=8.0)
        self.step = SpearStep(self.settings, self.state, self.actor, self.critic, max_response_length=8, sizes=sizes)

    def take(self, t: int, *batches: list[Episode]) -> StepReport:
        self.rollouts = FakeRollouts(*(batches or [make_group(f"{t}-00000")]))
        return self.step.run(t, self.rollouts)

    @property
    def last(self) -> Any:
        """The last pass over rows."""
        return self.actor.log[-1].update


def make_group(name: str = "1-00000", wins: int = 1, count: int = 2, turns: int = 2) -> list[Episode]:
    return [make_episode(name, n, won=n < wins, turns=turns, tool_calls=turns) for n in range(count)]


def list_values(table: Any, name: str) -> Any:
    """A column of the rows of the last pass, fresh ones."""
    return getattr(table.take(~table.replayed), name)


# ---- what is trained on ----------------------------------------------------------------------------------------------
def test_a_step_trains_on_its_rows_after_the_rollouts_have_ended() -> None:
    run = Run()
    report = run.take(1)
    assert run.last.rows.key.tolist() == report.rollout.rows.key.tolist()
    assert run.rollouts.played == [0] and run.rollouts.finished_after == [1]
    assert report.metrics["rollout/wasted_generations"] == 0 and report.metrics["rollout/generations"] == 4
    assert report.metrics["perf/spear_driver_seconds"] > 0
    assert report.seconds.keys() == {"gen", "old_log_prob", "update_actor"}
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert run.state.metrics["loss/on_policy"] == 0.5, "for the schedules of the next step"


@pytest.mark.parametrize("t", [1, 7, 40])
def test_weights_of_a_step_are_those_of_the_schedules(t: int) -> None:
    run = Run(sil={"warmup_steps": 20}, reward={"decay_steps": 10})
    metrics = run.take(t).metrics
    assert metrics["spear/gamma"] == run.last.gamma == cosine_warmup(t, 20)
    assert metrics["spear/mu"] == cosine_decay(t, 10)
    assert metrics["reward/tool_call"] == pytest.approx(0.2)
    assert metrics["reward/total"] == pytest.approx(0.1 + 0.2 * cosine_decay(t, 10))


def test_a_step_of_faults_alone_changes_nothing() -> None:
    run = Run()
    run.take(1)
    report = run.take(2, [make_episode("2-00000", n, fault="backend", stop="fault") for n in range(2)])
    assert len(run.actor.log) == 1 and not len(report.rollout.rows)
    assert report.metrics["fault/backend"] == 2 and report.metrics["rows/trained"] == 0
    assert report.metrics["replay/size"] == 2 and report.metrics["baseline/size"] == 1


def test_a_step_whose_rows_are_all_masked_still_tells_the_baseline() -> None:
    run = Run()
    report = run.take(1, [make_episode("1-00000", n, won=n == 0, rows=[{"void": True}]) for n in range(2)])
    assert run.actor.log == [] and report.metrics["baseline/size"] == 1
    assert len(report.rollout.rows) == 4, "written rows are cleared all the same"


# ---- replay ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("coupling", ["joint", "sequential"])
def test_what_is_replayed_is_always_older(coupling: str) -> None:
    run = Run(sil={"coupling": coupling})
    for t in range(1, 7):
        metrics = run.take(t).metrics
        replayed = run.last.rows.take(run.last.rows.replayed)
        # Each step stores its two winning rows; at four the next step replays them and begins anew.
        assert run.actor.log[-1].baseline == t, "the step's own mean is in the baseline before the draw"
        if t in (3, 5):
            assert metrics["replay/drawn"] == len(replayed) == 4
            assert metrics["replay/considered"] == 4 and metrics["replay/discarded"] == 0
            assert metrics["replay/mean_age"] == 1.5 and metrics["replay/failed"] == 0
            assert run.actor.log[-1].stored == 0 and metrics["replay/size"] == 2
            # Reward 1.1 against a baseline whose median is the mean of one win and one loss.
            assert replayed.advantage.tolist() == pytest.approx([1.0] * 4)
            assert (metrics["cov/lower"], metrics["cov/upper"]) == BOUNDS
        else:
            assert not len(replayed) and "replay/drawn" not in metrics
        assert metrics["replay/kept"] == 2 and metrics["replay/dropped_nonpositive"] == 2
        assert metrics["baseline/size"] == t and metrics["baseline/p50"] == pytest.approx(0.1)


def test_gamma_of_zero_leaves_replay_out() -> None:
    run = Run(sil={"gamma": "constant", "gamma_options": {"value": 0.0}})
    for t in range(1, 4):
        metrics = run.take(t).metrics
    assert metrics["replay/drawn"] == 4, "the buffer goes on as ever"
    assert not run.last.rows.replayed.any() and metrics["replay/n_sil"] == 0


def test_a_replay_step_may_store_nothing() -> None:
    run = Run(sil={"always_add": False})
    assert [run.take(t).metrics["replay/size"] for t in range(1, 6)] == [2, 4, 0, 2, 4]


def test_old_rows_leave_the_buffer() -> None:
    run = Run(replay={"capacity": 100, "max_age": 1})
    assert [run.take(t).metrics["replay/evicted_age"] for t in range(1, 5)] == [0, 0, 2, 2]


def test_without_self_imitation_nothing_is_stored_or_drawn() -> None:
    run = Run(sil={"enabled": False})
    for t in range(1, 5):
        metrics = run.take(t).metrics
        assert not run.last.rows.replayed.any()
        assert metrics["replay/size"] == 0 and metrics["spear/gamma"] == 0
        assert "replay/kept" not in metrics


def test_without_a_baseline_the_stored_advantages_are_replayed() -> None:
    run = Run(baseline={"capacity": 0})
    for t in range(1, 4):
        metrics = run.take(t, make_group(f"{t}-00000", count=4)).metrics
    assert "baseline/size" not in metrics
    assert run.last.rows.advantage[run.last.rows.replayed].tolist() == pytest.approx([1.5] * 4)


# ---- dynamic sampling ------------------------------------------------------------------------------------------------
def test_tasks_are_played_until_enough_groups_differ() -> None:
    batches = [
        [*make_group("1-00000"), *make_group("1-00001", wins=0)],
        [*make_group("1-00002", wins=2), *make_group("1-00003", wins=0)],
        [*make_group("1-00004"), *make_group("1-00005")],
        [],
    ]
    run = Run(sampling={"enabled": True, "max_rounds": 4})
    report = run.take(1, *batches)
    assert run.rollouts.played == [0, 1, 2] and run.rollouts.finished_after == [3]
    assert (report.metrics["sampling/rounds"], report.metrics["sampling/differing"]) == (3, 1.5)
    trained = {key.rpartition("_")[0].rpartition("_")[0] for key in run.last.rows.key}
    assert trained == {"1-00000", "1-00004"}, "no more groups than a batch has"
    assert len(report.rollout.rows) == 24, "all of which are to be cleared"
    fewer = Run(sampling={"enabled": True, "max_rounds": 2})
    assert fewer.take(1, *batches).metrics["sampling/differing"] == 0.5
    assert fewer.rollouts.played == [0, 1]


# ---- advantages ------------------------------------------------------------------------------------------------------
def test_rows_have_the_advantage_of_their_estimator() -> None:
    run = Run()
    metrics = run.take(1, make_group(count=4)).metrics
    assert run.last.rows.advantage.tolist() == pytest.approx([1.5] * 2 + [-0.5] * 6)
    assert "token_advantages" not in run.last.rows
    assert metrics["advantage/mean"] == pytest.approx(0.0) and metrics["advantage/std"] == pytest.approx(0.75**0.5)


def test_an_estimator_of_tokens_gives_rows_the_mean_over_their_loss_tokens() -> None:
    run = Run(advantage={"estimator": f"{__name__}:count_tokens"}, replay={"capacity": 100})
    run.take(1, [make_episode("1-00000", n, won=n == 0, turns=1, rows=[{"loss_tokens": 2}]) for n in range(2)])
    assert run.last.rows.token_advantages.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.last.rows.advantage.tolist() == [0.5, 3.5]
    assert len(run.state.replay) == 2


def count_tokens(rows: Any, settings: SpearSettings) -> np.ndarray:
    return np.arange(rows.response_length.sum())


EPISODES = ((2, True), (3, False), (1, True))
"""Turns of each episode, and whether it is won."""


def make_episodes() -> list[Episode]:
    """One row of the second is taken out of the loss; not all response tokens are the policy's."""
    episodes = []
    for n, (turns, won) in enumerate(EPISODES):
        rows = [{"response_length": 2 + turn + n, "loss_tokens": 1 + turn} for turn in range(turns)]
        if n == 1:
            rows[1]["void"] = True
        episodes.append(make_episode(f"1-{n:05d}", 0, won=won, turns=turns, rows=rows))
    return episodes


def specify_advantages(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Advantages and returns of each row, an episode at a time as one conversation."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    assert run.critic is not None
    for episode in make_episodes():
        keys = [f"{episode.record.trajectory}_{n}" for n in range(len(episode.rows))]
        sizes = [row["response_length"] for row in episode.rows]
        values = np.concatenate([run.critic.say_values(key, size) for key, size in zip(keys, sizes, strict=True)])
        mask = np.concatenate([np.arange(row["response_length"]) < row["loss_tokens"] for row in episode.rows])
        paid = np.zeros(len(mask))
        paid[np.flatnonzero(mask)[-1]] = 1.1 if episode.record.won else -0.9
        given = (torch.from_numpy(part)[None] for part in (paid, values, mask))
        options = run.settings.critic
        made = gae_advantages(*given, gamma=options.gamma, lam=options.lam, whiten=False)
        parts = [np.split(part[0].numpy(), np.cumsum(sizes)[:-1]) for part in made]
        found |= {key: (a, r) for key, a, r in zip(keys, *parts, strict=True)}
    return found


PPO: dict[str, Any] = {"advantage": {"estimator": "gae"}, "filter": {"groups": 1.0, "void": "turn"}}


def test_advantages_of_ppo_run_through_the_turns_of_an_episode() -> None:
    run = Run(**PPO, critic={"gamma": 0.97, "lam": 0.9, "whiten": False})
    run.take(1, make_episodes())
    assert run.critic is not None
    (fresh,), wanted = run.critic.learned, specify_advantages(run)
    assert "1-00001_0_1" not in fresh.key, "and the row that is left out is seen all the same"
    assert len(fresh) == 5
    for name, part in (("token_advantages", 0), ("returns", 1)):
        expected = np.concatenate([wanted[key][part] for key in fresh.key])
        np.testing.assert_allclose(getattr(fresh, name), expected, atol=1e-12)
    for key, advantage, on in zip(fresh.key, fresh.advantage, fresh.split("mask"), strict=True):
        assert advantage == pytest.approx(wanted[key][0][on].mean())


def test_whitening_is_of_the_loss_alone() -> None:
    plain, white = Run(**PPO, critic={"whiten": False}), Run(**PPO)
    for run in (plain, white):
        run.take(1, make_episodes())
    assert plain.critic is not None and white.critic is not None
    before, after = plain.critic.learned[0], white.critic.learned[0]
    on = after.mask
    assert after.token_advantages[on].mean() == pytest.approx(0, abs=1e-9)
    assert after.token_advantages[on].std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert not after.token_advantages[~on].any()
    assert after.advantage.tolist() == before.advantage.tolist(), "what gates the buffer"
    assert after.returns.tolist() == before.returns.tolist()
    order = np.argsort(before.token_advantages[on], kind="stable")
    assert (np.diff(after.token_advantages[on][order]) >= -1e-9).all()


def test_the_first_values_explain_nothing() -> None:
    run = Run(**PPO, values=0.0)
    metrics = run.take(1, make_episodes()).metrics
    assert run.critic is not None
    (fresh,) = run.critic.learned
    # With gamma = lambda = 1 and values of 0, every token of an episode is worth its reward.
    assert fresh.returns[fresh.mask].tolist() == pytest.approx(fresh.spread(fresh.reward)[fresh.mask].tolist())
    assert metrics["critic/explained_variance"] == 0 and metrics["critic/value_mean"] == 0
    assert fresh.advantage.tolist() == pytest.approx(fresh.reward.tolist())


def test_values_that_are_right_explain_all() -> None:
    run = Run(**PPO)
    assert run.critic is not None
    run.critic.say_values = lambda key, length: np.full(length, 1.1 if key[:7] != "1-00001" else -0.9)  # type: ignore[method-assign]
    assert run.take(1, make_episodes()).metrics["critic/explained_variance"] == pytest.approx(1)


def test_the_critic_learns_before_the_actor_and_alone_at_first() -> None:
    run = Run(**PPO, critic={"warmup": 2}, replay={"capacity": 100})
    for t in range(1, 5):
        metrics = run.take(t).metrics
    assert run.critic is not None
    assert run.critic.passes_before == [0, 0, 0, 1] and len(run.actor.log) == 2
    positive = int((run.critic.learned[-1].advantage > 0).sum())
    assert metrics["replay/kept"] == positive and metrics["replay/dropped_nonpositive"] == 4 - positive
    fresh = run.last.rows
    assert fresh.token_advantages.tolist() == run.critic.learned[-1].token_advantages.tolist()


@needs_critic
def count_rows(rows: Any, settings: SpearSettings) -> np.ndarray:
    return np.arange(len(rows), dtype=float)


def test_an_estimator_with_a_critic_may_give_rows_one_advantage_each() -> None:
    run = Run(advantage={"estimator": f"{__name__}:count_rows"}, critic={"whiten": False})
    run.take(1)
    assert run.last.rows.advantage.tolist() == [0, 1, 2, 3]
    assert run.last.rows.token_advantages.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
