"""Engines of verl over gloo in a process of their own: ``python -m tests.training.verl_plugin.real_engine WHAT ...``.

verl chooses its platform when it is imported, and a process group belongs to a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIABLES = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin"}
MARK = "RESULT "


def run_alone(*arguments: str) -> dict[str, Any]:
    """What ``main`` says in a process of its own."""
    command = [sys.executable, "-m", __name__, *arguments]
    environment = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])


def open_engine(folder: Path, dtype: str, **model: Any) -> Any:
    """An engine of the policy in ``folder``, on one rank."""
    import torch.distributed as dist
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from spear_training.verl_plugin.workers import CpuLanguageModelEngine

    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config: dict[str, Any] = {"use_remove_padding": True, "override_config": {"attn_implementation": "sdpa"}, **model}
    engine = CpuLanguageModelEngine(
        HFModelConfig(path=str(folder), load_tokenizer=False, **config),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def score(engine: Any, batch: Any) -> Any:
    """Log-probs of a batch by a pass of the engine, at all positions one behind another."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(batch, use_dynamic_bsz=True, max_token_len_per_gpu=2**16)
    with engine.eval_mode():
        return engine.infer_batch(batch, loss_function=None)["model_output"]["log_probs"].values()


def train_adapter(folder: str) -> dict[str, Any]:
    """Two steps of a tiny model with an adapter, and what its weights are then."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from verl.utils import tensordict_utils as tu

    from tests.training.verl_plugin import engines
    from tests.training.verl_plugin.test_scoring import make_batch, make_model

    base = make_model("sdpa", tie_word_embeddings=True)
    base.save_pretrained(folder)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    engine = open_engine(Path(folder), "fp32", lora_rank=4, lora_alpha=8, lora={"merge": True})
    batch = engines.ask(make_batch(), packed=True)
    tu.assign_non_tensor(batch, use_dynamic_bsz=True, max_token_len_per_gpu=2**16)
    plain = score(engine, batch)
    for _ in range(2):
        with engine.train_mode():
            engine.train_batch(
                batch, loss_function=lambda model_output, **_: (-model_output["log_probs"].values().mean(), {})
            )
    sent = dict(engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)[0])
    trained = score(engine, batch)
    with engine.disable_adapter():
        without = score(engine, batch)
    engine.save_checkpoint(f"{folder}/checkpoint", global_step=1)
    whole = f"{folder}/checkpoint/huggingface"
    reloaded = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, attn_implementation="sdpa")
    again = engines.run_engine(engines.open_engine(reloaded), reloaded, batch)["log_probs"].values()
    merged = PeftModel.from_pretrained(base, f"{whole}/lora_adapter").merge_and_unload().state_dict()
    return {
        "learnt": float((trained - plain).abs().max()),
        "base": float((without - plain).abs().max()),
        "sent": sorted(name for name in before if not torch.equal(sent[name], before[name])),
        "names": sorted(sent) == sorted(before),
        "reloaded": float((again - trained).abs().max()),
        "adapter": max(float((merged[name] - sent[name]).abs().max()) for name in sent),
    }


def compare_rollout(folder: str, dtype: str) -> dict[str, Any]:
    """How far log-probs of sampled tokens are from those of the trainer."""
    import numpy as np
    import torch

    from spear_agents.engines.base import Request, Sampling
    from spear_agents.engines.hf import HFModel, load_tokenizer
    from spear_training.algorithms import RowTable
    from spear_training.verl_plugin.columns import build_columns, find_predictions
    from spear_training.verl_plugin.scoring import make_exact
    from tests.training.verl_plugin.engines import ask

    tokenizer, model = load_tokenizer(folder), HFModel(folder, dtype=getattr(torch, dtype))
    make_exact(model.model.get_output_embeddings())  # as the rollout server does
    requests = []
    for number, text in enumerate(("Tell me how to tidy a kitchen. ", "You are in a room with a desk and a shelf. ")):
        for times in (1, 8):
            chat = [{"role": "user", "content": text * times}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tuple(tokenizer.encode(prompt))
            requests.append(Request(ids, Sampling(max_tokens=48, seed=number + times), f"r{number}_{times}"))
    answers = model.generate_batch(requests)
    pairs = list(zip([request.prompt_ids for request in requests], answers, strict=True))
    rows = RowTable(
        prompt_length=[len(ids) for ids, _ in pairs],
        response_length=[len(answer.token_ids) for answer in answers],
        ids=[token for ids, answer in pairs for token in (*ids, *answer.token_ids)],
        mask=[True for answer in answers for _ in answer.token_ids],
    )
    batch = ask(build_columns(rows), packed=True)
    values = score(open_engine(Path(folder), dtype), batch)
    learnt = values[find_predictions(rows.prompt_length, rows.response_length)].numpy()
    difference = np.abs(learnt - np.concatenate([answer.log_probs for answer in answers]))
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": len(difference)}


if __name__ == "__main__":
    print(MARK + json.dumps({"adapter": train_adapter, "rollout": compare_rollout}[sys.argv[1]](*sys.argv[2:])))
