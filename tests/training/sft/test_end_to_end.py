"""A real fine-tuning through verl: a tiny policy learns from an expert's episodes and plays."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from torch.utils.data import DistributedSampler

from spear_agents.engines.hf import HFModel
from spear_agents.evaluation.collect import collect_episodes
from spear_agents.evaluation.records import read_history
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_envs.core.machine import make_command
from spear_training.run.checkpoints import list_whole
from spear_training.sft.samples import open_store
from spear_training.warmstart import PolicyShape, WarmStartSettings, train_policy
from spear_training.warmstart.policy import make_model
from tests.agents.test_transcript import TOKENIZERS
from tests.training.sft.test_messages import retool, write_table

pytestmark = pytest.mark.slow

ENV, KEYWORDS = "spear/Sokoban-v1", {"modality": "text"}
BATCH, SEED = 64, 5


def fine_tune(policy: Path, data: Path, out: Path, *options: str, batch: int = BATCH, keep: int = 20) -> None:
    command = make_command("spear_envs.cli", "sft", "--device", "cpu")
    command += ["--model", str(policy), "--data", str(data), "--out", str(out), "--batch", str(batch)]
    command += ["--learning-rate", "1e-2", "--seed", str(SEED), *options]
    command += ["trainer.save_freq=1", f"trainer.max_ckpt_to_keep={keep}"]
    for name in ("datasets", "random"):  # the names of modules that verl imports
        (out.parent / f"{name}.py").write_text("raise RuntimeError('imported')")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=out.parent)
    log = out / "train.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")


def draw_batch(out: Path, batch: int) -> list[int]:
    """The samples of the first step."""
    store = open_store(out / "samples")
    order = DistributedSampler(store, num_replicas=1, rank=0, seed=SEED)  # type: ignore[arg-type]
    return list(order)[:batch]


def measure_loss(policy: Path, out: Path, batch: list[int]) -> float:
    """Mean over the policy's tokens of these samples, as transformers computes it."""
    store, model = open_store(out / "samples"), HFModel(policy)
    surprise, count = 0.0, 0
    for ids, mask in (store[index] for index in batch):
        log_probs = model.log_probs(ids[:1].tolist(), ids[1:].tolist())
        surprise -= sum(value for value, bit in zip(log_probs, mask[1:], strict=True) if bit)
        count += int(mask.sum())
    return surprise / count


def test_a_policy_learns_from_the_experts_episodes(tmp_path: Path) -> None:
    policy, data, out = tmp_path / "warmstart", tmp_path / "data.jsonl", tmp_path / "run"
    shape = PolicyShape(hidden=24, layers=1, heads=2, mlp=32)
    train_policy(WarmStartSettings(ENV, KEYWORDS, history=0, episodes=12, epochs=1, shape=shape, panel_tasks=0), policy)
    expert = EvalSettings(ENV, EngineKind.EXPERT, env_kwargs=KEYWORDS, template="compact", history=0, tasks="100")
    found = collect_episodes(expert, data, tokenizer=str(policy))
    each = found.samples // BATCH
    fine_tune(policy, data, out, "--epochs", "2")
    losses = [record["train/loss"] for record in read_history(out)]
    assert len(losses) == 2 * each >= 6
    assert losses[-1] < 0.7 * losses[0]

    lines = [json.loads(line) for line in data.read_text().splitlines()]
    first = draw_batch(out, BATCH)
    for index in first:
        assert open_store(out / "samples")[index][0].tolist() == lines[index]["input_ids"]
    assert losses[0] == pytest.approx(measure_loss(policy, out, first), rel=1e-4)

    # What it made loads and plays, in the type it was trained in.
    assert json.loads((out / "model" / "config.json").read_text())["dtype"] == "float32"
    evaluation = run_evaluation(
        EvalSettings(ENV, model=str(out / "model"), env_kwargs=KEYWORDS, history=0, tasks="8", temperature=0)
    )
    assert evaluation.overall.episodes == 8 and evaluation.overall.faults == 0

    # Killed at the end of an epoch, where verl's own trainer would leave out the next one.
    whole = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "model")
    for step in range(each + 1, 2 * each + 1):
        shutil.rmtree(out / "checkpoints" / f"global_step_{step}")
    fine_tune(policy, data, out, "--epochs", "2", keep=2)
    assert [record["train/loss"] for record in read_history(out)] == losses
    resumed = [json.loads(line)["step"] for line in (out / "metrics" / "0001.jsonl").read_text().splitlines()]
    assert resumed == list(range(each + 1, 2 * each + 1)), "no step is done twice"
    assert list_whole(out / "checkpoints") == resumed[-2:], "checkpoints of the first launch are removed too"
    assert (out / "model" / "model.safetensors").read_bytes() == whole
    assert torch.isfinite(HFModel(out / "model").model.lm_head.weight).all()


def test_retool_is_learnt_by_its_preset(tmp_path: Path) -> None:
    tokenizer, policy, out = TOKENIZERS["Qwen3"], tmp_path / "policy", tmp_path / "run"
    shape = PolicyShape(hidden=24, layers=1, heads=2, mlp=32)
    model = make_model(shape, tokenizer, 4_096, seed=1)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    data = write_table(tmp_path / "retool.parquet", [retool(f"What is {n} times 7?") for n in range(8)])
    fine_tune(policy, data, out, "--preset", "retool", batch=4)
    losses = [record["train/loss"] for record in read_history(out)]
    assert len(losses) == 6 * 2, "six epochs"
    assert losses[-1] < 0.9 * losses[0]
    assert losses[0] == pytest.approx(measure_loss(policy, out, draw_batch(out, 4)), rel=1e-4)
    assert HFModel(out / "model").model.config.vocab_size == len(tokenizer)
