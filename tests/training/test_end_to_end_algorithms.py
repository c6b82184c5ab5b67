"""Every algorithm of the list trains two real steps through verl and Ray; the second replays where it should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf, open_dict

from spear_envs.data.files import write_text
from spear_training.launch import CONFIG_FILE, compose_training, prepare_run
from spear_training.supervise import supervise_training
from tests.rooms import ROOT
from tests.training.every_algorithm import ALGORITHMS, NAME, OWN, STEPS_EACH, settings_of
from tests.training.trainings import get_steps

pytestmark = pytest.mark.slow

SMALLER = (
    f"trainer.total_training_steps={STEPS_EACH * len(ALGORITHMS)}",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=6",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=24",
)


@pytest.fixture(scope="module")
def steps(sokoban_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    out = tmp_path_factory.mktemp("runs") / "all"
    model = f"actor_rollout_ref.model.path={sokoban_policy}"
    training = compose_training((*settings_of("ppo_spear"), *SMALLER, model), out)  # with PPO there is a critic
    prepare_run(training, out)
    config = training.config
    with open_dict(config):
        config.trainer.v1.trainer_mode = NAME
        config.trainer.v1[NAME] = {}
    write_text(out / CONFIG_FILE, OmegaConf.to_yaml(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # before the package ``tests`` that verl installs
        supervise_training(out, "cpu", lambda history: None, module=OWN)
    return get_steps(out)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains(steps: dict[int, dict[str, float]], algorithm: str) -> None:
    start = 1 + STEPS_EACH * ALGORITHMS.index(algorithm)
    first, second = steps[start], steps[start + 1]
    imitates, rewards_tools = algorithm.endswith(("_sil", "_spear")), algorithm.endswith("_spear")
    for metrics in (first, second):
        assert metrics["rows/trained"] > 0 and math.isfinite(metrics["loss/on_policy"])
        assert metrics["actor/grad_norm"] > 0 or metrics["groups/equal"] == 1
        assert metrics["rollout/wasted_generations"] == 0
        assert (metrics["spear/mu"] > 0) == rewards_tools and metrics["reward/tool_call"] > 0
        assert ("critic/loss" in metrics) == algorithm.startswith("ppo")
        if algorithm.startswith("ppo"):
            assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0
        if algorithm.startswith("drbot"):
            assert metrics["rows/trained"] < metrics["rows/total"], "the filter of groups"
    assert ("replay/kept" in first) == imitates and first.get("replay/drawn", 0) == 0
    if imitates and first["replay/size"] >= 8:
        assert second["replay/considered"] == first["replay/size"]
        assert second["replay/drawn"] == min(8, second["replay/eligible"])
    if second.get("replay/drawn"):
        assert second["loss/sil"] < 0 and second["replay/n_sil"] > 0
        assert {"cov/lower", "cov/upper"} <= second.keys() and 0 < second["replay/ess"] <= 1
    assert ("loss/sil" in second) == bool(second.get("replay/drawn"))


def test_most_of_them_replayed(steps: dict[int, dict[str, float]]) -> None:
    replayed = [step for step, metrics in steps.items() if metrics.get("replay/drawn")]
    assert len(replayed) >= 10 and all(step % STEPS_EACH == 0 for step in replayed)
