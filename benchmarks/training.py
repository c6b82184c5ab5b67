"""Seconds of a training step through verl on a CPU: SPEAR beside GRPO, and what SPEAR adds on the driver.

Three short trainings of the demo's policy from the same warm start with the same seed: GRPO's form (no replay), SPEAR
whose replay never fires (every row still goes through the buffer), and SPEAR as in the demo. The first steps are left
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from agents.metrics import read_history
from training.runs import run_training
from training.warmstart import WarmStartSettings, train_policy

STEP_BAR, RATIO_BAR, DRIVER_BAR = 4.0, 1.10, 0.02
WARM_UP = 2
ARMS = {
    "GRPO (no replay)": ("spear.sil.enabled=false",),
    "SPEAR, replay never fires": ("spear.replay.capacity=1000000",),
    "SPEAR as in the demo": (),
}


def measure(policy: Path, out: Path, steps: int, overrides: tuple[str, ...]) -> dict[str, float]:
    """Train for ``steps`` steps; medians over the steps after the warm-up, seconds."""
    common = (
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )
    run_training(("preset=demo", *common, *overrides), out, Console(stderr=True))
    history = [record for record in read_history(out) if record["step"] > WARM_UP]
    names = {"step": "perf/step_seconds", "rollout": "timing_s/gen", "log-probs": "timing_s/old_log_prob"}
    names |= {"update": "timing_s/update_actor", "driver share": "perf/spear_driver_share"}
    return {name: statistics.median(record[key] for record in history) for name, key in names.items()}


def main() -> int:
    """Measure, print a table, and write it as JSON where asked; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14, help="steps of each training (default 14)")
    parser.add_argument("--policy", type=Path, help="warm-started folder; made if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy or Path(folder) / "warmstart"
        if options.policy is None:
            train_policy(WarmStartSettings("spear/Sokoban-v0", env_kwargs={"modality": "text"}, panel_tasks=0), policy)
        figures = {
            name: measure(policy, Path(folder) / f"arm{number}", options.steps, overrides)
            for number, (name, overrides) in enumerate(ARMS.items())
        }
    for name, row in figures.items():
        print(f"{name:28}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    grpo, idle, spear = figures.values()
    ratio = idle["step"] / grpo["step"]
    share = max(idle["driver share"], spear["driver share"])
    bars = (
        ("median step of the demo", spear["step"], STEP_BAR, "s"),
        ("SPEAR's step over GRPO's, replay off", ratio, RATIO_BAR, ""),
        ("driver-side share of the step", share, DRIVER_BAR, ""),
    )
    for name, value, bar, unit in bars:
        print(f"{name:40} {value:8.3g} {unit:2} bar {bar:g}{'' if value <= bar else '  NOT HELD'}")
    if options.json is not None:
        options.json.write_text(json.dumps({"arms": figures, "ratio": ratio, "driver share": share}, indent=1) + "\n")
    return 0 if all(value <= bar for _, value, bar, _ in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
