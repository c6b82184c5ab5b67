"""Files that people pass to each other, damaged at random, and whatever a model writes."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_agents.evaluation.records import EPISODES, METRICS_FOLDER, SETTINGS, read_history, read_last, read_settings
from spear_agents.play.trajectory import TokenKind, TrajectoryWriter
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import render_page
from spear_envs.alfworld.gamefile import GameFile, load_game
from spear_envs.alfworld.synthesis.games import write_synthetic_game
from spear_envs.bm25.build import build_index
from spear_envs.bm25.index import SearchIndex
from spear_envs.code.tasks import read_problems
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.spaces import INFO_KEYS
from spear_envs.data.embedded import read_embedded
from spear_envs.retrieval.build import build_bm25
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.indexes import open_index
from spear_envs.search.tasks import read_questions
from spear_envs.webshop.build import build_store
from spear_envs.webshop.products import find_files
from spear_envs.webshop.store import check_store
from tests.agents.test_trajectory import make_trajectory
from tests.resilience.damage import EXAMPLES, damaged

Write = Callable[[Path], None]
Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Loader:
    """What people share, and who reads it."""

    write: Write
    read: Read
    files: tuple[str, ...]
    """Those that are damaged."""


def write_run(folder: Path) -> None:
    with TrajectoryWriter(folder / EPISODES) as writer:
        for seed in range(2):
            turns = make_trajectory(count=2, tokens=TokenKind.BYTES, seed=seed, env_id="spear/Sokoban-v1")
            writer.write(turns)
    (folder / SETTINGS).write_text(
        json.dumps({"engine": "expert", "env_kwargs": {"modality": "text"}, "split": "test"})
    )
    (folder / METRICS_FOLDER).mkdir()
    lines = [{"step": step, "data": {"success/all": step / 4, "training/global_step": step}} for step in (1, 2, 3)]
    (folder / METRICS_FOLDER / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def show_run(folder: Path) -> None:
    run = Run(folder)
    summary = run.summarise()
    render_page(summary, ((row["i"], run.read_episode(row["i"])) for row in summary["episodes"]))


def write_rows(name: str, rows: list[Any], folder: Path) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


PROBLEMS = [
    {"problem": "1 + 1?", "answer": "2"},
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}},
]
QUESTIONS = [
    {"id": "nq_0", "question": "who?", "golden_answers": ["a", "b"], "metadata": {}},
    {"data_source": "nq", "prompt": [{"role": "user", "content": "Question: who?"}],
     "reward_model": {"ground_truth": {"target": ["a"]}}, "extra_info": {"question": "who?"}},
]  # fmt: skip
PASSAGES = [{"id": str(n), "contents": f"Title {n}\nthe river number {n} is long"} for n in range(6)]


def write_game(folder: Path) -> None:
    pytest.importorskip("alfworld", reason="writing a game needs the extra 'alfworld'")
    write_synthetic_game("pick_and_place_simple", 3, folder).rename(folder / "game.tw-pddl")


def read_rows_of(read: Callable[[Path], Iterator[Any]], name: str, folder: Path) -> None:
    assert list(read(folder / name))


def play_shop(folder: Path) -> None:
    env: Any = make_env("spear/WebShop-v0", "test", {"catalog": str(folder)})
    env.reset(seed=0)
    env.step(env.parser.respond("search[shoe]"))
    env.close()


def write_index(folder: Path) -> None:
    write_rows("corpus.jsonl", PASSAGES, folder)
    build_bm25(Corpus.open(folder / "corpus.jsonl"), folder / "index", processes=1)


def search_index(folder: Path) -> None:
    corpus = Corpus.open(folder / "corpus.jsonl")
    (hits,) = open_index("bm25", corpus, folder / "index").rank(["river"], 3)
    assert [corpus.document(row) for row, _ in hits]


def write_catalogue(folder: Path, products: int = 20) -> None:
    data = read_embedded("webshop")
    items = data["items"][:products]
    (folder / "items_shuffle.json").write_text(json.dumps(items))
    for name, key in (("items_ins_v2.json", "attributes"), ("items_human_ins.json", "human")):
        asins = [item["asin"] for item in items if item["asin"] in data[key]]
        (folder / name).write_text(json.dumps({asin: data[key][asin] for asin in asins}))


def write_store(folder: Path) -> None:
    (folder / "raw").mkdir()
    write_catalogue(folder / "raw")
    build_store(find_files(folder / "raw"), folder / "store", processes=1)


LOADERS: dict[str, Loader] = {
    "episodes, figures": Loader(write_run, lambda folder: read_last(folder / EPISODES), (EPISODES,)),
    "episodes, settings": Loader(write_run, read_settings, (SETTINGS,)),
    "episodes, metrics": Loader(write_run, read_history, (f"{METRICS_FOLDER}/1.jsonl",)),
    "episodes, page": Loader(write_run, show_run, (EPISODES, SETTINGS, f"{METRICS_FOLDER}/1.jsonl")),
    "problems": Loader(
        partial(write_rows, "p.jsonl", PROBLEMS), partial(read_rows_of, read_problems, "p.jsonl"), ("p.jsonl",)
    ),
    "questions": Loader(
        partial(write_rows, "q.jsonl", QUESTIONS), partial(read_rows_of, read_questions, "q.jsonl"), ("q.jsonl",)
    ),
    "corpus": Loader(
        partial(write_rows, "corpus.jsonl", PASSAGES), lambda folder: Corpus.open(folder / "corpus.jsonl"),
        ("corpus.jsonl",),
    ),
    "index of words": Loader(
        lambda folder: build_index((row["contents"] for row in PASSAGES), folder / "index", processes=1),
        lambda folder: SearchIndex.open(folder / "index"),
        ("index/*",),
    ),
    "index": Loader(write_index, search_index, ("index/*", "index/*/*", "corpus.jsonl")),
    "games": Loader(write_game, lambda folder: load_game(GameFile(folder / "game.tw-pddl")), ("game.tw-pddl",)),
    "catalogue": Loader(write_catalogue, play_shop, ("*.json",)),
    "store": Loader(write_store, lambda folder: check_store(folder / "store"), ("store/*", "store/*/*")),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The undamaged files of a loader, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("whole")
            LOADERS[name].write(folder)  # skips the test, each one, where it lacks a package
            made[name] = folder
        return made[name]

    return make


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_told_in_one_sentence(
    name: str, whole: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    loader = LOADERS[name]
    folder = tmp_path_factory.mktemp("damaged") / "files"
    shutil.copytree(whole(name), folder)
    names = sorted(
        path.relative_to(folder).as_posix()
        for pattern in loader.files
        for path in folder.glob(pattern)
        if path.is_file()
    )
    chosen = folder / data.draw(st.sampled_from(names))
    chosen.write_bytes(data.draw(damaged(chosen.read_bytes())))
    try:
        loader.read(folder)
    except SpearError as error:
        assert str(error) and len(str(error)) < 5000
    finally:
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("name", LOADERS)
def test_an_empty_file_is_told_in_one_sentence(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Each of them, as after a power failure; an index or a store does not open without it."""
    loader = LOADERS[name]
    files = [path for pattern in loader.files for path in whole(name).glob(pattern) if path.is_file()]
    assert files
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(whole(name), folder)
        (folder / path.relative_to(whole(name))).write_bytes(b"")
        with pytest.raises(SpearError) if "index" in name or "store" in name else suppress(SpearError):
            loader.read(folder)


@pytest.mark.parametrize("name", LOADERS)
def test_whole_files_are_read(name: str, whole: Callable[[str], Path]) -> None:
    """What the damage is done to."""
    LOADERS[name].read(whole(name))


TAGS = ("think", "action", "search", "answer", "code", "tool_call", "information", "image")
PIECES = (
    *(f"<{tag}>" for tag in TAGS),
    *(f"</{tag}>" for tag in TAGS),
    '{"name": "code_interpreter", "arguments": {"code": "print(1)"}}',
    '{"name":',
    "{" * 3000,
    "```python\n",
    "```",
    "print(2)\n",
    "\\boxed{",
    "}",
    *("<|im_end|>", "\ud800", "\x00", "\u202e", "\r\n", " " * 5000, "é" * 300, "١٢", "1e999"),
    *("up", "look", "search[shoe]", "click[buy now]", "go to desk 1", "river"),
)
responses = st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=8).map("".join)
KEYWORDS: dict[str, dict[str, Any]] = {
    "spear/Sokoban-v1": {"modality": "text"},
    "spear/ALFWorld-v0": {},
    "spear/WebShop-v0": {},
    "spear/SearchR1-v0": {},
    "spear/CodeInterpreter-v0": {"time_limit": 5},
}


@pytest.fixture(scope="module", params=KEYWORDS)
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    if "Code" in request.param:
        from tests.sandbox.service import need_isolation

        need_isolation()
    made = make_env(request.param, keywords=KEYWORDS[request.param])
    yield made
    made.close()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(said=st.lists(responses, min_size=1, max_size=3), number=st.integers(0, 5))
def test_any_response_is_answered(env: Any, said: list[str], number: int) -> None:
    env.reset(options={"task": env.tasks[number].id})
    for response in said:
        observation, reward, terminated, truncated, info = env.step(response)
        assert env.observation_space.contains(observation) and isinstance(observation, str)
        assert set(info) >= set(INFO_KEYS) and info["fault"] is None
        assert math.isfinite(reward) and (reward == 0 or terminated or truncated)
        if terminated or truncated:
            assert 0 <= info["score"] <= 1
            break
    again = env.set_state(env.get_state())
    assert again[1]["task_id"] == env.task.id


@pytest.mark.slow
def test_a_server_of_environments_that_dies_takes_no_task_along() -> None:
    """The episode is lost with its session; played again on another server it is the same."""
    pytest.importorskip("websockets", reason="needs the extra 'env-server'")
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    from tests.commands import run_command
    from tests.spear_envs.adapters.service import Player

    def play(url: str, kill: Any = None) -> list[Any]:
        seen: list[Any] = []
        with connect(url.replace("http", "ws") + "/ws") as socket:
            player = Player(socket)
            seen.append(player.ask("reset", seed=5))
            for response in ("<think>a</think><action>up</action>", "nonsense", "<think></think><action>left</action>"):
                if kill is not None and len(seen) == 2:
                    kill()
                seen.append(player.ask("step", response=response))
        return seen

    arguments = ("spear/Sokoban-v1", "--env", "modality=text")
    with run_command("serve", *arguments) as first:
        whole = play(first.url)
        with pytest.raises((WebSocketException, ConnectionError, TimeoutError)):
            play(first.url, first.process.kill)
    with run_command("serve", *arguments) as second:
        assert play(second.url) == whole
