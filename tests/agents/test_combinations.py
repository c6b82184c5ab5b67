"""Options and features that meet."""

import asyncio
import concurrent.futures
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
pytest.importorskip("httpx", reason="needs the extra 'api'")

import httpx

from spear_agents import evaluate
from spear_agents.cli import evaluate as command
from spear_agents.cli import gateway
from spear_agents.comparison.significance import compare
from spear_agents.engines.base import ChatByteTokenizer, Finish, Generation, Sampling, cut_at_stop
from spear_agents.evaluation.collect import collect_episodes
from spear_agents.evaluation.exports import export_data, open_recorded
from spear_agents.evaluation.panels import OFFICIAL
from spear_agents.evaluation.records import EPISODES, SETTINGS
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.gateway import programs as loop
from spear_agents.gateway.programs import AgentTask, ProgramPlayer
from spear_agents.gateway.server import Gateway, Host
from spear_agents.gateway.session import Limits
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, Trajectory, TrajectoryWriter
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.prompts import CompactTemplate
from tests.agents.chat_server import Script, complete, say
from tests.agents.corridor import CorridorEnv
from tests.agents.gateway.programs import TASK, KeepingEngine, play_program
from tests.agents.gateway.test_server import ASK, CALL, post
from tests.agents.test_statistics import episode


class BlockingCorridor(CorridorEnv):
    metadata: ClassVar[dict[str, Any]] = {**CorridorEnv.metadata, "blocking": True}

    def _act(self, action: str) -> Any:
        if action == "stray":
            return next(iter(()))
        time.sleep(0.2)
        return super()._act(action)


def test_a_step_is_of_the_call_before_it_also_if_another_is_answered_meanwhile() -> None:
    async def play(task: AgentTask) -> None:
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(base_url=task.base_url, headers=headers, verify=False) as client:
            while not task.done:
                await client.post("/chat/completions", json=ASK)
                await asyncio.gather(task.step("go"), client.post("/chat/completions", json=ASK))

    (played,) = play_program(play, KeepingEngine("go"), env=BlockingCorridor(response_format="plain"))
    assert played.steps == ((0, "go"), (2, "go"))
    assert [turn.action for turn in played.turns][0::2] == ["go", "go"]
    assert [turn.reward for turn in played.turns] == [-0.1, 0.0, 1.0, 0.0]


def stop_iterating(task: Any) -> None:
    next(iter(()))


def wait_for_what_was_cancelled(task: Any) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.cancel()
    future.result()


@pytest.mark.parametrize("program", [stop_iterating, wait_for_what_was_cancelled])
def test_no_error_of_a_program_hangs_or_ends_the_run(program: Any) -> None:
    start = time.monotonic()
    (played,) = play_program(program, KeepingEngine(), limits=Limits(seconds=10))
    assert played.fault == "agent_failed" and time.monotonic() - start < 8


def test_a_stray_stop_iteration_of_a_blocking_environment_is_told() -> None:
    prompts = PromptBuilder(ChatByteTokenizer(), CompactTemplate())
    engine = KeepingEngine("<think>a</think><action>stray</action>")
    wanted: Any = {"task_id": TASK, "sampling": Sampling(), "seed": 0, "env_id": "corridor"}
    with pytest.raises(SpearError, match="the environment broke"):
        asyncio.run(asyncio.wait_for(play_episode(BlockingCorridor(), engine, prompts, **wanted), 8))


def test_a_panel_lists_no_generated_tasks() -> None:
    options = ["--panel", "sokoban", "--split", "train", "--tasks", "4", "--engine", "random"]
    result = CliRunner().invoke(command, options)
    assert isinstance(result.exception, SpearError) and "1,000,000 generated tasks" in str(result.exception)


class Characters:
    """A token for each character."""

    eos_token_id = 0x10FFFE

    def apply_chat_template(self, conversation: Any, **keywords: Any) -> str:
        text = "".join(f"<{each['role']}>{each['content']}</{each['role']}>" for each in conversation)
        return text + "<assistant>" * bool(keywords.get("add_generation_prompt"))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


class Searcher:
    async def generate(self, prompt_ids: Any, sampling: Any, *, request_id: str, images: Any = ()) -> Generation:
        first = request_id.endswith("#0001")
        text = f"<think>t</think><{'search' if first else 'answer'}>river</{'search' if first else 'answer'}>"
        ids = (*map(ord, text), Characters.eos_token_id)
        return Generation(ids, (0.0,) * len(ids), Finish.STOP)


def test_what_a_local_model_read_is_measured_as_it_was_when_it_is_played_again(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.save(str(tmp_path / "tokenizer.json"))
    env = make_env("spear/SearchR1-v0")
    core: Any = env.unwrapped
    prompts = PromptBuilder(Characters(), core.templates["default"])
    wanted: Any = {"task_id": core.tasks[0].id, "sampling": Sampling(), "seed": 0, "env_id": "spear/SearchR1-v0"}
    played = asyncio.run(play_episode(env, Searcher(), prompts, **wanted))
    assert 400 < len(played.turns[1].observation) <= 505, "cut at 500 tokens"
    settings = EvalSettings("spear/SearchR1-v0", EngineKind.HF, str(tmp_path), template="default")
    settings = settings.resolve(core.tasks.split, core.templates)
    run = tmp_path / "run"
    run.mkdir()
    (run / SETTINGS).write_text(json.dumps(settings.to_json() | {"fingerprint": played.fingerprint}))
    with TrajectoryWriter(run / EPISODES) as writer:
        writer.write(played)
    with open_recorded(run) as recorded:
        (episode,) = recorded.episodes
        said = recorded.report(episode)
    assert said is not None and played.turns[1].observation in said[1].prompt[0]["content"]


def test_what_native_tools_played_is_collected_with_a_prompt_that_fits(script: Script, tmp_path: Path) -> None:
    function = {"name": "move", "arguments": '{"direction": "up"}'}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    script.answers[:] = [say(complete(choice={"message": message, "finish_reason": "tool_calls"}))]
    keywords = {"modality": "text", "max_turns": 2}
    server = script.server(tools=True)
    settings = EvalSettings("spear/Sokoban-v1", EngineKind.OPENAI, "name", keywords, "test", tasks="1", server=server)
    collect_episodes(settings, tmp_path / "x.jsonl", keep_lost=True)
    asked, said = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])["messages"]
    assert "<action>" in said["content"] and "<action>" in asked["content"] and "Call move" not in asked["content"]
    run_evaluation(settings, tmp_path / "run", concurrency=1)
    with open_recorded(tmp_path / "run") as recorded:
        told = recorded.report(recorded.episodes[0])
    assert told is not None and told[0].prompt == [asked] and told[0].response == said["content"]


def test_pairs_of_adapters_of_one_model_are_of_other_seeds(tmp_path: Path) -> None:
    def write(name: str, wins: int, **settings: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / SETTINGS).write_text(json.dumps({"model_digest": "base", **settings}))
        with TrajectoryWriter(tmp_path / name / EPISODES) as writer:
            for number in range(12):
                won = number < wins
                writer.write(episode(str(number), won, reward_terms={"outcome": 1.0 if won else -1.0}))
        return str(tmp_path / name)

    first, second = write("a0", 2, lora_digest="a0"), write("b0", 6, lora_digest="b0")
    third, fourth = write("a1", 3, lora_digest="a1"), write("b1", 8, lora_digest="b1")
    assert CliRunner().invoke(compare, [first, second, "--pair", third, fourth]).exit_code == 0
    copy = write("a2", 2, lora_digest="a0"), write("b2", 6, lora_digest="b0")
    assert "given twice" in str(CliRunner().invoke(compare, [first, second, "--pair", *copy]).exception)


def test_gateways_of_other_seeds_play_other_episodes() -> None:
    prompts = PromptBuilder(ChatByteTokenizer(), CompactTemplate(), Layout.CONVERSATION)
    policy: Any = SimpleNamespace(
        prompts=prompts, settings=SimpleNamespace(sampling=Sampling), engine_for=lambda env: KeepingEngine("go")
    )
    records: list[Trajectory] = []

    async def begin_one(first_seed: int) -> None:
        gateway = Gateway()
        host = Host(
            *(gateway, policy, CorridorEnv, ["corridor/test/000"], "corridor"),
            token=None, limits=Limits(), most=2, on_end=records.append, first_seed=first_seed,
        )  # fmt: skip
        await gateway.start()
        async with httpx.AsyncClient(verify=False) as client:
            assert (await client.post(f"{gateway.url}/episodes", json={})).status_code == 200
        await host.aclose()
        await gateway.aclose()

    asyncio.run(begin_one(0))
    asyncio.run(begin_one(1 << 32))
    assert [one.seed for one in records] == [0, 1 << 32]


def test_streams_have_the_log_probabilities_that_were_asked_for() -> None:
    def play(task: AgentTask) -> None:
        whole = post(task, {**ASK, "logprobs": True}).json()["choices"][0]["logprobs"]
        lines = post(task, {**ASK, "logprobs": True, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert [chunk["logprobs"] for chunk in chunks] == [whole, None]

    (played,) = play_program(play, KeepingEngine("hello"))
    assert played.fault is None


def test_anthropic_s_client_gets_one_call_if_it_wants_one_and_an_empty_stop_costs_no_row() -> None:
    tools = {"tools": [{"name": "act"}], "max_tokens": 800}

    def play(task: AgentTask) -> None:
        one = {"type": "auto", "disable_parallel_tool_use": True}
        for choice, count in ((None, 2), (one, 1)):
            reply = post(task, {**ASK, **tools, "tool_choice": choice}, "/messages").json()
            assert [block["type"] for block in reply["content"]] == ["tool_use"] * count
        said = post(task, {**ASK, "max_tokens": 800}, "/messages").json()["content"]
        later = [*ASK["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "and"}]
        ask = {"model": task.model, "messages": later, "max_tokens": 800}
        assert post(task, {**ask, "stop_sequences": [""]}, "/messages").status_code == 400
        assert post(task, ask, "/messages").status_code == 200

    (played,) = play_program(play, KeepingEngine(CALL + CALL, CALL + CALL, "hm"), sampling=Sampling(max_tokens=800))
    assert played.fault is None and [turn.follows for turn in played.turns] == [None, None, None, 2]


class Rambler:
    """Is cut at its limit in its first turn."""

    calls = 0

    async def generate(self, prompt_ids: Any, sampling: Any, *, request_id: str, images: Any = ()) -> Generation:
        self.calls += 1
        written = "I think, and think, and think" if self.calls == 1 else "<answer>x</answer>"
        text, cut = cut_at_stop(written, sampling.stop_strings)
        ids = ChatByteTokenizer().encode_plain(text)[: sampling.max_tokens]
        finish = Finish.LENGTH if len(ids) == sampling.max_tokens else Finish.STRING if cut else Finish.STOP
        ids += [256] if finish is Finish.STOP else []
        return Generation(tuple(ids), (0.0,) * len(ids), finish)


def test_our_own_program_goes_on_after_a_cut_as_our_loop_does() -> None:
    envs = [make_env("spear/SearchR1-v0") for _ in range(2)]
    core: Any = envs[0].unwrapped
    prompts = PromptBuilder(ChatByteTokenizer(), core.templates["search_r1"], Layout.CONVERSATION)
    wanted: Any = {"task_id": core.tasks[0].id, "sampling": Sampling(max_tokens=20), "seed": 3, "env_id": "search"}

    async def play_both() -> tuple[Trajectory, Trajectory]:
        direct = await play_episode(envs[0], Rambler(), prompts, **wanted)
        gateway = Gateway()
        await gateway.start()
        try:
            return direct, await ProgramPlayer(loop.play, gateway)(envs[1], Rambler(), prompts, **wanted)
        finally:
            await gateway.aclose()

    direct, through = asyncio.run(play_both())
    assert [turn.finish for turn in direct.turns] == [Finish.LENGTH, Finish.STRING]
    assert direct.rows() == through.rows()


def test_none_leaves_an_option_to_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[EvalSettings] = []
    monkeypatch.setattr("spear_agents.shortcuts.run_evaluation", lambda settings, *a, **k: found.append(settings))
    evaluate(panel="alfworld-small", engine="random", progress=False, max_tokens=None, episodes_per_task=None)
    (settings,) = found
    assert settings.panel is not None and not settings.panel.overrides and settings.max_tokens == 48
    assert settings.episodes_per_task == OFFICIAL["alfworld-small"].protocol.samples


def test_a_path_is_a_keyword_of_an_environment(tmp_path: Path) -> None:
    settings = EvalSettings("spear/SearchR1-v0", EngineKind.EXPERT, env_kwargs={"corpus": tmp_path / "corpus.jsonl"})
    assert settings.identify("x")["env_kwargs"] == {"corpus": str(tmp_path / "corpus.jsonl")}
    assert json.loads(json.dumps(settings.to_json()))["env_kwargs"] == dict(settings.env_kwargs)


RANDOM = ["spear/Sokoban-v1", "--engine", "random", "--env", "modality=text"]


def fail(command: Any, *words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words])
    assert isinstance(result.exception, SpearError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    "words", [("--layout", "per_turn"), ("--episodes-per-task", "3"), ("--method", "reflexion")], ids=" ".join
)
def test_options_that_a_gateway_cannot_follow_are_refused(words: tuple[str, str]) -> None:
    assert words[0] in fail(gateway, *RANDOM, *words)


def test_a_limit_of_rows_needs_a_conversation() -> None:
    words = [*RANDOM, "--tasks", "1", "--max-row-tokens", "9000"]
    assert "--layout conversation" in fail(command, *words)
    assert CliRunner().invoke(command, [*words, "--layout", "conversation"]).exit_code == 0


def test_seeds_beyond_64_bits_are_refused_by_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'export'")
    assert CliRunner().invoke(command, [*RANDOM, "--tasks", "2", "--seed", str(10**15), "--out", f"{tmp_path}/run"])
    assert "64 bits" in fail(export_data, tmp_path / "run", "--form", "dataset", "--out", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_left_out_tasks_are_counted_by_run(tmp_path: Path) -> None:
    runs = [f"{tmp_path}/{name}" for name in "abc"]
    for run, tasks in zip(runs, ("6", "3", "2"), strict=True):
        assert CliRunner().invoke(command, [*RANDOM, "--tasks", tasks, "--out", run]).exit_code == 0
    sentences = json.loads(CliRunner().invoke(compare, [*runs, "--json"]).output)["sentences"]
    (sentence,) = (each for each in sentences if "left out" in each)
    assert "3 with b, 4 with c" in sentence


def test_evaluate_takes_what_the_command_takes() -> None:
    kept = evaluate("spear/Sokoban-v1", engine="random", tasks=1, mixed_models=True, trust=True, progress=False)
    assert len(kept.trajectories) == 1
