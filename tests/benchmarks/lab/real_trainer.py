"""The trainer's side with verl's own worker and a real model, beside the lab's; in a process of its own.

verl chooses its platform when it is imported, and a process group belongs to a whole process.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from tests.training.verl_plugin.real_engine import MARK, VARIABLES

RATE = 1e-3
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_alone() -> dict[str, Any]:
    """What :func:`main` says in a process of its own."""
    environment = {**os.environ, **VARIABLES, **ALONE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])


class Workers:
    """verl's worker group of one rank: its worker, in this process."""

    def __init__(self, worker: Any, queue: Any) -> None:
        self._worker, self.queue = worker, queue
        self._dispatch_info: dict[str, list[int]] = {}

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        return [0]

    def update_actor(self, meta: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        data = self.queue.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=meta.fields)
        tu.assign_non_tensor(data, **meta.extra_info)
        return self._worker.train_mini_batch(data)


def make_worker(folder: str, settings: Any) -> Any:
    """verl's training worker over the model in ``folder``."""
    import torch.distributed as dist
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from spear_training.verl_plugin.actor import actor_loss
    from spear_training.verl_plugin.workers import SpearTrainingWorker

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config: dict[str, Any] = {"use_remove_padding": True, "override_config": {"attn_implementation": "sdpa"}}
    worker = SpearTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=folder, load_tokenizer=False, **config),
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
            optimizer_config=FSDPOptimizerConfig(lr=RATE, total_training_steps=10),
            checkpoint_config=CheckpointConfig(save_contents=["model"]),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(actor_loss, settings))
    return worker


def main() -> dict[str, Any]:
    """Both trainings, and the largest differences."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    import spear_training.verl_plugin  # noqa: F401 - registers our engines
    from benchmarks.lab.actor import LabActor
    from spear_training.algorithms import SpearSettings
    from tests.benchmarks.lab.pairs import (
        SETTINGS,
        ModelPolicy,
        count_replayed,
        measure_differences,
        run_both,
        score_with,
    )
    from tests.training.verl_plugin.fakes import FakeQueue
    from tests.training.verl_plugin.test_scoring import make_model

    settings = SpearSettings.from_mapping(SETTINGS)
    folder = tempfile.mkdtemp()
    make_model("sdpa", initializer_range=0.2).save_pretrained(folder)
    worker, queue = make_worker(folder, settings), FakeQueue()

    def load() -> ModelPolicy:
        return ModelPolicy(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        )

    policy, first = load(), load()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.01)
    lab = LabActor(settings, policy, optimizer, epochs=2)
    trainer, own = run_both(settings, score_with(first), Workers(worker, queue), lab, epochs=2)
    theirs = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in worker.engine.module.state_dict().items()
    }
    mine, start = policy.model.state_dict(), first.model.state_dict()
    assert theirs.keys() == mine.keys()
    return {
        "differences": measure_differences(trainer, own),
        "replayed": count_replayed(own),
        "moved": max(float((mine[name] - start[name]).abs().max()) for name in mine),
        "weights": max(float((mine[name] - theirs[name]).abs().max()) for name in mine),
    }


if __name__ == "__main__":
    print(MARK + json.dumps(main()), file=sys.stdout)
    sys.stdout.flush()
