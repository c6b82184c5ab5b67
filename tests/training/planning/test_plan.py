import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.planning.cli import plan
from spear_training.planning.fitting import GPU_SHARE
from spear_training.planning.memory import Trainer, find_architecture, read_known

GIB = 2**30
LORA = "model.lora_rank"


def ask(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_a_plan_on_eight_gpus() -> None:
    made = ask("preset=alfworld_qwen2.5_7b", "cluster=8gpu", "--turns", "16", "--prompt-tokens", "900")
    parameters = 7_615_616_512
    assert made["parameters"] == parameters
    assert (made["step"]["episodes"], made["step"]["rows"]) == (256, 4096)
    assert made["step"]["row_tokens"] == 900 + 512 and made["step"]["written"] == 4096 * 512
    update = made["update"]
    assert update["weights"] == update["gradients"] == parameters / 2 and update["Adam"] == parameters
    rollout = made["rollout"]
    assert rollout["engine's weights"] == parameters, "bfloat16 over two GPUs"
    cache = 0.6 * 80 * GIB - parameters
    assert rollout["key-value cache"] == pytest.approx(cache)
    assert made["cache_tokens"] == pytest.approx(cache / (56 * 1024 / 2))


@pytest.mark.parametrize("cluster", ["cpu", "cpu_vllm"])
def test_on_a_cpu_the_cache_is_held_while_the_engine_generates(cluster: str) -> None:
    words = ("preset=alfworld_smollm2", "model.path=smollm2-135m", f"cluster={cluster}")
    words += ("rollout.dtype=bfloat16", "--device-memory", "16")  # else this CPU would choose
    given = () if cluster == "cpu" else ("rollout.kv_cache_gib=1.5",)
    made = ask(*words, *given)
    update, rollout = made["update"], made["rollout"]
    assert "key-value cache" not in update and rollout["key-value cache"] > 0
    if given:
        assert rollout["key-value cache"] == 1.5 * GIB
        free = ask(*words)
        cache = free["rollout"]["key-value cache"]
        assert cache >= GIB and cache != 1.5 * GIB
    assert update.keys() & rollout.keys() >= {"engine's weights", "processes"}


def test_the_cache_of_a_cpu_is_of_the_episodes_that_run_at_a_time() -> None:
    words = ("preset=alfworld_smollm2", "model.path=smollm2-135m", "rollout.dtype=float32", "--device-memory", "16")
    made = ask(*words)
    assert made["fits"], "32 episodes of a step and 64 of a validation, not rollout.max_requests=128"
    key_and_value = 2 * 30 * 3 * 64 * 4  # layers, heads, their size, float32
    assert made["rollout"]["key-value cache"] == 64 * 2048 * key_and_value
    assert ask(*words, "validation.tasks=8")["rollout"]["key-value cache"] == 32 * 2048 * key_and_value
    assert ask(*words, "rollout.max_requests=16")["rollout"]["key-value cache"] == 16 * 2048 * key_and_value


def test_ranks_of_a_cpu_share_its_memory() -> None:
    words = ("preset=alfworld_smollm2", "model.path=smollm2-135m", "rollout.dtype=float32", "--device-memory", "16")
    one, two = (ask(*words, f"cluster.gpus_per_node={ranks}") for ranks in (1, 2))
    assert one["device_bytes"] == 16 * GIB == 2 * two["device_bytes"]
    assert one["update"]["weights"] == 2 * two["update"]["weights"]
    assert one["rollout"]["engine's weights"] == two["rollout"]["engine's weights"], "each rank has an engine"
    for name in ("processes", "key-value cache"):
        assert one["rollout"][name] == 2 * two["rollout"][name]


def test_a_reference_policy_stays_on_a_cpu_while_it_generates() -> None:
    words = ("preset=alfworld_smollm2", "model.path=smollm2-135m", "rollout.dtype=float32", "--device-memory", "24")
    without, with_one = (ask(*words, f"kl.coefficient={beta}")["rollout"]["trainer's share"] for beta in (0.0, 0.1))
    assert with_one - without == 4 * 134_515_008


def test_a_cache_has_no_fewer_heads_than_gpus() -> None:
    made = ask("preset=alfworld_qwen2.5_1.5b", "cluster=8gpu", "rollout.tensor_parallel=4")
    token = 28 * 2 * 128 * 2  # layers, a key and a value, size of a head, bfloat16: one of the two heads on each GPU
    assert made["cache_tokens"] == pytest.approx(made["rollout"]["key-value cache"] / token)


def test_optimiser_steps_are_of_all_passes_over_the_groups_that_are_kept() -> None:
    words = ("preset=demo", "--turns", "1", "train.batch_size=100", "train.mini_batch_size=1", "filter.groups=0.29")
    assert ask(*words)["step"]["optimiser_steps"] == 29
    assert ask(*words, "train.epochs=2")["step"]["optimiser_steps"] == 58


DTYPE = "verl.actor_rollout_ref.actor.fsdp_config.model_dtype"


def test_what_does_not_fit_is_said() -> None:
    small = CliRunner().invoke(plan, ["preset=math_qwen3_32b_16k", "cluster=8gpu", "--device-memory", "40"])
    assert small.exit_code == 1 and "does not fit into" in small.output
    large = CliRunner().invoke(plan, ["preset=math_qwen3_32b_16k", "cluster=8gpu", "--device-memory", "192"])
    assert large.exit_code == 0 and "does not fit" not in large.output
    cache = ["preset=alfworld_qwen2.5_7b", "cluster=1gpu", "--device-memory", "24", f"{LORA}=8", f"{DTYPE}=bfloat16"]
    assert CliRunner().invoke(plan, cache).exit_code == 1, "no room for the engine's cache"
    assert CliRunner().invoke(plan, [*cache, "rollout.gpu_memory=0.8"]).exit_code == 0


@pytest.mark.parametrize(
    ("model", "gib", "settings", "fits"),
    [
        ("1.5b", "24", (), False),
        ("1.5b", "27", (), False),
        ("1.5b", "30", (), True),
        ("1.5b", "24", (f"{LORA}=32",), True),
        ("1.5b", "24", ("cluster.memory_saving=true",), True),
        ("1.5b", "24", ("cluster.memory_saving=true", "cluster.strategy=fsdp"), False),
        ("1.5b", "24", (f"{LORA}=32", "algorithm=ppo"), False),
        ("7b", "80", (f"{LORA}=32",), True),
    ],
)
def test_adapters_and_the_host_s_memory_are_counted_as_verl_uses_them(
    model: str, gib: str, settings: tuple[str, ...], fits: bool
) -> None:
    command = [f"preset=alfworld_qwen2.5_{model}", "cluster=1gpu", "--device-memory", gib, *settings]
    result = CliRunner().invoke(plan, command)
    assert result.exit_code == (0 if fits else 1) and "memory of an update" in result.output, result.output


WAYS = ("LoRA", "LoRA bf16", "all on host", "LoRA on host", "LoRA bf16 on host")
"""Ways to train with less memory than all weights in float32 take."""


def tabulate_cards(models: Sequence[str], cards: Sequence[int], tokens: int) -> list[list[str]]:
    """What fits on one card of so many GiB, for rows of ``tokens``: a row of cells for each model.

    A cell is ``all`` where all weights can be trained so, else how they or an adapter can be; ``–``: in no way.
    """
    table = []
    for name in models:
        model = find_architecture(name)
        whole = Trainer(model, 2)
        adapter, half = replace(whole, rank=32), replace(whole, rank=32, stored=2)
        on_host = (replace(way, on_host=True) for way in (whole, adapter, half))
        ways = [("all", whole), *zip(WAYS, (adapter, half, *on_host), strict=True)]
        generating = 2 * (model.parameters + tokens * model.cache_values)
        table.append([name.rpartition("/")[2]])
        for room in (GPU_SHARE * card * GIB for card in cards):
            fitting = [way for way, made in ways if max(made.measure(tokens), generating) <= room]
            firsts = (next((way for way in fitting if way.startswith(kind)), None) for kind in ("LoRA", "all"))
            table[-1].append("all" if "all" in fitting else "; ".join(filter(None, firsts)) or "–")
    return table


def test_the_table_of_cards_in_the_docs_is_that_of_the_plan() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "gpu.md").read_text("utf-8")
    table = page.partition("<!-- cards -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    names = {name.rpartition("/")[2]: name for name in read_known()}
    cards = [int(cell.removesuffix(" GiB")) for cell in rows[0][1:]]
    assert cards == [16, 24, 40, 48, 80, 141] and len(rows) > 7
    assert rows[2:] == tabulate_cards([names[row[0]] for row in rows[2:]], cards, 4096)


@pytest.mark.parametrize("limit", ["many", "-5", "2.7"])
def test_a_turn_limit_that_is_none_is_one_sentence(limit: str) -> None:
    with pytest.raises(SpearError, match="max_turns"):
        ask("preset=demo", f"env.kwargs.max_turns={limit}")
