"""A real fine-tuning through verl: a tiny policy learns from an expert's episodes and plays."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from torch.utils.data import DistributedSampler

from spear_agents.collect import collect_episodes
from spear_agents.engines.hf import HFModel
from spear_agents.evaluation import run_evaluation
from spear_agents.records import read_history
from spear_agents.settings import EngineKind, EvalSettings
from spear_envs.core.machine import make_command
from spear_training.checkpoints import list_whole
from spear_training.sft.samples import open_store
from spear_training.warmstart import PolicyShape, WarmStartSettings, train_policy

pytestmark = pytest.mark.slow

ENV, KEYWORDS = "spear/Sokoban-v1", {"modality": "text"}
BATCH, SEED = 64, 5


def fine_tune(policy: Path, data: Path, out: Path, *, keep: int = 20) -> None:
    command = make_command("spear_envs.cli", "sft", "--device", "cpu")
    command += ["--model", str(policy), "--data", str(data), "--out", str(out), "--batch", str(BATCH)]
    command += ["--epochs", "2", "--learning-rate", "1e-2", "--seed", str(SEED)]
    command += ["trainer.save_freq=1", f"trainer.max_ckpt_to_keep={keep}"]
    for name in ("datasets", "random"):  # the names of modules that verl imports
        (out.parent / f"{name}.py").write_text("raise RuntimeError('imported')")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=out.parent)
    log = out / "train.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")


def test_a_policy_learns_from_the_experts_episodes(tmp_path: Path) -> None:
    policy, data, out = tmp_path / "warmstart", tmp_path / "data.jsonl", tmp_path / "run"
    shape = PolicyShape(hidden=24, layers=1, heads=2, mlp=32)
    train_policy(WarmStartSettings(ENV, KEYWORDS, history=0, episodes=12, epochs=1, shape=shape, panel_tasks=0), policy)
    expert = EvalSettings(ENV, EngineKind.EXPERT, env_kwargs=KEYWORDS, template="compact", history=0, tasks="100")
    found = collect_episodes(expert, data, tokenizer=str(policy))
    each = found.samples // BATCH
    fine_tune(policy, data, out)
    losses = [record["train/loss"] for record in read_history(out)]
    assert len(losses) == 2 * each >= 6
    assert losses[-1] < 0.7 * losses[0]

    # The loss is the mean over the policy's tokens, on the ids that were recorded, of the first batch that is drawn.
    store, model = open_store(out / "samples"), HFModel(policy)
    order = DistributedSampler(store, num_replicas=1, rank=0, seed=SEED)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    surprise, count = 0.0, 0
    for index in list(order)[:BATCH]:
        ids, learnt = lines[index]["input_ids"], sum(lines[index]["loss_mask"])
        surprise -= sum(model.log_probs(ids[:-learnt], ids[-learnt:]))
        count += learnt
    assert losses[0] == pytest.approx(surprise / count, rel=1e-4)

    # What it made loads and plays.
    evaluation = run_evaluation(
        EvalSettings(ENV, model=str(out / "model"), env_kwargs=KEYWORDS, history=0, tasks="8", temperature=0)
    )
    assert evaluation.overall.episodes == 8 and evaluation.overall.faults == 0

    # Killed at the end of an epoch, where verl's own trainer would leave out the next one.
    whole = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "model")
    for step in range(each + 1, 2 * each + 1):
        shutil.rmtree(out / "checkpoints" / f"global_step_{step}")
    fine_tune(policy, data, out, keep=2)
    assert [record["train/loss"] for record in read_history(out)] == losses
    resumed = [json.loads(line)["step"] for line in (out / "metrics" / "0001.jsonl").read_text().splitlines()]
    assert resumed == list(range(each + 1, 2 * each + 1)), "no step is done twice"
    assert list_whole(out / "checkpoints") == resumed[-2:], "checkpoints of the first launch are removed too"
    assert (out / "model" / "model.safetensors").read_bytes() == whole
    assert torch.isfinite(HFModel(out / "model").model.lm_head.weight).all()
