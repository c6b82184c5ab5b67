"""The comparison of a real model: records, their figures, and what an edited one is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.real_model.__main__ import real_model
from benchmarks.real_model.figures import draw_learning, draw_reasons, judge_primary, make_behaviour, make_tables
from benchmarks.real_model.records import (
    COLD,
    METRICS,
    Evaluation,
    Game,
    Plan,
    Record,
    make_evaluation,
    read_plan,
    read_record,
    read_records,
    write_record,
)
from benchmarks.real_model.start import merge_adapter, shorten_adapter
from spear_envs.core import SpearError

PANELS = {"small": "alfworld-small", "unseen": "alfworld-unseen", "unseen-paper": "alfworld-unseen-paper"}
MANIFESTS = {
    name: json.loads((Path(__file__).resolve().parents[2] / "panels" / f"{panel}.json").read_text())
    for name, panel in PANELS.items()
}


def make_evaluation_of(name: str, won: list[int]) -> Evaluation:
    """All games of a panel, every four of them won as ``won`` says."""
    tasks = [task["id"] for task in MANIFESTS[name]["tasks"]]
    games = {task: Game(won[place % len(won)], 10, 5, 4) for place, task in enumerate(tasks)}
    return Evaluation(f"{PANELS[name]} with x=1", "p", MANIFESTS[name]["fingerprint"], games)


def make_record(plan: Plan, run: str, won: list[int]) -> Record:
    arm, _, seed = run.rpartition("-")
    cold = run == COLD
    return Record(
        run=run,
        arm=COLD if cold else arm,
        seed=0 if cold else int(seed),
        plan=plan.digest,
        code="0",
        processor="x",
        model_digest=f"of {run}",
        steps={} if cold else {name: [0.5, None] for name in METRICS},
        evaluations={name: make_evaluation_of(name, won) for name in PANELS},
    )


@pytest.fixture
def plan() -> Plan:
    return replace(read_plan(), seeds=2)


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    """A cold start that wins one of every four games, GRPO two, SPEAR three and two."""
    for run, won in (
        (COLD, [1, 0, 0, 0]),
        ("grpo-0", [1, 1, 0, 0]),
        ("grpo-1", [1, 1, 0, 0]),
        ("spear-0", [1, 1, 1, 0]),
        ("spear-1", [1, 1, 0, 0]),
    ):
        write_record(make_record(plan, run, won), tmp_path)
    return tmp_path


def test_records_come_back_and_give_the_tables(plan: Plan, folder: Path, tmp_path: Path) -> None:
    records = read_records(plan, folder)
    assert {name: replace(record, digest="") for name, record in records.items()}["grpo-1"] == make_record(
        plan, "grpo-1", [1, 1, 0, 0]
    )
    text = make_tables(records, plan)
    for row in ("| cold start | – | 25.0 %", "| GRPO | 2 of 2 | 50.0 %", "| SPEAR | 2 of 2 | 62.5 %"):
        assert row in text
    assert "| SPEAR − GRPO | +12.5 [" in text and text.splitlines()[-3].endswith("| +25.0, +0.0 |")
    assert "does not differ from 0" in text and "| small | GRPO | 10.0 | 50 % | 4.0 |" in make_behaviour(records, plan)
    for draw in (draw_learning, draw_reasons):
        draw(records, plan, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_of_the_seeds_concludes_nothing(plan: Plan, folder: Path) -> None:
    (folder / "spear-1.json").unlink()
    assert "1 of 2 pairs" in judge_primary(read_records(plan, folder), plan)
    assert "SPEAR − GRPO | +25.0 |" in make_tables(read_records(plan, folder), plan)


GAME = "alfworld/embedded-small/valid_unseen/00001"


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (f'{GAME}": [1,', f'{GAME}": [0,', "edited"),
        (f'"{GAME}": [1,', f'"{GAME}": [0, 10, 5, 4],\n"{GAME}": [1,', "edited"),
        ("[0.5,", "[0.5000000000000001,", "edited"),
        ("[0.5,", "[0.50,", "edited"),
        ("[0.5,", "[NaN,", "not a record"),
        ('"seed": 0', '"seed": 1', "edited"),
        ("{", "", "not a record"),
        ("{", "[" * 100_000, "not a record"),
    ],
)
def test_an_edited_record_is_refused(plan: Plan, folder: Path, old: str, new: str, word: str) -> None:
    path = folder / "grpo-0.json"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(SpearError, match=word):
        read_record(path)


def test_records_of_another_plan_or_other_games_are_refused(plan: Plan, folder: Path) -> None:
    with pytest.raises(SpearError, match="plan"):
        read_records(replace(plan, digest="0"), folder)
    record = make_record(plan, "spear-1", [1, 1, 0, 0])
    small = record.evaluations["small"]
    games = dict(small.games)
    order = dict(sorted(games.items(), reverse=True))
    lost = {task: game for task, game in games.items() if game.won}
    for changed, word in (
        (replace(small, games=lost), "other games"),
        (replace(small, games=order), "another order"),
        (replace(small, games={**games, GAME: Game(2, 10, 5, 4)}), "impossible"),
        (replace(small, games={**games, GAME: Game(1, 10, 11, 4)}), "impossible"),
        (replace(small, fingerprint="f"), "was played on"),
        (record.evaluations["unseen"], "was played on"),
    ):
        write_record(replace(record, evaluations={**record.evaluations, "small": changed}), folder)
        with pytest.raises(SpearError, match=word):
            read_records(plan, folder)
    write_record(replace(record, evaluations={"small": small}), folder)
    with pytest.raises(SpearError, match="has the panels small instead of"):
        read_records(plan, folder)


def test_mixed_records_are_refused(plan: Plan, folder: Path) -> None:
    record = make_record(plan, "spear-1", [1, 1, 0, 0])
    steps = {name: [0.5] for name in METRICS}
    small = record.evaluations["small"]
    cooler = replace(small, panel=f"{PANELS['small']} with temperature=0.1", panel_digest="q")
    older = replace(small, panel=PANELS["small"])
    for changed, word in (
        (replace(record, arm="grpo"), "no such run"),
        (replace(record, seed=0), "no such run"),
        (replace(record, model_digest="of spear-0"), "spear-0, spear-1 are of one model"),
        (replace(record, steps=steps), "different numbers of steps"),
        (replace(record, steps={}), "has the metrics of no step"),
        (replace(record, evaluations={**record.evaluations, "small": cooler}), "several panels small"),
        (replace(record, evaluations={**record.evaluations, "small": older}), "another panel alfworld-small"),
    ):
        write_record(changed, folder)
        with pytest.raises(SpearError, match=word):
            read_records(plan, folder)
    write_record(record, folder)
    (folder / "grpo-1.json").rename(folder / "grpo-2.json")
    with pytest.raises(SpearError, match="no such run"):
        read_records(plan, folder)


def test_a_folder_has_trainings_of_one_plan_for_one_purpose(tmp_path: Path) -> None:
    (tmp_path / "purpose.txt").write_text("runs of plan 0")
    for command in (("run",), ("replay", COLD)):
        refused = CliRunner().invoke(real_model, [*command, "--out", str(tmp_path)])
        assert isinstance(refused.exception, SpearError) and "has runs of plan 0" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["purpose.txt"]


def test_games_of_another_model_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"model_digest": "of another"}))
    with pytest.raises(SpearError, match="another model"):
        make_evaluation(tmp_path, "of this")


def test_the_published_figures_are_those_of_the_records() -> None:
    done = CliRunner().invoke(real_model, ["verify"])
    assert done.exit_code == 0, done.exception
    refused = CliRunner().invoke(real_model, ["replay", "grpo-9"])
    assert isinstance(refused.exception, SpearError) and "grpo-4" in str(refused.exception)


def test_the_plan_is_the_registered_one() -> None:
    plan = read_plan()
    assert [run for run, _, _ in plan.list_runs()][:3] == ["grpo-0", "spear-0", "grpo-1"]
    assert tuple(plan.panels) == tuple(PANELS) and json.loads(json.dumps(plan.primary))["half_width"] == 6


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Path]:
    """A model of two layers and an adapter of it, as ``spear sft`` leaves them."""
    torch, peft, transformers = map(pytest.importorskip, ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
    )
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    model.save_pretrained(base)
    dressed = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=12, target_modules="all-linear"))
    for name, value in dressed.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05)
    dressed.save_pretrained(adapter)
    return base, adapter


def test_the_cold_start_is_what_peft_merges(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    torch, peft, transformers = map(pytest.importorskip, ("torch", "peft", "transformers"))
    base, adapter = adapted
    digest = shorten_adapter(adapter, "tiny", tmp_path / "short")
    merge_adapter(base, tmp_path / "short", digest, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", torch_dtype=torch.float32)
    found = merged.state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "short").merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], value.float(), rtol=1e-5, atol=1e-6)
    moved = [name for name, value in start.items() if not torch.equal(value, expected[name].float())]
    assert len(moved) == 14, "all matrices of both layers"


def test_another_adapter_is_refused(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="SHA-256"):
        merge_adapter(*adapted, "0" * 64, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
