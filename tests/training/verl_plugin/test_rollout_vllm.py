"""vLLM on a CPU as a rollout server, with an engine in its place that remembers what it is told."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from safetensors.torch import save_file

from spear_agents.engines.base import Finish, Generation, Sampling
from spear_agents.engines.vllm_options import VLLMOptions
from spear_envs.core.errors import SpearError
from spear_training.verl_plugin import rollout_servers
from spear_training.verl_plugin import rollout_servers as rollout_vllm
from spear_training.verl_plugin.rollout_servers import VLLMReplica, VLLMServer, VLLMWeightSender, close_servers

ACTOR: Any = VLLMServer
SERVER: Any = ACTOR.__ray_metadata__.modified_class
"""The class behind the Ray actor."""


class FakeEngine:
    """Remembers what it is asked, given and told."""

    def __init__(self, path: str, options: VLLMOptions, max_batch: int) -> None:
        self.made_of = (path, options, max_batch)
        self.asked: list[tuple[Sequence[int], Sampling, str]] = []
        self.state: dict[str, torch.Tensor] = {}
        self.closed = self.released = False

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
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rollout_vllm, "VLLMEngine", FakeEngine)
    return SERVER("policy", VLLMOptions(max_model_len=70, kv_cache_gib=0.5), 128, 6)


def test_it_answers_with_vllm(server: Any) -> None:
    async def run() -> Any:
        await server.start()
        parameters = {"temperature": 0.4, "top_k": -1, "seed": 9, "stop_token_ids": [3], "logprobs": True}
        return await server.generate("r", prompt_ids=[7], sampling_params=parameters, image_data=None)

    output = asyncio.run(run())
    assert server._engine.made_of == ("policy", VLLMOptions(max_model_len=70, kv_cache_gib=0.5), 128)
    assert server._engine.asked == [([7], Sampling(temperature=0.4, max_tokens=6, stop_token_ids=(3,), seed=9), "r")]
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([5, 2], [-0.5, -0.25], "completed")


def test_new_weights_reach_it_without_ray_and_it_ends(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    sender: Any = object.__new__(VLLMWeightSender)
    sender.model_config = SimpleNamespace(local_path=str(tmp_path))
    push = SimpleNamespace(update_weights=SimpleNamespace(remote=server.update_weights))
    monkeypatch.setattr(sender, "get_server", lambda: push)

    async def run() -> None:
        await server.close()  # before it has been started there is nothing to end
        await server.start()
        await sender.send({"w": torch.ones(2)}, 1)
        with pytest.raises(SpearError, match=r"missing \['w'\], unknown \['v'\]"):
            await sender.send({"v": torch.ones(2)}, 2)
        await server.sleep()
        await server.close()

    asyncio.run(run())
    engine = server._engine
    assert torch.equal(engine.state["w"], torch.ones(2)) and server.version == 1 and engine.released and engine.closed


def test_weights_change_between_responses_and_a_response_names_its_own(server: Any) -> None:
    """vLLM would go on with keys and values of other weights, and refuses."""
    log: list[str] = []

    async def run() -> list[int]:
        await server.start()
        free = asyncio.Event()

        async def generate(*_: Any, request_id: str) -> Generation:
            log.append(f"begin {request_id}")
            await free.wait()
            log.append(f"end {request_id}")
            return Generation((5, 2), (-0.5, -0.25), Finish.STOP)

        server._engine.generate = generate
        server._engine.load_file = lambda path: log.append("weights")
        server.version = 3
        ask = lambda name: asyncio.create_task(server.generate(name, prompt_ids=[7], sampling_params={}))  # noqa: E731
        early = [ask("a"), ask("b")]
        await asyncio.sleep(0)
        push = asyncio.create_task(server.update_weights("weights", 4))
        await asyncio.sleep(0.01)
        late = ask("c")
        await asyncio.sleep(0.01)
        assert log == ["begin a", "begin b"], "nothing new is begun, and the weights wait"
        free.set()
        outputs = await asyncio.gather(*early, late)
        await push
        return [output.extra_fields["global_steps"] for output in outputs]

    assert asyncio.run(run()) == [3, 3, 4]
    assert log == ["begin a", "begin b", "end a", "end b", "weights", "begin c", "end c"]


def test_weights_that_vllm_does_not_take_leave_the_gate_open(server: Any) -> None:
    def refuse(state: Any) -> None:
        raise SpearError("other weights")

    async def run() -> Any:
        await server.start()
        server._engine.load_file = refuse
        with pytest.raises(SpearError, match="other weights"):
            await server.update_weights("weights", 4)
        return await server.generate("r", prompt_ids=[7], sampling_params={})

    assert asyncio.run(run()).extra_fields == {"global_steps": None}


def test_a_replica_runs_it_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def options(**chosen: Any) -> Any:
        made["options"] = chosen
        return SimpleNamespace(remote=lambda *arguments: made.setdefault("arguments", arguments))

    monkeypatch.setattr(rollout_vllm, "VLLMServer", SimpleNamespace(options=options))
    replica = object.__new__(VLLMReplica)
    replica.model_config = SimpleNamespace(path="policy")
    replica.config = SimpleNamespace(
        engine_kwargs={"vllm_cpu": {"kv_cache_gib": 0.5}},
        tensor_model_parallel_size=2,
        dtype="float32",
        prompt_length=64,
        response_length=6,
        max_num_seqs=32,
    )
    replica.make_server(name="vllm_cpu_server_0")
    wanted = VLLMOptions(tensor_parallel=2, dtype="float32", max_model_len=70, kv_cache_gib=0.5)
    assert made == {"options": {"name": "vllm_cpu_server_0"}, "arguments": ("policy", wanted, 32, 6)}


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
