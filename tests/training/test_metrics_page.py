"""docs/metrics.md names every metric that a training can log, and none besides."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spear_training.algorithms import SpearSettings
from spear_training.run.config import RolloutCorrection
from tests.rooms import ROOT
from tests.training.episodes import make_episode, play
from tests.training.step.actors import Played
from tests.training.step.test_step import Run, make_group

PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
CODE = ROOT / "training" / "spear_training"
VERL_TIMES = ("step", "update_weights", "save_checkpoint", "testing")
"""Phases of verl's loop around the step."""


def read_page(page: str = PAGE) -> list[str]:
    """Names in the first column of the page's tables of metrics."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+/[^`]+)`", cell)]


def read_pattern(name: str) -> re.Pattern[str]:
    """What a name of the page stands for: words in capitals are any names."""
    return re.compile(re.sub(r"[A-Z]{2,}", ".+", re.escape(name)))


def find_keys(source: str) -> Iterator[str]:
    """Metrics that a module puts into a mapping by name; ``{}`` for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.DictComp):
            found = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found = [node.slice]
        for key in found:
            text = ast.unparse(key).removeprefix("f").strip("'\"") if key is not None else ""
            text = re.sub(r"{[^}]*}", "{}", text)
            if re.fullmatch(r"[a-z_]+/[A-Za-z0-9_/{}-]+", text):
                yield text


def take_out_first(rows: Any, settings: SpearSettings) -> Any:
    return np.arange(len(rows)) == 0


RUNS: dict[str, dict[str, Any]] = {
    "joint": {"cov": {"ratio": 0.1}},
    "sequential": {"sil": {"coupling": "sequential"}},
    "critic": {"advantage": {"estimator": "gae"}},
    "sampling": {"sampling": {"enabled": True, "max_rounds": 1}},
    "filter": {"filter": {"custom": [f"{__name__}:take_out_first"]}},
}


def play_runs() -> set[str]:
    """Metrics of a few steps without verl, and the phases that they time."""
    names = set()
    for nodes in RUNS.values():
        run = Run(**nodes)
        for t in (1, 2, 3):
            names |= set(run.take(t, make_group(f"{t}-00000", count=4)))
        fault = make_episode("4-00000", 0, fault="backend", stop="fault")
        batch = [fault, *make_group("4-00000")]
        names |= set(run.take(4, batch))
        names |= {f"timing_s/{name}" for name in run.step.run(5, Played(run.actor, play(batch))).seconds}
    return names


def read_code() -> set[str]:
    paths = [*CODE.glob("step/*.py"), *CODE.glob("verl_plugin/*.py")]
    return {name for path in paths for name in find_keys(path.read_text("utf-8"))}


def correct() -> set[str]:
    """What verl says about weights and rejections."""
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from spear_training.verl_plugin.actor import correct_rows

    settings = RolloutCorrection(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.1_10")
    log_probs = -torch.linspace(0.1, 1.0, 6)
    mask, lengths = torch.ones(6, dtype=torch.bool), np.asarray([3, 3])
    return set(correct_rows(settings, log_probs, log_probs + 0.1, mask, lengths).metrics)


@pytest.fixture(scope="module")
def logged() -> set[str]:
    names = play_runs() | read_code() | correct()
    return names | {f"timing_s/{name}" for name in VERL_TIMES}


def test_every_metric_is_on_the_page(logged: set[str]) -> None:
    patterns = [read_pattern(name) for name in read_page()]
    missing = [name for name in sorted(logged) if not any(p.fullmatch(name.replace("{}", "x")) for p in patterns)]
    # Prefixes alone (f"timing_s/{name}") are told by what is behind them, which the runs have.
    assert not [name for name in missing if not name.endswith("{}")], "give each a row in docs/metrics.md"


def test_nothing_on_the_page_is_made_up(logged: set[str]) -> None:
    unknown = [name for name in read_page() if not any(read_pattern(name).fullmatch(other) for other in logged)]
    # A validation has the names of a step.
    assert [name for name in unknown if name != "val/NAME"] == []
    assert "val/{}" in logged
