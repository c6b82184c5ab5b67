"""What strangers share runs, reaches and reads nothing: models, samples, checkpoints, folders, and files."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_agents.cli import evaluate
from spear_agents.evaluation.exports import export_data
from spear_agents.evaluation.panels import OFFICIAL, digest_panel, panel, write_panel
from spear_agents.evaluation.records import EPISODES, SETTINGS
from spear_agents.evaluation.rescoring import rescore
from spear_agents.models import digest_model
from spear_agents.shortcuts import evaluate as run
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import view
from spear_envs.alfworld.gamefile import read_game_file
from spear_envs.core.errors import SpearError
from spear_envs.data.files import digest_file, read_yaml_text
from spear_envs.data.rows import parse_rows
from spear_envs.retrieval.corpus import Corpus
from spear_envs.sokoban.tasks import read_file as read_levels
from spear_envs.webshop.products import JsonReader
from tests.resilience.damage import EXAMPLES, damaged
from tests.rooms import ROOT, find_modules


class Bomb:
    """Leaves a folder where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that loads."""
    from tests.agents.conftest import save_tiny_model

    return save_tiny_model(tmp_path / "model", hidden=32)


def test_weights_are_safetensors_or_none(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from spear_agents.engines.hf import HFModel

    HFModel(model)
    (model / "model.safetensors").unlink()
    for save in (lambda path: torch.save({"a": Bomb(tmp_path / "trace")}, path),
                 lambda path: path.write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))):  # fmt: skip
        save(model / "pytorch_model.bin")
        with pytest.raises(SpearError, match="no weights in safetensors") as caught:
            HFModel(model)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_is_not_run(model: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told, transformers would ask whoever sits at the terminal."""
    from spear_agents.engines.hf import HFModel, load_tokenizer

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\nEvil = object\n")
    content = json.loads((model / file).read_text())
    names = {"config.json": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    content["auto_map"] = names.get(file, {"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    content.pop("tokenizer_class", None)
    if file == "config.json":
        content["model_type"] = "evil"
    (model / file).write_text(json.dumps(content))
    with pytest.raises(SpearError, match="cannot be"):
        if file == "config.json":
            HFModel(model)
        else:
            load_tokenizer(model)
            raise SpearError("cannot be told from another: it was read without its code")
    assert not (tmp_path / "trace").exists()


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def test_a_checkpoint_whose_folder_is_a_link_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    import torch

    from spear_training.run.checkpoints import check_files, finish_checkpoint
    from tests.training.trainings import save_small_checkpoint

    folder = save_small_checkpoint(tmp_path / "run", 3)
    (folder / "actor").rename(tmp_path / "shards")
    torch.save({"weights": Bomb(tmp_path / "trace")}, tmp_path / "shards" / "model_world_size_1_rank_0.pt")
    (folder / "actor").symlink_to(tmp_path / "shards")
    finish_checkpoint(folder)
    with pytest.raises(SpearError, match="link"):
        check_files(folder)


@pytest.mark.parametrize(
    "name", ["actor/model_world_size_1_rank_0.pt", "actor/optim_world_size_1_rank_0.pt", "data.pt"]
)
def test_a_checkpoint_with_a_program_is_neither_exported_nor_resumed(tmp_path: Path, name: str) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    import torch

    from spear_training.run.checkpoints import check_files, finish_checkpoint
    from spear_training.run.store import export_policy
    from tests.training.trainings import save_small_checkpoint

    trace = tmp_path / "trace"
    folder = save_small_checkpoint(tmp_path / "run", 3)
    for protocol in (2, 4):
        torch.save({"weights": Bomb(trace)}, folder / name, pickle_protocol=protocol)
        finish_checkpoint(folder)  # whoever can change a file can change the list of files
        for use in (lambda: export_policy(tmp_path / "run", tmp_path / "out"), lambda: check_files(folder)):
            with pytest.raises(SpearError, match=r"would run|cannot be read"):
                use()
    assert not trace.exists() and not (tmp_path / "out").exists()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_checkpoints_are_told_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from spear_training.run.checkpoints import check_files, check_origin, finish_checkpoint, read_best, read_state
    from tests.training.trainings import save_small_checkpoint

    folder = save_small_checkpoint(tmp_path_factory.mktemp("run"), 3)
    (folder.parent / "best").mkdir()
    (folder.parent / "best" / "best.json").write_text('{"step": 3, "metric": "m", "value": 0.5}')
    names = ["spear.json", "spear.safetensors", "manifest.json", "actor/model.pt", "data.pt", "../best/best.json"]
    chosen = folder / data.draw(st.sampled_from(names))
    chosen.write_bytes(data.draw(damaged(chosen.read_bytes())))
    if data.draw(st.booleans()) and chosen.name != "manifest.json":
        finish_checkpoint(folder)
    uses = (check_files, read_state, lambda path: check_origin(path, {}, exact=True, changeable=()))
    for use in (*uses, lambda path: read_best(path.parent)):
        try:
            use(folder)
        except SpearError as error:
            assert str(error) and len(str(error)) < 2000


# ---- arrays and samples ----------------------------------------------------------------------------------------------
def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    from spear_envs.bm25.build import build_index
    from spear_envs.bm25.index import SearchIndex
    from spear_training.sft.samples import ARRAYS, open_store

    bombs = np.array([Bomb(tmp_path / "trace")], dtype=object)
    for name in ARRAYS:
        np.save(tmp_path / f"{name}.npy", bombs, allow_pickle=True)
    with pytest.raises(SpearError, match="cannot be read"):
        open_store(tmp_path)
    build_index(["one river", "two rivers"], tmp_path / "index", processes=1)
    for path in sorted((tmp_path / "index").iterdir()):
        if path.suffix != ".json":
            kept = path.read_bytes()
            path.write_bytes(pickle.dumps(bombs))
            with pytest.raises(SpearError):
                SearchIndex.open(tmp_path / "index")
            path.write_bytes(kept)
    SearchIndex.open(tmp_path / "index")
    assert not (tmp_path / "trace").exists()


# ---- the code itself -------------------------------------------------------------------------------------------------
# What can run a program that it reads. Each place reads only what another process of ours has written for it.
READERS = ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "marshal.loads", "torch.load")
READERS += ("yaml.load", "yaml.unsafe_load", "eval", "exec", "joblib.load", "shelve.open", "np.load", "numpy.load")
PLACES = {
    "spear_envs/testing/trace.py": "an order to a process that was started for it",
    "spear_envs/testing/checks.py": "a copy of what it has just pickled itself",
    "sandbox/spear_sandbox/guest/*": "inside the sandbox",
    "agents/spear_agents/engines/vllm_worker.py": "weights alone (weights_only), from the process that started it",
    "training/spear_training/verl_plugin/workers.py": "shards whose pickles check_files has looked through",
    "spear_envs/code/grammar.py": "text of a program for the sandbox",
}


def test_programs_are_read_only_from_our_own_processes() -> None:
    faults = []
    for path in find_modules():
        shown, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if not any(f"{reader}(" in text for reader in READERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in READERS:
                continue
            pickles = [word for word in node.keywords if word.arg == "allow_pickle"]
            if ast.unparse(node.func).endswith("np.load") and not pickles:
                continue
            if not any(fnmatch(shown, place) for place in PLACES):
                faults.append(f"{shown}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not faults, "\n" + "\n".join(faults)


def test_json_of_any_depth_is_an_error_like_others() -> None:
    """Python answers JSON that is nested too deeply with RecursionError, which is not a ValueError."""
    faults = []
    for path in find_modules():
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "json.load" in text else ():
            if not isinstance(node, ast.Try) or "json.load" not in " ".join(map(ast.unparse, node.body)):
                continue
            caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
            if "ValueError" in caught and "RecursionError" not in caught:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno} catches {caught}")
    assert not faults, "\n" + "\n".join(faults)


HARMFUL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("strangers_module:spear/Sokoban-v1", {"modality": "text"}),
    ("this:spear/Sokoban-v1", {}),
    ("spear/McpTools-v0", {"tasks": "tasks.jsonl", "server": "touch trace"}),
    ("spear/McpTools-v0", {"tasks": "x", "server": "reboot"}),
    ("spear/McpTools-v0", {"tasks": "x", "pass_variables": ["HOME"]}),
    ("spear/CodeInterpreter-v0", {"sandbox": "http://127.0.0.1:9"}),
    ("spear/CodeInterpreter-v0", {"dataset": "/etc/passwd"}),
    ("spear/CodeInterpreter-v0", {"dataset": ".."}),
    ("spear/SearchR1-v0", {"retriever": "http://127.0.0.1:9"}),
    ("spear/SearchR1-v0", {"retriever": ["http://127.0.0.1:9"]}),
    ("spear/SearchR1-v0", {"retriever": "retriever.yaml"}),
    ("spear/SearchR1-v0", {"corpus": "tasks.jsonl"}),
    ("spear/Sokoban-v1", {"level": "/dev/zero"}),
    ("no/Such-v0", {}),
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of one episode, without harm."""
    folder = tmp_path_factory.mktemp("strangers") / "run"
    run("spear/Sokoban-v1", engine="random", tasks=1, env_kwargs={"modality": "text"}, out=folder, progress=False)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the files name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strangers_module.py").write_text("open('trace', 'w')\n")
    (tmp_path / "retriever.yaml").write_text("kind: bm25\n")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    return tmp_path


def copy_run(source: Path, target: Path, **settings: Any) -> Path:
    shutil.copytree(source, target)
    path = target / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


def write_strangers_panel(path: Path, env_id: str, kwargs: dict[str, Any]) -> Path:
    written = write_panel(OFFICIAL["sokoban-tiny"]) | {"env_id": env_id, "env_kwargs": kwargs}
    path.write_text(json.dumps(written | {"digest": digest_panel(written)}))
    return path


@pytest.mark.parametrize(("env_id", "kwargs"), HARMFUL)
def test_no_environment_is_made_that_runs_reaches_or_reads(
    here: Path, played: Path, env_id: str, kwargs: dict[str, Any]
) -> None:
    if "McpTools" in env_id:
        pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    folder = copy_run(played, here / "run", env_id=env_id, env_kwargs=kwargs, engine="hf", model="policy")
    file = write_strangers_panel(here / "panel.json", env_id, kwargs)
    lines = (folder / EPISODES).read_text().replace('"tokens": "bytes"', '"tokens": "model"')
    (folder / EPISODES).write_text(lines)
    commands: list[tuple[Any, list[str]]] = [
        (rescore, [str(folder)]),
        (panel, ["verify", str(file)]),
        (panel, ["export", str(file), "--out", "copy.json"]),
        (evaluate, ["--panel", str(file), "--engine", "random"]),
    ]
    if '"tokens": "model"' in lines:
        commands.append((export_data, [str(folder), "--form", "dataset", "--out", "out"]))
    for command, words in commands:
        found = CliRunner().invoke(command, words)
        assert isinstance(found.exception, SpearError), (words, found.output)
        assert "--trust" in str(found.exception) and "\n" not in str(found.exception)
    assert not (here / "trace").exists()


def test_consent_is_given_on_the_command_line(here: Path, played: Path) -> None:
    (here / "mine.py").write_text("import spear_envs\n")
    folder = copy_run(played, here / "run", env_id="mine:spear/Sokoban-v1")
    assert CliRunner().invoke(rescore, [str(folder)]).exit_code == 1
    assert CliRunner().invoke(rescore, [str(folder), "--trust"], catch_exceptions=False).exit_code == 0
    plain = copy_run(played, here / "plain")
    assert CliRunner().invoke(rescore, [str(plain)], catch_exceptions=False).exit_code == 0, "words and numbers"


def test_pictures_are_drawn_of_nothing_that_a_folder_names(here: Path, played: Path) -> None:
    shown = Run(played).read_episode(0)
    assert shown["turns"][0]["image"] and not shown["notes"]
    folder = copy_run(played, here / "run", env_kwargs={"modality": "text", "levels": str(here)})
    refused = Run(folder).read_episode(0)
    assert refused["turns"][0]["image"] is None and "--trust" in refused["notes"][0]
    assert "--trust" not in Run(folder, trust=True).read_episode(0)["notes"][0], "the folder is read, and has no levels"
    page = here / "page.html"
    assert (
        CliRunner().invoke(view, [str(folder), "--trust", "--export", str(page)], catch_exceptions=False).exit_code == 0
    )


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [make_pipe, link_zero, make_huge])
@pytest.mark.parametrize("name", [SETTINGS, EPISODES, "metrics/0.jsonl"])
def test_a_page_reads_regular_files_of_bounded_size(
    tmp_path: Path, played: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(played, folder)
    (folder / "metrics").mkdir()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    try:
        assert Run(folder).summarise()["trainings"] == []
    except SpearError as error:
        assert str(folder) in str(error)
    if name == SETTINGS:
        found = CliRunner().invoke(rescore, [str(folder)])
        assert isinstance(found.exception, SpearError)


READERS: dict[str, Callable[[Path], Any]] = {
    "corpus.jsonl": Corpus.open,
    "tasks.jsonl": lambda path: list(parse_rows(path, "data", lambda row, _: row, noun="problem", example="{}")),
    "tasks.jsonl.gz": lambda path: list(parse_rows(path, "data", lambda row, _: row, noun="problem", example="{}")),
    "levels.txt": read_levels,
    "game.tw-pddl": read_game_file,
    "items.json": JsonReader,
    "items.json.xz": JsonReader,
    "model.safetensors": lambda path: digest_model(path.parent),
    "file.bin": digest_file,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(tmp_path: Path, name: str) -> None:
    make_pipe(tmp_path / name)
    with pytest.raises((SpearError, OSError), match="not a regular file"):
        READERS[name](tmp_path / name)


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_corpus_s_offsets_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "a"}\n')
    make_pipe(tmp_path / "corpus.jsonl.lines")
    assert len(Corpus.open(tmp_path / "corpus.jsonl")) == 1


@pytest.mark.timeout(20)
def test_yaml_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(["a0: &a0 [1]", *levels]))
    for text in (file.read_text(), "a: &a [*a]", "a: *a " + "[" * 100_000):
        file.write_text(text)
        with pytest.raises((yaml.YAMLError, RecursionError)):
            read_yaml_text(file)
    file.write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert yaml.safe_load(read_yaml_text(file)) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
