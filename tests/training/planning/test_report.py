from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training import precision
from spear_training.launch import compose_config
from spear_training.planning.architecture import read_known
from spear_training.planning.cli import plan
from spear_training.planning.fitting import tabulate_cards
from spear_training.planning.report import find_rewriting
from spear_training.settings import RunSettings
from tests.agents.test_metrics import write_launch
from tests.training.planning.test_architecture import LLAMA

GIB = 2**30
LORA = "actor_rollout_ref.model.lora_rank"
FSDP = "actor_rollout_ref.actor.fsdp_config"
DTYPE = f"{FSDP}.model_dtype"


def ask(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_a_plan_on_eight_gpus() -> None:
    made = ask("preset=alfworld_qwen2.5_7b", "cluster=8gpu", "--turns", "16", "--prompt-tokens", "900")
    parameters = 7_615_616_512
    assert made["parameters"] == parameters
    assert (made["step"]["episodes"], made["step"]["rows"]) == (256, 4096)
    assert made["texts"] == {"turns": 16, "prompt": 900, "response": 512, "written": 512, "positive": 0.5}
    update = {item["name"]: item["bytes"] for item in made["memory"]["update"]}
    assert update["weights"] == update["gradients"] == parameters / 2 and update["Adam"] == parameters
    rollout = {item["name"]: item["bytes"] for item in made["memory"]["rollout"]}
    assert rollout["engine's weights"] == parameters, "bfloat16 over two GPUs"
    cache = 0.6 * 80 * GIB - parameters
    assert rollout["key-value cache"] == pytest.approx(cache)
    assert made["memory"]["cache_tokens"] == pytest.approx(cache / (56 * 1024 / 2))
    assert made["memory"]["rollout_bytes"] == pytest.approx(sum(rollout.values()))


def test_rows_of_a_conversation_are_those_of_the_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.agents.test_transcript import make_tokenizer

    for family in ("Qwen3", "Qwen2.5"):
        make_tokenizer(family).save_pretrained(tmp_path / family)
        (tmp_path / family / "config.json").write_text(json.dumps(LLAMA))
    model = f"actor_rollout_ref.model.path={tmp_path / 'Qwen3'}"
    made = ask("preset=alfworld_qwen2.5_7b", "cluster=8gpu", "--turns", "16", "spear.env.layout=conversation", model)
    assert made["rewrites"] and made["step"]["rows"] == 4096
    config = compose_config(["preset=alfworld_qwen2.5_7b"], Path("plan"), check=False)
    settings = RunSettings.from_config(config)
    assert find_rewriting(config, settings, str(tmp_path / "Qwen2.5")) is False
    assert find_rewriting(config, settings, str(tmp_path)) is None
    stripping = make_tokenizer("Qwen2.5")
    stripping.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    stripping.save_pretrained(tmp_path / "Qwen2.5")
    assert find_rewriting(config, settings, str(tmp_path / "Qwen2.5")) is False, (
        "few responses have blanks at their ends"
    )


def test_weights_and_optimiser_wait_elsewhere_on_one_gpu() -> None:
    made = ask("preset=alfworld_qwen2.5_1.5b", "cluster=1gpu")
    rollout = {item["name"]: item["bytes"] for item in made["memory"]["rollout"]}
    assert rollout["trainer's share"] == 0


def test_a_plan_counts_the_type_that_a_training_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for faster in (True, False):
        monkeypatch.setattr(precision, "prefers_bfloat16", lambda faster=faster: faster)
        made = ask("preset=alfworld_qwen2.5_1.5b", "cluster=cpu", "--device-memory", "64")
        rollout = {item["name"]: item["bytes"] for item in made["memory"]["rollout"]}
        widths.append(rollout["engine's weights"] / made["parameters"])
    assert widths == [2, 4]


@pytest.mark.parametrize("cluster", ["cpu", "cpu_vllm"])
def test_on_a_cpu_the_cache_is_held_while_the_engine_generates(cluster: str) -> None:
    given = () if cluster == "cpu" else ("actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.kv_cache_gib=1.5",)
    made = ask("preset=alfworld_smollm2", "actor_rollout_ref.model.path=smollm2-135m", f"cluster={cluster}", *given)
    update, rollout = ({item["name"]: item["bytes"] for item in made["memory"][name]} for name in ("update", "rollout"))
    assert "key-value cache" not in update and rollout["key-value cache"] > 0
    if given:
        assert rollout["key-value cache"] == 1.5 * GIB
        free = ask("preset=alfworld_smollm2", "actor_rollout_ref.model.path=smollm2-135m", f"cluster={cluster}")
        (cache,) = (item["bytes"] for item in free["memory"]["rollout"] if item["name"] == "key-value cache")
        assert cache >= GIB and cache != 1.5 * GIB
    assert update.keys() & rollout.keys() >= {"engine's weights", "processes"}


def test_what_does_not_fit_is_said() -> None:
    small = CliRunner().invoke(plan, ["preset=math_qwen3_32b_16k", "cluster=8gpu", "--device-memory", "40"])
    assert small.exit_code == 1 and "does not fit into 40.0 GiB" in small.output
    large = CliRunner().invoke(plan, ["preset=math_qwen3_32b_16k", "cluster=8gpu", "--device-memory", "192"])
    assert large.exit_code == 0 and "does not fit" not in large.output and "P = 32,762,123,264" in large.output
    cache = ["preset=alfworld_qwen2.5_7b", "cluster=1gpu", "--device-memory", "24", f"{LORA}=8", f"{DTYPE}=bfloat16"]
    assert CliRunner().invoke(plan, cache).exit_code == 1, "no room for the engine's cache"
    assert CliRunner().invoke(plan, [*cache, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8"]).exit_code == 0


@pytest.mark.parametrize(
    ("model", "gib", "settings", "fits"),
    [
        ("1.5b", "24", (), False),
        ("1.5b", "24", (f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), False),
        ("1.5b", "24", (f"{LORA}=32",), True),
        ("1.5b", "24", (f"{FSDP}.offload_policy=true",), True),
        ("1.5b", "24", (f"{FSDP}.offload_policy=true", "actor_rollout_ref.actor.strategy=fsdp"), False),
        ("1.5b", "24", (f"{LORA}=32", "algorithm=ppo"), False),
        ("1.5b", "24", (f"{LORA}=32", "spear.kl.coefficient=0.1"), True),
        ("1.5b", "48", (), True),
        ("7b", "80", (), False),
        ("7b", "80", (f"{LORA}=32",), True),
        ("7b", "80", (f"{FSDP}.offload_policy=true",), True),
    ],
)
def test_adapters_and_the_host_s_memory_are_counted_as_verl_uses_them(
    model: str, gib: str, settings: tuple[str, ...], fits: bool
) -> None:
    command = [f"preset=alfworld_qwen2.5_{model}", "cluster=1gpu", "--device-memory", gib, *settings]
    result = CliRunner().invoke(plan, command)
    assert result.exit_code == (0 if fits else 1) and "Memory of a device" in result.output, result.output
    if not settings and not fits:
        told = " ".join(result.output.split())
        assert f"what would fit is {LORA}=32" in told and f"{FSDP}.offload_policy=true" in told
        assert "ppo_max_token_len_per_gpu=2560" in told


def test_the_table_of_cards_in_the_docs_is_that_of_the_plan() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "gpu.md").read_text("utf-8")
    table = page.partition("<!-- cards -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    names = {name.rpartition("/")[2]: name for name in read_known()}
    cards = [int(cell.removesuffix(" GiB")) for cell in rows[0][1:]]
    assert cards == [16, 24, 40, 48, 80, 141] and len(rows) > 7
    assert rows[2:] == tabulate_cards([names[row[0]] for row in rows[2:]], cards, 4096)


def test_a_plan_says_how_each_number_is_made() -> None:
    output = CliRunner().invoke(plan, ["preset=math", "cluster=8gpu"], env={"COLUMNS": "140"}).output
    for words in (
        "128 tasks × 16",
        "one for each episode",
        "prompt 2048 + response 16384",
        "rows × 0.75",
        "first replay                  step 4",
        "Memory: unknown without a model; add actor_rollout_ref.model.path=FOLDER",
    ):
        assert words in output


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (("preset=demo", "algorithm=grpo"), "Replay: none"),
        (("preset=demo", "--positive", "0"), "Replay: none"),
        (("preset=demo", "spear.replay.capacity=1000000"), "Replay: never"),
    ],
)
def test_a_training_without_replay(choices: tuple[str, ...], expected: str) -> None:
    assert expected in CliRunner().invoke(plan, list(choices), catch_exceptions=False).output


def test_lengths_come_from_another_run(tmp_path: Path) -> None:
    step = {"rows/total": 60.0, "rows/trained": 40.0, "turns/mean": 7.5, "replay/dropped_nonpositive": 10.0}
    step |= {"tokens/prompt": 2400.0, "tokens/response": 180.0, "tokens/written": 120.0, "training/global_step": 1}
    write_launch(tmp_path, 0, (1, step))
    made = ask("preset=demo", "--like", str(tmp_path), "--turns", "5")
    assert made["texts"] == {"turns": 5, "prompt": 40, "response": 3, "written": 2, "positive": 0.75}
    assert made["step"]["rows"] == 128 * 5


def test_a_folder_without_metrics_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="lacks metrics of a training step"):
        CliRunner().invoke(plan, ["--like", str(tmp_path)], catch_exceptions=False)


def test_a_mistake_is_told_as_by_the_training() -> None:
    with pytest.raises(SpearError, match="did you mean demo"):
        CliRunner().invoke(plan, ["preset=demoo"], catch_exceptions=False)
    with pytest.raises(SpearError, match=r"data\.train_batch_size must be a number, not 'many'"):
        CliRunner().invoke(plan, ["preset=demo", "data.train_batch_size=many"], catch_exceptions=False)
