from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.code.env import NO_CODE, NOT_RUN
from spear_envs.core.errors import SpearError
from spear_envs.testing import check_spear_env
from spear_sandbox.protocol import FaultKind, KillReason, Limits, Outcome, RunStatus, SandboxFault
from tests.sandbox.service import RunningService, run_local
from tests.spear_envs.code.conftest import Subprocess, call, make, make_asking, make_outcome


def test_contract(isolated: Callable[..., Outcome]) -> None:
    check_spear_env(
        "spear/CodeInterpreter-v0", dataset="mini-small", split="valid", prelude="none", max_turns=4, resets=100
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"dataset": "mini-small", "reward": "native", "on_malformed": "peer"},
        {"grader": "math_verify", "feedback": "helpful", "split": "test"},
        {"grader": "strict", "feedback": "paper", "response_format": "plain", "split": "test"},
    ],
)
def test_contract_with_other_settings(kwargs: dict[str, Any], isolated: Callable[..., Outcome]) -> None:
    check_spear_env("spear/CodeInterpreter-v0", **kwargs)


def test_code_is_run_and_its_output_comes_back(tmp_path: Path) -> None:
    env = make_asking(tmp_path)
    observation, reward, terminated, truncated, info = env.step(call("print(6 * 7)\nprint(sqrt(4))"))
    assert (observation, reward, terminated, truncated) == ("42\n2.0", 0.0, False, False)
    assert info["action"] == "```python\nprint(6 * 7)\nprint(sqrt(4))\n```"
    assert (info["format_ok"], info["action_ok"], info["tool_calls"]) == (True, True, 1)
    assert (info["run"], info["return_code"], info["answer"]) == ("Finished", 0, None)
    observation, reward, terminated, truncated, info = env.step("So it is \\boxed{42}.")
    assert terminated and not truncated and info["won"] and info["score"] == 1.0
    assert (info["answer"], info["action"], info["run"]) == ("42", "\\boxed{42}", None)
    assert reward == pytest.approx(1.0 + 0.1)
    with pytest.raises(gym.error.ResetNeeded):
        env.step("\\boxed{42}")


def test_each_run_is_a_process_of_its_own(tmp_path: Path) -> None:
    env = make_asking(tmp_path)
    env.step(call("x = 1"))
    observation, *_, info = env.step(call("print(x)"))
    assert observation.endswith("NameError: name 'x' is not defined\nErrors occurred! Check your code.")
    assert (info["tool_calls"], info["action_ok"], info["return_code"]) == (2, True, 1), "it was executed all the same"


@pytest.mark.parametrize("response", ["", "It is 42.", "<think>\\boxed{42}", "\\boxed{42"])
def test_one_without_an_answer_too_and_its_turn_is_void(tmp_path: Path, response: str) -> None:
    env = make_asking(tmp_path)
    observation, reward, terminated, _, info = env.step(response)
    assert terminated and not info["won"] and reward == -1.0
    assert info["action"] == "" and not info["format_ok"] and not info["action_ok"]
    assert env.parsed.problem in observation


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>', "no tool 'python'"),
        (call(3), "'code' is not a string"),
        ("<code>print(1)", "never closed"),
    ],
)
def test_a_call_that_cannot_be_read_costs_a_turn(tmp_path: Path, response: str, words: str) -> None:
    env = make_asking(tmp_path)
    observation, reward, terminated, truncated, info = env.step(response)
    assert words in observation and env.parser.hint in observation
    assert (reward, terminated, truncated, info["turn"], info["tool_calls"]) == (0.0, False, False, 1, 0)
    assert info["action"] == "" and not info["format_ok"]
    peer = make_asking(tmp_path, on_malformed="peer")
    _, reward, terminated, _, info = peer.step(response)
    assert terminated and reward == -1.0 and not info["won"], "the authors' loop ends there"


@pytest.mark.parametrize("code", ["", "  \n", None, "```python\n```"])
def test_empty_code_is_no_tool_call(tmp_path: Path, code: Any) -> None:
    runner = Subprocess()
    env = make_asking(tmp_path, sandbox=runner)
    observation, *_, info = env.step(call(code))
    assert observation == "Empty input argument. You should pass your code into the function arguments."
    assert (info["tool_calls"], info["action_ok"], info["format_ok"], runner.programs) == (0, False, True, [])


def test_the_call_of_the_last_turn_is_not_run(tmp_path: Path) -> None:
    runner = Subprocess()
    env = make_asking(tmp_path, sandbox=runner, max_turns=2)
    env.step(call("print(1)"))
    observation, reward, terminated, truncated, info = env.step(call("print(2)"))
    assert observation == NOT_RUN and truncated and not terminated
    assert (info["tool_calls"], len(runner.programs)) == (1, 1)
    assert info["action"] and reward == pytest.approx(-1.0 + 0.1)


def test_long_output_is_cut_in_its_middle(tmp_path: Path) -> None:
    env = make_asking(tmp_path)
    observation, *_ = env.step(call("print('a' * 10_000 + 'b' * 10_000)"))
    assert observation == "a" * 8_192 + "\n... [3,616 characters cut] ...\n" + "b" * 8_192
    env = make_asking(tmp_path, observation_chars=20)
    assert len(env.step(call("print('a' * 10_000)"))[0]) < 60


@pytest.mark.parametrize(
    ("feedback", "text"),
    [
        ("spear", "Tool API failed! Please try again."),
        ("paper", "Tool API failed! Please try again."),
        ("helpful", "3\nTime limit of 2.5 s exceeded."),
    ],
)
def test_a_run_that_takes_too_long_is_the_policy_s_doing(tmp_path: Path, feedback: str, text: str) -> None:
    runner = Subprocess()
    runner.outcome = make_outcome("3\n", status=RunStatus.TIME_LIMIT, return_code=None, reason=KillReason.TIMEOUT)
    env = make_asking(tmp_path, sandbox=runner, feedback=feedback, time_limit=2.5, memory_mb=64)
    observation, *_, truncated, info = env.step(call("while True: pass"))
    assert observation == text and not truncated and info["fault"] is None
    assert (info["tool_calls"], info["run"], info["return_code"]) == (1, "TimeLimitExceeded", NO_CODE)
    assert runner.limits == [Limits(wall_s=2.5, memory_mb=64)]


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_sandbox_that_fails_is_a_fault(tmp_path: Path, kind: FaultKind) -> None:
    runner = Subprocess()
    env = make_asking(tmp_path, sandbox=runner)
    env.step(call("print(1)"))
    runner.fault = SandboxFault(kind, "it is gone")
    observation, reward, terminated, truncated, info = env.step(call("print(2)"))
    assert truncated and not terminated and reward == 0.0 and "it is gone" in observation
    assert (info["fault"], info["tool_calls"], info["score"]) == (kind.value, 1, 0.0)
    runner.fault = None
    env.reset(seed=0)
    assert env.step(call("print(1)"))[4]["fault"] is None


def test_what_a_person_must_mend_is_no_fault(tmp_path: Path) -> None:
    runner = Subprocess()
    runner.fault = ValueError("the token is not right")
    with pytest.raises(SpearError, match="the token is not right"):
        make_asking(tmp_path, sandbox=runner).step(call("print(1)"))


def test_nobody_answers_at_the_address(tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="needs the extra 'sandbox'")
    env = make_asking(tmp_path, sandbox="http://127.0.0.1:9")
    _, reward, _, truncated, info = env.step(call("print(1)"))
    assert truncated and reward == 0.0 and info["fault"] == "sandbox_unavailable"
    env.reset(seed=0)
    assert env.step("\\boxed{42}")[4]["won"], "an answer needs no sandbox"


def test_an_executor_of_one_s_own(tmp_path: Path) -> None:
    class Asynchronous:
        async def run(self, code: str, **kwargs: Any) -> Outcome:
            return make_outcome(f"{len(code)}\n")

        async def close(self) -> None:
            pass

    env = make_asking(tmp_path, sandbox=Asynchronous(), prelude="none")
    assert env.step(call("four"))[0] == "4"


def test_presets_and_limits() -> None:
    assert (make().max_turns, make(preset="16k").max_turns, make(preset="32k").max_turns) == (8, 8, 15)
    assert make(preset="32k", max_turns=3).max_turns == 3


def test_the_anchor_is_the_task_and_what_came_back(tmp_path: Path) -> None:
    env, other = make_asking(tmp_path), make_asking(tmp_path)
    start = env.reset(seed=0)[1]["anchor"]
    assert env.step("<tool_call>")[4]["anchor"] == start
    same = env.step(call("print(1)"))[4]["anchor"]
    assert same != start and other.step(call("print(2 - 1)"))[4]["anchor"] == same
    assert other.step(call("print(2 - 1)"))[4]["anchor"] != same
    mini = make()
    assert mini.reset(options={"task": mini.tasks[0].id})[1]["anchor"] != start


def test_the_expert_posts_the_code_and_boxes_what_it_printed() -> None:
    runner = Subprocess()
    env = make(sandbox=runner, prelude="none")
    env.reset(options={"task": "code/mini/train/00003"})
    reference = env.task.content["code"]
    assert env.expert_plan() == [f"```python\n{reference}\n```"]
    runner.outcome = make_outcome("1234\n")
    env.step(env.parser.respond(env.expert_plan()[0]))
    assert runner.programs == [reference] and env.expert_plan() == ["\\boxed{1234}"]
    *_, info = env.step(env.parser.respond(env.expert_plan()[0]))
    assert not info["won"] and env.expert_plan() == []


def test_on_the_last_turn_the_expert_answers(tmp_path: Path) -> None:
    env = make(max_turns=1)
    env.reset(options={"task": "code/mini/train/00003"})
    assert env.expert_plan() == [f"\\boxed{{{env.task.content['answer']}}}"]
    assert make_asking(tmp_path).expert_plan() == ["\\boxed{42}"], "there is no reference code"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dataset": "minni"}, "Did you mean 'mini'"),
        ({"split": "dev"}, "choose one of 'train', 'valid', 'test'"),
        ({"sandbox": "localhost:8080"}, "sandbox='localhost:8080'"),
        ({"sandbox": 3}, "sandbox=3"),
        ({"grader": "exact"}, "'strict', 'integer', 'math_verify'"),
        ({"feedback": "none"}, "'spear', 'paper', 'helpful'"),
        ({"prelude": "numpy"}, "'retool', 'none'"),
        ({"preset": "8k"}, "'16k', '32k'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"histroy": 2}, "has no keyword 'histroy'"),
        ({"observation_chars": 3}, "observation_chars=3"),
        ({"memory_mb": 0}, "memory_mb=0"),
        ({"memory_mb": 0.5}, "memory_mb=0.5"),
        ({"time_limit": 31}, "a service that allows more"),
        ({"memory_mb": 2_048}, "a service that allows more"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"time_limit": -1}, "time_limit=-1"),
        ({"time_limit": True}, "time_limit=True"),
        ({"time_limit": "30"}, "time_limit='30'"),
        ({"time_limit": float("nan")}, "time_limit=nan"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_keywords_without_a_valid_value_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(SpearError, match=words) as caught:
        make(**kwargs)
    assert "\n" not in str(caught.value)


class TestInTheSandbox:
    """The same with the sandbox of this process."""

    @pytest.fixture(autouse=True)
    def _sandbox(self, isolated: Callable[..., Outcome]) -> None:
        pass

    def test_calls(self, tmp_path: Path) -> None:
        env = make_asking(tmp_path, sandbox=None)
        assert env.step(call("print(6 * 7, Counter('aab')['a'])"))[0] == "42 2"
        observation, *_ = env.step(call("def f():\n    return 1 / 0\nprint('before')\nf()"))
        assert observation.endswith("ZeroDivisionError: division by zero\nErrors occurred! Check your code.")
        assert env.step(call("import sys\nsys.exit(3)"))[4]["return_code"] == 3
        assert env.step(call("import os\nos._exit(0)"))[0].startswith("Empty stdout!")

    @pytest.mark.parametrize("code", ["a\0b", "print('\ud800')", "'" + "x" * 100_000, "print(" * 500, "\ufeffx"])
    def test_strange_code_is_answered(self, tmp_path: Path, code: str) -> None:
        *_, info = make_asking(tmp_path, sandbox=None).step(call(code))
        assert info["fault"] is None and info["tool_calls"] == 1

    def test_many_episodes_at_once(self) -> None:
        def play(number: int) -> bool:
            env = make(split="test", dataset="mini-small", prelude="none")
            env.reset(options={"task": f"code/mini-small/test/{number:05d}"})
            while not env.done:
                *_, info = env.step(env.parser.respond(env.expert_plan()[0]))
            return info["won"]

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(play, range(12)))


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason="needs the extra 'sandbox'")
    with run_local(Limits(), max_running=4) as running:
        yield running


def test_code_is_run_over_there(tmp_path: Path, service: RunningService) -> None:
    env = make_asking(tmp_path, sandbox=service.url, feedback="helpful")
    assert env.step(call("print(6 * 7)"))[0] == "42"
    observation, *_, info = env.step(call("print('before')\n1 / 0"))
    assert 'File "/tmp/main.py", line 2' in observation and observation.startswith("before\n")
    assert (info["return_code"], info["tool_calls"], info["fault"]) == (1, 2, None)


def test_the_expert_wins(service: RunningService) -> None:
    env = make(split="test", sandbox=service.url)
    for task in env.tasks[:5]:
        env.reset(options={"task": task.id})
        while not env.done:
            *_, info = env.step(env.parser.respond(env.expert_plan()[0]))
        assert info["won"] and info["tool_calls"] == 1
