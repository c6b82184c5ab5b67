"""One training twice: by the trainer's actor over verl's interfaces, and by the lab's; and what differs."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.lab.actor import LabActor
from spear_training.algorithms import RowTable, SpearSettings
from spear_training.step.records import Rollout
from spear_training.step.state import SpearState
from spear_training.step.step import SpearStep
from spear_training.step.update import Pass, UpdateSizes
from spear_training.verl_plugin.actor import VerlActor
from spear_training.verl_plugin.queue import StepQueue, build_columns
from spear_training.verl_plugin.rollout_worker import TOKENS
from tests.training.episodes import make_episode, play

VOCABULARY, SCALE, STEPS = 13, 6.0, 5
SETTINGS: dict[str, Any] = {
    "filter": {"groups": 0.75, "void": "turn", "repetition": False},
    "replay": {"capacity": 6},
    "baseline": {"capacity": 64},
    "sil": {"warmup_steps": 4},
    "reward": {"decay_steps": 3},
    "loss": {"scale_factor": SCALE},
}
Score = Callable[[RowTable], np.ndarray]
TIMES = ("perf/", "timing_s/")


def make_rollout(t: int, score: Score) -> Rollout:
    """Two to four groups of six episodes with random tokens, some void, and the log-probs that ``score`` gives them."""
    dice = np.random.default_rng(t)
    episodes = [
        make_episode(f"{t}-{group:05d}", n, won=bool(dice.random() < 0.4), tool_calls=int(dice.integers(5)),
                     rows=[{"void": bool(dice.random() < 0.1)}, {"response_length": 5, "loss_tokens": 4}])
        for group in range(4) for n in range(6)
    ]  # fmt: skip
    rollout = play(episodes)
    rows = rollout.rows
    lengths = rows.prompt_length + rows.response_length
    inside = np.arange(rows.response_length.sum()) - np.repeat(
        np.cumsum(rows.response_length) - rows.response_length, rows.response_length
    )
    rows = rows.add(ids=dice.integers(VOCABULARY, size=int(lengths.sum())), mask=inside < rows.spread(rows.loss_tokens))
    return Rollout(rollout.records, rows.add(rollout_log_probs=score(rows)), rollout.generations)


class Side:
    """One of the two trainings: a step over an actor, its passes, its metrics."""

    def __init__(self, settings: SpearSettings, actor: Any, epochs: int, minibatch: int) -> None:
        self.passes: list[Pass] = []
        self.metrics: list[dict[str, float]] = []
        train = actor.train

        def watch(update: Pass) -> Any:
            self.passes.append(update)
            return train(update)

        actor.train = watch
        self.state = SpearState(settings, seed=3)
        sizes = UpdateSizes(minibatch, SCALE, epochs)
        self.step = SpearStep(settings, self.state, actor, None, max_response_length=8, sizes=sizes)

    def take(self, t: int, rollout: Rollout) -> None:
        one = type("Once", (), {"play": lambda self, number: rollout, "finish": lambda self: None})()
        metrics = self.step.run(t, one).metrics
        self.metrics.append({name: value for name, value in metrics.items() if not name.startswith(TIMES)})


def run_both(
    settings: SpearSettings,
    score: Score,
    workers: Any,
    lab: LabActor,
    *,
    epochs: int = 1,
    minibatch: int = 16,
) -> tuple[Side, Side]:
    """:data:`STEPS` steps of either side over the same episodes."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"ppo_epochs": epochs, "data_loader_seed": 42, "ppo_max_token_len_per_gpu": 10_000},
                "rollout": {"temperature": 1.0, "log_prob_max_token_len_per_gpu": 10_000},
            },
            "data": {"max_response_length": SCALE},
            "spear": {"rollout": {"correction": {"bypass_mode": True}}},
        }
    )
    queue = StepQueue(SimpleNamespace(pad_token_id=12, eos_token_id=2), store=workers.queue)
    trainer = Side(settings, VerlActor(workers, config, settings, queue), epochs, minibatch)
    own = Side(settings, lab, epochs, minibatch)
    for t in range(1, STEPS + 1):
        rollout = make_rollout(t, score)
        queue.put(rollout.rows.key.tolist(), build_columns(rollout.rows))
        trainer.take(t, Rollout(rollout.records, rollout.rows.drop(*TOKENS), rollout.generations))
        own.take(t, Rollout(rollout.records, lab.hold(rollout.rows), rollout.generations))
        lab.release()
    return trainer, own


def measure_differences(trainer: Side, own: Side) -> dict[str, float]:
    """The largest difference of each column of the rows, and of each metric; what is not a number must be equal."""
    found: dict[str, float] = {}
    assert len(trainer.passes) == len(own.passes) > 0
    for one, other in zip(trainer.passes, own.passes, strict=True):
        assert (one.deal, one.pieces, one.hold_learning_rate) == (other.deal, other.pieces, other.hold_learning_rate)
        assert one.rows.columns == other.rows.columns and one.rows.key.tolist() == other.rows.key.tolist()
        found["gamma"] = max(found.get("gamma", 0.0), abs(one.gamma - other.gamma))
        for name in set(one.rows.columns) - {"key"}:
            gap = np.abs(np.subtract(getattr(one.rows, name), getattr(other.rows, name), dtype=np.float64)).max()
            found[f"row/{name}"] = max(found.get(f"row/{name}", 0.0), float(gap))
    for mine, theirs in zip(own.metrics, trainer.metrics, strict=True):
        for name in mine.keys() & theirs.keys():
            pair = (float(mine[name]), float(theirs[name]))
            gap = 0.0 if np.isnan(pair).all() else abs(pair[0] - pair[1]) / max(1.0, abs(pair[1]))
            found[name] = max(found.get(name, 0.0), gap)
        # verl says more of the entropy; nothing that is the step's own may be missing.
        assert {name for name in theirs.keys() ^ mine.keys() if not name.startswith("entropy/")} == set()
    return found


def count_replayed(side: Side) -> int:
    """Rows that were replayed."""
    return sum(int(update.rows.replayed.sum()) for update in side.passes)


class TablePolicy:
    """log pi of a token is its entry in a table, as in ``FakeWorkers``."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table.detach().clone().requires_grad_()

    def parameters(self) -> list[torch.Tensor]:
        return [self.table]

    def encode(self, rows: RowTable) -> torch.Tensor:
        longest = int(rows.response_length.max())
        parts = zip(rows.split("ids"), rows.prompt_length, strict=True)
        return torch.stack([torch.from_numpy(np.pad(ids[p:], (0, longest - len(ids[p:])))).long() for ids, p in parts])

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table[inputs] - 2.0


class ModelPolicy(torch.nn.Module):
    """A causal language model; rows are padded on the right, and each is computed alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def encode(self, rows: RowTable) -> torch.Tensor:
        """Ids, and in the last two columns the lengths of prompt and response."""
        longest = int((rows.prompt_length + rows.response_length).max())
        ids = np.stack([np.pad(part, (0, longest - len(part))) for part in rows.split("ids")])
        return torch.from_numpy(np.concatenate([ids, np.stack([rows.prompt_length, rows.response_length], 1)], 1))

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        ids, prompts, responses = inputs[:, :-2].long(), inputs[:, -2], inputs[:, -1]
        every = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits.float(), -1)
        width = int(responses.max())
        at = (prompts[:, None] + torch.arange(width)).clamp(max=ids.shape[1] - 1).long()
        predicted = every.gather(1, (at - 1)[..., None].expand(-1, -1, every.shape[-1]))
        return predicted.gather(-1, ids.gather(1, at)[..., None])[..., 0]


def score_with(policy: Any) -> Score:
    """Log-probs of the responses of rows under a policy as it is now, for rollouts."""

    @torch.no_grad()
    def score(policy: Any, rows: RowTable) -> np.ndarray:
        padded = policy.score(policy.encode(rows)).float().numpy()
        return padded[np.arange(padded.shape[1]) < rows.response_length[:, None]]

    return partial(score, policy)
