"""Engines of verl over gloo in a process of their own: ``python -m tests.training.verl_plugin.real_engine WHAT ...``.

verl chooses its platform when it is imported, and a process group belongs to a whole process.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import partial
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


def open_engine(folder: Path, dtype: str, *, sequence: int = 1, **model: Any) -> Any:
    """An engine of the policy in ``folder``, on one rank unless there is a process group."""
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
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision=precision,
            ulysses_sequence_parallel_size=sequence,
        ),
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


def emulate_flash() -> None:
    """Replace flash-attention by rows attended one by one, behind the name that verl wraps."""
    import torch
    from transformers import PreTrainedModel, modeling_utils
    from verl.models.transformers import monkey_patch

    def attend(query: Any, key: Any, value: Any, *_: Any, position_ids: Any, softmax_scale: float, **__: Any) -> Any:
        groups = query.shape[2] // key.shape[2]
        starts = [*(position_ids.flatten() == 0).nonzero()[:, 0].tolist(), query.shape[1]]
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        parts = (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2))
        rows = zip(*(part.transpose(1, 2).split(lengths, 2) for part in parts), strict=True)
        attended = [
            torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True, scale=softmax_scale) for row in rows
        ]
        return torch.cat(attended, 2).transpose(1, 2)

    monkey_patch._flash_attention_forward = attend
    PreTrainedModel._flash_attn_can_dispatch = lambda self, *_, **__: True
    modeling_utils.lazy_import_flash_attention = lambda *_, **__: None


def take_step(folder: str, attention: str, sequence: int) -> list[float]:
    """Norm of the gradient, a checksum of the weights after a step, and the entropy before it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from verl.utils import tensordict_utils as tu

    from spear_training import attention as choice
    from spear_training.algorithms import SpearSettings
    from spear_training.verl_plugin.loss import actor_loss
    from tests.training.verl_plugin.test_invariance import PADDING, ROWS, make_rows, take

    if attention == "flash_attention_2":
        emulate_flash()
    elif attention == "alone":  # what a size above 1 would be without our refusal: each rank's part by itself
        choice.EXCHANGES, attention = ("eager",), "eager"
    engine = open_engine(Path(folder), "fp32", sequence=sequence, override_config={"attn_implementation": attention})
    settings = SpearSettings.from_mapping({"cov": {"ratio": 0.0}})
    shares, share = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    size = (ROWS + PADDING) // shares
    batch = take(make_rows(settings), range(share * size, (share + 1) * size), shares)
    tu.assign_non_tensor(
        batch, use_remove_padding=True, temperature=0.7, calculate_entropy=True, use_dynamic_bsz=True,
        max_token_len_per_gpu=48 // sequence, pad_token_id=0,
    )  # fmt: skip
    with engine.eval_mode():
        scored = engine.infer_batch(batch, loss_function=None).get("model_output") or {}
    # The first rank of a sequence speaks for all of them.
    whole = torch.tensor([float(scored["entropy"].values().sum()) if engine.is_mp_src_rank_with_outputs() else 0.0])
    dist.all_reduce(whole)
    tu.assign_non_tensor(batch, calculate_entropy=False)
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function=partial(actor_loss, settings))["metrics"]
    weights = 0.0
    for _, value in sorted(engine.module.state_dict().items()):
        full = (value.full_tensor() if isinstance(value, DTensor) else value).double()
        weights += float((full * torch.arange(1, full.numel() + 1).reshape(full.shape).cos()).sum())
    return [float(metrics.get("grad_norm", 0.0)), weights, float(whole)]


def compare_ranks() -> dict[str, Any]:
    """The same step by several groups of ranks, each a fork of this process; what rank 0 of each says."""
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import spear_training.verl_plugin  # noqa: F401
    from tests.training.verl_plugin.test_invariance import VOCABULARY

    folder = tempfile.mkdtemp()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = Qwen2Config(vocab_size=VOCABULARY, intermediate_size=48, initializer_range=0.2, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)

    def play(name: str, attention: str, rank: int, rows: int, sequence: int) -> None:
        store = f"file://{folder}/store-{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=rows * sequence)
        told = take_step(folder, attention, sequence)
        if not rank:
            Path(folder, name).write_text(json.dumps(told))
        dist.destroy_process_group()

    plan = [("sdpa", 1, 1), ("sdpa", 2, 1), ("sdpa", 1, 2), ("sdpa", 2, 2), ("sdpa", 1, 4)]
    plan += [("flash_attention_2", 2, 2), ("alone", 1, 2)]
    found = {}
    for attention, rows, sequence in plan:
        name = f"{attention} {rows}x{sequence}"
        children = []
        for rank in range(rows * sequence):
            children.append(os.fork())
            if not children[-1]:
                try:
                    play(name, attention, rank, rows, sequence)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert not any(codes), (name, codes)
        found[name] = json.loads(Path(folder, name).read_text())
    return found


if __name__ == "__main__":
    tasks = {"adapter": train_adapter, "rollout": compare_rollout, "ranks": compare_ranks}
    print(MARK + json.dumps(tasks[sys.argv[1]](*sys.argv[2:])))
