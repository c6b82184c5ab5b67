"""Prints advice (:mod:`spear_training.guidance`) before, during and after a run (``spear advise``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from spear_agents.metrics import read_history
from spear_envs.core.errors import SpearError
from spear_sandbox.terminal import Console
from spear_training.algorithms.settings import SpearSettings
from spear_training.earlier import load_earlier
from spear_training.environments import count_turns
from spear_training.guidance import Advice, RunShape, review_history, review_settings
from spear_training.launch import CONFIG_FILE
from spear_training.settings import RunSettings
from spear_training.supervise import Observer


@dataclass(eq=False)
class Adviser:
    """Prints each piece of advice about a run once."""

    console: Console
    settings: SpearSettings
    shape: RunShape
    told: set[str] = field(default_factory=set)
    """Topics already printed."""
    steps: int = 0

    def review_start(self) -> None:
        """Print advice on the settings."""
        self._tell(review_settings(self.settings, self.shape))

    def watch(self, observer: Observer) -> Observer:
        """Wrap ``observer``: also print advice from the metrics after each step."""

        def observe(history: list[dict[str, Any]]) -> None:
            observer(history)
            if len(history) != self.steps:
                self.steps = len(history)
                self.review_steps(history)

        return observe

    def review_steps(self, history: list[dict[str, Any]]) -> None:
        """Print new advice from the metrics."""
        self._tell(review_history(history, self.settings))

    def _tell(self, found: Iterable[Advice]) -> None:
        for advice in found:
            if advice.topic not in self.told:
                self.told.add(advice.topic)
                self.console.print(Text.assemble(("advice", "yellow"), f" {advice}"))


@click.command("advise")
@click.argument("run", type=click.Path(path_type=Path))
def advise(run: Path) -> None:
    """Report conflicting settings and suspicious metrics of a training, and which setting to change.

    RUN is the folder of `spear train --out`, of a running or a finished training.

    \b
      spear advise runs/alfworld
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        raise SpearError(f"{run} does not contain {CONFIG_FILE}: name the folder of a training")
    config = load_earlier(path, "actor_rollout_ref")
    console = Console()
    settings = RunSettings.from_config(config)
    adviser = Adviser(console, settings.algorithm, RunShape.of_config(config, count_turns(settings.env)))
    adviser.review_start()
    adviser.review_steps(read_history(run))
    if not adviser.told:
        console.print("nothing to advise")
