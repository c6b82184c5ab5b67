import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf
from rich.console import Console

from spear_envs.core.errors import SpearError
from spear_training.run.checkpoints import MANIFEST, repair_tracker
from spear_training.run.compose import compose
from spear_training.run.config import RunConfig
from spear_training.run.inputs import TASKS_FILE, describe_inputs
from spear_training.run.launch import CHANGEABLE, CONFIG_FILE, Training, prepare_run, prepare_training, read_run
from spear_training.run.supervise import LOCK_FILE, lock_run
from tests.training.trainings import save_small_checkpoint

MODEL = "model.path"
TEXT = "env.kwargs.modality=text"
"""Sokoban shows a picture unless asked for text."""
ON_TEXTS = ("alfworld_tiny", "code_tiny", "search_tiny", "webshop_tiny")
"""Presets of the environments that are text anyway."""
CONFIGS: dict[str, tuple[str, ...]] = {
    "none": (TEXT,),
    "demo": ("preset=demo",),
    **{name: (f"preset={name}",) for name in ON_TEXTS},
}
TRACKER = "latest_checkpointed_iteration.txt"


def check(*words: str, out: Path = Path("runs/x")) -> Training:
    return prepare_training(compose(words), out)


@pytest.fixture(scope="module")
def composed(model_folder: Path) -> dict[str, Training]:
    """Each training once; tests that change one take a copy."""
    return {name: check(f"{MODEL}={model_folder}", *words) for name, words in CONFIGS.items()}


def change(training: Training, key: str, value: Any) -> Training:
    """A copy with another value of a dotted key."""
    values = node = training.config.to_mapping()
    *parts, name = key.split(".")
    for part in parts:
        node = node.setdefault(part, {})
    node[name] = value
    return replace(training, config=RunConfig.from_mapping(values))


def fail(*words: str) -> str:
    """The message of the error that ``words`` end in, which is one line."""
    with pytest.raises(SpearError) as caught:
        check(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_data_is_told_before_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_hub(name: str) -> bool:
        raise AssertionError(f"asked for {name}")

    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    monkeypatch.setattr("spear_training.run.launch.has_vision", ask_hub)
    assert "spear data get alfworld" in fail("preset=alfworld_qwen2.5_1.5b", "cluster=8gpu")


# ---- errors of models ------------------------------------------------------------------------------------------------


def test_a_model_folder_that_is_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert fail(f"{MODEL}={tmp_path}/empty") == (
        f"{tmp_path}/empty does not contain config.json: name a Hugging Face model folder"
    )
    assert "does not exist: make one with `spear warmstart`" in fail(f"{MODEL}={tmp_path}/none")
    assert "does not exist" in fail(f"{MODEL}=./qwen")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "bert").mkdir(parents=True)
    (tmp_path / "runs" / "bert" / "config.json").write_text('{"architectures": ["BertModel"]}')
    for name in ("runs/bert", "./runs/bert"):
        assert "holds a BertModel" in fail(f"{MODEL}={name}")


def test_a_model_that_was_fetched_is_a_folder_before_anything_starts(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    fetched = tmp_path / "models" / "smollm2-135m"
    shutil.copytree(model_folder, fetched)
    for override in ("model=smollm2-135m", f"{MODEL}=smollm2-135m"):
        training = check(override, TEXT)
        assert training.config.model.path == str(fetched)
        assert training.fit is not None and not training.fit.describe()
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    shutil.rmtree(fetched)
    assert "smollm2-135m is not here, and downloads are forbidden" in fail("model=smollm2-135m", TEXT)


def test_a_hub_id_is_left_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spear_training.run.launch.has_vision", lambda name: False)
    name = "Qwen/Qwen2.5-1.5B-Instruct"
    assert check("cluster=1gpu", f"{MODEL}={name}", TEXT).config.model.path == name
    # The rollouts of a CPU read a folder.
    assert "spear models get" in fail(f"{MODEL}={name}", TEXT)


# ---- errors of settings ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rollout.tensor_parallel=2", "=2 does not divide the 1 ranks of the cluster"),
        ("train.tokens_per_gpu=99", "raise train.tokens_per_gpu=99 to 2048"),
        ("train.log_prob_tokens_per_gpu=99", "raise train.log_prob_tokens_per_gpu=99 to 2048"),
        ("loss.aggregation=sum-norm", "take seq-mean-token-sum-norm"),
        ("env.template=fancy", "no prompt template 'fancy': this environment has compact, default"),
        ("env.train_split=trian", "split='trian' is not valid: choose one of 'train', 'valid', 'test'"),
        ("env.kwargs.boxen=3", "no keyword 'boxen'. Did you mean 'boxes'?"),
        ("env.kwargs.modality=image", "shows a picture"),
        ("train.batch_size=2000000", "train.batch_size=2000000 exceeds the 1000000 tasks"),
        ("train.max_tasks=7", "train.batch_size=32 exceeds train.max_tasks=7"),
        ("curriculum.choice=thompson", "set train.max_tasks"),
        ("rollout.agent=play.py:play", "set env.layout=conversation"),
    ],
)
def test_a_setting_that_cannot_be_is_told_before_anything_starts(model_folder: Path, word: str, expected: str) -> None:
    assert expected in fail(f"{MODEL}={model_folder}", TEXT, word)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["env.layout=conversation"], "env.layout=per_turn"),
        (["rollout.staleness=1"], "rollout.staleness=0"),
        (["env.layout=conversation", "rollout.agent=AGENT:play"], "leave out rollout.agent"),
    ],
)
def test_a_run_that_cannot_branch_is_refused(
    tmp_path: Path, model_folder: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "agent.py").write_text("def play(): ...\n")
    words = [word.replace("AGENT", str(tmp_path / "agent.py")) for word in words]
    base = (f"{MODEL}={model_folder}", TEXT, "branch.share=0.5")
    assert check(*base).config.branch.share == 0.5
    assert expected in fail(*base, *words)


def test_a_filter_of_actions_in_tags_needs_a_template_that_writes_them(model_folder: Path) -> None:
    base, wanted = (f"{MODEL}={model_folder}",), "filter.void=incomplete"
    assert check(*base, TEXT, wanted).config.filter.void.value == "incomplete"
    assert "filter.void=turn" in fail(*base, "preset=search_tiny", wanted)


# ---- run folders -----------------------------------------------------------------------------------------------------
def test_a_new_run_gets_its_folder_and_its_configuration(tmp_path: Path, composed: dict[str, Training]) -> None:
    out = tmp_path / "deep" / "run"
    assert prepare_run(composed["none"], out) is None
    assert read_run(out) == composed["none"].config
    names = {path.name for path in out.iterdir()}
    assert names == {CONFIG_FILE, TASKS_FILE, LOCK_FILE}, "nothing else, no test file, no temporary one"
    tasks = json.loads((out / TASKS_FILE).read_text())
    assert tasks["environment"] == "spear/Sokoban-v1"
    assert (tasks["train"]["tasks"], tasks["valid"]["tasks"]) == (1_000_000, 256)
    assert tasks["train"]["fingerprint"] != tasks["valid"]["fingerprint"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_command_resumes(tmp_path: Path, composed: dict[str, Training], name: str) -> None:
    prepare_run(composed[name], tmp_path)
    save_small_checkpoint(tmp_path, 4)
    assert prepare_run(composed[name], tmp_path) == 4
    assert read_run(tmp_path) == composed[name].config


def test_another_configuration_is_refused_and_named(tmp_path: Path, composed: dict[str, Training]) -> None:
    config = composed["none"]
    prepare_run(config, tmp_path)
    save_small_checkpoint(tmp_path, 4)
    before = (tmp_path / CONFIG_FILE).read_text()
    with pytest.raises(SpearError, match=r"sil\.warmup_steps was 200, is now 7\. Name another --out"):
        prepare_run(change(config, "sil.warmup_steps", 7), tmp_path)
    with pytest.raises(SpearError, match=r"and 1 more"):
        prepare_run(change(change(config, "sil.warmup_steps", 7), "seed", 5), tmp_path)
    with pytest.raises(SpearError, match=r"env\.kwargs\.max_turns was None, is now 9"):
        prepare_run(change(config, "env.kwargs.max_turns", 9), tmp_path)
    assert (tmp_path / CONFIG_FILE).read_text() == before


def test_other_tasks_another_model_or_other_code_are_refused_and_named(tmp_path: Path, model_folder: Path) -> None:
    """Under the same configuration: what the paths in it hold has changed."""
    data, reward, out = tmp_path / "mine.jsonl", tmp_path / "reward.py", tmp_path / "run"
    model = shutil.copytree(model_folder, tmp_path / "model")

    def write(answer: int) -> None:
        rows = [{"problem": f"What is {number} plus {answer}?", "answer": str(number + answer)} for number in range(8)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prepare_mine() -> int | None:
        words = (
            *(f"{MODEL}={model}", "preset=code_tiny", f"env.kwargs.dataset={data}"),
            *("env.train_split=all", "env.valid_split=all", "train.batch_size=4"),
            f"reward.function={reward}",
        )
        return prepare_run(check(*words, out=out), out)

    write(0)
    reward.write_text("def compute_score(**_):\n    return 1.0\n")
    prepare_mine()
    save_small_checkpoint(out, 4)
    assert prepare_mine() == 4
    before = (out / TASKS_FILE).read_text()
    write(1)
    with pytest.raises(SpearError, match=r"tasks .* changed"):
        prepare_mine()
    write(0)
    reward.write_text("def compute_score(**_):\n    return 2.0\n")
    with pytest.raises(SpearError, match=r"reward\.py changed"):
        prepare_mine()
    reward.write_text("def compute_score(**_):\n    return 1.0\n")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    with pytest.raises(SpearError, match="model's folder changed"):
        prepare_mine()
    assert (out / TASKS_FILE).read_text() == before, "the evidence is kept"
    (out / TASKS_FILE).unlink()
    with pytest.raises(SpearError, match="model's folder changed"):
        prepare_mine()  # what counts stands in the checkpoint
    (model / "config.json").write_text(json.dumps(config))
    assert prepare_mine() == 4


@pytest.mark.parametrize(
    "name", ["words.yaml", "corpus.jsonl", "helper.py", "kit/deep.py", "lazy.py", "server.py", "index/manifest.json"]
)
def test_files_that_values_files_and_modules_name_are_inputs(
    tmp_path: Path, composed: dict[str, Training], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {
        "words.yaml": "indexes: {words: {kind: bm25, corpus: corpus.jsonl, path: [index/]}}",
        "corpus.jsonl": "{}",
        "index/manifest.json": "{}",
        "reward.py": "from kit import deep\ndef compute_score(**_):\n    import lazy, json\n",
        "kit/deep.py": "from .. import helper",
        "lazy.py": "",
        "helper.py": "",
        "server.py": "",
    }
    for place, text in contents.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    monkeypatch.chdir(tmp_path)
    values = {"retriever": f"{tmp_path}/words.yaml#words", "server": "python server.py", "split": "reward"}
    config = change(change(composed["none"], "env.kwargs", values), "reward.function", "reward:go").config
    played = composed["none"].environment

    def describe() -> dict[str, str]:
        return {
            os.path.realpath(place): digest
            for place, digest in describe_inputs(config, played, changeable=())["files"].items()
        }

    before = describe()
    assert {os.path.realpath(place) for place in contents} <= set(before)
    (tmp_path / name).write_text(contents[name] + " ")
    after = describe()
    assert {place for place in before if before[place] != after[place]} == {os.path.realpath(name)}


def test_the_module_of_an_environment_of_ones_own_is_an_input(
    tmp_path: Path, composed: dict[str, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess.py").write_text("")
    monkeypatch.chdir(tmp_path)
    played = replace(composed["none"].environment, id="guess:mine/Guess-v0")
    config = change(composed["none"], "env.id", played.id).config
    assert str(tmp_path / "guess.py") in map(os.path.realpath, describe_inputs(config, played, changeable=())["files"])


def test_checkpoints_that_are_not_complete_are_named(tmp_path: Path, composed: dict[str, Training]) -> None:
    prepare_run(composed["none"], tmp_path)
    (tmp_path / "checkpoints" / "global_step_4" / "actor").mkdir(parents=True)
    console = Console(file=io.StringIO(), width=200)
    assert prepare_run(composed["none"], tmp_path, console) is None
    assert "no complete checkpoint" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["train.steps", "checkpoint.every", "verl.ray_kwargs.ray_init.num_cpus"])
def test_what_does_not_change_the_run_may_change(tmp_path: Path, composed: dict[str, Training], key: str) -> None:
    assert any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)
    prepare_run(composed["none"], tmp_path)
    save_small_checkpoint(tmp_path, 4)
    assert prepare_run(change(composed["none"], key, 17), tmp_path) == 4
    assert OmegaConf.select(OmegaConf.load(tmp_path / CONFIG_FILE), key) == 17


def test_a_folder_that_is_being_trained_in_is_left_alone(tmp_path: Path, composed: dict[str, Training]) -> None:
    prepare_run(composed["none"], tmp_path)
    before = (tmp_path / CONFIG_FILE).read_text()
    with lock_run(tmp_path), pytest.raises(SpearError, match="another process trains in"):
        prepare_run(change(composed["none"], "seed", 9), tmp_path)
    assert (tmp_path / CONFIG_FILE).read_text() == before


def test_a_run_folder_may_move(tmp_path: Path, model_folder: Path) -> None:
    for place in ("here", "there"):
        if place == "there":
            (tmp_path / "here").rename(tmp_path / "there")
        out = tmp_path / place
        assert prepare_run(check(f"{MODEL}={model_folder}", TEXT, out=out), out) == (None if place == "here" else 4)
        if place == "here":
            save_small_checkpoint(out, 4)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, composed: dict[str, Training]) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    for out in (taken, taken / "run"):
        with pytest.raises(SpearError, match=r"cannot be written.*choose another folder"):
            prepare_run(composed["none"], out)
    assert taken.read_text() == "mine"


# ---- trackers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [None, "", "1\x00", "ten", "15"])
def test_a_torn_tracker_is_mended_to_the_newest_whole_checkpoint(tmp_path: Path, torn: str | None) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (5, 10):
        save_small_checkpoint(tmp_path, step)
    half = save_small_checkpoint(tmp_path, 15, tracked=False)
    (half / MANIFEST).unlink()
    if torn is None:
        (checkpoints / TRACKER).unlink()
    else:
        (checkpoints / TRACKER).write_text(torn)
    assert repair_tracker(checkpoints) == 10
    assert (checkpoints / TRACKER).read_text() == "10"


def test_a_tracker_without_any_whole_checkpoint_goes(tmp_path: Path) -> None:
    half = save_small_checkpoint(tmp_path, 5)
    (half / MANIFEST).unlink()
    assert repair_tracker(tmp_path / "checkpoints") is None
    assert not (tmp_path / "checkpoints" / TRACKER).exists(), "verl would look for the folder it names"


def test_a_checkpoint_whose_weights_were_cleared_away_does_not_count(tmp_path: Path) -> None:
    # verl removes the oldest weights and leaves the rest of their folder.
    old = save_small_checkpoint(tmp_path, 5)
    (old / "actor" / "model.pt").unlink()
    (old / "actor").rmdir()
    save_small_checkpoint(tmp_path, 10, tracked=False)
    assert repair_tracker(tmp_path / "checkpoints") == 10


def test_a_whole_tracker_is_believed(tmp_path: Path) -> None:
    save_small_checkpoint(tmp_path, 5)
    save_small_checkpoint(tmp_path, 10, tracked=False)  # killed just before the tracker was written
    assert repair_tracker(tmp_path / "checkpoints") == 5
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == "5"


def test_a_users_copy_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    best = save_small_checkpoint(tmp_path, 5)
    best.rename(best.with_name("global_step_5_best"))
    save_small_checkpoint(tmp_path, 10)
    assert repair_tracker(tmp_path / "checkpoints") == 10
