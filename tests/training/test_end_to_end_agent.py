"""A training of two steps that is played by a program of the OpenAI SDK."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the distribution spear-training is not installed")
pytest.importorskip("openai", reason="needs the OpenAI SDK, which vLLM brings")

from tests.training.test_end_to_end_presets import run

pytestmark = pytest.mark.slow

PROGRAM = """
from openai import AsyncOpenAI


async def play(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    while not task.done:
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": await task.step(text)}]
"""


def test_two_steps_of_spear_by_a_program_of_the_sdk(tmp_path: Path) -> None:
    program = tmp_path / "my_agent.py"
    program.write_text(PROGRAM, "utf-8")
    training = ("preset=search_qwen2.5_7b", "model=tiny", "algorithm=grpo_spear", f"spear.agent={program}:play")
    steps = run(tmp_path / "run", *training)
    for metrics in steps.values():
        faults = {name: value for name, value in metrics.items() if name.startswith("fault")}
        assert not any(faults.values()), faults
        assert metrics["rollout/turns_per_episode"] > 1 if "rollout/turns_per_episode" in metrics else True
    print(json.dumps(steps[max(steps)], indent=1))
