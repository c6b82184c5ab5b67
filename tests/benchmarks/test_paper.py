import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.paper import jobs as paper_jobs
from benchmarks.paper.__main__ import paper
from benchmarks.paper.jobs import Choice, Flavour, Job, read_table
from benchmarks.paper.tables import format_cell, gather, make_cells, make_latex, make_markdown
from spear_agents.cli import evaluate
from spear_agents.evaluation.baselines import Method
from spear_agents.shortcuts import load
from spear_envs.core.errors import SpearError
from spear_envs.data.files import hold_lock
from spear_training.cli import export, warmstart
from spear_training.planning.cli import make_plan
from spear_training.run.compose import compose, list_algorithms
from spear_training.warmstart import PolicyShape, choose_recipe, train_policy

TABLE = read_table()


def list_tiny(out: Path, *rows: str, seeds: int = 1, environments: tuple[str, ...] = ("webshop",)) -> list[Job]:
    return Choice(rows, environments=environments, seeds=seeds, flavour=Flavour.TINY, out=out).list_jobs()


def play(job: Job, engine: str, *others: str) -> None:
    """Run the job's own evaluation with a scripted player in place of the policy."""
    *_, step = job.list_steps()
    words = list(step.words[1:])
    words[words.index("--engine") + 1] = engine
    place = words.index("--model")
    done = CliRunner().invoke(evaluate, [*words[:place], *words[place + 2 :], *others], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def call(*words: str) -> Result:
    return CliRunner().invoke(paper, ["table1", *words])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with WebShop's expert as GRPO + SPEAR, random play as GRPO, and both as seeds of PPO."""
    out = tmp_path_factory.mktemp("table")
    for job in list_tiny(out, "ppo", "grpo", "grpo_spear", seeds=2):
        if job.row.name == "ppo" or job.seed == 0:
            play(job, "expert" if (job.row.name, job.seed) in {("grpo_spear", 0), ("ppo", 1)} else "random")
    return out


class TestPlan:
    def test_a_seed_has_44_trainings_and_56_evaluations(self) -> None:
        jobs = Choice(seeds=1).list_jobs()
        assert sum(job.row.method is None for job in jobs) == 44
        assert len(jobs) == 56
        # What only prompts has nothing to train again.
        assert len(Choice(seeds=3).list_jobs()) == 3 * 44 + 12

    def test_rows_are_algorithms_or_methods_and_have_all_figures(self) -> None:
        known = {each.name for each in list_algorithms()} | {method.value for method in Method}
        assert set(TABLE.rows) <= known
        width = sum(len(environment.columns) for environment in TABLE.environments.values())
        for model in TABLE.models:
            assert TABLE.figures[model].keys() == TABLE.rows.keys()
            for figures in TABLE.figures[model].values():
                assert len(figures) == width and all(0 <= figure <= 100 for figure in figures)
        # The gains that the paper prints.
        assert TABLE.figures["qwen2.5_1.5b"]["grpo_spear"][6] - TABLE.figures["qwen2.5_1.5b"]["grpo"][
            6
        ] == pytest.approx(16.1)
        assert TABLE.figures["qwen2.5_7b"]["drbot_gigpo_spear"][8] - TABLE.figures["qwen2.5_7b"]["drbot_gigpo"][
            8
        ] == pytest.approx(3.9)

    @pytest.mark.parametrize("flavour", Flavour)
    def test_every_training_can_be_composed_and_differs(self, flavour: Flavour) -> None:
        jobs = [job for job in Choice(seeds=2, flavour=flavour).list_jobs() if job.row.method is None]
        plain = [json.dumps(job.config.to_mapping(), sort_keys=True) for job in jobs]
        assert len(set(plain)) == len({job.folder for job in jobs}) == len(jobs)

    @pytest.mark.parametrize("flavour", Flavour)
    def test_commands_have_the_options_of_spear(self, flavour: Flavour, tmp_path: Path) -> None:
        commands = {"warmstart": warmstart, "export": export, "eval": evaluate}
        choice = Choice(seeds=1, flavour=flavour, out=tmp_path, best=flavour is Flavour.OFFICIAL)
        for job in choice.list_jobs():
            (job.folder / "run").mkdir(parents=True)  # which spear export asks for
            for step in job.list_steps():
                name, *words = step.words
                if name in commands:
                    commands[name].make_context(name, words)  # raises for an unknown option or a wrong value

    def test_the_panels_are_the_papers_and_prompts_those_of_the_training(self) -> None:
        job, *_ = Choice(("grpo",), environments=("alfworld",)).list_jobs()
        *_, step = job.list_steps()
        assert step.words[:3] == ("eval", "--panel", "alfworld-paper")
        assert not {"--template", "--history", "--env", "--tasks"} & set(step.words)
        tiny, *_ = list_tiny(Path("out"), "grpo", environments=("alfworld",))
        *_, step = tiny.list_steps()
        assert "--template compact --history 4" in " ".join(step.words)

    def test_the_heaviest_training_takes_the_papers_hours(self) -> None:
        jobs = {(job.model, job.environment.name): job for job in Choice(("grpo",), seeds=1).list_jobs()}
        # 60 hours on 32 GPUs, and a little for the evaluation.
        heavy = jobs["qwen2.5_7b", "webshop"]
        assert heavy.cost.hours is not None and 240 < heavy.cost.hours < 242
        light = jobs["qwen2.5_1.5b", "webshop"]
        assert light.cost.hours == pytest.approx(heavy.cost.hours * 1543714304 / 7615616512)
        plan = make_plan(compose((*heavy.words, "model.path=null")), {}, 0.0)
        assert heavy.cost.tokens == 350 * plan.step["tokens"] + 500 * 15 * (4096 + 1024)

    def test_an_unknown_name_names_those_there_are(self) -> None:
        with pytest.raises(SpearError, match="'grpo_spear'"):
            Choice(("gpro_spear",)).list_jobs()
        with pytest.raises(SpearError, match="drbot_gigpo_spear"):
            Choice(("nothing*",)).list_jobs()
        assert "qwen2.5_7b" in str(call("--models", "qwen3", "--list").exception)
        assert "--flavour" in str(call("--tiny", "--flavour", "official", "--list").exception)

    def test_the_list_has_cost_state_and_sums(self, played: Path) -> None:
        listed = call("--list", "--tiny", "--rows", "grpo,io", "--environments", "webshop", "--out", str(played)).output
        assert re.search(r"^tiny +grpo +webshop +1 of 3 +warm start ", listed, re.M)
        assert "3 trainings, 4 evaluations" in listed
        paid = call("--list", "--rows", "grpo", "--models", "*7b", "--environments", "webshop", "--seeds", "2").output
        assert re.search(r"0 of 2 +training +6,919.7 +241.3$", paid, re.M)


class TestGathering:
    def test_cells_are_those_of_the_evaluations(self, played: Path) -> None:
        gathered = gather(Choice(("grpo*",), environments=("webshop",), seeds=1, flavour=Flavour.TINY, out=played))
        assert not gathered.missing
        *alfworld, score, success = make_cells(gathered, "tiny", "grpo_spear")
        assert [cell.text for cell in alfworld] == ["–"] * 7
        found = load(played / "tiny/webshop/tiny/grpo_spear-0/eval").overall.success
        assert found is not None and success.estimate == found and found.tasks == 48
        assert success.heading == "SR" and success.text == "100.0" and score.text == "100.0"

    def test_seeds_are_averaged_with_students_interval(self, played: Path) -> None:
        gathered = gather(Choice(("ppo",), environments=("webshop",), seeds=2, flavour=Flavour.TINY, out=played))
        *_, score, _ = make_cells(gathered, "tiny", "ppo")
        scores = [load(played / f"tiny/webshop/tiny/ppo-{seed}/eval").overall.score for seed in range(2)]
        mean, apart = sum(scores) / 2, abs(scores[0] - scores[1])
        # t of one degree of freedom, times the deviation of two values over the root of 2.
        assert format_cell(score) == f"{100 * mean:.1f} ± {100 * 12.7062 * apart / 2:.1f}"

    def test_the_gain_is_paired_by_seed(self, played: Path, tmp_path: Path) -> None:
        def find_gain(out: Path) -> str:
            choice = Choice(("grpo*",), environments=("webshop",), seeds=2, flavour=Flavour.TINY, out=out)
            text = make_markdown(gather(choice)).split("paired by seed:")[1]
            return next(line for line in text.splitlines() if line.startswith("| GRPO + SPEAR"))

        lost = load(played / "tiny/webshop/tiny/grpo-0/eval").overall.success
        assert lost is not None
        gain = f"+{100 * (1 - lost.mean):.1f}"
        assert find_gain(played) == f"| GRPO + SPEAR | WebShop | 1 | {gain} |"
        shutil.copytree(played / "tiny", tmp_path / "tiny")
        for row in ("grpo", "grpo_spear"):  # seed 1: the expert in both
            copied = tmp_path / "tiny" / "webshop" / "tiny"
            shutil.copytree(copied / "grpo_spear-0", copied / f"{row}-1")
        assert find_gain(tmp_path).startswith(f"| GRPO + SPEAR | WebShop | 2 | +{50 * (1 - lost.mean):.1f} [−")
        shutil.rmtree(copied / "grpo-1")  # a seed without its base does not count
        assert find_gain(tmp_path) == find_gain(played)

    def test_what_is_missing_is_named_with_its_command(self, played: Path) -> None:
        gathered = gather(Choice(("grpo",), environments=("webshop",), seeds=2, flavour=Flavour.TINY, out=played))
        assert list(gathered.results) == ["tiny/webshop/tiny/grpo-0"]
        (missing,) = gathered.missing
        assert missing.reasons == ["seed 1: no warm start"]
        words = missing.command.split()
        assert words[:4] == ["python", "-m", "benchmarks.paper", "table1"]
        listed = call(*words[4:], "--list").output
        assert "1 of 2" in listed
        assert missing.command in make_markdown(gathered)

    def test_the_published_games_stand_beside_the_papers_figures(
        self, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archives = sorted((shared / "data" / "alfworld").glob("games_*.tar.xz"))
        if not archives:
            pytest.skip("the official games of ALFWorld are not beside the checkout")
        for archive in archives:
            shutil.unpack_archive(archive, tmp_path / "games", filter="data")
        (seen,) = (tmp_path / "games").glob("*/valid_seen")
        monkeypatch.setenv("ALFWORLD_DATA", str(seen.parent))
        choice = Choice(("grpo*",), ("*1.5b",), ("alfworld",), 1, out=tmp_path)
        first, second = choice.list_jobs()
        play(first, "expert")
        shutil.copytree(first.folder, second.folder)
        text = make_markdown(gather(choice))
        assert re.search(r"^\| RL \| GRPO \| 1 / 0 \| 100.0 ± ", text, re.M)
        assert "| Qwen2.5-1.5B-Instruct | GRPO + SPEAR | ALFWorld | 1 | +0.0 | +16.1 |" in text
        assert "panel `alfworld-paper (" in text and "140 tasks" in text

    def test_another_panel_never_enters(self, tmp_path: Path) -> None:
        job, *_ = list_tiny(tmp_path, "grpo")
        play(job, "expert", "--temperature", "0.5")
        result, reason = job.read()
        assert result is None
        assert "temperature=0.5" in reason and job.find_panel().digest[:12] in reason

    def test_the_papers_figures_stand_below_ours(self, tmp_path: Path) -> None:
        gathered = gather(Choice(("grpo",), seeds=1, out=tmp_path))
        text, latex = make_markdown(gathered), make_latex(gathered)
        assert "| RL | GRPO | 0 |" + " – |" * 9 in text
        assert "|  | *GRPO, paper* |  | *85.3* | *53.7* |" in text
        assert "4 of 4 evaluations are missing" in text
        assert r"\textcolor{gray}{72.8}" in latex and latex.count(r"\midrule") == 2
        assert r"RL & GRPO & --" in latex

    def test_an_evaluation_without_a_panel_never_enters(self, tmp_path: Path) -> None:
        job, *_ = list_tiny(tmp_path, "grpo")
        words = ["spear/WebShop-v0", "--engine", "expert", "--tasks", "4", "--out", str(job.evaluation)]
        assert CliRunner().invoke(evaluate, words).exit_code == 0
        assert "no panel" in job.read()[1]

    def test_a_fault_makes_the_evaluation_run_again(self, played: Path, tmp_path: Path) -> None:
        shutil.copytree(played / "tiny", tmp_path / "tiny")
        job, *_ = list_tiny(tmp_path, "grpo")
        summary = json.loads((job.evaluation / "summary.json").read_text())
        summary["overall"]["faults"] = 2
        (job.evaluation / "summary.json").write_text(json.dumps(summary))
        assert "fault" in job.read()[1]
        step = job.find_next()
        assert step is not None and step.name == "evaluation"

    def test_files_and_the_page_are_written(self, played: Path, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("# Page\n\n<!-- table1 tiny -->\nold\n<!-- end -->\nRest.\n")
        words = ("--tiny", "--gather", "--rows", "grpo*", "--environments", "webshop", "--seeds", "1")
        done = call(*words, "--out", str(played), "--docs", str(page))
        assert done.exit_code == 0, done.output
        text = (played / "tiny" / "table.md").read_text()
        assert "Nothing is missing: 2 evaluations." in text
        assert page.read_text() == f"# Page\n\n<!-- table1 tiny -->\n\n{text}\n<!-- end -->\nRest.\n"
        assert "GRPO + SPEAR" in (played / "tiny" / "table.tex").read_text()
        page.write_text("# Page\n")
        assert "<!-- table1 tiny -->" in str(call(*words, "--out", str(played), "--docs", str(page)).exception)


class TestRunning:
    def test_a_job_that_fails_is_named_and_the_others_count(
        self, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('no torch')")  # so that it fails at once
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        )
        shutil.copytree(played / "tiny", tmp_path / "tiny")
        job, *_ = list_tiny(tmp_path, "io")
        job.start.mkdir()  # no policy
        words = ("--rows", "io,grpo", "--environments", "webshop", "--seeds", "1")
        done = call("--tiny", *words, "--out", str(tmp_path))
        assert done.exit_code == 1
        assert "evaluation: exit code 1 (" in done.output
        assert str(job.folder / "log.txt") in done.output and (job.folder / "log.txt").is_file()
        assert "1 of 2 evaluations" in done.output

    def test_what_is_done_is_not_done_again(self, played: Path) -> None:
        done = call("--tiny", "--rows", "grpo", "--environments", "webshop", "--seeds", "1", "--out", str(played))
        assert done.exit_code == 0 and ": warm start" not in done.output
        assert "1 of 1 evaluations" in done.output

    def test_two_calls_do_not_work_in_one_folder(self, tmp_path: Path) -> None:
        with hold_lock(tmp_path, lambda: None):
            done = call("--tiny", "--rows", "io", "--out", str(tmp_path))
        assert "Another call" in str(done.exception)

    @pytest.mark.nightly
    def test_a_cell_from_the_warm_start_to_the_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = [each.replace("=4", "=2") for each in paper_jobs.TINY_SETTINGS]
        monkeypatch.setattr(paper_jobs, "TINY_SETTINGS", (*settings, "train.batch_size=2", "train.mini_batch_size=2"))
        job, *_ = list_tiny(tmp_path, "grpo_spear")
        recipe = replace(
            choose_recipe("spear/WebShop-v0"),
            episodes=40,
            short_epochs=1,
            long_epochs=1,
            panel_tasks=0,
            shape=PolicyShape(hidden=32, layers=1, heads=2, mlp=32),
        )
        train_policy(recipe, job.start)
        words = ("--tiny", "--rows", "grpo_spear", "--environments", "webshop", "--seeds", "1", "--out", str(tmp_path))
        done = call(*words, "--prune")
        log = (job.folder / "log.txt").read_text()
        assert done.exit_code == 0, f"{done.output}\n{log[-3000:]}"
        result, reason = job.read()
        assert result is not None, reason
        assert load(job.evaluation).settings.model == str(job.folder / "policy")
        assert not (job.folder / "run" / "checkpoints").exists()
        assert "Nothing is missing" in (tmp_path / "tiny" / "table.md").read_text()
        again = call(*words)
        assert again.exit_code == 0 and ": training" not in again.output
        shutil.rmtree(job.folder / "policy")
        shutil.rmtree(job.evaluation)
        assert "checkpoints were removed" in call(*words).output
