"""Programs of all kinds: those that play, and those that fail, hang, never ask or never stop."""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
pytest.importorskip("httpx", reason="needs the extra 'api'")

import httpx

from spear_agents.engines.base import ChatByteTokenizer, EngineFault, EngineFaultKind
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine
from spear_agents.gateway import programs as loop
from spear_agents.gateway.programs import AgentTask, ProgramPlayer, load_program
from spear_agents.gateway.server import Gateway
from spear_agents.gateway.session import NO_STEP, Limits
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, StopReason, Trajectory
from spear_agents.viewer.gif import replay_frames
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from tests.agents.corridor import CorridorEnv
from tests.agents.gateway.programs import KeepingEngine, Sampling, play_program


def ask(task: AgentTask, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return httpx.post(
        f"{task.base_url}/chat/completions",
        json={"model": task.model, "messages": messages, **fields},
        headers={"Authorization": f"Bearer {task.api_key}"},
        timeout=20,
    )


def walk(task: AgentTask) -> None:
    """A plain program: each response is played as a call of the tool."""
    messages = [{"role": "user", "content": task.prompt}]
    while not task.done:
        text = ask(task, messages).json()["choices"][0]["message"]["content"]
        shown = task.call("act", {"action": text})
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]


def test_a_program_wins_and_its_calls_are_one_row() -> None:
    engine = KeepingEngine("go")
    (played,) = play_program(walk, engine)
    assert (played.stop, played.won, played.layout) == (StopReason.WON, True, Layout.CONVERSATION)
    assert [turn.action for turn in played.turns] == ["go", "go"]
    assert [turn.follows for turn in played.turns] == [None, 0]
    (row,) = played.rows()
    (first, said), (second, last) = engine.kept
    assert row.prompt_ids == first and (*row.prompt_ids, *row.response_ids) == (*second, *last.token_ids)
    assert sum(row.response_mask) == len(said.token_ids) + len(last.token_ids)
    assert played.turns[-1].reward == 1.0 and played.reward == pytest.approx(1.0 + 0.1)
    assert Trajectory.from_json(played.to_json()) == played


ENVIRONMENTS = {
    "spear/ALFWorld-v0": {"rooms": "small"},
    "spear/WebShop-v0": {},
    "spear/Sokoban-v1": {"modality": "text"},
    "spear/CodeInterpreter-v0": {},
    "spear/SearchR1-v0": {},
}


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_our_own_loop_through_the_gateway_is_our_own_loop(env_id: str) -> None:
    """The same prompts, tokens, log-probabilities, rewards and reward terms, turn by turn."""
    envs = [InfoWatch(make_env(env_id, keywords=ENVIRONMENTS[env_id])) for _ in range(2)]
    core: Any = envs[0].unwrapped
    prompts = PromptBuilder(ChatByteTokenizer(), core.templates["default"], Layout.CONVERSATION)
    engines = [ScriptedEngine(NoisyExpert(env, prompts.template), ChatByteTokenizer()) for env in envs]
    wanted = {"task_id": core.tasks[0].id, "sampling": Sampling(), "seed": 3, "env_id": env_id}

    async def play_both() -> tuple[Trajectory, Trajectory]:
        direct = await play_episode(envs[0], engines[0], prompts, **wanted)
        gateway = Gateway()
        await gateway.start()
        try:
            through = await ProgramPlayer(loop.play, gateway)(envs[1], engines[1], prompts, **wanted)
        finally:
            await gateway.aclose()
        return direct, through

    direct, through = asyncio.run(play_both())
    assert direct.won and len(direct.turns) > 1
    assert direct.list_steps() == through.list_steps()
    assert direct == replace(through, steps=None)
    assert direct.rows() == through.rows()


def test_async_programs_and_functions_made_of_tools() -> None:
    async def play(task: AgentTask) -> None:
        (act,) = task.functions
        assert act.__name__ == "act" and list(inspect.signature(act).parameters) == ["action"]
        assert task.tools[0]["function"]["name"] == "act"
        assert "_P_" in await act(action="go") and not task.done
        assert await task.call("act", {"wrong": "go"}) == "act takes no argument 'wrong': it takes action."
        assert "There is no tool 'atc'" in await task.call("atc", {"action": "go"})
        await act("go")  # as openai-agents calls it
        assert task.done

    (played,) = play_program(play, KeepingEngine())
    assert played.won and played.turns == () and played.rows() == []


def test_calls_without_a_step_and_steps_between_calls() -> None:
    def play(task: AgentTask) -> None:
        for _ in range(2):
            ask(task, [{"role": "user", "content": "think"}])
        for action in ("go", "nonsense", "go"):
            task.step(action)

    (played,) = play_program(play, KeepingEngine("hm"))
    assert [turn.action for turn in played.turns] == [NO_STEP, "go; nonsense; go"]
    assert [turn.action_ok for turn in played.turns] == [False, True]
    assert [turn.reward for turn in played.turns] == [0.0, pytest.approx(1.0 - 0.2)]
    assert len(played.rows()) == 2
    assert [place for place, _ in played.list_steps()] == [1, 1, 1]
    assert Trajectory.from_json(played.to_json()) == played


def test_what_a_program_played_is_played_again() -> None:
    def play(task: AgentTask) -> None:
        task.step("up")
        ask(task, [{"role": "user", "content": "x"}])
        for action in ("down", "left"):
            task.step(action)
        ask(task, [{"role": "user", "content": "x"}])

    keywords = {"modality": "text", "response_format": "plain"}
    env = make_env("spear/Sokoban-v1", keywords=keywords)
    core: Any = env.unwrapped
    (played,) = play_program(play, KeepingEngine(), env=env, task=core.tasks[0].id, env_id="spear/Sokoban-v1")
    assert [turn.action for turn in played.turns] == ["down; left", NO_STEP]
    frames = replay_frames("spear/Sokoban-v1", {"response_format": "plain"}, played)
    assert len(frames) == 3 and (frames[1] == frames[2]).all()


@pytest.mark.parametrize("modality", ["image", "both"])
def test_prompts_with_pictures_are_refused(modality: str) -> None:
    env = make_env("spear/Sokoban-v1", keywords={"modality": modality, "response_format": "plain"})
    with pytest.raises(SpearError, match="pictures"):
        play_program(lambda task: None, KeepingEngine(), env=env, task=env.tasks[0].id)


def give_up(task: Any) -> None:
    """A program whose own request took too long for it."""
    raise asyncio.TimeoutError


@pytest.mark.parametrize(
    ("program", "stop", "fault"),
    [
        (lambda task: None, StopReason.QUIT, None),
        (lambda task: [][0], StopReason.FAULT, "agent_failed"),
        (lambda task: exit(3), StopReason.FAULT, "agent_failed"),
        (lambda task: time.sleep(30), StopReason.FAULT, "agent_timeout"),
        (give_up, StopReason.FAULT, "agent_failed"),
        (lambda task: task.step("break"), StopReason.FAULT, "collapse"),
    ],
)
def test_programs_that_do_not_play(program: Any, stop: StopReason, fault: str | None, caplog: Any) -> None:
    (played,) = play_program(program, KeepingEngine(), limits=Limits(seconds=0.5 if fault == "agent_timeout" else 20))
    assert (played.stop, played.fault, played.won) == (stop, fault, False)
    assert played.reward == (0.0 if fault else -1.0)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == (fault is not None and fault.startswith("agent"))


def test_an_async_program_that_waits_is_woken_and_one_that_hangs_holds_up_no_other() -> None:
    ended, over = threading.Event(), threading.Event()

    async def play(task: AgentTask) -> None:
        if not ended.is_set():
            ended.set()
            over.wait(60)  # blocks its own loop
        try:
            await task.step("go")
            await asyncio.sleep(60)
        finally:
            ended.set()

    start = time.monotonic()
    played = play_program(play, KeepingEngine(), limits=Limits(seconds=0.7), episodes=4)
    assert time.monotonic() - start < 30
    over.set()
    assert [one.fault for one in played] == ["agent_timeout"] * 4


def test_a_step_under_way_is_waited_for_before_the_environment_is_somebody_else_s() -> None:
    class Slow(CorridorEnv):
        metadata: ClassVar[dict[str, Any]] = {**CorridorEnv.metadata, "blocking": True}
        busy = False

        def _act(self, action: str) -> Any:
            self.busy = True
            time.sleep(0.8)
            self.busy = False
            return super()._act(action)

    env = Slow(response_format="plain")
    (played,) = play_program(lambda task: task.step("go"), KeepingEngine(), env=env, limits=Limits(seconds=0.2))
    assert played.fault == "agent_timeout" and not env.busy

    async def wait(task: Any) -> None:
        await task.step("go")

    (played,) = play_program(wait, KeepingEngine(), env=env, limits=Limits(seconds=0.2))
    assert played.fault == "agent_timeout" and not env.busy

    async def hurry(task: Any) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(task.step("go"), 0.1)
        assert env.busy
        await task.step("back")  # begins when the other has ended
        assert env.turn == 2

    (played,) = play_program(hurry, KeepingEngine(), env=env, limits=Limits(seconds=20))
    assert played.fault is None


def test_an_error_after_the_end_costs_nothing() -> None:
    def play(task: AgentTask) -> None:
        walk(task)
        late = ask(task, [{"role": "user", "content": "more"}])
        assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_ended")
        with pytest.raises(SpearError, match="has ended"):
            task.step("go")
        raise ValueError("whatever")

    (played,) = play_program(play, KeepingEngine("go"))
    assert played.won and played.fault is None and len(played.turns) == 2


def test_calls_are_counted_and_bounded() -> None:
    def play(task: AgentTask) -> None:
        while (reply := ask(task, [{"role": "user", "content": "x"}])).status_code == 200:
            pass
        assert reply.status_code == 410 and "used up its 3 calls" in reply.json()["error"]["message"]

    (played,) = play_program(play, KeepingEngine(), limits=Limits(calls=3))
    assert len(played.turns) == 3 and played.stop is StopReason.QUIT


def test_an_engine_s_fault_is_told_and_counts_if_nothing_came_after_it() -> None:
    class Broken(KeepingEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            if not self.samplings or len(self.samplings) > 1:
                self.samplings.append(args[1])
                raise EngineFault(EngineFaultKind.TIMEOUT, "too slow")
            return await super().generate(*args, **kwargs)

    def play(task: AgentTask) -> None:
        codes = [ask(task, [{"role": "user", "content": "x"}]).status_code for _ in range(tries)]
        assert codes == [503, 200, 503][:tries]

    for tries, stop in ((2, StopReason.QUIT), (3, StopReason.FAULT)):
        (played,) = play_program(play, Broken())
        assert (played.stop, len(played.turns)) == (stop, 1)
        assert played.fault == ("engine_timeout" if tries == 3 else None)


def test_a_conversation_that_grows_too_long_is_told_and_is_no_other_end() -> None:
    errors: list[Any] = []

    def play(task: AgentTask) -> None:
        messages = [{"role": "user", "content": "x" * 30}]
        while (reply := ask(task, messages)).status_code == 200:
            messages += [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "y" * 10}]
        errors.append(reply.json()["error"])

    (played,) = play_program(play, KeepingEngine("hm"), max_prompt_tokens=40, max_row_tokens=40)
    assert errors[0]["code"] == "context_length_exceeded" and played.stop is StopReason.CONTEXT_LIMIT
    (row,) = played.rows()
    assert len(row.prompt_ids) <= 40 and 28 < len(row.response_ids) <= 40
    assert played.reward == -1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("walk", r"FILE\.py:FUNCTION or MODULE:FUNCTION"),
        ("no_such_module:play", "cannot be imported"),
        ("tests.agents.gateway.programs:absent", "no function 'absent'"),
        ("broken_agent.py:play", "ZeroDivisionError"),
        ("absent.py:play", "FileNotFoundError"),
        ("ended_agent.py:play", "ends the program"),
        ("ended_agent:play", "ends the program"),
    ],
)
def test_a_program_that_is_not_there(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_agent.py").write_text("1 / 0\n")
    (tmp_path / "ended_agent.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpearError, match=words):
        load_program(name)


def test_a_broken_engine_or_environment_ends_the_run() -> None:
    class Broken(KeepingEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(SpearError, match="the engine failed: ZeroDivisionError"):
        play_program(walk, Broken())
    with pytest.raises(SpearError, match="turn 1: the environment broke: ZeroDivisionError"):
        play_program(lambda task: task.step("bug"), KeepingEngine())


def test_tools_want_bare_actions() -> None:
    def play(task: AgentTask) -> None:
        with pytest.raises(SpearError, match="response_format=plain"):
            task.call("act", {"action": "go"})

    (played,) = play_program(play, KeepingEngine(), env=CorridorEnv())
    assert played.fault is None
