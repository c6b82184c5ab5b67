"""A training whose steps take turns with and without SPEAR, on the same episodes: ``python -m THIS RUN_FOLDER``.

Two trainings differ by more than what is measured: by the minute they ran in, and soon by their policies. Here one
process plays the same episodes at each step, learns at a rate of 0, and changes the algorithm's settings between steps.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Every process of the run registers the trainer, as it does the plugin's.
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "spear_training.verl_plugin,benchmarks.parts.training_arms"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    from spear_training.verl_plugin.process import main

    main()
    sys.exit()

# Before anything of verl that asks for a device; where the plugin itself is what imports verl, it is half made here.
import spear_training.verl_plugin.platform  # noqa: F401, I001
import psutil
from verl.trainer.ppo.v1 import register_trainer

from benchmarks.training import NAME, Arm, choose_arm
from spear_training.algorithms import SpearSettings
from spear_training.step.state import SpearState
from spear_training.run.supervise import MARK
from spear_training.verl_plugin.trainer import SpearTrainer


@register_trainer(NAME)
class ArmsTrainer(SpearTrainer):
    """The trainer of all others, with other settings at each step."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._arms: dict[Arm, tuple[SpearSettings, SpearState]] = {}

    def prepare_step(self) -> dict[str, float]:
        """Change the settings, then play the first step's episodes again."""
        arm = choose_arm(self.global_steps)
        if arm not in self._arms:
            settings = self._settle(arm)
            self._arms[arm] = settings, SpearState(settings, self.seed)
        self.settings, self.state = self._arms[arm]
        self.install_algorithm()
        if self._train_iterator is None:
            self._train_iterator = repeat(next(iter(self.train_dataloader)))
        step, self.global_steps = self.global_steps, 1  # seeds are made of it
        try:
            return super().prepare_step()
        finally:
            self.global_steps = step

    def _settle(self, arm: Arm) -> SpearSettings:
        settings: SpearSettings = self.settings if not self._arms else self._arms[Arm.GRPO][0]
        if arm is Arm.GRPO:
            return replace(settings, sil=replace(settings.sil, enabled=False))
        capacity = 10**6 if arm is Arm.IDLE else len(self._arms[Arm.IDLE][1].replay)
        sil, replay = replace(settings.sil, enabled=True), replace(settings.replay, capacity=capacity)
        return replace(settings, sil=sil, replay=replay)

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *rest: Any, **options: Any) -> None:
        super()._compute_metrics(batch, metrics, *rest, **options)
        metrics["benchmark/peak_mb"] = _measure_peak()


def _measure_peak() -> float:
    """Most resident memory that the trainer and its workers have held so far, added up, MB."""
    total = 0.0
    for process in psutil.process_iter():
        try:
            own = process.environ().get(MARK) == os.environ[MARK]
            if own and any(name in " ".join(process.cmdline()) for name in ("WorkerDict", "TaskRunner")):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        except (psutil.Error, OSError, StopIteration):
            continue
    return total
