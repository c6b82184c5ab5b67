"""Rollout servers over transformers and vLLM, each with an engine in its place that records its calls."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from safetensors.torch import save_file

from spear_agents.engines.base import Finish, Generation, Request, Sampling
from spear_agents.engines.vllm_options import VLLMOptions
from spear_envs.core.errors import SpearError
from spear_training.run.to_verl import HF
from spear_training.verl_plugin import rollout_servers
from spear_training.verl_plugin.rollout_servers import (
    HFServer,
    HFWeightSender,
    VLLMReplica,
    VLLMServer,
    VLLMWeightSender,
    close_servers,
    explain_death,
    name_server,
)


def find_class(actor: Any) -> Any:
    """The class behind a Ray actor."""
    return actor.__ray_metadata__.modified_class


# ---- transformers ----------------------------------------------------------------------------------------------------
class FakeModel:
    """Records what it is asked, what weights it is given, and where it is moved."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.state: dict[str, torch.Tensor] = {}
        self.moved: list[str] = []
        self.model = SimpleNamespace(to=lambda device: self.moved.append(str(device)))

    def generate_batch(self, requests: list[Request]) -> list[Generation]:
        self.requests += requests
        return [Generation((*request.prompt_ids, 2), (-0.5, -0.25), Finish.STOP) for request in requests]

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def open_server(model: FakeModel, device: str = "cpu") -> Any:
    return find_class(HFServer)(lambda: model, 16, device)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, Sampling(max_tokens=16)),
        (
            {"temperature": 0.4, "top_p": 0.6, "top_k": -1, "max_tokens": 5},
            Sampling(temperature=0.4, top_p=0.6, max_tokens=5),
        ),
        ({"top_k": 3, "max_new_tokens": 4, "seed": 9}, Sampling(top_k=3, max_tokens=4, seed=9)),
        (
            {"stop_token_ids": [5], "stop": ["</a>"]},
            Sampling(max_tokens=16, stop_token_ids=(5,), stop_strings=("</a>",)),
        ),
    ],
)
def test_verls_own_agent_loops_can_ask(parameters: dict[str, Any], expected: Sampling) -> None:
    model = FakeModel()
    output = asyncio.run(
        open_server(model).generate(request_id="r", prompt_ids=[7], sampling_params=parameters, image_data=None)
    )
    assert model.requests == [Request((7,), expected, "r")]
    assert output.token_ids == [7, 2] and output.log_probs == [-0.5, -0.25]
    assert output.stop_reason == "completed" and output.extra_fields == {"global_steps": None}


def test_a_response_names_the_weights_that_wrote_it_though_others_wait_for_its_end() -> None:
    model = FakeModel()
    server, begun, go_on = open_server(model), threading.Event(), threading.Event()
    generate = model.generate_batch

    def wait(requests: list[Request]) -> list[Generation]:
        begun.set()
        assert go_on.wait(10)
        return generate(requests)

    model.generate_batch = wait  # type: ignore[method-assign]

    async def run() -> list[Any]:
        await server.update_weights({}, 3)
        first = asyncio.create_task(server.generate_batch([Request((1,), Sampling(), "r")]))
        await asyncio.to_thread(begun.wait)
        push = asyncio.create_task(server.update_weights({"w": torch.ones(2)}, 4))
        await asyncio.sleep(0.01)
        assert not push.done() and not model.state
        go_on.set()
        (old,) = await first
        await push
        (new,) = await server.generate_batch([Request((1,), Sampling(), "r")])
        return [old.version, new.version]

    assert asyncio.run(run()) == [3, 4]


def test_the_trainer_has_the_device_while_the_server_sleeps() -> None:
    """On a device of torch that holds no numbers, instead of a GPU."""
    model = FakeModel()
    server = open_server(model, "meta")
    asyncio.run(server.generate_batch([Request((1,), Sampling(), "r")]))
    asyncio.run(server.sleep())
    asyncio.run(server.update_weights({"w": torch.ones(2)}, 1))
    asyncio.run(server.generate_batch([Request((1,), Sampling(), "r")]))
    assert model.moved == ["meta", "cpu", "meta"]


@pytest.mark.parametrize(
    ("rank", "per_replica", "replica", "sends"), [(0, 1, 0, True), (3, 1, 3, True), (2, 2, 1, True), (3, 2, 1, False)]
)
def test_one_rank_of_each_replica_sends_the_weights(
    monkeypatch: pytest.MonkeyPatch, rank: int, per_replica: int, replica: int, sends: bool
) -> None:
    sent: list[tuple[str, Any]] = []

    class FakeActor:
        def __init__(self, name: str) -> None:
            self.update_weights = self
            self._name = name

        async def remote(self, state: Any, version: int) -> None:
            sent.append((self._name, (state, version)))

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(rollout_servers.BaseRollout, "__init__", lambda self, *_: None)
    monkeypatch.setattr(rollout_servers.ray, "get_actor", FakeActor)
    config = SimpleNamespace(tensor_model_parallel_size=per_replica, data_parallel_size=1, dtype="bfloat16")
    sender = HFWeightSender(config, None, None)
    drained: list[str] = []

    def weights() -> Any:
        for name in ("a", "b"):
            drained.append(name)
            yield name, torch.ones(2, requires_grad=True)

    asyncio.run(sender.update_weights(weights(), global_steps=1))
    assert drained == ["a", "b"], "gathering is collective: every rank drains"
    assert [name for name, _ in sent] == ([name_server(HF, replica)] if sends else [])
    if sends:
        ((_, (state, version)),) = sent
        assert version == 1
        assert all(value.dtype is torch.bfloat16 and not value.requires_grad for value in state.values())


# ---- vLLM ------------------------------------------------------------------------------------------------------------
class FakeEngine:
    """Records how it was made, and what it is asked and given."""

    def __init__(self) -> None:
        self.made_of: Any = None
        self.asked: list[tuple[Sequence[int], Sampling, str]] = []
        self.state: dict[str, torch.Tensor] = {}
        self.closed = self.released = False

    def open(self, path: str, options: VLLMOptions, max_batch: int) -> Any:
        self.made_of = (path, options, max_batch)
        return self

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        self.asked.append((prompt_ids, sampling, request_id))
        return Generation((5, 2), (-0.5, -0.25), Finish.STOP)

    def load_file(self, path: str) -> None:
        self.state = torch.load(path, weights_only=True)

    def release_memory(self) -> None:
        self.released = True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine() -> Any:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Any:
    return find_class(VLLMServer)("policy", VLLMOptions(max_model_len=70, kv_cache_gib=0.5), 128, 6, engine.open)


def test_new_weights_reach_vllm_without_ray_and_it_ends(
    server: Any, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    sender: Any = object.__new__(VLLMWeightSender)
    sender.model_config = SimpleNamespace(local_path=str(tmp_path))
    push = SimpleNamespace(update_weights=SimpleNamespace(remote=server.update_weights))
    monkeypatch.setattr(sender, "get_server", lambda: push)

    async def run() -> Any:
        await server.close()  # before it has been started there is nothing to end
        await server.start()
        await sender.send({"w": torch.ones(2)}, 1)
        with pytest.raises(SpearError, match="missing"):
            await sender.send({"v": torch.ones(2)}, 2)
        parameters = {"temperature": 0.4, "top_k": -1, "seed": 9, "stop_token_ids": [3], "logprobs": True}
        output = await server.generate("r", prompt_ids=[7], sampling_params=parameters, image_data=None)
        await server.sleep()
        await server.close()
        return output

    output = asyncio.run(run())
    assert engine.made_of == ("policy", VLLMOptions(max_model_len=70, kv_cache_gib=0.5), 128)
    assert engine.asked == [([7], Sampling(temperature=0.4, max_tokens=6, stop_token_ids=(3,), seed=9), "r")]
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([5, 2], [-0.5, -0.25], "completed")
    assert torch.equal(engine.state["w"], torch.ones(2)) and server.version == 1
    assert engine.released and engine.closed


def test_weights_change_between_responses_and_a_response_names_its_own(server: Any, engine: Any) -> None:
    """vLLM would continue with keys and values of other weights, and refuses."""
    log: list[str] = []

    async def run() -> list[int]:
        await server.start()
        free = asyncio.Event()

        async def generate(*_: Any, request_id: str) -> Generation:
            log.append(f"begin {request_id}")
            await free.wait()
            log.append(f"end {request_id}")
            return Generation((5, 2), (-0.5, -0.25), Finish.STOP)

        engine.generate, engine.load_file = generate, lambda path: log.append("weights")
        server.version = 3
        ask = lambda name: asyncio.create_task(server.generate(name, prompt_ids=[7], sampling_params={}))  # noqa: E731
        early = [ask("a"), ask("b")]
        await asyncio.sleep(0)
        push = asyncio.create_task(server.update_weights("weights", 4))
        await asyncio.sleep(0.01)
        late = ask("c")
        await asyncio.sleep(0.01)
        assert log == ["begin a", "begin b"], "nothing new begins, and the weights wait"
        free.set()
        outputs = await asyncio.gather(*early, late)
        await push
        return [output.extra_fields["global_steps"] for output in outputs]

    assert asyncio.run(run()) == [3, 3, 4]
    assert log == ["begin a", "begin b", "end a", "end b", "weights", "begin c", "end c"]


def test_weights_that_vllm_refuses_leave_the_gate_open(server: Any, engine: Any) -> None:
    def refuse(path: str) -> None:
        raise SpearError("other weights")

    async def run() -> Any:
        await server.start()
        engine.load_file = refuse
        with pytest.raises(SpearError, match="other"):
            await server.update_weights("weights", 4)
        return await server.generate("r", prompt_ids=[7], sampling_params={})

    assert asyncio.run(run()).extra_fields == {"global_steps": None}


def test_servers_end_in_order_and_a_dead_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def replica(kind: type, name: str) -> Any:
        made: Any = object.__new__(kind)
        made.servers = [SimpleNamespace(close=SimpleNamespace(remote=lambda: name))]
        return made

    def get(name: str, timeout: float) -> None:
        if name == "dead":
            raise rollout_servers.ray.exceptions.RayActorError
        ended.append(name)

    monkeypatch.setattr(rollout_servers.ray, "get", get)
    stock = type("Stock", (), {})  # verl's own replicas end with their workers
    close_servers([replica(VLLMReplica, name) for name in ("a", "dead", "b")] + [replica(stock, "stock")])
    assert ended == ["a", "b"]


# ---- deaths ----------------------------------------------------------------------------------------------------------
LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")


@pytest.mark.parametrize(
    ("error", "process"),
    [
        (ActorDiedError(), "worker process"),
        (WorkerCrashedError(), "worker process"),
        (OutOfMemoryError("too much"), "memory"),
        (LOST, "trainer"),
        (RayTaskError("play", "trace", ActorDiedError()), "worker process"),
        (RayTaskError("train", "trace", RuntimeError("Connection reset by peer")), "trainer"),
        (RuntimeError("shape mismatch"), None),
        (RayTaskError("f", "t", ValueError("no")), None),
    ],
)
def test_a_death_is_one_line_that_names_the_process(error: Exception, process: str | None) -> None:
    text = explain_death(error)
    if process is None:
        assert text is None
    else:
        assert text is not None and process in text and "resumes" in text and "\n" not in text
