"""The flow and the evaluator for rLLM, which no package index has: against its types where it is installed, else their
published form."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="rLLM brings it")

from spear_envs.adapters.rllm import RllmEvaluator, RllmFlow, make_rows
from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.making import make_env
from tests.spear_envs.adapters.conforming import compare_totals
from tests.spear_envs.adapters.episodes import SETTINGS, Episode, Script
from tests.spear_envs.adapters.scripted_model import ScriptedModel, run_model
from tests.spear_envs.corridor import CORRIDOR


@pytest.fixture(autouse=True)
def rllm(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("rllm") is not None:
        return
    for name, kinds in {"rllm": (), "rllm.types": ("Episode", "Trajectory"), "rllm.eval": (), "rllm.eval.types": (
        "EvalOutput", "Signal")}.items():  # fmt: skip
        module = ModuleType(name)
        for kind in kinds:
            setattr(module, kind, type(kind, (SimpleNamespace,), {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with run_model() as served:
        yield served


def ask(model: ScriptedModel, row: dict[str, Any]) -> Any:
    config = SimpleNamespace(base_url=model.url, model="m", session_uid="1:0")
    return asyncio.run(RllmFlow().arun(SimpleNamespace(id="1", metadata=row), config))


@pytest.mark.parametrize(
    ("count", "env_ids"),
    [
        (4, [CORRIDOR]),
        pytest.param(40, SETTINGS, marks=pytest.mark.nightly),
    ],
)
def test_conforms(model: ScriptedModel, count: int, env_ids: Any) -> None:
    def play(script: Script, episode: Episode, responses: list[str]) -> tuple[list[str], float | None, str | None]:
        model.begin(responses)
        row = {"env_id": script.env_id, "task": episode.task, "keywords": json.dumps(script.keywords)}
        try:
            found = ask(model, {"spear": row})
        except EnvFault as fault:
            return model.shown, None, fault.kind
        assert [trajectory.name for trajectory in found.trajectories] == ["spear"]
        return model.shown, RllmEvaluator().evaluate(None, found).reward, None

    assert compare_totals(play, count, env_ids) > count


def test_a_conversation_that_no_longer_fits_is_lost(model: ScriptedModel) -> None:
    (row,) = make_rows(CORRIDOR, 1)
    model.begin(["nonsense"])
    found = ask(model, row)
    output = RllmEvaluator().evaluate(None, found)
    assert found.artifacts["turn"] == 1 and not output.is_correct and output.reward <= 0


def test_thoughts_that_the_server_returns_separately_are_put_back(model: ScriptedModel) -> None:
    (row,) = make_rows(CORRIDOR, 1)
    env = make_env(CORRIDOR)
    env.reset(options={"task": row["spear"]["task"]})
    responses = [env.parser.respond(action, "On.") for action in env.expert_plan()]
    for splits in (False, True):
        model.splits = splits
        model.begin(responses)
        output = RllmEvaluator().evaluate(None, ask(model, row))
        assert output.is_correct and output.reward > 1, "won, in the right form"


def test_wrong_rows(model: ScriptedModel) -> None:
    (row,) = make_rows(CORRIDOR, 1)
    for wrong, text in (
        ({}, "column 'spear'"),
        ({"spear": row["spear"] | {"env_id": "spear/Nothing-v0"}}, "no environment"),
        ({"spear": row["spear"] | {"keywords": "[1]"}}, "JSON object"),
        ({"spear": row["spear"] | {"task": "x"}}, "x"),
    ):
        with pytest.raises(SpearError, match=text):
            ask(model, wrong)
    with pytest.raises(SpearError, match="use RllmEvaluator with RllmFlow"):
        RllmEvaluator().evaluate(None, SimpleNamespace(artifacts={}))
