"""TRL's trainer on our environments: the contract of ``environment_factory``, and two steps of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spear_envs.adapters.conversation import ENDED
from spear_envs.adapters.trl import TrlEnvironment, make_factory, make_rows
from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.making import make_env
from spear_envs.core.tools import CallError
from tests.calling_policy import make_policy
from tests.spear_envs.corridor import CORRIDOR, CorridorEnv

FIVE = ("spear/ALFWorld-v0", "spear/WebShop-v0", "spear/Sokoban-v1", "spear/SearchR1-v0", "spear/CodeInterpreter-v0")


@pytest.mark.parametrize("env_id", FIVE)
def test_the_expert_wins_by_calls_of_tools(env_id: str) -> None:
    keywords = {"modality": "text"} if "Sokoban" in env_id else {}
    made: Any = make_factory(env_id, **keywords)()
    (row,) = make_rows(env_id, 1, seed=4, **keywords)
    shown = made.reset(**row)
    twin = make_env(env_id, keywords={"response_format": "plain", **keywords})
    twin.reset(options={"task": row["task"]})
    assert twin.task.instruction.strip() in shown
    assert " or ".join(tool.name for tool in twin.tools) in shown, "the prompt names the tools"
    while not twin.done:
        action = twin.expert_plan()[0]
        name, arguments = next((tool.name, read) for tool in twin.tools if (read := tool.read(action)) is not None)
        shown = getattr(made, name)(**arguments)
        _, reward, *_ = twin.step(action)
    assert shown.endswith(ENDED) and twin.episode.won
    assert made.get_reward() == reward > 1
    assert getattr(made, name)(**arguments) == ENDED and made.get_reward() == reward


def test_methods_are_the_tools_and_nothing_else() -> None:
    """TRL offers every public method but ``reset`` and ``get_reward``."""
    for env_id, names in (("spear/SearchR1-v0", {"search", "answer"}), (CORRIDOR, {"act"})):
        made = make_factory(env_id)()
        public = {name for name in dir(type(made)) if not name.startswith("_")}
        assert public == {"reset", "get_reward", *names}
    assert type(made).__name__ == "CorridorEnv" and isinstance(made, TrlEnvironment)


def test_schemas_are_read_off_the_methods() -> None:
    transformers_utils = pytest.importorskip("transformers.utils", reason="transformers comes with the extra 'train'")
    for env_id in (*FIVE, CORRIDOR):
        made: Any = make_factory(env_id)()
        for tool in make_env(env_id, keywords={"response_format": "plain"}).tools:
            found = transformers_utils.get_json_schema(getattr(made, tool.name))
            assert {**found["function"], "return": None} == {**tool.schema()["function"], "return": None}


def write_tools(path: Path, *tools: tuple[str, str, dict[str, Any], list[str]]) -> dict[str, str]:
    """Tools of an MCP server, each with name, description, properties and what is required."""
    entries = [
        {"name": name, "description": about, "schema": {"type": "object", "properties": have, "required": needed}}
        for name, about, have, needed in tools
    ]
    path.with_suffix(".tools").write_text(json.dumps({"tools": entries}) + "\n")
    path.write_text(json.dumps({"instruction": "Look.", "reward": {"answer": "x"}}) + "\n")
    return {"tasks": str(path), "recording": str(path.with_suffix(".tools"))}


TEXT = {"type": "string"}


def test_tools_of_other_people(tmp_path: Path) -> None:
    """Descriptions with headings of their own, arguments that may be left out, and names that Python lacks."""
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    transformers_utils = pytest.importorskip("transformers.utils", reason="transformers comes with the extra 'train'")
    about = "Search mails.\n\n    Args:\n        query: words\n\n    Returns:\n        mails\n"
    have = {
        "limit": {"type": "integer", "default": 10, "description": "how many\nReturns: no more"},
        "query": {**TEXT, "description": "words (choices: any)"},
        "author": TEXT,
        "from": TEXT,
    }
    keywords = write_tools(tmp_path / "tasks.jsonl", ("search", about, have, ["query"]), ("bare", "", {"x": TEXT}, []))
    made: Any = make_factory("spear/McpTools-v0", **keywords)()
    found = transformers_utils.get_json_schema(made.search)["function"]["parameters"]
    assert list(found["properties"]) == ["query", "limit", "author"] and found["required"] == ["query"]
    assert found["properties"]["limit"] == {"type": "integer", "description": "how many Returns - no more"}
    assert transformers_utils.get_json_schema(made.bare)["function"]["description"] == "bare"
    made.reset(**make_rows("spear/McpTools-v0", 1, **keywords)[0])
    shown = made.search(query="x", author=None)
    assert "lacks the call search" in shown, "None stands for what is left out"


@pytest.mark.parametrize("name", ["reset", "get_reward", "_hidden"])
def test_tools_that_would_take_the_place_of_trls_own_methods(tmp_path: Path, name: str) -> None:
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    with pytest.raises(SpearError, match=name):
        make_factory("spear/McpTools-v0", **write_tools(tmp_path / "tasks.jsonl", (name, "", {}, [])))


def test_a_needed_argument_that_no_function_can_have(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    for argument in ("from", "to-day", "self"):
        keywords = write_tools(tmp_path / "tasks.jsonl", ("mail", "", {argument: TEXT}, [argument]))
        with pytest.raises(SpearError, match=argument):
            make_factory("spear/McpTools-v0", **keywords)


def test_rows() -> None:
    rows = make_rows(CORRIDOR, 10, seed=1)
    assert rows == make_rows(CORRIDOR, 10, seed=1) != make_rows(CORRIDOR, 10, seed=2)
    tasks = {task.id for task in make_env(CORRIDOR).tasks}
    assert len({row["task"] for row in rows}) == 10 and {row["task"] for row in rows} <= tasks
    assert {row["task"] for row in make_rows(CORRIDOR, 10**6)} == tasks
    with pytest.raises(SpearError, match="make_rows"):
        make_factory(CORRIDOR)().reset(prompt=[])


def test_an_unfinished_episode_is_lost_and_a_fault_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = make_factory(CORRIDOR)()
    assert made.get_reward() is None and made.act(action="left") == ENDED
    made.reset(seed=1)
    assert made.get_reward() == -1
    made.act(action="left")
    assert made.get_reward() == pytest.approx(-1 + 0.1)
    for wrong in ({"move": "left"}, {"action": 3}, {}, {"action": "left", "more": "x"}):
        with pytest.raises(CallError, match=r"act (takes|needs)|'action' of act"):
            made.act(**wrong)

    def fail(self: CorridorEnv, action: str) -> Any:
        raise EnvFault("service_down", "it is down")

    with monkeypatch.context() as patched:
        patched.setattr(CorridorEnv, "_act", fail)
        assert "it is down" in made.act(action="left") and made.get_reward() is None
    native: Any = make_factory(CORRIDOR, reward="native")()
    native.reset(seed=1)
    native.act(action="nothing")
    assert native.get_reward() == pytest.approx(-0.1)


def test_pictures_stand_where_the_text_has_their_place() -> None:
    made: Any = make_factory("spear/Sokoban-v1")()
    first, second = made.reset(seed=1), made.move(direction="up")
    for blocks in (first, second):
        assert [block["type"] for block in blocks[:3]] == ["text", "image", "text"]
        assert np.array_equal(np.asarray(blocks[1]["image"]).shape, (96, 96, 3))
    assert "Call move" in first[2]["text"] and "<image>" not in json.dumps([b.get("text") for b in first])


def make_caller(texts: list[str], act: Any) -> tuple[Any, Any]:
    """A tiny Qwen3 that calls ``act`` with ``left`` or ``right`` and knows nothing else, with Qwen3's chat template."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import render_jinja_template
    from trl.chat_template_utils import qwen3_chat_template

    conversations = [[{"role": "user", "content": text}] for text in texts[-3:]]
    prompts, _ = render_jinja_template(
        conversations, tools=[get_json_schema(act)], chat_template=qwen3_chat_template, add_generation_prompt=True
    )
    head, tail = '\n{"name": "act", "arguments": {"action": "', '"}}\n'
    responses = [("<tool_call>", head, word, tail, "</tool_call>") for word in ("left", "right")]
    return make_policy(qwen3_chat_template, prompts, responses, texts=texts)


@pytest.mark.slow
def test_two_steps_of_training(tmp_path: Path) -> None:
    """TRL's own loop generates, calls our tools, and trains on our rewards."""
    pytest.importorskip("trl", reason="TRL comes with the extra 'trl'")
    pytest.importorskip("jmespath", reason="TRL comes with the extra 'trl'")
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    factory = make_factory(CORRIDOR, length=5, max_turns=4)
    rows = make_rows(CORRIDOR, 8, length=5)
    probe: Any = factory()
    texts = [str(probe.reset(**row)) for row in rows] + [str(probe.act(action="left"))]
    model, tokenizer = make_caller(texts, probe.act)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    seen: list[tuple[str, list[str], float]] = []

    def watch(completions: list[Any], environments: list[Any], task: list[str], **_: Any) -> list[float]:
        for messages, environment, name in zip(completions, environments, task, strict=True):
            calls = [call for message in messages for call in message.get("tool_calls") or ()]
            actions = [call["function"]["arguments"]["action"] for call in calls if call["function"]["name"] == "act"]
            seen.append((name, actions, environment.get_reward()))
        return [0.0] * len(completions)

    settings = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=2,
        max_completion_length=600,
        max_tool_calling_iterations=5,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        environment_factory=factory,
        reward_funcs=[watch],
    )
    trainer.train()

    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert trainer.state.global_step == 2 and len(logs) == 2
    assert all(line["tools/call_frequency"] > 1 and line["tools/failure_frequency"] == 0 for line in logs)
    assert any(not torch.equal(before[name], value) for name, value in model.named_parameters())
    assert len(seen) == 16
    for start in range(0, 16, 4):
        assert len({name for name, _, _ in seen[start : start + 4]}) == 1, "a group plays one task"
    for name, actions, reward in seen:
        twin: Any = factory()
        twin.reset(task=name)
        for action in actions:
            twin.act(action=action)
        assert twin.get_reward() == pytest.approx(reward), "the reward is that of the calls"
    assert len({round(reward, 3) for _, _, reward in seen}) > 1
    means = [np.mean([reward for _, _, reward in seen[start : start + 8]]) for start in (0, 8)]
    assert [line["reward"] for line in logs] == pytest.approx(means, abs=1e-4)
