"""A whole step without verl: what is drawn, trained and stored when, and what the parameters are afterwards."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import cosine_decay, cosine_warmup
from spear_training.algorithms import SettingsError, SpearSettings, gae_advantages, spear_loss
from spear_training.step.state import SpearState
from spear_training.step.step import SpearStep, summarize_ratios
from spear_training.step.tasks import BatchesAhead
from spear_training.step.update import UpdateSizes
from tests.training.episodes import Episode, make_episode, play
from tests.training.step.actors import Optimiser, Played, TableActor, TableCritic, descend

PLAIN: dict[str, Any] = {
    "filter": {"groups": 1.0, "overlong": False, "void": "off", "repetition": False, "unreadable": False},
    "cov": {"ratio": 0.0},
    "replay": {"capacity": 4},
    "baseline": {"capacity": 64},
    "loss": {"scale_factor": 6.0},
}


class Run:
    """A training over a table: settings, state, policy, step."""

    def __init__(self, *, ranks: int = 1, minibatch: int = 1000, optimiser: Optimiser = descend, **nodes: Any) -> None:
        merged = {name: {**PLAIN.get(name, {}), **nodes.get(name, {})} for name in {*PLAIN, *nodes}}
        self.settings = SpearSettings.from_mapping(merged)
        self.state = SpearState(self.settings, seed=1)
        self.actor = TableActor(self.settings, ranks=ranks, optimiser=optimiser)
        self.critic = TableCritic(self.actor) if self.settings.advantage.needs_critic else None
        sizes = UpdateSizes(rows_per_minibatch=minibatch, scale_factor=6.0)
        self.step = SpearStep(self.settings, self.state, self.actor, self.critic, max_response_length=8, sizes=sizes)

    def take(self, t: int, *batches: list[Episode]) -> dict[str, Any]:
        """Make step ``t``; returns its metrics."""
        self.played = Played(self.actor, *map(play, batches))
        return self.step.run(t, self.played).metrics


def make_group(group: str = "1-00000", *, wins: int = 1, count: int = 2, **changes: Any) -> list[Episode]:
    return [make_episode(group, n, won=n < wins, tool_calls=2, **changes) for n in range(count)]


# ---- the order of a step ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", [1, 7, 30])
def test_weights_follow_the_schedules(t: int) -> None:
    run = Run(sil={"warmup_steps": 20}, reward={"decay_steps": 10})
    metrics = run.take(t, make_group())
    assert metrics["spear/gamma"] == run.actor.passes[0].gamma == cosine_warmup(t, 20)
    assert metrics["spear/mu"] == cosine_decay(t, 10)
    assert metrics["reward/total"] == pytest.approx(0.1 + 0.2 * cosine_decay(t, 10))


def test_a_schedule_sees_what_the_step_before_measured() -> None:
    run = Run(reward={"mu": "success", "mu_options": {"target": 1.0}}, sil={"gamma": "success"})
    first, second = (run.take(t, make_group(f"{t}-00000", wins=1, count=4)) for t in (1, 2))
    assert (first["spear/mu"], second["spear/mu"]) == (1.0, 0.75)
    assert (first["spear/gamma"], second["spear/gamma"]) == (0.0, 0.5)


def test_what_is_replayed_is_always_older() -> None:
    run = Run(reward={"mu": "none"})
    for t in range(1, 7):
        metrics = run.take(t, make_group(f"{t}-00000"))
        update = run.actor.passes[-1]
        # Each step stores its two winning rows; at four the next step replays them and begins anew.
        if t in (3, 5):
            assert metrics["replay/drawn"] == metrics["replay/considered"] == 4 and metrics["replay/discarded"] == 0
            replayed = update.rows.take(update.rows.replayed)
            assert len(replayed) == 4 and metrics["replay/mean_age"] == 1.5
            # Reward 1.1 against a baseline whose median is the mean of a win and a loss; the step's own is in it.
            assert replayed.advantage.tolist() == pytest.approx([1.0] * 4)
            assert metrics["replay/size"] == 2 and metrics["replay/share"] == 0.5
            assert metrics["replay/failed"] == 0.0 and metrics["replay/n_sil"] == 1.0
        else:
            assert not update.rows.replayed.any() and "replay/drawn" not in metrics
        assert metrics["replay/kept"] == 2 and metrics["replay/dropped_nonpositive"] == 2
        assert metrics["baseline/size"] == t and metrics["baseline/p50"] == pytest.approx(0.1)
    assert run.actor.read == [f"{t}-00000_0_{n}" for t in range(1, 7) for n in (0, 1)], "tokens of winners alone"


@pytest.mark.parametrize("level", [0.0, 9.0])
def test_a_replay_step_may_store_nothing_even_if_it_finds_nothing_to_imitate(level: float) -> None:
    run = Run(sil={"always_add": False})
    run.state.baseline.extend([level] * 9)  # type: ignore[union-attr]
    assert [run.take(t, make_group(f"{t}-00000"))["replay/size"] for t in range(1, 6)] == [2, 4, 0, 2, 4]
    assert sum(bool(update.rows.replayed.any()) for update in run.actor.passes) == int(level == 0.0)


def test_old_rows_leave_the_buffer() -> None:
    run = Run(replay={"capacity": 100, "max_age": 1})
    assert [run.take(t, make_group(f"{t}-00000"))["replay/evicted_age"] for t in range(1, 5)] == [0, 0, 2, 2]


def test_without_self_imitation_nothing_is_stored_or_drawn() -> None:
    run = Run(sil={"enabled": False})
    for t in range(1, 5):
        metrics = run.take(t, make_group(f"{t}-00000"))
        assert metrics["replay/size"] == 0 and metrics["spear/gamma"] == 0 and "replay/kept" not in metrics
    assert not any(update.rows.replayed.any() for update in run.actor.passes) and run.actor.read == []


def test_without_a_baseline_the_stored_advantages_are_replayed() -> None:
    run = Run(baseline={"capacity": 0})
    for t in range(1, 4):
        metrics = run.take(t, make_group(f"{t}-00000", count=4))
    rows = run.actor.passes[-1].rows
    assert "baseline/size" not in metrics
    assert rows.advantage[rows.replayed].tolist() == pytest.approx([1.5] * 4)


def test_a_draw_of_fewer_rows_than_wanted_is_left_out() -> None:
    for wanted, replayed in ((4, True), (5, False)):
        run = Run(reward={"mu": "none"}, sil={"min_rows": wanted, "trigger_ratio": 0.8}, replay={"capacity": 5})
        for t in range(1, 4):
            metrics = run.take(t, make_group(f"{t}-00000"))
        assert metrics.get("replay/drawn", 0) == (4 if replayed else 0)
        assert metrics["replay/discarded"] == (0 if replayed else 4)
        assert run.actor.passes[-1].rows.replayed.any() == replayed and metrics["replay/kept"] == 2
        assert metrics["replay/share"] == (0.5 if replayed else 0.0)
    with pytest.raises(SettingsError, match="min_rows"):
        Run(sil={"min_rows": 5}, replay={"capacity": 4})


def test_a_gamma_of_zero_draws_and_trains_on_nothing_of_it() -> None:
    run = Run(sil={"gamma": "none"})
    for t in range(1, 4):
        metrics = run.take(t, make_group(f"{t}-00000"))
    assert metrics["replay/drawn"] == 4 and metrics["replay/share"] == 0.0
    assert not run.actor.passes[-1].rows.replayed.any()


def test_a_step_of_faults_alone_changes_nothing() -> None:
    run = Run()
    run.take(1, make_group())
    before = run.actor.table.detach().clone()
    metrics = run.take(2, [make_episode("2-0", n, fault="backend", stop="fault") for n in range(2)])
    assert torch.equal(run.actor.table.detach(), before) and len(run.actor.passes) == 1
    assert metrics["fault/backend"] == 2 and metrics["rows/trained"] == 0
    assert metrics["replay/size"] == 2 and metrics["baseline/size"] == 1


def test_a_step_whose_rows_are_all_masked_still_tells_the_baseline() -> None:
    run = Run(filter={"void": "trajectory"})
    metrics = run.take(1, make_group(rows=[{"void": True}]))
    assert run.actor.passes == [] and metrics["baseline/size"] == 1


# ---- dynamic sampling ------------------------------------------------------------------------------------------------
def test_more_tasks_are_drawn_until_as_many_groups_differ() -> None:
    same = [*make_group("1-0", wins=0), *make_group("1-1", wins=2)]
    half = [*make_group("1-2"), *make_group("1-3", wins=0)]
    rest = [*make_group("1-4"), *make_group("1-5")]
    run = Run(sampling={"enabled": True, "max_rounds": 5})
    metrics = run.take(1, same, half, rest)
    assert run.played.asked == [0, 1, 2] and run.played.finished == 1
    assert metrics["sampling/rounds"] == 3 and metrics["sampling/differing"] == 1.5
    trained = set(run.actor.passes[0].rows.key)
    assert {key.split("_")[0] for key in trained} == {"1-2", "1-4"}, "two groups were asked for, the first that differ"
    assert metrics["baseline/size"] == 2 and metrics["success/all"] == pytest.approx(5 / 12), "success is of all played"


def test_drawing_more_has_a_limit() -> None:
    dull = [make_group(f"1-{n}", wins=0) for n in range(2)]
    run = Run(sampling={"enabled": True, "max_rounds": 2})
    metrics = run.take(1, *dull)
    assert run.played.asked == [0, 1] and metrics["sampling/differing"] == 0.0
    assert metrics["rows/trained"] == 0 and run.actor.passes == []
    plain = Run()
    plain.take(1, *dull)
    assert plain.played.asked == [0] and plain.played.finished == 1


# ---- advantages ------------------------------------------------------------------------------------------------------
def test_the_critic_values_whole_episodes_and_its_advantages_are_trained_on() -> None:
    run = Run(
        advantage={"estimator": "gae"},
        critic={"gamma": 0.97, "lam": 0.9, "whiten": False},
        filter={"void": "turn"},
        replay={"capacity": 100},
    )
    episodes = make_group(rows=[{}, {"void": True}])
    run.take(1, episodes)
    assert run.critic is not None
    assert run.critic.valued == ["1-00000_0_0", "1-00000_0_1", "1-00000_1_0", "1-00000_1_1"], "masked ones too"
    (update,), (learned,) = run.actor.passes, run.critic.updates
    assert update.rows.key.tolist() == ["1-00000_0_0", "1-00000_1_0"]
    for number, reward in enumerate((1.1 + 0.2 * cosine_decay(1, 200), -0.9 + 0.2 * cosine_decay(1, 200))):
        ids = np.concatenate([run.actor.tokens[f"1-00000_{number}_{turn}"][0][4:] for turn in (0, 1)])
        paid = torch.zeros(1, 6, dtype=torch.float64)
        paid[0, -1] = reward
        values = torch.from_numpy(run.critic.values[ids])[None]
        wanted, returns = gae_advantages(paid, values, torch.ones(1, 6), gamma=0.97, lam=0.9, whiten=False)
        own = slice(3 * number, 3 * number + 3)
        np.testing.assert_allclose(update.rows.token_advantages[own], wanted[0, :3], atol=1e-9)
        np.testing.assert_allclose(learned.returns[own], returns[0, :3], atol=1e-9)
        assert update.rows.advantage[number] == pytest.approx(float(wanted[0, :3].mean()))


def test_whitening_is_of_the_loss_alone_and_leaves_what_gates_the_buffer() -> None:
    raw, white = (Run(advantage={"estimator": "gae"}, critic={"whiten": whiten}) for whiten in (False, True))
    for run in (raw, white):
        run.take(1, make_group(count=4))
    one, other = raw.actor.passes[0].rows, white.actor.passes[0].rows
    assert other.token_advantages.mean() == pytest.approx(0, abs=1e-9)
    assert other.token_advantages.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert one.advantage.tolist() == other.advantage.tolist()


def test_the_critic_may_learn_alone_at_first() -> None:
    run = Run(advantage={"estimator": "gae"}, critic={"warmup": 2})
    for t in range(1, 5):
        run.take(t, make_group(f"{t}-00000"))
    assert run.critic is not None and len(run.critic.updates) == 4 and len(run.actor.passes) == 2


def every_second_token(rows: Any, settings: Any) -> Any:
    return np.arange(rows.response_length.sum()) % 2.0


def test_tokens_of_any_estimator_may_have_advantages_of_their_own() -> None:
    run = Run(advantage={"estimator": f"{__name__}:every_second_token"}, replay={"capacity": 2})
    run.take(1, make_group(rows=[{"loss_tokens": 2}]))
    rows = run.actor.passes[0].rows
    assert rows.token_advantages.tolist() == [n % 2 for n in range(12)]
    assert rows.advantage.tolist() == pytest.approx([1 / 2, 2 / 3, 1 / 2, 2 / 3]), "means over loss tokens"
    run.state.baseline.extend([-5.0] * 9)  # type: ignore[union-attr]
    run.take(2, make_group("2-0"))
    rows = run.actor.passes[1].rows
    replayed = rows.take(rows.replayed)
    assert len(replayed) > 0
    assert replayed.token_advantages.tolist() == np.repeat(replayed.advantage, 3).tolist(), "one for a replayed row"


# ---- the update ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean"])
def test_a_joint_step_goes_down_the_papers_loss(mode: str, ranks: int) -> None:
    run = Run(ranks=ranks, sil={"warmup_steps": 6}, loss={"aggregation": mode, "scale_factor": 6.0})
    for t in (1, 2):
        run.take(t, make_group(f"{t}-00000", rows=[{"loss_tokens": 2}]))
    before = run.actor.table.detach().clone().requires_grad_()
    metrics = run.take(3, make_group("3-00000"))
    update = run.actor.passes[-1]
    assert metrics["actor/optimizer_steps"] == 1 and update.rows.replayed.sum() == 4
    ids = torch.stack([torch.from_numpy(run.actor._responses[key]) for key in update.rows.key])
    mask = torch.stack([torch.from_numpy(run.actor.tokens[key][1]) for key in update.rows.key])
    old = torch.stack([torch.from_numpy(part).double() for part in update.rows.split("log_probs")])
    result = spear_loss(
        before[ids],
        old,
        torch.from_numpy(update.rows.advantage),
        mask,
        torch.from_numpy(update.rows.replayed),
        gamma=cosine_warmup(3, 6),
        cov_ratio=0.0,
        mode=mode,
        loss_scale_factor=6.0,
    )
    result.loss.backward()
    assert before.grad is not None and before.grad.abs().max() > 1e-3
    torch.testing.assert_close(run.actor.table.detach(), before.detach() - 0.7 * before.grad, atol=1e-6, rtol=0)
    assert metrics["loss/on_policy"] == pytest.approx(float(result.on_policy), abs=1e-6)
    assert metrics["loss/sil"] == pytest.approx(float(result.self_imitation), abs=1e-6)
    assert metrics["kl/old"] == pytest.approx(0.0, abs=1e-9), "the policy that played is the one that learns"
    assert 0 < metrics["replay/ess"] <= 1


def make_adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, betas=(0.9, 0.99))


def drift(coupling: str, gamma: float, *, enabled: bool = True) -> torch.Tensor:
    """How far eight steps under Adam move the policy, each with one mini-batch of eight fresh rows."""
    sil = {"coupling": coupling, "gamma": "constant", "gamma_options": {"value": gamma}, "enabled": enabled}
    run = Run(minibatch=8, optimiser=make_adam, sil=sil, replay={"capacity": 4})
    start = run.actor.table.detach().clone()
    for t in range(1, 9):
        run.take(t, make_group(f"{t}-00000", count=4))
    return run.actor.table.detach() - start


def test_joint_coupling_adds_gamma_times_imitation_and_nothing_else_under_adam() -> None:
    """With a vanishing gamma replay must change nothing; sequential coupling applies Adam's momentum once more."""
    alone = drift("joint", 0.0, enabled=False)
    torch.testing.assert_close(drift("joint", 1e-9), alone, atol=1e-4, rtol=0)
    sequential = drift("sequential", 1e-9)
    assert float(sequential @ alone / alone.square().sum()) > 1.05, "why it is not the default"
    assert float((drift("joint", 1.0) - alone).norm()) > 0.05


@pytest.mark.parametrize("count", [1, 3])
def test_replay_adds_rows_to_the_steps_of_the_fresh_ones_not_steps(count: int) -> None:
    run = Run(minibatch=12 // count, replay={"capacity": 6})
    for t in (1, 2, 3):
        metrics = run.take(t, make_group(f"{t}-00000", wins=3, count=6))
        assert metrics["actor/optimizer_steps"] == count
    update = run.actor.passes[-1]
    shares = [[int(update.rows.replayed[row]) for row in part if row >= 0] for part in update.deal.minibatches]
    assert [sum(share) for share in shares] == [6 // count] * count
    assert update.deal.size // update.pieces <= 12 // count, "nor does a micro-batch grow"


def test_bounds_follow_the_policy_and_lambda_binds_over_a_training() -> None:
    run = Run(cov={"ratio": 0.1, "momentum": 0.5}, replay={"capacity": 32}, reward={"decay_steps": 50})
    shares, bounds = [], []
    for t in range(1, 25):
        episodes = [make_episode(f"{t}-{g}", n, won=n < 4, tool_calls=n % 4) for g in range(4) for n in range(8)]
        metrics = run.take(t, episodes)
        if "clip/cov_fraction" in metrics:
            shares.append(metrics["clip/cov_fraction"])
            bounds.append(metrics["cov/lower"])
    assert len(shares) > 5 and min(shares) > 0.09 and max(shares) <= 0.1
    assert len(set(bounds)) == len(bounds), "measured anew at each replay"


def test_the_same_seed_gives_the_same_run_and_a_restored_state_goes_on() -> None:
    def make() -> Run:
        return Run(ranks=2, minibatch=4, cov={"ratio": 0.1}, sil={"gamma": "success"})

    def report(run: Run, steps: range) -> list[Any]:
        return [
            {
                k: v
                for k, v in run.take(t, make_group(f"{t}-00000", count=6)).items()
                if "seconds" not in k and k[:4] != "time"
            }
            for t in steps
        ]

    whole, parted = make(), make()
    everything = report(whole, range(1, 8))
    assert report(parted, range(1, 5)) == everything[:4]
    resumed = make()
    resumed.state.load_state_dict(parted.state.state_dict())
    with torch.no_grad():
        resumed.actor.table.copy_(parted.actor.table)
    assert report(resumed, range(5, 8)) == everything[4:]
    assert torch.equal(resumed.actor.table, whole.actor.table)


@pytest.mark.parametrize("name", ["grad_norm", "on_policy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stop_the_step(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.take(1, make_group("1-00000"))
    stored, learn = len(run.state.replay), TableActor.train
    monkeypatch.setattr(TableActor, "train", lambda self, update: {**learn(self, update), name: value})
    with pytest.raises(SpearError, match=str(value)):
        run.take(2, make_group("2-00000"))
    assert len(run.state.replay) == stored


@given(lead=st.integers(0, 4), last=st.integers(1, 9), killed=st.integers(1, 9))
def test_no_batch_is_older_than_the_lead_and_a_resumed_run_plays_the_same_tasks(
    lead: int, last: int, killed: int
) -> None:
    drawn = iter(range(100))

    def open_batches() -> tuple[BatchesAhead[tuple[int, list[str], int]], list[int]]:
        now = [0]
        draw = lambda: [str(next(drawn))]  # noqa: E731
        return BatchesAhead(lead, draw, lambda step, tasks: (step, tasks, now[0])), now

    batches, now = open_batches()
    learnt = []
    for step in range(1, last + 1):
        now[0] = step - 1  # version of the weights
        batches.reach(step, last)
        begun_for, tasks, version = batches.take()
        assert begun_for == step and 0 <= step - 1 - version <= lead
        learnt += tasks
        if step == killed:
            kept = batches.list_drawn()
            assert len(kept) == min(lead, last - step), "so many are under way"
            batches, now = open_batches()
            batches.restore(kept)
    assert learnt == [str(number) for number in range(last)], "each task once, in order"
    assert batches.list_drawn() == []


def test_ratios_before_any_clipping() -> None:
    probs, rollout = np.array([0.5, 0.1, 0.4]), np.array([0.25, 0.2, 0.4])
    found = summarize_ratios(np.log(probs), np.log(rollout))
    assert found["staleness/ratio_mean"] == pytest.approx((2 + 0.5 + 1) / 3)
    assert (found["staleness/ratio_min"], found["staleness/ratio_max"]) == (pytest.approx(0.5), pytest.approx(2))
    assert found["staleness/ratio_ess"] == pytest.approx(3.5**2 / (3 * (4 + 0.25 + 1)))
    same = summarize_ratios(np.log(probs), np.log(probs))
    assert set(same.values()) == {1.0}


def test_a_schedule_by_entropy_outlasts_a_step_without_a_trained_row() -> None:
    gamma = {"gamma": "entropy", "gamma_options": {"low": 50.0, "high": 60.0}, "warmup_steps": 0}
    run = Run(reward={"mu": "none"}, sampling={"enabled": True, "max_rounds": 1}, sil=gamma)
    steps = [run.take(t, make_group(f"{t}-00000", wins=wins)) for t, wins in ((1, 1), (2, 2), (3, 1))]
    assert [metrics["spear/gamma"] for metrics in steps] == [1.0, 0.0, 0.0]


def test_a_schedule_by_novelty_outlasts_a_step_of_faults() -> None:
    run = Run(reward={"mu": "novelty"})
    faults = make_group("2-00000", fault="backend", stop="fault")
    found = [run.take(t, batch) for t, batch in enumerate((make_group(), faults, make_group("3-00000")), 1)]
    assert [metrics["spear/mu"] for metrics in found] == [1.0, 1.0, 1.0] and "anchors/new" not in found[1]


def test_a_schedule_by_success_outlasts_a_step_of_faults() -> None:
    run = Run(reward={"mu": "success"}, sil={"gamma": "success"})
    run.take(1, make_group("1-00000", wins=2))
    run.take(2, make_group("2-00000", fault="env"))
    metrics = run.take(3, make_group("3-00000"))
    assert (metrics["spear/mu"], metrics["spear/gamma"]) == (0.0, 1.0)


def test_rows_wait_for_an_actor_that_learns() -> None:
    settings: dict[str, Any] = {"sil": {"gamma": "constant", "always_add": False}, "replay": {"capacity": 2}}
    run = Run(reward={"mu": "none"}, advantage={"estimator": "gae"}, critic={"warmup": 2}, **settings)
    steps = [run.take(t, make_group(f"{t}-00000")) for t in (1, 2, 3)]
    assert ["replay/drawn" in metrics for metrics in steps] == [False, False, True]
    assert run.actor.passes[0].rows.replayed.sum() == 2
