"""Responses of models whose files disagree about what ends one, and of broken models."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from tokenizers.decoders import Fuse  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from spear_agents.engines.base import (  # noqa: E402
    Finish,
    find_end_ids,
    require_end_ids,
)
from spear_agents.engines.hf import HFModel, load_tokenizer, quiet_transformers  # noqa: E402
from spear_agents.evaluation.collect import collect_episodes  # noqa: E402
from spear_agents.evaluation.records import EPISODES  # noqa: E402
from spear_agents.evaluation.run import run_evaluation  # noqa: E402
from spear_agents.evaluation.settings import EngineKind, EvalSettings  # noqa: E402
from spear_agents.play.chat import Chat  # noqa: E402
from spear_agents.play.prompting import PromptBuilder  # noqa: E402
from spear_agents.play.trajectory import Layout, StopReason, read_trajectories  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402
from spear_envs.core.prompts import CompactTemplate  # noqa: E402
from spear_envs.core.registration import register_env  # noqa: E402
from spear_training.warmstart.policy import PolicyShape, make_model  # noqa: E402
from tests.agents.test_evaluation import SplitCorridor  # noqa: E402
from tests.agents.test_prompting import see  # noqa: E402

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think is defined and not think %}<t></t>{% endif %}"
    "{% endif %}"
)
LLAMA_3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKS = {
    CHATML: ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    LLAMA_3: ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


def make_tokenizer(template: str, end: str | None) -> PreTrainedTokenizerFast:
    """Characters and the marks of a family of chat models; ``end`` is what the tokenizer itself takes for its end."""
    characters = [chr(i) for i in range(128)]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        additional_special_tokens=MARKS[template],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def write_ends(
    folder: Path, generation: Any = None, config: Any = None, text: Any = None, vocabulary: int = 10
) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    part = {"eos_token_id": text, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config, "text_config": part}))
    return folder


@pytest.mark.parametrize(
    ("own", "generation", "config", "text", "expected"),
    [
        (3, None, None, None, (3,)),
        (None, [3, 4], None, None, (3, 4)),
        (3, 3, 3, None, (3,)),
        (3, [4, 3], 5, 6, (3, 4, 5, 6)),
        (None, None, None, [7, 8], (7, 8)),
        (None, "x", True, {}, ()),
        (None, [3, -1, 9], 10, 99, (3, 9)),
    ],
)
def test_all_files_are_asked(
    tmp_path: Path, own: Any, generation: Any, config: Any, text: Any, expected: tuple[int, ...]
) -> None:
    tokenizer = make_tokenizer(CHATML, None)
    tokenizer.eos_token_id = own
    assert find_end_ids(write_ends(tmp_path, generation, config, text), tokenizer) == expected


def test_a_model_that_names_no_end_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "null"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpearError, match=r"names no end token: set eos_token_id in its generation_config\.json"):
            require_end_ids(tmp_path, None)


@pytest.mark.parametrize(
    ("template", "own", "others", "written"),
    [
        (CHATML, "<|im_end|>", ["<|endoftext|>"], "<|im_end|>"),
        (CHATML, "<|endoftext|>", ["<|im_end|>"], "<|im_end|>"),
        (CHATML, "<|endoftext|>", [], "<|endoftext|>"),
        (CHATML, "<|im_start|>", ["<|im_end|>"], "<|im_end|>"),
        (CHATML, None, ["<|im_end|>"], "<|im_end|>"),
        (LLAMA_3, "<|eot_id|>", ["<|end_of_text|>"], "<|eot_id|>"),
        (LLAMA_3, "<|end_of_text|>", ["<|eot_id|>"], "<|eot_id|>"),
    ],
)
@pytest.mark.parametrize("has_keywords", [False, True])
def test_a_conversation_goes_on_with_the_one_end_token_that_was_sampled(
    template: str, own: str | None, others: list[str], written: str, has_keywords: bool
) -> None:
    keywords = {"think": False} if has_keywords and template is CHATML else {}
    tokenizer = make_tokenizer(template, own)
    ids = tokenizer.convert_tokens_to_ids
    builder = PromptBuilder(
        tokenizer,
        CompactTemplate(),
        Layout.CONVERSATION,
        stop_token_ids=[ids(mark) for mark in others],
        template_kwargs=keywords,
    )
    assert builder.chat.end_id == ids(written)
    template_end = "<|im_end|>" if template is CHATML else "<|eot_id|>"
    for mark in [*([own] if own else []), *others]:
        reply = (*tokenizer.encode("go", add_special_tokens=False), ids(mark))
        assert builder.decode(reply) == "go"
        dialogue = builder.begin()
        first = dialogue.next(**see("o1"))
        dialogue.add("o1", "go", reply, Finish.STOP)
        second = dialogue.next(**see("o2", 2))
        assert first is not None and second is not None
        if keywords:  # the template writes something before a response that it does not show later
            assert builder.rewrites and second.follows is None and second.new_ids == second.ids
            assert tokenizer.decode(second.ids).count("<t></t>") == 1
            continue
        assert second.ids == first.ids + reply + second.new_ids and second.follows == 0
        added = tokenizer.decode(second.new_ids)
        assert added.lstrip("\n").startswith(("<|im_start|>user", "<|start_header_id|>user"))
        assert tokenizer.decode(second.ids).count(template_end) == 2 + (mark == template_end), "two messages of a user"
    if keywords:
        return
    dialogue = builder.begin()
    dialogue.next(**see("o1"))
    dialogue.add("o1", "go", tuple(tokenizer.encode("go", add_special_tokens=False)), Finish.LENGTH)
    cut = dialogue.next(**see("o2", 2))
    assert cut is not None and tokenizer.decode(cut.new_ids).startswith(template_end), "the model wrote none"


def test_a_model_without_a_chat_template_is_one_line() -> None:
    tokenizer = make_tokenizer(CHATML, "<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(SpearError, match=r"no chat template: take a chat \(instruct\) version"):
        PromptBuilder(tokenizer, CompactTemplate())
    tokenizer.chat_template = "{{ raise_exception('Only the user speaks') }}"
    with pytest.raises(SpearError, match=r"refuses messages of user.* \(Only the user speaks\)"):
        PromptBuilder(tokenizer, CompactTemplate())
    tokenizer.chat_template = "a template that shows nothing"
    with pytest.raises(SpearError, match="drops messages of user: take another model"):
        PromptBuilder(tokenizer, CompactTemplate())
    tokenizer.chat_template = "{{ messages | tojson }}"
    prompt = PromptBuilder(tokenizer, CompactTemplate()).begin().next(**see("o1"))
    assert prompt is not None and "o1" in tokenizer.decode(prompt.ids), "escaped characters are still shown"


@pytest.fixture
def torn_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model whose generation settings and configuration name another end token than its tokenizer."""
    folder = tmp_path / "torn"
    shutil.copytree(tiny_model, folder)
    other = load_tokenizer(folder).convert_tokens_to_ids("go")
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": other}))
    return folder


def test_whichever_end_token_a_model_samples_ends_the_response(
    torn_model: Path, tiny_model: Path, corridor_id: str
) -> None:
    own, other = HFModel(torn_model).stop_token_ids
    assert (own,) == HFModel(tiny_model).stop_token_ids
    register_env(corridor_id, SplitCorridor)
    found = run_evaluation(
        EvalSettings(corridor_id, model=str(torn_model), episodes_per_task=8, layout=Layout.PER_TURN)
    )
    turns = [turn for trajectory in found.trajectories for turn in trajectory.turns]
    ended = {turn.response_ids[-1] for turn in turns if turn.finish is Finish.STOP}
    assert ended == {own, other}
    tokenizer = load_tokenizer(torn_model)
    for turn in turns:
        assert not {own, other} & {*turn.response_ids[:-1]}, "nothing follows an end token"
        if turn.finish is Finish.STOP:
            assert turn.response == tokenizer.decode(list(turn.response_ids[:-1]))


@pytest.fixture
def settings(corridor_id: str, tiny_model: Path) -> EvalSettings:
    register_env(corridor_id, SplitCorridor)
    return EvalSettings(corridor_id, model=str(tiny_model), episodes_per_task=2)


def test_broken_weights_are_faults_and_no_lost_episodes(
    settings: EvalSettings, tiny_model: Path, tmp_path: Path
) -> None:
    model = HFModel(tiny_model).model
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with quiet_transformers():
        model.save_pretrained(tmp_path / "broken")
    load_tokenizer(tiny_model).save_pretrained(tmp_path / "broken")
    with pytest.raises(SpearError, match=r"failed 5 episodes in a row \(engine_nan"):
        run_evaluation(replace(settings, model=str(tmp_path / "broken")), tmp_path / "out", concurrency=1)
    played = list(read_trajectories(tmp_path / "out" / EPISODES))
    assert {(t.stop, t.fault, t.reward) for t in played} == {(StopReason.FAULT, "engine_nan", 0.0)}
    assert "NaN" not in (tmp_path / "out" / EPISODES).read_text()


LIMITED = """
import resource, sys
from pathlib import Path
import torch, transformers, spear_agents.engines.hf
from spear_envs.cli import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
main(sys.argv[1:])
"""


@pytest.mark.slow  # two processes that import torch; and neither is quick without memory
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_memory_that_runs_out_is_one_clear_error_and_the_run_goes_on_later(tiny_model: Path, tmp_path: Path) -> None:
    # 28 prompts at a time need more than 300 MiB for the activations of a layer, two less than 100.
    tokenizer = load_tokenizer(tiny_model)
    model = make_model(PolicyShape(hidden=16, layers=1, heads=2, mlp=2**17), tokenizer, 64, seed=0)
    with quiet_transformers():
        model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")

    keywords, out = {"modality": "text", "max_turns": 1}, tmp_path / "out"
    wide = EvalSettings("spear/Sokoban-v1", model=str(tmp_path / "wide"), env_kwargs=keywords, max_tokens=2, tasks="4")
    run_evaluation(wide, out, concurrency=2)

    def evaluate(concurrency: int) -> subprocess.CompletedProcess[str]:
        options = ["--env", "modality=text", "--env", "max_turns=1", "--max-tokens", "2", "--tasks", "32"]
        options += ["--model", str(wide.model), "--out", str(out), "--concurrency", str(concurrency)]
        command = [sys.executable, "-c", LIMITED, "eval", "spear/Sokoban-v1", *options]
        # One arena: glibc reserves 64 MiB for each thread that allocates, which would count here or not.
        surroundings = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        return subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300, check=False)

    before = (out / EPISODES).read_bytes()
    many = evaluate(32)
    assert many.returncode == 1
    assert "out of memory with 28 responses at a time: play fewer (--concurrency)" in many.stderr
    assert "Traceback" not in many.stderr
    assert (out / EPISODES).read_bytes() == before, "what was played is still there"
    assert evaluate(2).returncode == 0
    played = Counter((t.task_id, t.seed) for t in read_trajectories(out / EPISODES))
    assert len(played) == 32 and set(played.values()) == {1}


def test_a_chat_template_that_loops_is_one_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spear_agents.play.chat.RENDER_S", 0.3)
    tokenizer = load_tokenizer(tiny_model)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    tokenizer.chat_template = loops + "{{ messages[0].content }}"
    started = time.monotonic()
    with pytest.raises(SpearError, match="template"):
        Chat(tokenizer).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - started < 10


def test_data_for_a_model_ends_as_its_chat_template_does(corridor_id: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML, "<|im_start|>")
    tokenizer.save_pretrained(tmp_path / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    write_ends(tmp_path / "model", end, vocabulary=len(tokenizer))
    register_env(corridor_id, SplitCorridor)
    settings = EvalSettings(corridor_id, EngineKind.EXPERT, layout=Layout.CONVERSATION, template="compact")
    for split in ({}, {"layout": Layout.PER_TURN}):
        path = tmp_path / f"data{len(split)}.jsonl"
        collect_episodes(replace(settings, **split), path, tokenizer=str(tmp_path / "model"))
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            assert sample["input_ids"][-1] == end and sample["loss_mask"][-1] == 1
            assert "<|im_end|><|im_end|>" not in tokenizer.decode(sample["input_ids"])
