"""Tasks with the tools of an MCP server: a real one over stdio and HTTP, and its recording."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

import spear_envs  # noqa: F401
from spear_envs.adapters.conversation import Conversation, find_tools_template
from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.tasks import Task
from spear_envs.core.tools import CallError
from spear_envs.mcp_tools.client import CallResult, McpFaultKind, Recording, ToolEntry
from spear_envs.mcp_tools.env import judge, make_tools
from spear_envs.testing import check_spear_env

HERE = Path(__file__).parent
COMMAND = f"{sys.executable} {HERE / 'library_server.py'}"
TASKS = str(HERE / "library.jsonl")
RECORDING = HERE / "library_calls.jsonl"
"""What :func:`record` writes."""


def ask_twice(task: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], answer: str | None) -> float:
    return min(1.0, len(calls) / task["content"]["more"]["times"])


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def call(**keywords: Any) -> Any:
        keywords = {"tasks": TASKS, "response_format": "plain", "seconds": 20.0, **keywords}
        made.append(gym.make("spear/McpTools-v0", disable_env_checker=True, **keywords).unwrapped)
        return made[-1]

    yield call
    for env in made:
        env.close()


def play(env: Any, task: int, actions: Sequence[str]) -> list[Any]:
    env.reset(options={"task": env.tasks[task].id})
    return [env.step(action) for action in actions]


def record(path: Path) -> None:
    """Plays with a server: every task's plan, a call that fails, and calls that a second episode must not see."""
    for split in ("train", "valid", "test"):
        keywords = {"tasks": TASKS, "server": COMMAND, "recording": str(path), "split": split, "seconds": 30.0}
        env: Any = gym.make(
            "spear/McpTools-v0", disable_env_checker=True, response_format="plain", **keywords
        ).unwrapped
        for task in env.tasks:
            env.reset(options={"task": task.id})
            *_, info = [env.step(action) for action in env.expert_plan()][-1]
            assert info["won"] and info["score"] == 1, info
        if split == "train":
            observation, *_ = play(env, 0, ['borrow {"title": "Emma"}', 'find {"title": "Emma"}'])[-1]
            assert observation == "Emma is lent out"
            observation, *_, info = play(env, 0, ['find {"title": "Nemo"}'])[-1]
            assert "no book" in observation and not info["action_ok"] and info["fault"] is None
            # A server of its own for each episode: the book is back.
            observation, *_ = play(env, 0, ['find {"title": "Emma"}'])[-1]
            assert observation == "Emma is on shelf 3"
        env.close()


@pytest.mark.slow
def test_a_server_plays_as_it_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "calls.jsonl")
    assert (tmp_path / "calls.jsonl").read_text() == RECORDING.read_text()


def test_a_recording_stands_in(make: Make) -> None:
    env = make(recording=str(RECORDING))
    (_, first, *_), (_, reward, terminated, _, info) = play(env, 1, env_plan(env, 1))
    assert first == 0 and terminated and info["won"] and reward > 0
    observation, *_ = play(env, 0, ['borrow {"title": "Emma"}', 'find {"title": "Emma"}'])[-1]
    assert observation == "Emma is lent out"
    assert env.expert_plan() == ['answer {"answer": "shelf 3"}']
    play(env, 0, ['borrow {"title": "Emma"}'])
    assert env.expert_plan() == env_plan(env, 0), "a call beside the plan is none of it"
    _, reward, terminated, truncated, info = play(env, 0, ['find {"title": "Ulysses"}'])[-1]
    assert truncated and not terminated and reward == 0 and info["fault"] == McpFaultKind.NOT_RECORDED.value
    # Wrong answers lose, and the state can be taken along.
    *_, info = play(env, 0, ['answer {"answer": "shelf 4"}'])[-1]
    assert not info["won"] and info["score"] == 0
    play(env, 1, env_plan(env, 1)[:1])
    copy = make(recording=str(RECORDING))
    copy.reset(seed=0)
    copy.set_state(env.get_state())
    assert copy.step(env_plan(env, 1)[1])[4]["won"]


def env_plan(env: Any, task: int) -> list[str]:
    env.reset(options={"task": env.tasks[task].id})
    return list(env.expert_plan())


def test_wrong_calls_cost_a_turn_and_are_explained(make: Make) -> None:
    env = make(recording=str(RECORDING))
    for action, text in {
        "fnd {}": "find",
        "find Emma": "not a JSON object",
        'find ["Emma"]': "not a JSON object",
        'find\n{"name": "Emma"}': "'title' is a required property",
        'borrow {"title": "Emma", "days": "many"}': "days: 'many' is not of type 'integer'",
        "find " + "[" * 90_000: "not a JSON object",
        'find {"title": "x", "y": ' + "[" * 900 + "]" * 900 + "}": "not a JSON object",
        'find {"title": "\\ud800"}': "not a JSON object",
        'find {"title": "x", "y": NaN}': "not a JSON object",
        'find {"title": "x", "y": 1e999}': "not a JSON object",
        'find {"title": "x", "y": ' + "9" * 5000 + "}": "not a JSON object",
    }.items():
        observation, _, _, _, info = play(env, 0, [action])[-1]
        assert text in observation and not info["action_ok"] and info["fault"] is None, observation


def test_tools_and_prompts(make: Make) -> None:
    env = make(recording=str(RECORDING))
    assert [tool.name for tool in env.tools] == ["find", "borrow", "crash", "wait", "answer"]
    assert env.tools[1].types == {"title": str, "days": int}
    assert env.tools[0].schema()["function"]["parameters"]["properties"]["title"]["description"] == "The book's title."
    prompt = Conversation(env, find_tools_template(env)).reset(task=env.tasks[0].id).text
    assert "Where is Emma?" in prompt and "Call find or borrow" in prompt
    tags = Conversation(make(recording=str(RECORDING), response_format="tags"))
    first = tags.reset(task=env.tasks[0].id).text
    assert '"days"' in first and "<action>" in first
    said = tags.respond('<think>so</think><action>find {"title": "Emma"}</action>')
    assert said.observation == "Emma is on shelf 3"


@pytest.mark.nightly
def test_contract() -> None:
    check_spear_env("spear/McpTools-v0", tasks=TASKS, recording=str(RECORDING))


@pytest.mark.slow
def test_servers_that_fail(make: Make) -> None:
    with pytest.raises(EnvFault, match=r"mcp_unreachable.*no card, no entry"):
        make(server=f"{COMMAND} --broken")
    with pytest.raises(EnvFault, match="mcp_unreachable"):
        make(server="there-is-no-such-command")
    with pytest.raises(EnvFault, match="mcp_unreachable"):
        make(server="http://127.0.0.1:9/mcp")
    mark = f"{600 + os.getpid() / 1e7}"
    with pytest.raises(EnvFault, match=r"mcp_unreachable.*no answer within 2 s"):
        make(server=f"sleep {mark}", seconds=2.0)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in path.read_bytes()]
    env = make(server=COMMAND, seconds=12.0, most_characters=100)
    assert not env.unwrapped.restores, "what its server did cannot be kept"
    observation, *_ = play(env, 0, ['wait {"seconds": 0}'])[-1]
    assert observation.endswith("(19,900 characters more)")
    _, reward, _, truncated, info = play(env, 0, ["crash {}"])[-1]
    assert truncated and reward == 0 and info["fault"] == McpFaultKind.LOST.value
    began = time.monotonic()
    assert play(env, 0, ['wait {"seconds": 60}'])[-1][4]["fault"] == McpFaultKind.TIMEOUT.value
    assert time.monotonic() - began < 30
    # The next episode has a server again.
    assert play(env, 0, ['find {"title": "Emma"}'])[-1][0] == "Emma is on shelf 3"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"instruction": "x"}', "'reward' is a required property"),
        ('{"instruction": "x", "reward": {}}', "reward"),
        ('{"instruction": "x", "reward": {"answer": "a", "calls": []}}', "reward"),
        ('{"instruction": "x", "reward": {"answer": "a"}, "rewrd": 1}', "rewrd"),
        ('{"instruction": "x", "reward": {"function": "json:nothing"}}', "lacks the function 'nothing'"),
        ("", "no tasks of the split 'train'"),
    ],
)
def test_wrong_tasks(make: Make, tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SpearError, match=text):
        make(tasks=str(path), recording=str(RECORDING))


def test_wrong_recordings(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="give a server="):
        make()
    with pytest.raises(SpearError, match="give a server="):
        make(recording=str(tmp_path / "none.jsonl"))
    path = tmp_path / "damaged.jsonl"
    path.write_text(RECORDING.read_text().replace('"result"', '"resul', 1))
    with pytest.raises(SpearError, match="is not a recording"):
        make(recording=str(path))
    with pytest.raises(SpearError, match="server is a text, not False"):
        make(server=False)
    with pytest.raises(SpearError, match="'find' is taken"):
        make(recording=str(RECORDING), answer_tool="find")


FIND = ToolEntry("find", "", {"type": "object"})


def find_again(path: Path, numbers: Sequence[int]) -> None:
    found = Recording(path)
    for number in numbers:
        call = {"tool": "find", "arguments": {"number": number}}
        assert found.find("t", [call]) == CallResult(f"{number}", False)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    Recording(path).add_tools([FIND])
    for number in range(3):
        Recording(path).add("t", [{"tool": "find", "arguments": {"number": number}}], CallResult(f"{number}", False))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    find_again(path, [0, 1])
    with pytest.raises(EnvFault, match="lacks the call"):
        find_again(path, [2])
    Recording(path).add("t", [{"tool": "find", "arguments": {"number": 2}}], CallResult("2", False))
    assert path.read_bytes() == whole
    path.write_bytes(whole.rstrip(b"\n"))
    Recording(path).add("t", [{"tool": "find", "arguments": {"number": 3}}], CallResult("3", False))
    find_again(path, range(4))
    for size in range(whole.index(b"\n")):  # the list of tools itself
        path.write_bytes(whole[:size])
        Recording(path).add_tools([FIND])
        assert Recording(path).tools == [FIND]


def test_several_processes_begin_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    waiting = [Recording(path) for _ in range(3)]
    for number, recording in enumerate(waiting):
        recording.add_tools([FIND])
        recording.add("t", [{"tool": "find", "arguments": {"number": number}}], CallResult(f"{number}", False))
    find_again(path, range(3))
    other = tmp_path / "other.jsonl"
    first, second = Recording(other), Recording(other)
    first.add_tools([FIND])
    with pytest.raises(SpearError, match="other tools"):
        second.add_tools([])


FILES = """
from mcp.server import MCPServer
from mcp.types import BlobResourceContents, EmbeddedResource, TextResourceContents

server = MCPServer("files", log_level="ERROR")


@server.tool()
def read() -> list:
    words = TextResourceContents(uri="file:///a.txt", text="Call me Ishmael.")
    bytes = BlobResourceContents(uri="file:///b", blob="aGk=")
    return [EmbeddedResource(type="resource", resource=one) for one in (words, bytes)]


server.run("stdio")
"""


def test_the_text_of_an_embedded_file_is_shown(make: Make, tmp_path: Path) -> None:
    (tmp_path / "files.py").write_text(FILES)
    env = make(server=f"{sys.executable} {tmp_path / 'files.py'}")
    assert play(env, 0, ["read"])[-1][0] == "Call me Ishmael.\n(resource)"


def test_an_environment_that_cannot_be_made_leaves_no_server(make: Make) -> None:
    before = threading.active_count()
    with pytest.raises(SpearError, match="taken"):
        make(server=COMMAND, answer_tool="find")
    assert threading.active_count() == before, "the thread of the connection has ended"


def test_a_text_like_the_end_of_a_thought_stays_in_the_call(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    arguments = {"number": "a </think> b"}
    recording = Recording(path)
    recording.add_tools([FIND])
    recording.add("library/train/00000", [{"tool": "find", "arguments": arguments}], CallResult("well", False))
    env = make(recording=str(path))
    assert play(env, 0, [env.tools[0].write(arguments)])[-1][0] == "well"


def test_texts_with_line_ends_of_unicode(make: Make, tmp_path: Path) -> None:
    """What another environment recorded and what tasks say, in one line each."""
    odd = "a\u2028b\u0085c"
    recorded = Recording(tmp_path / "calls.jsonl")
    recorded.add_tools([ToolEntry("say", odd, {"type": "object"})])
    call = {"tool": "say", "arguments": {}}
    recorded.add("tasks/train/00000", [call], CallResult(odd, False))
    row = {"instruction": odd, "reward": {"answer": odd}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    env = make(tasks=str(tmp_path / "tasks.jsonl"), recording=str(tmp_path / "calls.jsonl"))
    assert play(env, 0, ["say {}"])[-1][0] == odd and env.tasks[0].instruction == odd


def test_odd_schemas() -> None:
    properties = {"from": {"type": "string"}, "days": {"multipleOf": 0.5}}
    send, _ = make_tools([ToolEntry("send", "", {"type": "object", "properties": properties})], "answer")
    assert send.read(send.write({"from": "me", "days": 1})) == {"from": "me", "days": 1}
    with pytest.raises(CallError, match="send cannot take this"):
        send.check({"days": 10**400})


def test_long_lists_of_different_items_take_linear_time() -> None:
    schema = {"type": "object", "properties": {"ids": {"uniqueItems": True}}}
    (put, _) = make_tools([ToolEntry("put", "", schema)], "answer")
    start = time.process_time()
    put.check({"ids": [True, "1", {"a": 1}, *range(10_000)]})
    put.check({"ids": 5})
    assert time.process_time() - start < 2, "seconds; each was compared with each"
    for wrong in ([1, "a", 1], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]):
        with pytest.raises(CallError, match="non-unique"):
            put.check({"ids": wrong})


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", "(?<year>[0-9]{4})", "(a+)+$", "["])
def test_patterns_are_left_to_the_server(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": pattern}},
        "additionalProperties": False,
    }
    (search, _) = make_tools([ToolEntry("search", "", schema)], "answer")
    search.check({"pattern": "a" * 60 + "!"})
    for wrong in ({"pattern": 1}, {"other": "a"}):
        with pytest.raises(CallError, match="search cannot take this"):
            search.check(wrong)
    named = {"type": "object", "patternProperties": {pattern: {"type": "string"}}}
    for closed in ("additionalProperties", "unevaluatedProperties"):
        (label, _) = make_tools([ToolEntry("label", "", {**named, closed: False})], "answer")
        label.check({"a" * 60 + "!": "b"})


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_patterns_are_left_to_the_server_in_every_dialect(dialect: str) -> None:
    name = {"$schema": dialect, "type": "string", "pattern": "["}
    properties = {"name": name, "child": {"$ref": "#"}, "$schema": {"type": "string"}}
    schema = {"$schema": dialect, "type": "object", "properties": properties}
    (plant, _) = make_tools([ToolEntry("plant", "", schema)], "answer")
    plant.check({"child": {"child": {"name": "oak", "$schema": "any"}}})
    for wrong in ({"name": 1}, {"$schema": 1}):
        with pytest.raises(CallError, match="plant cannot take this"):
            plant.check({"child": wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seconds", value) for value in ("abc", float("nan"), 0, float("inf"), 10**400, None, True)),
        *(("most_characters", value) for value in ("x", 0, None, 1.5)),
        *(("answer_tool", value) for value in (5, "", "a b")),
        *(("pass_variables", value) for value in ("PATH", 5, [5])),
        ("tasks", "\0"),
    ],
)
def test_keywords_that_are_not_valid(make: Make, name: str, value: Any) -> None:
    with pytest.raises(SpearError, match=name):
        make(recording=str(RECORDING), **{name: value})


@pytest.mark.slow
def test_over_http(make: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen(
        [sys.executable, str(HERE / "library_server.py"), "--http", str(port)], env={**os.environ}
    )
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        env = make(server=f"http://127.0.0.1:{port}/mcp")
        assert play(env, 0, ['find {"title": "Emma"}'])[-1][0] == "Emma is on shelf 3"
        running.kill()
        running.wait()
        assert env.step('find {"title": "Emma"}')[4]["fault"] == McpFaultKind.LOST.value
        with pytest.raises(EnvFault, match="mcp_unreachable"):
            env.reset(seed=0)
    finally:
        running.kill()


def too_generous(task: Any, calls: Any, answer: Any) -> float:
    return 1 / 0 if answer == "x" else 2.0


def test_rules() -> None:
    def score(rule: dict[str, Any], calls: Sequence[Mapping[str, Any]] = (), answer: str | None = None) -> float:
        return judge(Task("t/train/0", "train", "task", "Do it.", {"reward": rule}), calls, answer)

    call = {"tool": "borrow", "arguments": {"title": "Emma", "days": 3}, "text": "", "is_error": False}
    wanted = {"tool": "borrow", "arguments": {"days": 3}}
    assert score({"calls": [wanted]}, [call]) == 1 and score({"calls": [wanted, {"tool": "find"}]}, [call]) == 0.5
    assert score({"calls": [wanted]}, [call | {"is_error": True}]) == 0
    assert score({"calls": [{"tool": "borrow", "arguments": {"days": 3, "more": None}}]}, [call]) == 0
    assert score({"answer": "Shelf 3"}, answer=" shelf\n3. ") == 1 and score({"answer": "shelf 3"}) == 0
    assert score({"answer": ["a", "b"]}, answer="b") == 1 and score({"answer": "ab"}, answer="a") == 0
    assert score({"answer": "5"}, answer=".5") == 0 and score({"answer": ".5"}, answer=".5.") == 1
    function = {"function": f"{__name__}:too_generous"}
    with pytest.raises(SpearError, match="a score is from 0 to 1"):
        score(function)
    with pytest.raises(SpearError, match="failed on t/train/0: ZeroDivisionError"):
        score(function, answer="x")


STRICT = """
import json, os, re, sys
from pathlib import Path
starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if starts.read_text() == "xx":
    sys.exit("out of order")
TYPED = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["title"]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        about = {"serverInfo": {"name": "strict", "version": "1"}, "capabilities": {"tools": {}}}
        answer = {"result": {"protocolVersion": asked["params"]["protocolVersion"], **about}}
    elif asked["method"] == "tools/list":
        tool = {"name": "find", "description": "Finds.", "inputSchema": SCHEMA, "outputSchema": TYPED}
        answer = {"result": {"tools": [tool]}}
    elif asked["method"] == "tools/call":
        title = asked["params"]["arguments"]["title"]
        code = int(title.partition("code ")[2] or -32602)
        answer = {"error": {"code": code, "message": f"title={title} is refused"}}
        if re.fullmatch("[a-z]+", title):
            answer = {"result": {"content": [{"type": "text", "text": f"found {title}"}], "isError": False}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
"""A server of JSON-RPC alone, whose second start fails."""


def test_arguments_that_only_the_server_refuses_cost_a_turn(make: Make, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(STRICT)
    env = make(server=f"{sys.executable} -S {tmp_path / 'strict.py'} {tmp_path / 'starts'}")
    refused, found = play(env, 0, ['find {"title": "Emma 1"}', 'find {"title": "emma"}'])
    assert "Emma 1 is refused" in refused[0] and not refused[4]["action_ok"]
    assert not refused[3] and refused[4]["fault"] is None
    assert found[0] == "found emma"
    with pytest.raises(EnvFault, match=r"mcp_unreachable.*out of order"):
        env.reset(seed=0)
    env.reset(seed=0)
    assert env.step('find {"title": "emma"}')[0] == "found emma"


@pytest.mark.parametrize("code", [-32603, -32600, -32002, -32050])
def test_an_error_of_a_tool_costs_a_turn_whatever_its_code(make: Make, tmp_path: Path, code: int) -> None:
    """Servers of the TypeScript package answer -32603 where a tool throws; a text alone is no end either."""
    (tmp_path / "strict.py").write_text(STRICT)
    env = make(server=f"{sys.executable} -S {tmp_path / 'strict.py'} {tmp_path / 'starts'}")
    refused, found = play(env, 0, [f'find {{"title": "code {code}"}}', 'find {"title": "emma"}'])
    assert "is refused" in refused[0] and refused[4]["fault"] is None and not refused[3]
    assert found[0] == "found emma"
