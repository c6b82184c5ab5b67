"""Updates of the same rows by our engine, verl's and plain transformers: ``python -m THIS TASK ROWS MODEL OPTIONS``.

``update`` alternates the arms in one process and prints a line of JSON for each. ``step`` is what a script without Ray
and verl does in a step of the demo: it generates the responses turn by turn, then makes one pass over the rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

if __name__ == "__main__":
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin"}

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RATE = 1e-9
"""Learning rate: every round is to find the same policy."""
DUAL = 10.0
"""Factor of the dual clip, our default."""
Numbers = dict[str, np.ndarray]


def load_rows(path: str) -> Numbers:
    """Read rows: ``prompts`` and ``responses`` [N] count tokens, ``ids`` are theirs, ``mask`` is of response tokens."""
    with np.load(path) as file:
        return dict(file)


def update(rows: Numbers, model: str, options: dict[str, Any]) -> None:
    """Time an optimiser step of each arm, round by round; the first round warms up and is not printed."""
    import torch.distributed as dist
    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    from spear_training.algorithms import RowTable, SpearSettings, weigh_rows
    from spear_training.verl_plugin.actor import STEERING, actor_loss
    from spear_training.verl_plugin.queue import build_columns, find_predictions, nest_flat
    from spear_training.verl_plugin.workers import CpuEngine, CpuLanguageModelEngine

    class VerlEngine(CpuEngine, FSDPEngineWithLMHead):
        """verl's own engine of a policy, which our platform lets run on a CPU."""

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    prompts, responses, mask = rows["prompts"], rows["responses"], rows["mask"] > 0
    count, tokens = len(prompts), np.add.reduceat(mask, np.cumsum(responses) - responses)
    asked = {
        "temperature": 1.0, "calculate_entropy": False, "use_dynamic_bsz": True, "pad_token_id": 0,
        "max_token_len_per_gpu": options["tokens"], "global_batch_size": count,
    }  # fmt: skip

    buckets = {"pad_to_length": True, "pad_to_length_bucket": 256}  # what our launcher chooses

    def open_engine(kind: Any, *, packed: bool, **more: Any) -> Any:
        engine = kind(
            HFModelConfig(
                path=model, load_tokenizer=False, use_remove_padding=packed, enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"}, **more,
            ),
            FSDPEngineConfig(
                strategy="fsdp2", use_torch_compile=False,
                mixed_precision={"param_dtype": options["dtype"], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                **(buckets if packed and options["dtype"] == "bf16" else {}),
            ),
            FSDPOptimizerConfig(lr=RATE, total_training_steps=1000, weight_decay=0.0),
            CheckpointConfig(),
        )  # fmt: skip
        engine.initialize()
        return engine

    def make_columns(*, packed: bool) -> TensorDict:
        columns = build_columns(RowTable(prompt_length=prompts, response_length=responses, ids=rows["ids"], mask=mask))
        tu.assign_non_tensor(columns, use_remove_padding=packed, **asked)
        return columns

    lora = {"lora_rank": 16, "lora_alpha": 32, "lora": {"merge": True}} if options["lora"] else {}
    ours = open_engine(CpuLanguageModelEngine, packed=True, **lora)
    with ours.eval_mode():
        scored = ours.infer_batch(make_columns(packed=True), loss_function=None)["model_output"]["log_probs"]
    old = scored.values()[find_predictions(prompts, responses)].float() * torch.from_numpy(mask)
    settings = SpearSettings.from_mapping({"cov": {"ratio": 0.0}, "clip": {"dual": DUAL}})
    weight = weigh_rows(tokens, np.zeros(count, bool), mode="token-mean", loss_scale_factor=1.0)
    steering = np.stack([rows["advantage"], weight, np.zeros(count), np.arange(count)], 1)

    def step_ours() -> float:
        batch = make_columns(packed=True)
        batch["old_log_probs"] = nest_flat(old, responses)
        batch[STEERING] = torch.from_numpy(steering)
        tu.assign_non_tensor(batch, gamma=0.0, cov_lower=float("nan"), cov_upper=float("nan"))
        with ours.train_mode():
            return float(ours.train_batch(batch, partial(actor_loss, settings))["metrics"]["grad_norm"])

    arms: dict[str, Callable[[], float]] = {"ours": step_ours}
    if options["lora"]:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(network, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        arms["plain"] = partial(step_plainly, adapted, rows, old.numpy(), options)
    else:
        verl = open_engine(VerlEngine, packed=False)
        config = ActorConfig(
            strategy="fsdp2", rollout_n=1, clip_ratio_c=DUAL, use_dynamic_bsz=True, use_torch_compile=False
        )

        def step_verl() -> float:
            batch = make_columns(packed=False)
            ends = np.cumsum(prompts + responses)
            ids = torch.from_numpy(rows["ids"].astype(np.int64))
            flat = [
                ids[end - own - ahead : end - own] for end, own, ahead in zip(ends, responses, prompts, strict=True)
            ]
            answers = [ids[end - own : end] for end, own in zip(ends, responses, strict=True)]
            batch["prompts"], batch["responses"] = (
                nest_flat(torch.cat(parts), lengths) for parts, lengths in ((flat, prompts), (answers, responses))
            )
            batch["response_mask"] = batch["loss_mask"]
            batch["old_log_probs"] = nest_flat(old, responses)
            advantages = np.repeat(rows["advantage"], responses).astype(np.float32)
            batch["advantages"] = nest_flat(torch.from_numpy(advantages), responses)
            with verl.train_mode():
                return float(verl.train_batch(batch, partial(ppo_loss, config))["metrics"]["grad_norm"])

        arms["verl"] = step_verl
    for number in range(options["rounds"] + 1):
        for name, step in arms.items():
            start = time.perf_counter()
            norm = step()
            if number:
                print(json.dumps({"arm": name, "seconds": time.perf_counter() - start, "norm": norm}), flush=True)


def cut_batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Cut rows in their order into padded batches of at most ``tokens``."""
    batches: list[list[int]] = [[]]
    longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, int(length))
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = int(length)
        batches[-1].append(row)
    return [np.array(batch) for batch in batches]


def step_plainly(model: Any, rows: Numbers, old: np.ndarray, options: dict[str, Any]) -> float:
    """One GRPO step as a plain script of transformers makes it: padded batches, logits everywhere, AdamW."""
    if not hasattr(model, "optimizer"):
        trained = [value for value in model.parameters() if value.requires_grad]
        model.optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
        model.train()
    ends, starts = np.cumsum(rows["prompts"] + rows["responses"]), np.cumsum(rows["responses"]) - rows["responses"]
    total = float(rows["mask"].sum())
    for batch in cut_batches(rows["prompts"] + rows["responses"], options["tokens"]):
        width = int((rows["prompts"] + rows["responses"])[batch].max())
        ids, seen = torch.zeros(len(batch), width, dtype=torch.long), torch.zeros(len(batch), width, dtype=torch.long)
        learnt, before = torch.zeros(len(batch), width), torch.zeros(len(batch), width)
        for place, row in enumerate(batch):
            prompt, own = int(rows["prompts"][row]), int(rows["responses"][row])
            ids[place, : prompt + own] = torch.from_numpy(
                rows["ids"][ends[row] - prompt - own : ends[row]].astype(np.int64)
            )
            seen[place, : prompt + own] = 1
            part = slice(starts[row], starts[row] + own)
            learnt[place, prompt : prompt + own] = torch.from_numpy(rows["mask"][part].astype(np.float32))
            before[place, prompt : prompt + own] = torch.from_numpy(old[part].astype(np.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=options["dtype"] == "bf16"):
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
        scores = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (scores - before[:, 1:]).exp()
        advantage = torch.from_numpy(rows["advantage"][batch]).float()[:, None]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        ((loss * learnt[:, 1:]).sum() / total).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    model.optimizer.step()
    model.optimizer.zero_grad()
    return norm


def step(rows: Numbers, model: str, options: dict[str, Any]) -> None:
    """Generate all responses and make one pass over their rows; prints the seconds of both, round by round."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(model)
    starts = np.cumsum(rows["prompts"] + rows["responses"]) - rows["prompts"] - rows["responses"]
    prompts = [rows["ids"][start : start + own].tolist() for start, own in zip(starts, rows["prompts"], strict=True)]
    for number in range(options["rounds"] + 1):
        begin = time.perf_counter()
        network.eval()
        for turn in range(int(rows["turn"].max()) + 1):
            asked = [prompts[row] for row in np.flatnonzero(rows["turn"] == turn)]
            width = max(map(len, asked))
            ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in asked])
            seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])
            with torch.no_grad():
                network.generate(
                    ids, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=options["most"],
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
        middle = time.perf_counter()
        network.train()
        step_plainly(network, rows, rows["old"], options)
        if number:
            print(json.dumps({"generate": middle - begin, "learn": time.perf_counter() - middle}), flush=True)


if __name__ == "__main__":
    chosen = json.loads(sys.argv[4])
    torch.set_num_threads(chosen["threads"])
    {"update": update, "step": step}[sys.argv[1]](load_rows(sys.argv[2]), sys.argv[3], chosen)
