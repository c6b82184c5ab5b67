"""A tiny untrained model with its tokenizer, and the corridor under a gymnasium id."""

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

from spear_envs.core.registration import register_env
from tests.agents.chat_server import Script, serve_script
from tests.agents.corridor import CorridorEnv

CORRIDOR = "spear-test/AgentCorridor-v0"


@pytest.fixture
def corridor_id() -> Iterator[str]:
    """The corridor as a registered environment."""
    register_env(CORRIDOR, CorridorEnv)
    yield CORRIDOR
    gym.registry.pop(CORRIDOR, None)


@pytest.fixture
def script() -> Iterator[Script]:
    """A local server of chat completions whose answers the test sets."""
    with serve_script() as script:
        yield script


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer model that speaks the corridor's language."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden=32)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 32, the least that vLLM computes with on a CPU."""
    return save_tiny_model(tmp_path_factory.mktemp("wide") / "model", hidden=64)


def save_tiny_model(folder: Path, hidden: int) -> Path:
    """Makes a random model of two heads and its tokenizer."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from spear_agents.engines.hf import quiet_transformers
    from spear_envs.core.prompts import CompactTemplate
    from spear_training.warmstart.policy import PolicyShape, make_model
    from spear_training.warmstart.rows import make_tokenizer

    template = CompactTemplate()
    texts = ["walk to the end\nPPP_P_", *(template.respond(word) for word in ("go", "back", "fail"))]
    tokenizer = make_tokenizer(template, texts)
    shape = PolicyShape(hidden=hidden, layers=2, heads=2, mlp=48, initializer_range=0.25)
    model = make_model(shape, tokenizer, 64, seed=3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.max_new_tokens = 8
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
