"""verl's own tool loop with our tools: a real sandbox, a real retriever, and a server of models that says a script."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from spear_envs.code.feedback import TOOL_FAILED
from spear_envs.core.errors import SpearError
from spear_envs.search.embedded import open_base
from spear_training.verl_tools import CALLS, FAULTS, CodeInterpreterTool, SearchTool
from tests import commands
from tests.calling_policy import make_policy
from tests.sandbox.service import need_isolation

TOOLS_FILE = Path("training/spear_training/config/tools.yaml")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes, and a chat template of Qwen's form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


class Script:
    """verl's client of model servers, whose model says what is in a list."""

    def __init__(self, tokenizer: Any, *responses: str) -> None:
        self.tokenizer = tokenizer
        self.responses = list(responses)
        self.prompts: list[str] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer(self.responses.pop(0) + "<|im_end|>", add_special_tokens=False)["input_ids"]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"max_global_steps": 1})


def play(tokenizer: Any, tools: list[Any], question: str, *responses: str, **settings: Any) -> tuple[Any, Script]:
    """An episode of verl's loop: its output, and the model's side."""
    turns = {"max_user_turns": 8, "max_assistant_turns": 8, "max_parallel_calls": 1, "max_tool_response_length": 4096}
    multi_turn = {**turns, "tool_response_truncate_side": "middle", "format": "hermes", **settings}
    rollout = {"prompt_length": 4096, "response_length": 16384, "full_determinism": False, "multi_turn": multi_turn}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    script = Script(tokenizer, *responses)

    async def run() -> Any:
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=script,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap(tools),
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": question}])

    return asyncio.run(run()), script


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[commands.RunningCommand, commands.RunningCommand]]:
    need_isolation()
    with commands.run_command("sandbox") as sandbox, commands.run_command("retriever") as retriever:
        yield sandbox, retriever


@pytest.fixture(scope="module")
def tools(services: Any) -> list[Any]:
    """What an agent-loop worker of verl makes of our file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAR_SANDBOX_URL", services[0].url)
        patch.setenv("SPEAR_RETRIEVER_URL", services[1].url)
        return load_all_tools(tool_config_path=str(commands.ROOT / TOOLS_FILE), function_tool_path=None)


def test_a_program_and_a_search_on_real_services(tokenizer: Any, tools: list[Any]) -> None:
    assert [tool.name for tool in tools] == ["code_interpreter", "search"]
    passage = open_base("standard").corpus[7]
    title = passage["contents"].partition("\n")[0]
    output, script = play(
        tokenizer,
        tools,
        "What is it?",
        "I compute. " + call("code_interpreter", code="```python\nprint(sum(range(101)), 'é')\n```"),
        call("code_interpreter", code="1 / 0"),
        call("search", query=title),
        "It is 5050.",
    )
    assert "code_interpreter" in script.prompts[0] and script.prompts[0].endswith("assistant\n")
    assert "<|im_start|>tool\n5050 é<|im_end|>" in script.prompts[1]
    assert "ZeroDivisionError" in script.prompts[2] and "Errors occurred! Check your code." in script.prompts[2]
    assert f"<information>Doc 1(Title: {title})" in script.prompts[3]
    said = [i for i, mine in zip(output.response_ids, output.response_mask, strict=True) if mine]
    text = tokenizer.decode(said)
    assert text.startswith("I compute. <tool_call>") and "It is 5050." in text
    assert "5050 é" not in text and "Doc 1" not in text, "what a tool said has loss mask 0"
    assert len(output.response_logprobs) == len(output.response_ids)
    assert output.extra_fields[CALLS] == 3 and FAULTS not in output.extra_fields
    assert output.extra_fields["tool_rewards"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (call("code_interpreter", code=3), "'code' of code_interpreter is a text, not 3."),
        (call("code_interpreter"), "code_interpreter needs the argument 'code': a text."),
        (call("code_interpreter", code=" \n"), "Empty input argument"),
        (call("search", query=" "), "The query is empty"),
        (call("search", query="x" * 9_000), "at most 8,192 are searched"),
        (call("search", query="\ud800"), "<information>"),
        (call("nothing", query="x"), "Unknown function 'nothing'"),
    ],
)
def test_calls_that_make_no_sense_are_answered(tokenizer: Any, tools: list[Any], response: str, words: str) -> None:
    output, script = play(tokenizer, tools, "What?", response, "I give up.")
    assert words in script.prompts[1]
    assert FAULTS not in output.extra_fields


def test_a_sandbox_that_dies_is_a_fault_and_no_lesson(tokenizer: Any) -> None:
    need_isolation()
    with commands.run_command("sandbox") as running:
        tool = CodeInterpreterTool({"type": "native", "sandbox": running.url})
        running.process.kill()
        running.process.wait()
        responses = (call("code_interpreter", code="print(1)"), "I cannot tell.")
        output, script = play(tokenizer, [tool], "What?", *responses)
    assert f"<|im_start|>tool\n{TOOL_FAILED}<|im_end|>" in script.prompts[1]
    assert output.extra_fields[FAULTS] == 1 and CALLS not in output.extra_fields


def test_many_episodes_at_once_mix_nothing(tools: list[Any]) -> None:
    async def ask(number: int) -> str:
        response, _, _ = await tools[0].execute("", {"code": f"print({number} ** 2)"})
        return str(response.text)

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(number) for number in range(48)))

    assert asyncio.run(ask_all()) == [str(number**2) for number in range(48)]


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        (CodeInterpreterTool, {"sandbocks": None}, "Did you mean 'sandbox'"),
        (CodeInterpreterTool, {"feedback": "kind"}, "feedback='kind'"),
        (CodeInterpreterTool, {"time_limit": -1}, "time_limit=-1"),
        (CodeInterpreterTool, {"sandbox": "http://127.0.0.1:9"}, "code_interpreter does not answer"),
        (SearchTool, {"retriever": "bm52"}, "Did you mean 'bm25'"),
        # It is asked again for ten seconds.
        pytest.param(SearchTool, {"retriever": "http://127.0.0.1:9"}, "search does not answer", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_work_is_said_before_the_first_episode(kind: Any, config: dict[str, Any], words: str) -> None:
    """verl's loop would tell the model of it, and train on."""
    with pytest.raises(SpearError, match=words):
        kind({"type": "native", **config})


def test_without_services_the_worker_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    need_isolation()
    monkeypatch.delenv("SPEAR_SANDBOX_URL", raising=False)
    monkeypatch.delenv("SPEAR_RETRIEVER_URL", raising=False)
    code, search = load_all_tools(tool_config_path=str(commands.ROOT / TOOLS_FILE), function_tool_path=None)
    response, reward, _ = asyncio.run(code.execute("", {"code": "print(2 ** 10)"}))
    assert (response.text, reward) == ("1024", 0.0)
    response, _, _ = asyncio.run(search.execute("", {"query": "river"}))
    assert response.text.startswith("<information>")


ANSWER = "tool\n42\n"
"""What verl hands to a reward function has no special tokens."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    called = extra_info.get("tool_calls", 0) > 0
    return float(called and ground_truth in solution_str) - extra_info.get("tool_faults", 0)
"""


@pytest.mark.slow
def test_two_steps_of_training(tmp_path: Path, services: Any, tools: list[Any]) -> None:
    """verl's own command, trainer and loop; of ours the tools, their services, and the CPU under verl."""
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file
    from transformers.utils.chat_template_utils import render_jinja_template

    question = [{"role": "user", "content": "What is six times seven?"}]
    answers = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "<information>Doc 1"}]
    schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    prompts, _ = render_jinja_template(
        [question, *([*question, answer] for answer in answers)],
        tools=schemas,
        chat_template=TEMPLATE,
        add_generation_prompt=True,
    )
    calls = [call("code_interpreter", code="print(6 * 7)"), call("search", query="river")]
    pieces = [("<tool_call>", text[len("<tool_call>") : -len("</tool_call>")], "</tool_call>") for text in calls]
    model, tokenizer = make_policy(TEMPLATE, prompts, [*pieces, ("I stop here.",)])
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    row = {"prompt": question, "data_source": "sums", "reward_model": {"ground_truth": ANSWER}}
    Dataset.from_list([{**row, "extra_info": {"index": index}} for index in range(8)]).to_parquet(
        tmp_path / "rows.parquet"
    )
    (tmp_path / "reward.py").write_text(REWARD)

    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": tmp_path / "rows.parquet",
        "data.val_files": tmp_path / "rows.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 512,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": tmp_path / "policy",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3,
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 200,
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": commands.ROOT / TOOLS_FILE,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": tmp_path / "reward.py",
        "trainer.logger": "[file]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 2,
        "trainer.default_local_dir": tmp_path / "checkpoints",
        "trainer.rollout_data_dir": tmp_path / "episodes",
        "ray_kwargs.ray_init.num_cpus": 8,
        "hydra.run.dir": tmp_path,
    }
    verl = [sys.executable, "-m", "verl.trainer.main_ppo"]
    ours = ["hydra.searchpath=[pkg://spear_training.config]", "+cluster=cpu"]
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin",
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "SPEAR_SANDBOX_URL": services[0].url,
        "SPEAR_RETRIEVER_URL": services[1].url,
        "RAY_ADDRESS": "local",
        "RAY_raylet_start_wait_time_s": "120",
    }
    done = subprocess.run(
        [*verl, *ours, *(f"{key}={value}" for key, value in settings.items())],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-6000:]

    steps = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [(tmp_path / "episodes" / f"{step}.jsonl").read_text().splitlines() for step in (1, 2)]
    episodes = [json.loads(line) for line in chain(*lines)]
    assert len(episodes) == 2 * 4 * 4 and len(steps) == 2
    scores = [episode["score"] for episode in episodes]
    assert scores == [float(ANSWER in episode["output"]) for episode in episodes] and set(scores) == {0.0, 1.0}
    assert any("tool\n<information>Doc 1(Title: " in episode["output"] for episode in episodes)
    assert max(step["actor/grad_norm"] for step in steps) > 0
    trained = load_file(tmp_path / "checkpoints" / "global_step_2" / "actor" / "huggingface" / "model.safetensors")
    before = load_file(tmp_path / "policy" / "model.safetensors")
    assert set(trained) == set(before)
    assert not any(torch.equal(trained[name], before[name]) for name in before if "_proj" in name)
