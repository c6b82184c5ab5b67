"""Real trainings through verl and Ray on a CPU: an actor, a critic and a reference policy on two ranks over gloo.

One run goes through; another is interrupted, loses a worker, is killed, and must come to the same end. Each start of
verl takes the better part of a minute, so that all tests share these two.
"""

import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
psutil = pytest.importorskip("psutil")
torch = pytest.importorskip("torch")

from spear_agents.play.trajectory import Trajectory, read_trajectories  # noqa: E402
from spear_envs.core.rewards import cosine_decay, cosine_warmup  # noqa: E402
from spear_training.run.checkpoints import BEST, check_files, finish_checkpoint, is_finished, read_best, read_state  # noqa: E402
from spear_training.run.store import export_policy  # noqa: E402
from spear_training.run.supervise import MARK  # noqa: E402
from tests.training.trainings import finish, get_steps, start_training  # noqa: E402

pytestmark = pytest.mark.slow

STEPS = 7
OVERRIDES = (
    "algorithm=ppo_spear",
    "kl.coefficient=0.01",
    f"train.steps={STEPS}",
    "cluster.gpus_per_node=2",
    "checkpoint.every=1",
    "validation.every=2",
    "validation.at_start=false",
    "train.batch_size=8",
    "validation.tasks=16",
    "rollout.group_size=4",
    "train.mini_batch_size=16",
    # Small enough to replay within the run, so that what is resumed includes a filled buffer and measured bounds.
    "replay.capacity=64",
    "sil.warmup_steps=4",
    "reward.decay_steps=4",
    "curriculum.choice=thompson",
    "train.max_tasks=64",
    "branch.share=0.5",
)


def start(sokoban_policy: Path, out: Path, *overrides: str) -> subprocess.Popen[str]:
    return start_training("demo", sokoban_policy, out, *OVERRIDES, *overrides)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def read_saved(out: Path) -> int:
    """Step of the latest whole checkpoint; 0 without one."""
    return max((int(folder.name.rpartition("_")[2]) for folder in (out / "checkpoints").glob("global_step_*")
                if is_finished(folder)), default=0)  # fmt: skip


def read_recorded(out: Path) -> list[Trajectory]:
    episodes = read_trajectories(out / "rollouts" / "episodes.jsonl")
    return sorted(episodes, key=lambda episode: (episode.step or 0, episode.task_id, episode.seed))


def kill_everything(process: subprocess.Popen[str]) -> None:
    """Kill a training and all that it started, Ray included, at once."""
    victims = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for item in victims:
        item.kill()
    process.wait()
    psutil.wait_procs(victims, timeout=30)


def find_marks(process: subprocess.Popen[str]) -> set[str]:
    """Marks of the trainings under way that ``process`` supervises."""
    marks = set()
    with suppress(psutil.NoSuchProcess, OSError):
        for item in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error, OSError):
                marks.add(item.environ().get(MARK))
    return marks - {None}


def find_marked(marks: set[str], title: str = "") -> list[Any]:
    """Processes of these trainings, those whose command has ``title`` in it: Ray names workers after their class."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) in marks and title in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="session")
def whole_run(sokoban_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(sokoban_policy, out), out)
    return out


def test_a_run_trains_through_all_steps(whole_run: Path) -> None:
    steps = get_steps(whole_run)
    assert sorted(steps) == list(range(1, STEPS + 1))
    policy = whole_run / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
    assert json.loads((policy / "config.json").read_text())["dtype"] == "float32", "that of its rollouts"
    for step, metrics in steps.items():
        assert metrics["spear/gamma"] == pytest.approx(cosine_warmup(step, 4))
        assert metrics["spear/mu"] == pytest.approx(cosine_decay(step, 4))
        assert metrics["rollout/wasted_generations"] == 0
        # What the rollout engine sampled with and what the actor trains on are the same distribution.
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert 0 <= metrics["success/all"] <= 1
        assert math.isfinite(metrics["loss/on_policy"]) and metrics["actor/grad_norm"] > 0
    assert any(metrics.get("replay/drawn", 0) > 0 for metrics in steps.values()), "nothing was replayed"
    replayed = next(metrics for metrics in steps.values() if metrics.get("replay/drawn", 0) > 0)
    assert replayed["loss/sil"] != 0 and replayed["replay/n_sil"] > 0
    assert {"cov/lower", "cov/upper"} <= replayed.keys()
    assert {"val/success/all"} <= steps[2].keys()
    assert steps[1]["curriculum/met"] == 8 / 64 < steps[STEPS]["curriculum/met"]
    # What was won at first is begun in from then on, and curriculum and success are of whole episodes alone.
    assert steps[1]["branch/share"] == 0 and {steps[step]["branch/share"] for step in range(2, STEPS + 1)} == {0.5}
    assert all(metrics["branch/turns_before"] > 0 for step, metrics in steps.items() if step > 1)
    first, last = steps[1], steps[STEPS]
    # The critic begins with the value 0 everywhere and moves from there; the reference is the policy of the beginning.
    assert first["critic/value_mean"] == 0 and first["critic/explained_variance"] == 0
    assert last["critic/value_mean"] != 0
    assert all(metrics["critic/grad_norm"] > 0 and metrics["critic/loss"] > 0 for metrics in steps.values())
    assert 0 <= first["kl/reference"] < last["kl/reference"]
    recorded = read_recorded(whole_run)
    assert [episode.step for episode in recorded] == [step for step in steps for _ in range(8)]


def test_a_run_leaves_pictures_and_a_model_that_loads(whole_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole_run / "tensorboard").iterdir())
    checkpoint = whole_run / "checkpoints" / f"global_step_{STEPS}"
    check_files(checkpoint)
    assert (checkpoint / "critic").is_dir()
    best = read_best(checkpoint.parent)
    assert best is not None and best["step"] in (2, 4, 6, 7)
    check_files(checkpoint.parent / BEST)
    folder = checkpoint / "actor" / "huggingface"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).eos_token is not None


def test_the_policy_is_exported_whole_or_from_its_shards(whole_run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    whole = export_policy(whole_run, tmp_path / "whole")
    assert AutoModelForCausalLM.from_pretrained(whole.folder).num_parameters() == whole.parameters
    # As on GPUs, where verl saves shards alone.
    run = tmp_path / "run"
    shutil.copytree(whole_run / "checkpoints", run / "checkpoints")
    folder = run / "checkpoints" / f"global_step_{STEPS}"
    (folder / "actor" / "huggingface" / "model.safetensors").unlink()
    finish_checkpoint(folder)
    joined = export_policy(run, tmp_path / "joined")
    found, expected = (load_file(made.folder / "model.safetensors") for made in (joined, whole))
    # verl rounds to the type that models are served in.
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert AutoModelForCausalLM.from_pretrained(joined.folder).num_parameters() == whole.parameters


@pytest.mark.parametrize("worker", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["twice", "thrice"])
def test_a_run_that_is_stopped_in_every_way_comes_to_the_same_end(
    sokoban_policy: Path, whole_run: Path, tmp_path: Path, worker: bool
) -> None:
    out = tmp_path / "stopped"
    # First a user interrupts it, ...
    process = start(sokoban_policy, out)
    wait_for(lambda: read_saved(out) >= 1, process)
    marks = find_marks(process)
    assert marks
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert "resumes" in text
    left = find_marked(marks)
    assert not left, left

    # ... then one of its workers dies, ...
    if worker:
        process = start(sokoban_policy, out)
        saved = read_saved(out)
        assert saved >= 1
        wait_for(lambda: read_saved(out) > saved, process)
        find_marked(find_marks(process), "WorkerDict")[-1].kill()
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 1, text
        assert "died in the middle of a step" in " ".join(text.split()), text

    # ... then everything at once, Ray included.
    process = start(sokoban_policy, out)
    saved = read_saved(out)
    wait_for(lambda: read_saved(out) > saved, process)
    kill_everything(process)
    resumed_after = read_saved(out)
    assert 2 + worker <= resumed_after < STEPS, "the run was over before it could be killed"

    text = finish(start(sokoban_policy, out), out)
    assert f"after step {resumed_after}" in text
    compare_runs(whole_run, out)
    saved = [read_state(run / "checkpoints" / f"global_step_{STEPS}") for run in (whole_run, out)]
    assert saved[0]["curriculum"] == saved[1]["curriculum"] and sum(saved[0]["curriculum"]["source"]["wins"]) > 0
    episodes = saved[0]["branch"]["archive"]["episodes"]
    assert len(episodes) > 8 and max(past["back"] for past in episodes) > 1
    assert len({json.dumps(one["branch"], default=lambda array: array.tolist()) for one in saved}) == 1
    states = [one["state"] for one in saved]
    assert states[0]["rng"] == states[1]["rng"] and states[0]["baseline"] == states[1]["baseline"]


def compare_runs(whole_run: Path, out: Path) -> None:
    """The same seed gives the same curve twice, with or without kills in between."""
    expected, found = get_steps(whole_run), get_steps(out)
    assert found.keys() == expected.keys()
    for step in found:
        assert found[step] == pytest.approx(expected[step], nan_ok=True, rel=0, abs=0), f"step {step}"
    weights = [run / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors"
               for run in (whole_run, out)]  # fmt: skip
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert read_recorded(out) == read_recorded(whole_run), "episodes for people to look at, each once"


def test_another_configuration_is_refused_and_a_finished_run_says_so(sokoban_policy: Path, whole_run: Path) -> None:
    other = start(sokoban_policy, whole_run, "replay.capacity=65")
    text, _ = other.communicate(timeout=120)
    assert other.returncode == 1
    assert "replay.capacity was 64, is now 65" in " ".join(text.split())
    assert f"has its {STEPS} steps already" in finish(start(sokoban_policy, whole_run), whole_run)
