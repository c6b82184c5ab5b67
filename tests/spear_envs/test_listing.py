"""``spear envs``: it says of an environment what the environment itself says, and data is here when it opens."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import pytest

from spear_envs import SpearError
from spear_envs.alfworld.tasks import OFFICIAL_COUNTS
from spear_envs.core.making import find_splits, make_env
from spear_envs.core.registration import ENVIRONMENTS
from spear_envs.data.cli import Collection
from spear_envs.listing import find_collections, list_envs
from tests.commands import run_main
from tests.spear_envs.alfworld.game_files import write_trial
from tests.spear_envs.webshop.catalogues import make_entry, make_record

CORRIDOR = "tests.spear_envs.corridor"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    return run_main(capsys, "envs", *args)


def write_alfworld(data: Path) -> None:
    for number, split in enumerate(OFFICIAL_COUNTS):
        write_trial(data / "alfworld" / "json_2.1.2" / split, number)


def write_aime(data: Path) -> None:
    (data / "code" / "aime-2024").mkdir(parents=True)
    (data / "code" / "aime-2024" / "aime.jsonl").write_text(json.dumps({"Problem": "1 + 1?", "Answer": 2}) + "\n")


def write_questions(data: Path) -> None:
    (data / "search" / "flashrag" / "nq").mkdir(parents=True)
    row = {"id": "0", "question": "who?", "golden_answers": ["x"]}
    (data / "search" / "flashrag" / "nq" / "test.jsonl").write_text(json.dumps(row) + "\n")


def write_shop(data: Path) -> None:
    folder = data / "webshop" / "small" / "raw"
    folder.mkdir(parents=True)
    records = [make_record(f"B{number:03d}") for number in range(40)]
    (folder / "items_shuffle_1000.json").write_text(json.dumps(records))
    entries = {record["asin"]: make_entry("soft") for record in records}
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(entries))


@pytest.mark.parametrize(
    ("env_id", "name", "keywords", "write"),
    [
        ("spear/ALFWorld-v0", "official", {"dataset": "official"}, write_alfworld),
        ("spear/CodeInterpreter-v0", "aime-2024", {"dataset": "aime-2024"}, write_aime),
        ("spear/SearchR1-v0", "nq", {"dataset": "nq", "retriever": "http://127.0.0.1:1"}, write_questions),
        ("spear/WebShop-v0", "small", {"catalog": "small", "split": "all"}, write_shop),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has 1 games")
def test_data_is_here_when_the_environment_opens_it(
    data: Path, env_id: str, name: str, keywords: dict[str, Any], write: Callable[[Path], None]
) -> None:
    def find() -> Collection:
        return next(one for one in find_collections(env_id) if one.name == name)

    assert not find().here
    with pytest.raises(SpearError, match="spear data get"):
        make_env(env_id, None, keywords)
    write(data)
    assert find().here
    make_env(env_id, None, keywords).close()
    assert [one.name for one in find_collections(env_id) if one.here] == [name], "and nothing else is"


def test_what_is_put_together_is_here_with_its_last_part(data: Path) -> None:
    def find() -> Collection:
        return next(one for one in find_collections("spear/CodeInterpreter-v0") if one.name == "dapo-aime")

    write_aime(data)
    assert find().command == "spear data get code dapo-math-17k aime-2025" and find().packages == ("pyarrow",)
    for name in ("dapo-math-17k", "aime-2025"):
        (data / "code" / name).mkdir()
        (data / "code" / name / "rows.jsonl").write_text("")
    assert find().here and find().packages == (), "no table is among the files"


def test_every_environment_is_described() -> None:
    listings = list_envs()
    assert [listing.short_id for listing in listings] == [entry.id for entry in ENVIRONMENTS]
    for listing in listings:
        assert listing.splits == find_splits(listing.short_id)
        assert listing.summary.endswith(".") and len(listing.summary) < 60
        assert not any(collection.here for collection in listing.collections)
        assert (listing.dataset is None) == (not listing.collections) == ("Sokoban" in listing.id)
        if listing.extra is not None:
            assert listing.extra.unlocks and listing.extra.requirement.startswith("spear-envs[")


def test_extras_are_in_the_metadata() -> None:
    from spear_envs.doctor import read_requirements

    assert {listing.extra.requirement for listing in list_envs() if listing.extra} <= read_requirements().keys()


def test_a_module_that_registers_a_class_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("lake_of_test")
    source = (
        "from spear_envs import register_env\nregister_env('mine/LakeOfTest-v0', 'spear_envs.wrappers:GymnasiumEnv')"
    )
    exec(source, vars(module))
    sys.modules["lake_of_test"] = module
    try:
        code, out, _ = run(capsys, "--module", "lake_of_test", "--json")
        assert code == 0 and json.loads(out)["environments"][-1]["short_id"] == "mine/LakeOfTest-v0"
        with pytest.raises(SpearError, match="It has mine/LakeOfTest-v0"):
            make_env("lake_of_test:mine/LakeOfTest-v1")
    finally:
        del sys.modules["lake_of_test"], gym.registry["mine/LakeOfTest-v0"]


def test_environments_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--module", CORRIDOR, "--json")
    found = json.loads(out)["environments"][len(ENVIRONMENTS) :]
    (corridor,) = (one for one in found if one["short_id"] == "tests/Corridor-v0")
    assert code == 0 and corridor["id"] == f"{CORRIDOR}:tests/Corridor-v0"
    assert corridor["summary"].startswith("Cells in a row") and "`" not in corridor["summary"]
    assert corridor["splits"] == ["train", "valid", "test"]
    assert (corridor["extra"], corridor["dataset"], corridor["collections"]) == (None, None, [])
    assert isinstance(gym.make(corridor["id"]), gym.Env)


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("no_such_module", 1, "cannot be imported"),
        ("json", 1, "json does not register a SPEAR environment: call register_env"),
        ("", 2, "is not the name of a module"),
        (".corridor", 2, "is not the name of a module"),
        ("my-package", 2, "is not the name of a module"),
    ],
)
def test_bad_modules_are_one_clear_error(
    capsys: pytest.CaptureFixture[str], module: str, code: int, words: str
) -> None:
    found, out, err = run(capsys, "--module", module)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err
